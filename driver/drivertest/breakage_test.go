package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// The ways for a backend to be wrong. Each function returns what is done to
// the backends of one store.

type wrapper = func(driver.Backend) driver.Backend

func inspector(b driver.Backend) driver.Inspector {
	in, _ := driver.As[driver.Inspector](b)
	return in
}

func notifier(b driver.Backend) driver.Notifier {
	n, _ := driver.As[driver.Notifier](b)
	return n
}

// look reads a key, whatever the caller's context.
func look(b driver.Backend, key string) driver.KeyInfo {
	info, err := inspector(b).Inspect(context.Background(), key)
	if err != nil {
		return driver.KeyInfo{Key: key}
	}
	return info
}

func isLost(err error) bool { return errors.Is(err, driver.ErrLost) }

// wakeOnly turns grants in events into plain wake-ups, which is all right.
func wakeOnly(b driver.Backend) driver.Backend {
	return heard(b, func(e driver.Event) []driver.Event {
		if e.Kind == driver.EventGrant {
			e = driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: e.Lease.Key, Owner: e.Lease.Owner}}
		}
		return []driver.Event{e}
	})
}

// heard changes the events of a backend.
func heard(b driver.Backend, change func(driver.Event) []driver.Event) driver.Backend {
	return Intercept(b, Hooks{Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
		return notifier(b).Listen(ctx, manager, func(e driver.Event) {
			for _, e := range change(e) {
				handle(e)
			}
		})
	}})
}

// ledger is what some breakages remember of one store.
type ledger struct {
	mu    sync.Mutex
	waits map[string][]driver.Request // by key, in order of arrival
	known map[string]driver.HeldError // the last refusal of a waiting owner
	ends  map[string]map[string]end   // by key and owner
}

// end is when a breakage ends a grant.
type end struct {
	lease driver.Lease
	at    time.Time
}

func newLedger() *ledger {
	return &ledger{
		waits: make(map[string][]driver.Request), known: make(map[string]driver.HeldError), ends: make(map[string]map[string]end),
	}
}

// note keeps book of who waits. l.mu is held.
func (l *ledger) note(req driver.Request, err error) {
	i := l.waiter(req.Key, req.Owner)
	held, refused := errors.AsType[*driver.HeldError](err)
	switch {
	case refused && req.Enqueue && i < 0:
		l.waits[req.Key] = append(l.waits[req.Key], req)
	case err == nil && i >= 0:
		l.forget(req.Key, req.Owner)
	}
	if refused {
		l.known[req.Owner] = *held
	}
}

func (l *ledger) waiter(key, owner string) int {
	return slices.IndexFunc(l.waits[key], func(r driver.Request) bool { return r.Owner == owner })
}

func (l *ledger) forget(key, owner string) {
	l.waits[key] = slices.DeleteFunc(l.waits[key], func(r driver.Request) bool { return r.Owner == owner })
}

// endAt plans the end of a grant. l.mu is held.
func (l *ledger) endAt(lease driver.Lease, at time.Time) {
	if l.ends[lease.Key] == nil {
		l.ends[lease.Key] = make(map[string]end)
	}
	l.ends[lease.Key][lease.Owner] = end{lease, at}
}

// sweep ends the grants of a key whose time has come. l.mu is held.
func (l *ledger) sweep(b driver.Backend, key string) {
	for owner, end := range l.ends[key] {
		if !end.at.After(time.Now()) {
			delete(l.ends[key], owner)
			_ = b.Release(context.Background(), end.lease)
		}
	}
}

// booked is a backend all of whose calls the ledger knows. before is called
// before each of them; then those of the hooks that are not nil take their
// place. l.mu is held in all of them.
func booked(l *ledger, b driver.Backend, before func(key string), h Hooks) driver.Backend {
	if before == nil {
		before = func(string) {}
	}
	return Intercept(b, Hooks{
		Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			before(req.Key)
			acquire := b.Acquire
			if h.Acquire != nil {
				acquire = h.Acquire
			}
			lease, err := acquire(ctx, req)
			l.note(req, err)
			return lease, err
		},
		Release: func(ctx context.Context, lease driver.Lease) error {
			l.mu.Lock()
			defer l.mu.Unlock()
			before(lease.Key)
			if lease.Token == 0 {
				l.forget(lease.Key, lease.Owner)
			}
			release := b.Release
			if h.Release != nil {
				release = h.Release
			}
			err := release(ctx, lease)
			if err == nil {
				delete(l.ends[lease.Key], lease.Owner)
			}
			return err
		},
		Extend: func(ctx context.Context, batch []driver.Renewal) {
			l.mu.Lock()
			defer l.mu.Unlock()
			for _, r := range batch {
				before(r.Lease.Key)
			}
			extend := b.Extend
			if h.Extend != nil {
				extend = h.Extend
			}
			extend(ctx, batch)
		},
		Inspect: func(ctx context.Context, key string) (driver.KeyInfo, error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			before(key)
			return inspector(b).Inspect(ctx, key)
		},
	})
}

// --- releases ---

func lostRelease() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Release: func(ctx context.Context, lease driver.Lease) error {
			if lease.Token != 0 {
				return ctx.Err()
			}
			return b.Release(ctx, lease)
		}})
	}
}

func releaseIgnoresOwner() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Release: func(ctx context.Context, lease driver.Lease) error {
			for _, h := range look(b, lease.Key).Holders {
				if h.Token == lease.Token {
					lease.Owner = h.Owner
				}
			}
			return b.Release(ctx, lease)
		}})
	}
}

func tokenIgnored() wrapper {
	return func(b driver.Backend) driver.Backend {
		real := func(lease driver.Lease) driver.Lease {
			for _, h := range look(b, lease.Key).Holders {
				if h.Owner == lease.Owner && lease.Token != 0 {
					lease.Token = h.Token
				}
			}
			return lease
		}
		return Intercept(b, Hooks{
			Release: func(ctx context.Context, lease driver.Lease) error { return b.Release(ctx, real(lease)) },
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				for i := range batch {
					token := batch[i].Lease.Token
					batch[i].Lease = real(batch[i].Lease)
					b.Extend(ctx, batch[i:i+1])
					batch[i].Lease.Token = token
				}
			},
		})
	}
}

func releaseByName() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Release: func(ctx context.Context, lease driver.Lease) error {
			if holders := look(b, lease.Key).Holders; lease.Token != 0 && len(holders) == 1 {
				lease.Owner, lease.Token = holders[0].Owner, holders[0].Token
			}
			return b.Release(ctx, lease)
		}})
	}
}

func lossHidden() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{
			Release: func(ctx context.Context, lease driver.Lease) error {
				if err := b.Release(ctx, lease); !isLost(err) {
					return err
				}
				return nil
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				b.Extend(ctx, batch)
				for i := range batch {
					if isLost(batch[i].Err) {
						batch[i].Err = nil
					}
				}
			},
		})
	}
}

func ticketLeaked() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Release: func(ctx context.Context, lease driver.Lease) error {
			waits := slices.ContainsFunc(look(b, lease.Key).Waiters, func(w driver.WaiterInfo) bool { return w.Owner == lease.Owner })
			if lease.Token == 0 && waits {
				return nil
			}
			return b.Release(ctx, lease)
		}})
	}
}

func withdrawalSparesGrants() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Release: func(ctx context.Context, lease driver.Lease) error {
			holds := slices.ContainsFunc(look(b, lease.Key).Holders, func(h driver.HolderInfo) bool { return h.Owner == lease.Owner })
			if lease.Token == 0 && holds {
				return nil
			}
			return b.Release(ctx, lease)
		}})
	}
}

func withdrawalOfNothingIsALoss() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Release: func(ctx context.Context, lease driver.Lease) error {
			info := look(b, lease.Key)
			if lease.Token == 0 && len(info.Holders)+len(info.Waiters) == 0 {
				return &driver.LostError{Key: lease.Key, Reason: driver.ReasonGone}
			}
			return b.Release(ctx, lease)
		}})
	}
}

// --- tokens ---

// retoken changes the tokens that callers see. give turns the real token of a
// grant into the one that is told.
func retoken(give func(b driver.Backend, key string, real int64) int64) wrapper {
	var mu sync.Mutex
	type id struct{ key, owner string }
	real, told := make(map[id]int64), make(map[id]int64)
	return func(b driver.Backend) driver.Backend {
		out := func(lease driver.Lease) driver.Lease {
			mu.Lock()
			defer mu.Unlock()
			k := id{lease.Key, lease.Owner}
			if real[k] != lease.Token {
				real[k], told[k] = lease.Token, give(b, lease.Key, lease.Token)
			}
			lease.Token = told[k]
			return lease
		}
		in := func(lease driver.Lease) driver.Lease {
			mu.Lock()
			defer mu.Unlock()
			k := id{lease.Key, lease.Owner}
			if lease.Token != 0 && lease.Token == told[k] {
				lease.Token = real[k]
			}
			return lease
		}
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				lease, err := b.Acquire(ctx, req)
				if err == nil {
					lease = out(lease)
				}
				return lease, err
			},
			Release: func(ctx context.Context, lease driver.Lease) error { return b.Release(ctx, in(lease)) },
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				for i := range batch {
					token := batch[i].Lease.Token
					batch[i].Lease = in(batch[i].Lease)
					b.Extend(ctx, batch[i:i+1])
					batch[i].Lease.Token = token
				}
			},
			Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
				return notifier(b).Listen(ctx, manager, func(e driver.Event) {
					if e.Kind == driver.EventGrant {
						e.Lease = out(e.Lease)
					}
					handle(e)
				})
			},
		})
	}
}

func tokenReused() wrapper {
	return retoken(func(driver.Backend, string, int64) int64 { return 7 })
}

func tokensFall() wrapper {
	return retoken(func(_ driver.Backend, _ string, real int64) int64 { return 1_000_000 - real })
}

func tokenZero() wrapper {
	return retoken(func(_ driver.Backend, _ string, real int64) int64 { return real - 1 })
}

func tokenTooLarge() wrapper {
	return retoken(func(_ driver.Backend, _ string, real int64) int64 { return maxToken + real })
}

// counterDies begins a key's tokens again when nothing is left of it.
func counterDies() wrapper {
	base := make(map[string]int64)
	return retoken(func(b driver.Backend, key string, real int64) int64 {
		if info := look(b, key); len(info.Holders) <= 1 && len(info.Waiters) == 0 {
			base[key] = real - 1
		}
		return real - base[key]
	})
}

func repetitionMintsAToken() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			for _, h := range look(b, req.Key).Holders {
				if h.Owner == req.Owner {
					_ = b.Release(ctx, driver.Lease{Key: req.Key, Owner: h.Owner, Token: h.Token})
				}
			}
			return b.Acquire(ctx, req)
		}})
	}
}

func repetitionIsRefused() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			for _, h := range look(b, req.Key).Holders {
				if h.Owner == req.Owner && len(look(b, req.Key).Waiters) == 0 {
					return driver.Lease{}, &driver.HeldError{Holder: h.Owner, Token: h.Token}
				}
			}
			return b.Acquire(ctx, req)
		}})
	}
}

// --- time ---

// retime changes the TTLs that the store gets. Callers are told what they
// asked for.
func retime(change func(time.Duration) time.Duration) wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				ttl := req.TTL
				req.TTL = change(ttl)
				lease, err := b.Acquire(ctx, req)
				lease.TTL = ttl
				return lease, err
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				for i := range batch {
					ttl := batch[i].Lease.TTL
					batch[i].Lease.TTL = change(ttl)
					b.Extend(ctx, batch[i:i+1])
					batch[i].Lease.TTL = ttl
				}
			},
		})
	}
}

func neverExpires() wrapper {
	return retime(func(time.Duration) time.Duration { return 1000 * time.Hour })
}

func expiresEarly() wrapper {
	return retime(func(d time.Duration) time.Duration { return d / 2 })
}

func ttlCapped() wrapper {
	return retime(func(d time.Duration) time.Duration { return min(d, time.Minute) })
}

func ttlTooLong() wrapper {
	return retime(func(d time.Duration) time.Duration { return d + d/4 })
}

// ttlToldTooLong tells of more time than the store gives.
func ttlToldTooLong() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				lease, err := b.Acquire(ctx, req)
				lease.TTL *= 2
				return lease, err
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				b.Extend(ctx, batch)
				for i := range batch {
					batch[i].Lease.TTL *= 2
				}
			},
		})
	}
}

func ageReversed() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				lease, err := b.Acquire(ctx, req)
				lease.Age = -lease.TTL / 2
				return lease, err
			},
		})
	}
}

func renewalRevives() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
			asked := slices.Clone(batch)
			b.Extend(ctx, batch)
			for i := range batch {
				if !isLost(batch[i].Err) {
					continue
				}
				l := asked[i].Lease
				if _, err := b.Acquire(ctx, driver.Request{Key: l.Key, Owner: l.Owner, TTL: l.TTL, Mode: l.Mode, Limit: 1}); err == nil {
					batch[i].Err = nil
				}
			}
		}})
	}
}

// renewalByName renews whatever grant the key has.
func renewalByName() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
			for i := range batch {
				lease := batch[i].Lease
				if holders := look(b, lease.Key).Holders; len(holders) == 1 {
					batch[i].Lease.Owner, batch[i].Lease.Token = holders[0].Owner, holders[0].Token
				}
				b.Extend(ctx, batch[i:i+1])
				batch[i].Lease.Owner, batch[i].Lease.Token = lease.Owner, lease.Token
			}
		}})
	}
}

// renewalOfAll renews all grants of the key together with the one that asked.
func renewalOfAll() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
			b.Extend(ctx, batch)
			for _, r := range batch {
				for _, h := range look(b, r.Lease.Key).Holders {
					b.Extend(ctx, []driver.Renewal{{Lease: driver.Lease{Key: r.Lease.Key, Owner: h.Owner, Token: h.Token, TTL: r.Lease.TTL}}})
				}
			}
		}})
	}
}

func renewalDoesNothing() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
			for i := range batch {
				batch[i].Err = ctx.Err()
			}
		}})
	}
}

func renewalOfTheFirstOnly() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
			b.Extend(ctx, batch[:min(1, len(batch))])
		}})
	}
}

func oneLossFailsTheBatch() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
			b.Extend(ctx, batch)
			for _, r := range batch {
				if isLost(r.Err) {
					for i := range batch {
						batch[i].Err = r.Err
					}
				}
			}
		}})
	}
}

// renewalSetsTheEnd lets the last renewal say when a grant ends, be it sooner
// or later. If shared, it says so for all readers of the key.
func renewalSetsTheEnd(shared bool) wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		set := func(lease driver.Lease) {
			at := time.Now().Add(lease.TTL)
			l.endAt(lease, at)
			if shared && lease.Mode == driver.Shared {
				for owner := range l.ends[lease.Key] {
					l.endAt(l.ends[lease.Key][owner].lease, at)
				}
			}
		}
		return booked(l, b, func(key string) { l.sweep(b, key) }, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				ttl := req.TTL
				req.TTL = 1000 * time.Hour
				lease, err := b.Acquire(ctx, req)
				lease.TTL = ttl
				if err == nil {
					set(lease)
				}
				return lease, err
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				for i := range batch {
					ttl := batch[i].Lease.TTL
					batch[i].Lease.TTL = 1000 * time.Hour
					b.Extend(ctx, batch[i:i+1])
					batch[i].Lease.TTL = ttl
					if batch[i].Err == nil {
						set(batch[i].Lease)
					}
				}
			},
		})
	}
}

// ttlRunsInTheQueue counts a waiter's TTL from its first request.
func ttlRunsInTheQueue() wrapper {
	l := newLedger()
	asked := make(map[string]time.Time)
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, func(key string) { l.sweep(b, key) }, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				if asked[req.Owner].IsZero() {
					asked[req.Owner] = time.Now()
				}
				lease, err := b.Acquire(ctx, req)
				if err == nil {
					l.endAt(lease, asked[req.Owner].Add(req.TTL))
				}
				return lease, err
			},
		})
	}
}

// --- the queue ---

// jump lets a refused try go in front of the queue.
func jump() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, nil, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			lease, err := b.Acquire(ctx, req)
			if req.Enqueue || !errors.Is(err, driver.ErrHeld) {
				return lease, err
			}
			for _, w := range l.waits[req.Key] {
				_ = b.Release(ctx, driver.Lease{Key: w.Key, Owner: w.Owner})
			}
			lease, err = b.Acquire(ctx, req)
			for _, w := range l.waits[req.Key] {
				_, _ = b.Acquire(ctx, w)
			}
			return lease, err
		}})
	}
}

// lifo puts new waiters in front of the queue.
func lifo() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, nil, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			others := slices.Clone(l.waits[req.Key])
			if !req.Enqueue || l.waiter(req.Key, req.Owner) >= 0 || len(look(b, req.Key).Holders) == 0 {
				return b.Acquire(ctx, req)
			}
			slices.SortFunc(others, func(x, y driver.Request) int { return l.known[x.Owner].Position - l.known[y.Owner].Position })
			for _, w := range others {
				_ = b.Release(ctx, driver.Lease{Key: w.Key, Owner: w.Owner})
			}
			lease, err := b.Acquire(ctx, req)
			for _, w := range others {
				_, err := b.Acquire(ctx, w)
				l.note(w, err)
			}
			return lease, err
		}})
	}
}

func refreshLosesThePlace() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, nil, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			waits := slices.ContainsFunc(look(b, req.Key).Waiters, func(w driver.WaiterInfo) bool { return w.Owner == req.Owner })
			if waits {
				_ = b.Release(ctx, driver.Lease{Key: req.Key, Owner: req.Owner})
			}
			return b.Acquire(ctx, req)
		}})
	}
}

func refreshDoesNothing() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, nil, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			holders := look(b, req.Key).Holders
			if l.waiter(req.Key, req.Owner) >= 0 && len(holders) > 0 && holders[0].Owner != req.Owner {
				held := l.known[req.Owner]
				return driver.Lease{}, &held
			}
			return b.Acquire(ctx, req)
		}})
	}
}

// deadWaitersStay refreshes every ticket for ever.
func deadWaitersStay() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, func(key string) {
			for _, w := range l.waits[key] {
				_, _ = b.Acquire(context.Background(), w)
			}
		}, Hooks{})
	}
}

// deadWaitersWaitTheirTurn lets no ticket lapse but that at the head.
func deadWaitersWaitTheirTurn() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, func(key string) {
			info := look(b, key)
			for i, w := range l.waits[key] {
				if len(info.Waiters) > 0 && w.Owner == info.Waiters[0].Owner && len(info.Holders) > 0 || i == 0 {
					continue
				}
				if slices.ContainsFunc(info.Waiters, func(live driver.WaiterInfo) bool { return live.Owner == w.Owner }) {
					_, _ = b.Acquire(context.Background(), w)
				}
			}
		}, Hooks{})
	}
}

// handOverForGood gives waiters their whole TTL before they have confirmed.
func handOverForGood() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, nil, Hooks{Release: func(ctx context.Context, lease driver.Lease) error {
			err := b.Release(ctx, lease)
			for _, w := range l.waits[lease.Key] {
				if slices.ContainsFunc(look(b, lease.Key).Holders, func(h driver.HolderInfo) bool { return h.Owner == w.Owner }) {
					_, _ = b.Acquire(ctx, w)
				}
			}
			return err
		}})
	}
}

// heirsLapseEarly takes a key that was handed over away before its time.
func heirsLapseEarly() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, func(key string) { l.sweep(b, key) }, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				lease, err := b.Acquire(ctx, req)
				if err == nil {
					delete(l.ends[req.Key], req.Owner)
				}
				return lease, err
			},
			Release: func(ctx context.Context, lease driver.Lease) error {
				err := b.Release(ctx, lease)
				for _, h := range look(b, lease.Key).Holders {
					if l.waiter(lease.Key, h.Owner) >= 0 {
						l.endAt(driver.Lease{Key: lease.Key, Owner: h.Owner, Token: h.Token}, time.Now().Add(window/4))
					}
				}
				return err
			},
		})
	}
}

// confirmationIsIgnored answers for a key that was handed over, and lets it
// lapse all the same: if it is confirmed by Acquire, or by Extend.
func confirmationIsIgnored(byAcquire bool) wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, nil, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				for _, h := range look(b, req.Key).Holders {
					if byAcquire && h.Owner == req.Owner && l.waiter(req.Key, req.Owner) >= 0 {
						return driver.Lease{Key: req.Key, Owner: req.Owner, Token: h.Token, TTL: req.TTL, Mode: req.Mode}, nil
					}
				}
				return b.Acquire(ctx, req)
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				for i := range batch {
					if byAcquire || l.waiter(batch[i].Lease.Key, batch[i].Lease.Owner) < 0 {
						b.Extend(ctx, batch[i:i+1])
					}
				}
			},
		})
	}
}

// onlyEventsGrant refuses waiters that ask again, whatever they have got.
func onlyEventsGrant() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return booked(l, b, nil, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			if l.waiter(req.Key, req.Owner) >= 0 {
				held := l.known[req.Owner]
				return driver.Lease{}, &held
			}
			return b.Acquire(ctx, req)
		}})
	}
}

func refusedTryLeavesATicket() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			req.Enqueue = true
			return b.Acquire(ctx, req)
		}})
	}
}

func refusal(change func(*driver.HeldError)) wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			lease, err := b.Acquire(ctx, req)
			if held, ok := errors.AsType[*driver.HeldError](err); ok {
				change(held)
			}
			return lease, err
		}})
	}
}

// --- kinds of grants ---

func remode(change func(*driver.Request)) wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			mode := req.Mode
			change(&req)
			lease, err := b.Acquire(ctx, req)
			lease.Mode = mode
			return lease, err
		}})
	}
}

func sharedIsExclusive() wrapper {
	return remode(func(req *driver.Request) { req.Mode = driver.Exclusive })
}

func exclusiveIsShared() wrapper {
	return remode(func(req *driver.Request) { req.Mode, req.Limit = driver.Shared, 1 })
}

func onePermitMore() wrapper {
	return remode(func(req *driver.Request) {
		if req.Mode == driver.Exclusive {
			req.Limit++
		}
	})
}

func onePermitLess() wrapper {
	return remode(func(req *driver.Request) { req.Limit = max(1, req.Limit-1) })
}

func anyLimitGoes() wrapper {
	return remode(func(req *driver.Request) {
		if req.Mode == driver.Exclusive && req.Limit != 1 {
			req.Limit = 3
		}
	})
}

func limitErrorIsBlank() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			lease, err := b.Acquire(ctx, req)
			if _, ok := errors.AsType[*driver.LimitError](err); ok {
				err = &driver.LimitError{}
			}
			return lease, err
		}})
	}
}

// --- contexts and outcomes ---

func contextIgnored() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				return b.Acquire(context.WithoutCancel(ctx), req)
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) { b.Extend(context.WithoutCancel(ctx), batch) },
			Release: func(ctx context.Context, lease driver.Lease) error {
				return b.Release(context.WithoutCancel(ctx), lease)
			},
		})
	}
}

// lateAnswer applies requests whose context has ended, and answers with err.
func lateAnswer(answer func(context.Context) error) wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			lease, err := b.Acquire(context.WithoutCancel(ctx), req)
			if ctx.Err() != nil {
				return driver.Lease{}, answer(ctx)
			}
			return lease, err
		}})
	}
}

func appliedButReportedNotApplied() wrapper {
	return lateAnswer(func(ctx context.Context) error { return fmt.Errorf("%w: %w", driver.ErrNotApplied, ctx.Err()) })
}

func unknownReportedAsRefusal() wrapper {
	return lateAnswer(func(context.Context) error { return &driver.HeldError{Holder: "somebody", Token: 1} })
}

// freezing makes backends that hang while their store is frozen. If deaf, they
// do not notice that a context ends.
func freezing(deaf bool) (wrapper, func(testing.TB) (thaw func())) {
	var mu sync.Mutex
	thawed := make(chan struct{})
	close(thawed)
	wait := func(ctx context.Context) error {
		mu.Lock()
		over := thawed
		mu.Unlock()
		if deaf {
			<-over
			return nil
		}
		select {
		case <-over:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	freeze := func(testing.TB) func() {
		mu.Lock()
		defer mu.Unlock()
		ch := make(chan struct{})
		thawed = ch
		return func() { close(ch) }
	}
	return func(b driver.Backend) driver.Backend {
		f, _ := driver.As[driver.Forcer](b)
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				if err := wait(ctx); err != nil {
					return driver.Lease{}, err
				}
				return b.Acquire(ctx, req)
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				if err := wait(ctx); err != nil {
					for i := range batch {
						batch[i].Err = err
					}
					return
				}
				b.Extend(ctx, batch)
			},
			Release: func(ctx context.Context, lease driver.Lease) error {
				if err := wait(ctx); err != nil {
					return err
				}
				return b.Release(ctx, lease)
			},
			Inspect: func(ctx context.Context, key string) (driver.KeyInfo, error) {
				if err := wait(ctx); err != nil {
					return driver.KeyInfo{}, err
				}
				return inspector(b).Inspect(ctx, key)
			},
			List: func(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
				if err := wait(ctx); err != nil {
					return nil, err
				}
				return inspector(b).List(ctx, prefix, after, limit)
			},
			ForceRelease: func(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
				if err := wait(ctx); err != nil {
					return nil, err
				}
				return f.ForceRelease(ctx, key, token)
			},
		})
	}, freeze
}

// acquireBlocks waits for a held key within the call, whatever the context.
func acquireBlocks() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Acquire: func(_ context.Context, req driver.Request) (driver.Lease, error) {
			for {
				lease, err := b.Acquire(context.Background(), req)
				if !errors.Is(err, driver.ErrHeld) {
					return lease, err
				}
				time.Sleep(10 * time.Millisecond)
			}
		}})
	}
}

// --- keys ---

// rekey changes the keys that the store gets.
func rekey(change func(string) string) wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				key := req.Key
				req.Key = change(key)
				lease, err := b.Acquire(ctx, req)
				lease.Key = key
				return lease, err
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				for i := range batch {
					key := batch[i].Lease.Key
					batch[i].Lease.Key = change(key)
					b.Extend(ctx, batch[i:i+1])
					batch[i].Lease.Key = key
				}
			},
			Release: func(ctx context.Context, lease driver.Lease) error {
				lease.Key = change(lease.Key)
				return b.Release(ctx, lease)
			},
			Inspect: func(ctx context.Context, key string) (driver.KeyInfo, error) {
				info, err := inspector(b).Inspect(ctx, change(key))
				info.Key = key
				return info, err
			},
		})
	}
}

func keysTruncated() wrapper {
	return rekey(func(key string) string { return key[:min(len(key), 511)] })
}

func keysFolded() wrapper { return rekey(strings.ToLower) }

func keysTrimmed() wrapper { return rekey(strings.TrimSpace) }

func keysCleaned() wrapper {
	return rekey(func(key string) string { return strings.ReplaceAll(key, "//", "/") })
}

func keysEndAtNUL() wrapper {
	return rekey(func(key string) string {
		head, _, _ := strings.Cut(key, "\x00")
		return head
	})
}

func listing(change func(list func(prefix, after string, limit int) ([]driver.KeyInfo, error), prefix, after string, limit int) ([]driver.KeyInfo, error)) wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{List: func(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
			return change(func(prefix, after string, limit int) ([]driver.KeyInfo, error) {
				return inspector(b).List(ctx, prefix, after, limit)
			}, prefix, after, limit)
		}})
	}
}

func listIncludesTheStart() wrapper {
	return listing(func(list func(string, string, int) ([]driver.KeyInfo, error), prefix, after string, limit int) ([]driver.KeyInfo, error) {
		all, err := list("", "", 10_000)
		all = slices.DeleteFunc(all, func(i driver.KeyInfo) bool { return !strings.HasPrefix(i.Key, prefix) || i.Key < after })
		if limit > 0 {
			all = all[:min(limit, len(all))]
		}
		return all, err
	})
}

func listIgnoresLimit() wrapper {
	return listing(func(list func(string, string, int) ([]driver.KeyInfo, error), prefix, after string, _ int) ([]driver.KeyInfo, error) {
		return list(prefix, after, 10_000)
	})
}

func listTakesPatterns() wrapper {
	return listing(func(list func(string, string, int) ([]driver.KeyInfo, error), prefix, after string, limit int) ([]driver.KeyInfo, error) {
		if strings.ContainsAny(prefix, "%_") {
			prefix = prefix[:strings.IndexAny(prefix, "%_")]
		}
		return list(prefix, after, limit)
	})
}

func listUnsorted() wrapper {
	return listing(func(list func(string, string, int) ([]driver.KeyInfo, error), prefix, after string, limit int) ([]driver.KeyInfo, error) {
		page, err := list(prefix, after, limit)
		slices.SortFunc(page, func(x, y driver.KeyInfo) int {
			return strings.Compare(strings.ToLower(x.Key)+x.Key, strings.ToLower(y.Key)+y.Key)
		})
		return page, err
	})
}

// --- events ---

func eventsDropped() wrapper {
	return func(b driver.Backend) driver.Backend {
		return heard(b, func(e driver.Event) []driver.Event {
			if e.Kind != driver.EventUp {
				return nil
			}
			return []driver.Event{e}
		})
	}
}

// wrongOneWoken sends the wake-up to the waiter that came last.
func wrongOneWoken() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return heard(booked(l, b, nil, Hooks{}), func(e driver.Event) []driver.Event {
			l.mu.Lock()
			defer l.mu.Unlock()
			if waits := l.waits[e.Lease.Key]; e.Kind == driver.EventGrant && len(waits) > 0 {
				e.Lease.Owner = waits[len(waits)-1].Owner
			}
			return []driver.Event{e}
		})
	}
}

// allWoken wakes everybody who waits, besides the one whose turn it is.
func allWoken() wrapper {
	l := newLedger()
	return func(b driver.Backend) driver.Backend {
		return heard(booked(l, b, nil, Hooks{}), func(e driver.Event) []driver.Event {
			l.mu.Lock()
			defer l.mu.Unlock()
			events := []driver.Event{e}
			for _, w := range l.waits[e.Lease.Key] {
				if w.Owner != e.Lease.Owner {
					events = append(events, driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: w.Key, Owner: w.Owner}})
				}
			}
			return events
		})
	}
}

// oneReaderWoken tells only the first of several readers.
func oneReaderWoken() wrapper {
	told := make(map[string]bool)
	var mu sync.Mutex
	return func(b driver.Backend) driver.Backend {
		return heard(b, func(e driver.Event) []driver.Event {
			mu.Lock()
			defer mu.Unlock()
			if e.Kind == driver.EventGrant && e.Lease.Mode == driver.Shared {
				if told[e.Lease.Key] {
					return nil
				}
				told[e.Lease.Key] = true
			}
			return []driver.Event{e}
		})
	}
}

func ticketNotTold() wrapper {
	return refusal(func(held *driver.HeldError) { held.Ticket = 0 })
}

func wrongTokenInEvents() wrapper {
	return func(b driver.Backend) driver.Backend {
		return heard(b, func(e driver.Event) []driver.Event {
			if e.Kind == driver.EventGrant {
				e.Lease.Token++
			}
			return []driver.Event{e}
		})
	}
}

func neverUp() wrapper {
	return func(b driver.Backend) driver.Backend {
		return heard(b, func(e driver.Event) []driver.Event {
			if e.Kind == driver.EventUp {
				return nil
			}
			return []driver.Event{e}
		})
	}
}

// oneSubscription serves only the first Listen call of a client.
func oneSubscription() wrapper {
	return func(b driver.Backend) driver.Backend {
		var mu sync.Mutex
		used := false
		return Intercept(b, Hooks{Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
			mu.Lock()
			again := used
			used = true
			mu.Unlock()
			if again {
				<-ctx.Done()
				return ctx.Err()
			}
			return notifier(b).Listen(ctx, manager, handle)
		}})
	}
}

// listenStays does not end with its context, but with its backend.
func listenStays() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
			return notifier(b).Listen(context.WithoutCancel(ctx), manager, handle)
		}})
	}
}

// listenOutlivesClose ends with its context only.
func listenOutlivesClose() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
			err := notifier(b).Listen(ctx, manager, handle)
			<-ctx.Done()
			return err
		}})
	}
}

// --- reading and forcing ---

// checking is a backend with a check.
type checking struct {
	driver.Backend
	check func(context.Context, driver.Backend) []driver.Finding
}

func (c checking) Unwrap() driver.Backend { return c.Backend }

func (c checking) Check(ctx context.Context) ([]driver.Finding, error) {
	return c.check(ctx, c.Backend), nil
}

func checks(check func(context.Context, driver.Backend) []driver.Finding) wrapper {
	return func(b driver.Backend) driver.Backend { return checking{b, check} }
}

func inspectStale() wrapper {
	last := make(map[string]driver.KeyInfo)
	var mu sync.Mutex
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Inspect: func(ctx context.Context, key string) (driver.KeyInfo, error) {
			mu.Lock()
			defer mu.Unlock()
			info, err := inspector(b).Inspect(ctx, key)
			if before, ok := last[key]; ok {
				last[key] = info
				return before, err
			}
			last[key] = info
			return info, err
		}})
	}
}

func inspectHidesWaiters() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Inspect: func(ctx context.Context, key string) (driver.KeyInfo, error) {
			info, err := inspector(b).Inspect(ctx, key)
			info.Waiters = nil
			return info, err
		}})
	}
}

func forceIgnoresToken() wrapper {
	return func(b driver.Backend) driver.Backend {
		f, _ := driver.As[driver.Forcer](b)
		return Intercept(b, Hooks{ForceRelease: func(ctx context.Context, key string, _ int64) ([]driver.HolderInfo, error) {
			return f.ForceRelease(ctx, key, 0)
		}})
	}
}

func forceTellsNothing() wrapper {
	return func(b driver.Backend) driver.Backend {
		f, _ := driver.As[driver.Forcer](b)
		return Intercept(b, Hooks{ForceRelease: func(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
			_, err := f.ForceRelease(ctx, key, token)
			return nil, err
		}})
	}
}

// --- life ---

func closeDoesNothing() wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Close: func() error { return nil }})
	}
}

// closeReleases takes the grants of the client along.
func closeReleases() wrapper {
	return func(b driver.Backend) driver.Backend {
		var mu sync.Mutex
		var leases []driver.Lease
		return Intercept(b, Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				lease, err := b.Acquire(ctx, req)
				if err == nil {
					mu.Lock()
					defer mu.Unlock()
					leases = append(leases, lease)
				}
				return lease, err
			},
			Close: func() error {
				mu.Lock()
				defer mu.Unlock()
				for _, lease := range leases {
					_ = b.Release(context.Background(), lease)
				}
				return b.Close()
			},
		})
	}
}

func secondCloseFails() wrapper {
	return func(b driver.Backend) driver.Backend {
		var mu sync.Mutex
		closed := false
		return Intercept(b, Hooks{Close: func() error {
			mu.Lock()
			defer mu.Unlock()
			if closed {
				return driver.ErrClosed
			}
			closed = true
			return b.Close()
		}})
	}
}

func changedProperties(change func(*driver.Properties)) wrapper {
	return func(b driver.Backend) driver.Backend {
		return Intercept(b, Hooks{Properties: func() driver.Properties {
			p := b.Properties()
			change(&p)
			return p
		}})
	}
}
