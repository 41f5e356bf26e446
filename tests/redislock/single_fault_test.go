package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// Faults that pass, under load: no lock is lost, nobody sees an error.
func TestSingleGoesOn(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		cfg   servers.RedisConfig
		seen  string // a part of an error that the managers must have met
		fault func(r *rig, seen func())
	}{
		{"script flush", servers.RedisConfig{}, "", func(r *rig, seen func()) {
			for range 20 {
				r.s.MustDo("SCRIPT", "FLUSH")
			}
		}},
		{"all connections killed", servers.RedisConfig{}, "", func(r *rig, seen func()) {
			for range 3 {
				r.s.MustDo("CLIENT", "KILL", "TYPE", "normal")
				r.s.MustDo("CLIENT", "KILL", "TYPE", "pubsub")
			}
		}},
		{"restart with data", servers.RedisConfig{Persist: true}, "", func(r *rig, seen func()) {
			r.s.Kill()
			r.s.Restart()
		}},
		{"loading", servers.RedisConfig{
			Persist: true,
			Args:    []string{"--key-load-delay", "300", "--loading-process-events-interval-bytes", "1024", "--aof-use-rdb-preamble", "no"},
		}, "LOADING", func(r *rig, seen func()) {
			r.s.MustDo("DEBUG", "POPULATE", "3000", "filler", "100")
			r.s.MustDo("BGREWRITEAOF")
			r.until("the log is rewritten", func() bool {
				info, err := r.admin.InfoMap(r.Context(), "persistence").Result()
				p := info["Persistence"]
				return err == nil && p["aof_rewrite_in_progress"] == "0" && p["aof_rewrite_scheduled"] == "0"
			})
			r.s.Restart()
		}},
		{"no replicas", servers.RedisConfig{}, "NOREPLICAS", func(r *rig, seen func()) {
			r.s.MustDo("CONFIG", "SET", "min-replicas-to-write", "1")
			seen()
			r.s.MustDo("CONFIG", "SET", "min-replicas-to-write", "0")
		}},
		{"a save that fails", servers.RedisConfig{Args: []string{"--save", "3600 1"}}, "MISCONF", func(r *rig, seen func()) {
			dump := filepath.Join(r.s.Dir(), "dump.rdb")
			if err := os.Mkdir(dump, 0o700); err != nil {
				r.Fatal(err)
			}
			save := func(want string) {
				r.until("a save ends with "+want, func() bool {
					_ = r.admin.BgSave(r.Context()).Err() // another may be under way
					info, err := r.admin.InfoMap(r.Context(), "persistence").Result()
					return err == nil && info["Persistence"]["rdb_last_bgsave_status"] == want
				})
			}
			save("err")
			seen()
			if err := os.Remove(dump); err != nil {
				r.Fatal(err)
			}
			save("ok")
		}},
		{"read only for a moment", servers.RedisConfig{}, "READONLY", func(r *rig, seen func()) {
			r.s.MustDo("REPLICAOF", "127.0.0.1", "1")
			seen()
			r.s.MustDo("REPLICAOF", "NO", "ONE")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, &tt.cfg)
			var journal journal
			cfg := dlm.LockConfig{Observer: &journal, MaxRetries: -1, CallTimeout: 3 * time.Second}
			m1 := r.manager(r.client(redis.Options{}), cfg, redislock.Options{})
			m2 := r.manager(r.client(redis.Options{}), cfg, redislock.Options{})
			kept := r.take(m1, "kept", 20*time.Second)
			l := r.load(m1, m2)
			l.goesOn()
			tt.fault(r, func() {
				r.Helper()
				r.until("a call meets "+tt.seen, func() bool { return journal.count(dlm.EventStoreError, tt.seen) > 0 })
			})
			l.goesOn()
			l.stop()
			if tt.seen != "" && journal.count(dlm.EventStoreError, tt.seen) == 0 {
				t.Errorf("no call met %s", tt.seen)
			}
			r.held(kept)
			r.release(kept)
			r.clean()
		})
	}
}

// A release that the server refuses is repeated, and says so when its time is
// over (REL7).
func TestSingleReleaseRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	m := r.plain()
	l := r.take(m, "a", time.Minute)
	r.s.MustDo("CONFIG", "SET", "min-replicas-to-write", "1")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := l.Release(ctx)
	if !errors.Is(err, dlm.ErrNotApplied) || errors.Is(err, dlm.ErrLost) {
		t.Errorf("a release that was refused: %v", err)
	}
	r.s.MustDo("CONFIG", "SET", "min-replicas-to-write", "0")
	r.release(l)
	r.clean()
}

// Locks that a server has forgotten are lost at the latest at their deadline,
// waiters are served, and tokens go on rising.
func TestSingleRestartWithoutData(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	m1, m2 := r.plain(), r.plain()
	var locks []*dlm.Lock
	var waits []<-chan *dlm.Lock
	for i := range 5 {
		locks = append(locks, r.take(m1, fmt.Sprint(i), 3*time.Second))
		waits = append(waits, r.later(m2, fmt.Sprint(i), time.Minute))
	}
	b := r.backend(redislock.Options{})
	for i := range 5 {
		r.queued(b, fmt.Sprint(i), 1)
	}
	r.s.Restart()
	for i, l := range locks {
		r.lossOf(l)
		next := closed(r, "a waiter is served", waits[i])
		if next.Token <= l.Token {
			t.Errorf("token %d follows %d", next.Token, l.Token)
		}
		r.release(next)
	}
	r.clean()
}

// A server that stops for less than the TTL costs nothing.
func TestSingleShortPause(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	var journal journal
	m := r.manager(r.client(redis.Options{}), dlm.LockConfig{Observer: &journal, RenewInterval: 100 * time.Millisecond, CallTimeout: 300 * time.Millisecond}, redislock.Options{})
	l := r.take(m, "a", 20*time.Second)
	next := r.later(r.plain(), "a", time.Minute)
	r.queued(r.backend(redislock.Options{}), "a", 1)
	r.s.Pause()
	r.until("a renewal fails", func() bool { return journal.count(dlm.EventExtendFailed, "") > 0 })
	r.s.Resume()
	before := journal.count(dlm.EventExtended, "")
	r.until("renewals go on", func() bool { return journal.count(dlm.EventExtended, "") > before })
	r.held(l)
	r.release(l)
	r.release(closed(r, "the waiter is served", next))
	r.clean()
}

// A server that stops for longer than the TTL costs the locks, in time.
func TestSingleLongPause(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	m := r.plain()
	locks := []*dlm.Lock{r.take(m, "a", time.Second), r.take(m, "b", time.Second)}
	next := r.later(r.plain(), "a", time.Minute)
	r.queued(r.backend(redislock.Options{}), "a", 1)
	r.s.Pause()
	for _, l := range locks {
		if lost := r.lossOf(l); lost.Reason != dlm.ReasonExpired {
			t.Errorf("lost by %s", lost.Reason)
		}
		if early := time.Until(l.Deadline()); early > 0 {
			t.Errorf("the loss was told %v before the deadline", early)
		}
	}
	r.s.Resume()
	got := closed(r, "the waiter is served", next)
	if got.Token <= locks[0].Token {
		t.Errorf("token %d follows %d", got.Token, locks[0].Token)
	}
	r.release(got)
	r.clean()
}

// RED7: while the subscription is down, waiters look for themselves; when it is
// up again, they are woken at once.
func TestSingleSubscriptionLost(t *testing.T) {
	t.Parallel()
	const n = 20
	r := newRig(t, nil)
	holder := r.plain()
	inner := r.backend(redislock.Options{LivenessWindow: time.Hour})
	var grants atomic.Int64
	m, err := dlm.NewManager(drivertest.Intercept(inner, drivertest.Hooks{
		Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
			return inner.Listen(ctx, manager, func(e driver.Event) {
				if e.Kind == driver.EventGrant {
					grants.Add(1)
				}
				handle(e)
			})
		},
	}), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.end(m) })

	handOver := func(locks []*dlm.Lock, gap func()) []*dlm.Lock {
		t.Helper()
		var waits []<-chan *dlm.Lock
		for i := range n {
			waits = append(waits, r.later(m, fmt.Sprint(i), time.Minute))
		}
		for i := range n {
			r.queued(inner, fmt.Sprint(i), 1)
		}
		gap()
		for _, l := range locks {
			r.release(l)
		}
		var got []*dlm.Lock
		for i := range n {
			got = append(got, closed(r, "a waiter is served", waits[i]))
		}
		return got
	}
	take := func() (locks []*dlm.Lock) {
		for i := range n {
			locks = append(locks, r.take(holder, fmt.Sprint(i), time.Minute))
		}
		return locks
	}
	releaseAll := func(locks []*dlm.Lock) {
		for _, l := range locks {
			r.release(l)
		}
	}
	subscribed := func() bool {
		for _, n := range r.admin.PubSubNumSub(t.Context(), r.channels()...).Val() {
			if n > 0 {
				return true
			}
		}
		return false
	}

	releaseAll(handOver(take(), func() { r.until("the subscription stands", subscribed) }))
	if got := grants.Load(); got != n {
		t.Errorf("%d waiters were handed a lock, want %d", got, n)
	}
	// Without the right to the channel the subscription ends, and does not come
	// back before the locks are released.
	releaseAll(handOver(take(), func() {
		r.s.MustDo("ACL", "SETUSER", "default", "resetchannels")
		r.until("the subscription is gone", func() bool { return !subscribed() })
	}))
	if got := grants.Load(); got != n {
		t.Errorf("%d waiters were handed a lock without a subscription", got-n)
	}
	r.s.MustDo("ACL", "SETUSER", "default", "allchannels")
	releaseAll(handOver(take(), func() { r.until("the subscription stands again", subscribed) }))
	if got := grants.Load(); got != 2*n {
		t.Errorf("%d waiters were handed a lock after the gap, want %d", got-n, n)
	}
	r.clean()
}

func (r *rig) channels() []string {
	return r.admin.PubSubChannels(r.Context(), r.prefix+"!*").Val()
}

// What a client's own time-outs are must not matter: the caller's contexts and
// the locks' deadlines do.
var patientClients = []struct {
	name string
	opts redis.Options
}{
	{"defaults", redis.Options{}},
	{"30s", redis.Options{ReadTimeout: 30 * time.Second, WriteTimeout: 30 * time.Second}},
	{"no time-out", redis.Options{ReadTimeout: -1, WriteTimeout: -1}},
	{"no deadlines", redis.Options{ReadTimeout: -2, WriteTimeout: -2}},
	{"pool of one", redis.Options{ReadTimeout: 30 * time.Second, PoolSize: 1}},
	{"pool of two", redis.Options{ReadTimeout: -1, PoolSize: 2, PoolTimeout: time.Hour}},
	{"contexts", redis.Options{ReadTimeout: 30 * time.Second, ContextTimeoutEnabled: true}},
}

func TestSingleBlackhole(t *testing.T) {
	t.Parallel()
	for _, tt := range patientClients {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			proxy := servers.StartProxy(t, r.s.Addr())
			tt.opts.Addr = proxy.Addr()
			var journal journal
			m := r.manager(r.client(tt.opts), dlm.LockConfig{Observer: &journal}, redislock.Options{})
			held := r.take(m, "held", 1500*time.Millisecond)
			freed := r.take(m, "freed", time.Hour)
			waits := make(chan error, 1)
			ctx, cancel := context.WithCancel(t.Context())
			other := r.take(r.plain(), "other", time.Minute)
			go func() {
				_, err := m.AcquireLock(ctx, "other", time.Minute)
				waits <- err
			}()
			r.until("a call waits", func() bool { return journal.count(dlm.EventWaiting, "") == 1 })
			proxy.Blackhole()

			// Any number of calls may hang before.
			errs := make(chan error, 30)
			for i := range cap(errs) {
				go func() {
					ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
					defer cancel()
					_, err := m.AcquireLock(ctx, fmt.Sprint(i), time.Second)
					errs <- err
				}()
			}
			for range cap(errs) {
				if err := closed(r, "an acquisition returns", errs); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("an acquisition without answer: %v", err)
				}
			}
			released := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
				defer cancel()
				released <- freed.Release(ctx)
			}()
			if err := closed(r, "the release returns", released); !errors.Is(err, context.DeadlineExceeded) ||
				!errors.Is(err, dlm.ErrIndeterminate) && !errors.Is(err, dlm.ErrNotApplied) {
				t.Errorf("a release without answer: %v", err)
			}
			if lost := r.lossOf(held); lost.Reason != dlm.ReasonExpired || time.Until(held.Deadline()) > 0 {
				t.Errorf("%v %v before the deadline", lost, time.Until(held.Deadline()))
			}
			cancel()
			if err := closed(r, "the wait ends", waits); !errors.Is(err, context.Canceled) || !errors.Is(err, dlm.ErrHeld) {
				t.Errorf("a wait that was cancelled: %v", err)
			}

			proxy.Resume()
			r.until("what was given up is freed", func() bool {
				info, err := r.backend(redislock.Options{}).Inspect(t.Context(), "freed")
				return err == nil && len(info.Holders) == 0
			})
			r.release(r.take(m, "held", time.Minute))
			r.release(other)
			r.clean()
			if n := proxy.Conns(); n > 40 {
				t.Errorf("%d connections are open", n)
			}
		})
	}
}

// Closing ends with its context, too.
func TestSingleBlackholeAtClose(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	proxy := servers.StartProxy(t, r.s.Addr())
	m := r.manager(r.client(redis.Options{Addr: proxy.Addr(), ReadTimeout: -1, PoolSize: 2}), dlm.LockConfig{}, redislock.Options{})
	l := r.take(m, "a", time.Second)
	proxy.Blackhole()
	ended := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	go func() { ended <- m.Close(ctx) }()
	if err := closed(r, "Close returns", ended); err == nil {
		t.Error("Close has released nothing, and says nothing")
	}
	if !errors.Is(l.Err(), dlm.ErrLost) {
		t.Errorf("after Close: %v", l.Err())
	}
	proxy.Resume()
	r.clean()
}

// A reply that is lost leaves the outcome unknown: asking again finds it out.
func TestSingleReplyLost(t *testing.T) {
	t.Parallel()
	for _, timeout := range []time.Duration{0, 30 * time.Second} {
		t.Run(fmt.Sprint(timeout), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			proxy := servers.StartProxy(t, r.s.Addr())
			m := r.manager(r.client(redis.Options{Addr: proxy.Addr(), ReadTimeout: timeout}), dlm.LockConfig{}, redislock.Options{})
			b := r.backend(redislock.Options{})
			holders := func(key string) []driver.HolderInfo {
				info, err := b.Inspect(t.Context(), key)
				if err != nil {
					t.Fatal(err)
				}
				return info.Holders
			}
			r.release(r.take(m, "a", time.Minute)) // connects

			proxy.Hold(servers.Down)
			got := r.later(m, "a", time.Minute)
			r.until("the server has granted", func() bool { return len(holders("a")) == 1 })
			token := holders("a")[0].Token
			proxy.Reset()
			proxy.Resume()
			l := closed(r, "the grant is found", got)
			if l.Token != token {
				t.Errorf("token %d after an answer that was lost, want %d", l.Token, token)
			}

			connected := func() {
				t.Helper()
				if _, err := m.GetLock(t.Context(), "a"); err != nil {
					t.Fatal(err)
				}
			}
			if err := l.Extend(t.Context(), time.Minute); err != nil { // teaches the server the script
				t.Fatal(err)
			}
			before := holders("a")[0].Remaining
			proxy.Hold(servers.Down)
			extended := make(chan error, 1)
			go func() { extended <- l.Extend(t.Context(), time.Hour) }()
			r.until("the server has renewed", func() bool { return holders("a")[0].Remaining > before+time.Minute })
			proxy.Reset()
			proxy.Resume()
			if err := closed(r, "Extend returns", extended); err != nil && !errors.Is(err, dlm.ErrIndeterminate) {
				t.Errorf("a renewal whose answer was lost: %v", err)
			}
			r.held(l)

			connected()
			proxy.Hold(servers.Down)
			released := make(chan error, 1)
			go func() { released <- l.Release(t.Context()) }()
			r.until("the server has released", func() bool { return len(holders("a")) == 0 })
			proxy.Reset()
			proxy.Resume()
			if err := closed(r, "Release returns", released); err != nil {
				t.Errorf("a release whose answer was lost: %v", err)
			}

			// The caller gives up before he knows.
			connected()
			proxy.Hold(servers.Down)
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				_, err := m.AcquireLock(ctx, "b", time.Hour)
				failed <- err
			}()
			r.until("the server has granted", func() bool { return len(holders("b")) == 1 })
			cancel()
			if err := closed(r, "the acquisition ends", failed); !errors.Is(err, context.Canceled) {
				t.Errorf("an acquisition that was given up: %v", err)
			}
			proxy.Reset()
			proxy.Resume()
			r.clean()
		})
	}
}

// A reset in mid-call, again and again, under load.
func TestSingleResets(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	proxy := servers.StartProxy(t, r.s.Addr())
	m := r.manager(r.client(redis.Options{Addr: proxy.Addr()}), dlm.LockConfig{MaxRetries: -1, RetryInterval: 5 * time.Millisecond}, redislock.Options{})
	kept := r.take(m, "kept", 20*time.Second)
	l := r.load(m, r.plain())
	for range 10 {
		l.goesOn()
		proxy.Reset()
	}
	l.goesOn()
	l.stop()
	r.held(kept)
	r.release(kept)
	r.clean()
}

// A request that is held on its way while new connections get through, so that
// it arrives behind its own withdrawal: as long as its connection stands, the
// withdrawal waits for it, and nothing is left.
func TestSingleRequestHeld(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	proxy := servers.StartProxy(t, r.s.Addr())
	var around atomic.Bool
	client := r.client(redis.Options{
		ReadTimeout: 30 * time.Second,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if !around.Load() {
				addr = proxy.Addr()
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	})
	m := r.manager(client, dlm.LockConfig{}, redislock.Options{})
	r.release(r.take(m, "a", time.Minute))
	proxy.Hold(servers.Up)
	giveUp := func(key string, ttl time.Duration, patience time.Duration) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if _, err := m.AcquireLock(ctx, key, ttl); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, dlm.ErrIndeterminate) {
			t.Errorf("an acquisition that was given up: %v", err)
		}
	}
	// The first is sent by its caller and cuts its connection when it is over:
	// what is left of it ends with its TTL.
	giveUp("lone", 500*time.Millisecond, 400*time.Millisecond)
	time.AfterFunc(200*time.Millisecond, func() { around.Store(true) }) // the request is on its way by then
	giveUp("queued", time.Hour, 400*time.Millisecond)
	proxy.Resume()
	r.clean()
	r.release(r.take(r.plain(), "lone", time.Minute))
	r.release(r.take(r.plain(), "queued", time.Minute))
	r.clean()
}
