package consullock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// One question for each lock waits for its keys to change, on behalf of all that
// wait for it here. A list of all tickets is asked for when there are waiters here
// that the last one does not know; otherwise the names of those that are still
// there do, which are much less: who has come since is behind. So nothing is missed,
// and what is old is not wrong: who has left does not come back before the ticket
// of a waiter, which keeps its place. Of a waiter's own ticket the session tells how
// long it is sure to be there.

const (
	// maxWatched is how many locks are watched at the same time. The waiters of
	// further ones look by themselves.
	maxWatched = 32
	// watchWait is how long a question waits, and watchGrace how much longer we
	// wait for its answer.
	watchWait  = 10 * time.Second
	watchGrace = 3 * time.Second
	// relist is how often all tickets are listed anyway, as a ticket may have been
	// made again under the same name.
	relist = 5 * time.Second
	// front is how near to the head a waiter always asks the store; those behind
	// are told again what they were told before.
	front = 3
	// warm is how long a lock is taken to be in use by others after it was seen to
	// be.
	warm = time.Second
)

// lock is what this backend knows of one lock. It is guarded by Backend.mu.
type lock struct {
	key, base string
	entries   map[string]*entry // by owner
	hot       time.Time         // when others were last seen to have it or wait for it

	stop  context.CancelFunc // ends the watch; nil if there is none
	list  []ticket           // as last seen, less those that have left; not to be changed
	index uint64             // all tickets that were made up to here are in the list
	heard time.Time          // when the watch last answered
}

// busy says whether the lock is likely to be in use. The mutex is held.
func (l *lock) busy(now time.Time) bool { return now.Sub(l.hot) < warm }

// lock returns what is known of a lock. The mutex is held.
func (b *Backend) lock(key string) *lock {
	l := b.locks[key]
	if l == nil {
		l = &lock{key: key} // it has just been forgotten
	}
	return l
}

// waits says whether an entry is a ticket that waits. The mutex is held.
func (e *entry) waits() bool { return e.create != 0 && !e.granted && !e.release }

// settle ends the watch of a lock that nobody waits for here, and forgets a lock
// that nothing is known of. The mutex is held.
func (b *Backend) settle(l *lock) {
	if l.stop != nil {
		for _, e := range l.entries {
			if e.waits() {
				return
			}
		}
		l.stop()
		l.stop, l.list, l.index, l.heard = nil, nil, 0, time.Time{}
		b.watching--
	}
	if len(l.entries) > 0 || b.locks[l.key] != l {
		return
	}
	if !l.busy(time.Now()) {
		delete(b.locks, l.key)
		return
	}
	b.task(func() {
		sleep(b.ctx, warm)
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.locks[l.key] == l && len(l.entries) == 0 && !l.busy(time.Now()) {
			delete(b.locks, l.key)
		}
	})
}

// watch has the waiters of a lock woken. The mutex is held.
func (b *Backend) watch(l *lock) {
	if l.stop != nil || b.watching >= maxWatched || b.ended || b.locks[l.key] != l {
		return
	}
	if !slices.ContainsFunc(b.waitersOf(l), func(e *entry) bool { return b.listeners[e.manager] != nil }) {
		return
	}
	ctx, cancel := context.WithCancel(b.ctx)
	l.stop = cancel
	b.watching++
	b.tasks.Go(func() {
		defer cancel()
		b.watchLock(ctx, l)
	})
}

func (b *Backend) waitersOf(l *lock) []*entry {
	var list []*entry
	for _, e := range l.entries {
		if e.waits() {
			list = append(list, e)
		}
	}
	return list
}

// placeBehind is the place that a request would get, if that is known, and if it
// is none that holds the lock. The mutex is held.
func (l *lock) placeBehind(req *driver.Request) *driver.HeldError {
	if l.stop == nil || time.Since(l.heard) > watchWait+watchGrace || len(l.list) == 0 || l.list[0].limit != req.Limit ||
		find(l.list, req.Owner) >= 0 {
		return nil
	}
	list := append(slices.Clip(l.list), ticket{owner: req.Owner, mode: req.Mode, limit: req.Limit})
	if holds(list, len(list)-1) {
		return nil
	}
	held := placeAt(list, len(list)-1)
	return &held
}

// watchLock asks for changes until nobody waits any more.
func (b *Backend) watchLock(ctx context.Context, l *lock) {
	var listed time.Time
	var seen uint64 // index of the last change
	for failures := 0; ctx.Err() == nil; {
		b.mu.Lock()
		all := seen == 0 || time.Since(listed) > relist ||
			slices.ContainsFunc(b.waitersOf(l), func(e *entry) bool { return e.create > l.index })
		b.mu.Unlock()
		after := seen
		if all {
			after = 0
		}
		st, names, err := b.change(ctx, l, after)
		if err != nil {
			failures++
			sleep(ctx, backoff(failures))
			continue
		}
		failures = 0
		if seen = st.index; seen < after {
			seen = 0 // the servers have begun anew
		}
		b.mu.Lock()
		if ctx.Err() == nil {
			l.heard = time.Now()
			switch {
			case !all:
				l.keep(names, st.index)
			case st.index >= l.index:
				l.list, l.index = st.list, st.index
				fallthrough
			default:
				listed = l.heard
			}
			b.judge(l)
			b.settle(l)
		}
		n := len(l.list)
		b.mu.Unlock()
		// Lists of long queues are work for all; so many changes at the same time
		// are seen together.
		sleep(ctx, time.Duration(n)*5*time.Microsecond)
	}
}

// keep takes note of which tickets are still there at an index. The mutex is held.
func (l *lock) keep(names []string, index uint64) {
	there := make(map[string]struct{}, len(names))
	for _, name := range names {
		there[name] = struct{}{}
	}
	list := make([]ticket, 0, len(l.list))
	for _, t := range l.list {
		if _, ok := there[t.name]; ok || t.create > index {
			list = append(list, t)
		}
	}
	l.list = list
}

// change returns what there is of a lock, or, with the index of the last change
// that is known, waits for another and returns the names of what is there.
func (b *Backend) change(ctx context.Context, l *lock, index uint64) (st state, names []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, watchWait+watchWait/16+watchGrace)
	defer cancel()
	err = guard(ctx, func(ctx context.Context) error {
		q := (&api.QueryOptions{WaitIndex: index, WaitTime: watchWait}).WithContext(ctx)
		var kvs api.KVPairs
		var meta *api.QueryMeta
		var err error
		if index == 0 {
			kvs, meta, err = b.client.KV().List(l.base, q)
		} else {
			names, meta, err = b.client.KV().Keys(l.base, "", q)
		}
		if err != nil {
			return err
		}
		st, err = parseState(l.base, kvs)
		st.index = meta.LastIndex
		return err
	})
	return st, names, err
}

// judge tells those who hold the lock by now, as the list shows. The mutex is
// held.
func (b *Backend) judge(l *lock) {
	waiting := b.waitersOf(l)
	if len(waiting) == 0 {
		return
	}
	at := make(map[string]int, len(l.list))
	for i := range l.list {
		at[l.list[i].name] = i
	}
	for _, e := range waiting {
		i, ok := at[e.name]
		switch {
		case !ok || l.list[i].create != e.create:
			if l.index >= e.create {
				b.wake(e) // its ticket is gone
			}
		case holds(l.list, i):
			b.grant(e)
		default:
			e.place = placeAt(l.list, i)
			l.hot = time.Now()
		}
	}
}

// left takes note that a ticket was given up, before the watch tells of it. The
// mutex is held.
func (b *Backend) left(l *lock, create uint64) {
	if l.stop == nil {
		return
	}
	if i := slices.IndexFunc(l.list, func(t ticket) bool { return t.create == create }); i >= 0 {
		l.list = slices.Delete(slices.Clone(l.list), i, i+1)
		b.judge(l)
		b.settle(l)
	}
}

// placeOf returns a waiter's place if it cannot have become the holder since it
// was last seen. The mutex is held.
func (b *Backend) placeOf(e *entry) (driver.HeldError, bool) {
	l := b.locks[e.key]
	if l == nil || l.stop == nil || time.Since(l.heard) > watchWait+watchGrace || e.granted || e.place.Position <= front ||
		e.session == nil || !e.session.usable(time.Now()) || e.place.Ticket != int64(e.create) {
		return driver.HeldError{}, false
	}
	return e.place, true
}

// wake tells a waiter that it is worth asking again. The mutex is held.
func (b *Backend) wake(e *entry) {
	e.place.Position = 0 // it is to ask the store
	if l := b.listeners[e.manager]; l != nil {
		l.tell(driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: e.key, Owner: e.owner}})
	}
}

// grant hands the lock to a waiter: nothing stands in its way any more. If its
// ticket belongs to a session that is too short, or that may be about to end, the
// waiter has to ask, and gets another. The mutex is held.
func (b *Backend) grant(e *entry) {
	l := b.listeners[e.manager]
	if l == nil {
		return
	}
	if !good(e.session, e.ttl) || b.delays(e) {
		e.first = true
		b.wake(e)
		return
	}
	e.granted = true
	l.tell(driver.Event{Kind: driver.EventGrant, Ticket: int64(e.create), Lease: b.leaseOf(e, e.ttl, e.asked)})
}

// listener is one Listen call under way. It is guarded by Backend.mu.
type listener struct {
	events []driver.Event
	ready  chan struct{} // has room for one
}

// tell queues an event. The mutex is held.
func (l *listener) tell(e driver.Event) {
	l.events = append(l.events, e)
	nudge(l.ready)
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Listen implements [driver.Notifier]. It needs no connection of its own: what is
// waited for is watched when somebody waits.
func (b *Backend) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	l := &listener{ready: make(chan struct{}, 1)}
	b.mu.Lock()
	b.listeners[manager] = l
	l.tell(driver.Event{Kind: driver.EventUp})
	for _, k := range b.locks {
		b.watch(k)
	}
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.listeners[manager] == l {
			delete(b.listeners, manager)
		}
	}()
	for {
		select {
		case <-b.ctx.Done():
			return driver.ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		case <-l.ready:
			b.mu.Lock()
			events := l.events
			l.events = nil
			b.mu.Unlock()
			for _, e := range events {
				handle(e)
			}
		}
	}
}

// stamp is a value that differs from any before, so that writing it is a change.
func stamp() []byte { return fmt.Append(nil, rand.Uint64()) }
