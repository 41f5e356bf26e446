package memlock

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// Store is the memory that backends share. It is safe for concurrent use.
type Store struct {
	epoch time.Time

	mu    sync.Mutex
	token int64 // the last one given
	seq   int64 // the last ticket given
	keys  map[string]*entry
	subs  map[string]*subscription
	calls int // acquisitions since the last sweep
}

// entry is the state of one key.
type entry struct {
	holds   []hold   // by rising token; may have expired
	tickets []ticket // in order of arrival; may have lapsed
}

type hold struct {
	owner   string
	token   int64
	mode    driver.Mode
	limit   int
	ttl     time.Duration
	since   time.Duration // all instants count from Store.epoch
	expires time.Duration
	manager string
}

type ticket struct {
	seq     int64
	owner   string
	mode    driver.Mode
	limit   int
	ttl     time.Duration
	since   time.Duration
	life    time.Duration
	expires time.Duration // when it lapses unless it is refreshed
	manager string
}

// subscription is the mailbox of one Listen call.
type subscription struct {
	events []driver.Event
	ready  chan struct{}
}

// NewStore returns an empty store.
func NewStore() *Store {
	return &Store{epoch: time.Now(), keys: make(map[string]*entry), subs: make(map[string]*subscription)}
}

func (s *Store) now() time.Duration { return time.Since(s.epoch) }

// open returns the key's entry without what has expired.
func (s *Store) open(key string, now time.Duration) *entry {
	e := s.keys[key]
	if e == nil {
		return &entry{}
	}
	e.holds = slices.DeleteFunc(e.holds, func(h hold) bool { return h.expires <= now })
	// A ticket that has lapsed is passed over, but it keeps its place for as
	// long again, so that a pause of the store does not cost live waiters
	// theirs.
	e.tickets = slices.DeleteFunc(e.tickets, func(t ticket) bool { return t.expires+t.life <= now })
	return e
}

// keep stores the entry, or forgets the key if nothing is left of it.
func (s *Store) keep(key string, e *entry) {
	if len(e.holds) == 0 && len(e.tickets) == 0 {
		delete(s.keys, key)
	} else {
		s.keys[key] = e
	}
}

// sweep now and then forgets keys that nobody asks for any more; its cost
// spreads over as many calls as there are keys.
func (s *Store) sweep(now time.Duration) {
	if s.calls++; s.calls < len(s.keys)+1000 {
		return
	}
	s.calls = 0
	for key := range s.keys {
		s.keep(key, s.open(key, now))
	}
}

// acquire implements [driver.Backend.Acquire].
func (s *Store) acquire(req driver.Request, life time.Duration) (driver.Lease, error) {
	now := s.now()
	s.sweep(now)
	e := s.open(req.Key, now)
	defer func() { s.keep(req.Key, e) }()

	if i := e.hold(req.Owner); i >= 0 {
		h := &e.holds[i]
		if h.mode != req.Mode || h.limit != req.Limit {
			return driver.Lease{}, fmt.Errorf("%w: owner holds key %q in another mode or with another limit", driver.ErrInvalid, req.Key)
		}
		h.ttl = req.TTL
		h.expires = max(h.expires, now+req.TTL)
		lease := h.lease(req.Key)
		s.serve(req.Key, e, now, "")
		return lease, nil
	}
	if have := e.limit(req.Owner, now); have != 0 && have != req.Limit {
		return driver.Lease{}, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: have}
	}

	i := e.ticket(req.Owner)
	queued := i >= 0
	if !queued {
		i = len(e.tickets)
		s.seq++
		e.tickets = append(e.tickets, ticket{seq: s.seq, owner: req.Owner, since: now})
	}
	if req.Enqueue || !queued {
		t := &e.tickets[i]
		t.mode, t.limit, t.ttl, t.manager = req.Mode, req.Limit, req.TTL, req.Manager
		t.life, t.expires = life, now+life
	}
	s.serve(req.Key, e, now, req.Owner)
	if i := e.hold(req.Owner); i >= 0 {
		return e.holds[i].lease(req.Key), nil
	}

	held := &driver.HeldError{}
	if len(e.holds) > 0 {
		held.Holder, held.Token = e.holds[0].owner, e.holds[0].token
		held.Remaining = e.holds[0].expires - now
		for _, h := range e.holds {
			held.Remaining = min(held.Remaining, h.expires-now)
		}
	}
	if req.Enqueue || queued {
		for _, t := range e.tickets {
			if t.expires > now {
				held.Position++
			}
			if t.owner == req.Owner {
				held.Ticket = t.seq
				break
			}
		}
	} else {
		e.tickets = e.tickets[:len(e.tickets)-1]
	}
	return driver.Lease{}, held
}

// serve grants the key to the head of the queue for as long as it can. The
// caller, if any, gets its whole TTL and no event. To all others the key is
// handed over: that grant lapses with its ticket unless the owner confirms it,
// so that a dead waiter costs no more than its ticket did.
func (s *Store) serve(key string, e *entry, now time.Duration, caller string) {
	for i := 0; i < len(e.tickets); {
		t := e.tickets[i]
		if t.expires <= now {
			i++
			continue
		}
		if !e.admits(t.mode, t.limit) {
			return
		}
		s.token++
		h := hold{
			owner: t.owner, token: s.token, mode: t.mode, limit: t.limit, ttl: t.ttl,
			since: now, expires: now + t.ttl, manager: t.manager,
		}
		if t.owner != caller {
			h.expires = min(h.expires, t.expires)
		}
		e.tickets = slices.Delete(e.tickets, i, i+1)
		e.holds = append(e.holds, h)
		if t.owner != caller {
			s.notify(t.manager, driver.Event{Kind: driver.EventGrant, Ticket: t.seq, Lease: h.lease(key)})
		}
	}
}

// notify puts an event into the manager's mailbox, if it listens.
func (s *Store) notify(manager string, event driver.Event) {
	sub := s.subs[manager]
	if sub == nil {
		return
	}
	sub.events = append(sub.events, event)
	select {
	case sub.ready <- struct{}{}:
	default:
	}
}

// extend implements one entry of [driver.Backend.Extend].
func (s *Store) extend(lease *driver.Lease) error {
	now := s.now()
	e := s.open(lease.Key, now)
	defer s.keep(lease.Key, e)
	i := e.hold(lease.Owner)
	if i < 0 || e.holds[i].token != lease.Token {
		return e.lost(lease)
	}
	h := &e.holds[i]
	h.ttl = lease.TTL
	h.expires = max(h.expires, now+lease.TTL)
	lease.Age = 0
	return nil
}

// release implements [driver.Backend.Release].
func (s *Store) release(lease driver.Lease) error {
	now := s.now()
	e := s.open(lease.Key, now)
	defer s.keep(lease.Key, e)
	i := e.hold(lease.Owner)
	if lease.Token != 0 && (i < 0 || e.holds[i].token != lease.Token) {
		return e.lost(&lease)
	}
	if i >= 0 {
		e.holds = slices.Delete(e.holds, i, i+1)
	}
	if lease.Token == 0 {
		if i := e.ticket(lease.Owner); i >= 0 {
			e.tickets = slices.Delete(e.tickets, i, i+1)
		}
	}
	s.serve(lease.Key, e, now, "")
	return nil
}

// force implements [driver.Forcer].
func (s *Store) force(key string, token int64) []driver.HolderInfo {
	now := s.now()
	e := s.open(key, now)
	defer s.keep(key, e)
	var removed []driver.HolderInfo
	e.holds = slices.DeleteFunc(e.holds, func(h hold) bool {
		if token != 0 && h.token != token {
			return false
		}
		removed = append(removed, h.info(now))
		lost := &driver.LostError{Key: key, Token: h.token, Reason: driver.ReasonGone}
		s.notify(h.manager, driver.Event{Kind: driver.EventLost, Lease: h.lease(key), Err: lost})
		return true
	})
	s.serve(key, e, now, "")
	return removed
}

func (s *Store) inspect(key string) driver.KeyInfo {
	now := s.now()
	e := s.open(key, now)
	defer s.keep(key, e)
	info := driver.KeyInfo{Key: key, Limit: e.limit("", now)}
	for _, h := range e.holds {
		info.Holders = append(info.Holders, h.info(now))
	}
	for _, t := range e.tickets {
		if t.expires > now {
			info.Waiters = append(info.Waiters, driver.WaiterInfo{Owner: t.owner, Mode: t.mode, Waiting: now - t.since})
		}
	}
	return info
}

func (s *Store) list(prefix, after string, limit int) []driver.KeyInfo {
	if limit <= 0 {
		limit = 1000
	}
	var list []driver.KeyInfo
	for key := range s.keys {
		if !strings.HasPrefix(key, prefix) || key <= after {
			continue
		}
		if info := s.inspect(key); info.Limit != 0 {
			list = append(list, info)
		}
	}
	slices.SortFunc(list, func(a, b driver.KeyInfo) int { return cmp.Compare(a.Key, b.Key) })
	return list[:min(limit, len(list))]
}

// hold returns the index of the owner's grant, or -1.
func (e *entry) hold(owner string) int {
	return slices.IndexFunc(e.holds, func(h hold) bool { return h.owner == owner })
}

// ticket returns the index of the owner's ticket, or -1.
func (e *entry) ticket(owner string) int {
	return slices.IndexFunc(e.tickets, func(t ticket) bool { return t.owner == owner })
}

// limit returns the limit in force by grants and live tickets of others than
// this owner, or 0.
func (e *entry) limit(owner string, now time.Duration) int {
	for _, h := range e.holds {
		return h.limit
	}
	for _, t := range e.tickets {
		if t.owner != owner && t.expires > now {
			return t.limit
		}
	}
	return 0
}

// admits says whether a grant fits beside the present ones.
func (e *entry) admits(mode driver.Mode, limit int) bool {
	if mode == driver.Shared {
		return !slices.ContainsFunc(e.holds, func(h hold) bool { return h.mode != driver.Shared })
	}
	return len(e.holds) < limit && !slices.ContainsFunc(e.holds, func(h hold) bool { return h.mode == driver.Shared })
}

// lost says why a grant is not there.
func (e *entry) lost(lease *driver.Lease) error {
	reason := driver.ReasonGone
	if len(e.holds) > 0 {
		reason = driver.ReasonTaken
	}
	return &driver.LostError{Key: lease.Key, Token: lease.Token, Reason: reason}
}

func (h *hold) lease(key string) driver.Lease {
	return driver.Lease{Key: key, Owner: h.owner, Token: h.token, TTL: h.ttl, Mode: h.mode}
}

func (h *hold) info(now time.Duration) driver.HolderInfo {
	return driver.HolderInfo{
		Owner: h.owner, Token: h.token, Mode: h.mode, TTL: h.ttl, Held: now - h.since, Remaining: h.expires - now,
	}
}
