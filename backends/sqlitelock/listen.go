package sqlitelock

import (
	"context"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// SQLite does not tell one process what another has done, so a manager looks:
// often while the file is changing, seldom while it is quiet, and not at all
// while the manager has nobody waiting.
const (
	minLook = 500 * time.Microsecond
	maxLook = 20 * time.Millisecond
)

// listener is the state of one Listen call, guarded by Backend.mu.
type listener struct {
	wake    chan struct{} // has room for one
	waiting map[place]int64
	prune   int64 // when to look for dead tickets again
}

// place is an owner's place in a key's queue. In listener.waiting it leads to
// the instant when its ticket dies unless it is refreshed.
type place struct{ key, owner string }

// rouse makes the Listen call look at once.
func (l *listener) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// waits notes that the owner has a ticket.
func (b *Backend) waits(manager, key, owner string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.listeners[manager]
	if l == nil {
		return
	}
	now, err := b.clock.now()
	if err != nil {
		return // the next call reports it
	}
	p := place{key, owner}
	if _, known := l.waiting[p]; !known {
		l.rouse()
	}
	l.waiting[p] = after(now, 2*b.ticketLife())
}

// left notes that the owner has no ticket any more.
func (b *Backend) left(manager, key, owner string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if l := b.listeners[manager]; l != nil {
		delete(l.waiting, place{key, owner})
	}
}

// forget is left for an owner whose manager is not known.
func (b *Backend) forget(key, owner string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.listeners {
		delete(l.waiting, place{key, owner})
	}
}

// nudge makes the managers of this process look that a transaction has granted
// something to.
func (b *Backend) nudge(managers []string) {
	if len(managers) == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range managers {
		if l := b.listeners[m]; l != nil {
			l.rouse()
		}
	}
}

// watched says whether anybody waits. It drops those whose tickets are dead.
func (b *Backend) watched(l *listener) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now, err := b.clock.now(); err == nil && now >= l.prune {
		maps.DeleteFunc(l.waiting, func(_ place, dies int64) bool { return dies <= now })
		l.prune = after(now, b.window/4)
	}
	return len(l.waiting) > 0
}

// Listen implements [driver.Notifier]. Besides its caller it costs one goroutine
// and one connection.
func (b *Backend) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if err := b.ready(ctx); err != nil {
		return err
	}
	l := &listener{wake: make(chan struct{}, 1), waiting: make(map[place]int64)}
	b.mu.Lock()
	select {
	case <-b.closed: // under mu, so Close cannot miss this call
		b.mu.Unlock()
		return driver.ErrClosed
	default:
	}
	b.listening.Add(1)
	b.listeners[manager] = l
	b.mu.Unlock()
	w := &watch{b: b, lane: newLane(), manager: manager}
	defer func() {
		b.mu.Lock()
		if b.listeners[manager] == l {
			delete(b.listeners, manager)
		}
		b.mu.Unlock()
		w.close()
	}()
	return w.run(ctx, l, handle)
}

// watch is the running part of one Listen call.
type watch struct {
	b       *Backend
	lane    *lane
	manager string
	version int64 // of the file, when it was last read
	// announced are the tokens of the grants that were reported and that
	// nobody has confirmed yet.
	announced map[int64]bool
}

// handover is a grant that waits for its owner to confirm it.
type handover struct {
	ticket int64
	lease  driver.Lease
}

// sight is what one look has shown.
type sight struct {
	version   int64
	changed   bool // since the look before; otherwise there are no handovers
	handovers []handover
}

func (w *watch) run(ctx context.Context, l *listener, handle func(driver.Event)) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	pause := minLook
	for first, must := true, true; ; first = false {
		seen, err := w.look(ctx, must)
		if err != nil {
			return err
		}
		if first {
			handle(driver.Event{Kind: driver.EventUp})
		}
		if seen.changed {
			w.report(seen, handle)
			pause = minLook
		} else {
			pause = min(pause*5/4, maxLook)
		}
		var due <-chan time.Time
		if w.b.watched(l) {
			timer.Reset(pause*3/4 + rand.N(pause/2))
			due = timer.C
		}
		must = false
		select {
		case <-due:
		case <-l.wake:
			must = true
		case <-ctx.Done():
			return ctx.Err()
		case <-w.b.closed:
			return driver.ErrClosed
		}
	}
}

// look reads the grants of this manager that nobody has confirmed yet, if the
// file has changed since it last did, or if it must.
func (w *watch) look(ctx context.Context, must bool) (sight, error) {
	version := w.version
	return call(ctx, w.b, w.lane, func(s *session) (sight, error) {
		var seen sight
		err := w.b.patiently(ctx, func() error {
			seen = sight{}
			// The version is read first: what changes in between is looked at
			// twice, not overlooked.
			if _, err := s.row("PRAGMA data_version", nil, &seen.version); err != nil {
				return err
			}
			if seen.changed = must || seen.version != version; !seen.changed {
				return nil
			}
			now, err := w.b.clock.now()
			if err != nil {
				return err
			}
			return s.rows(`SELECT key, owner, token, mode, ttl, ticket FROM holds
				WHERE manager = ? AND provisional = 1 AND expires > ? AND (SELECT boot FROM meta WHERE id = 1) = ?
				ORDER BY token`, []any{[]byte(w.manager), now, w.b.clock.boot},
				func(scan func(...any) error) error {
					var h handover
					err := scan(&h.lease.Key, &h.lease.Owner, &h.lease.Token, &h.lease.Mode, &h.lease.TTL, &h.ticket)
					seen.handovers = append(seen.handovers, h)
					return err
				})
		})
		if err != nil {
			s.bad = true
			return seen, notApplied(err)
		}
		return seen, nil
	})
}

// report passes on what has not been reported yet, and forgets what has gone.
func (w *watch) report(seen sight, handle func(driver.Event)) {
	w.version = seen.version
	announced := make(map[int64]bool, len(seen.handovers))
	for _, h := range seen.handovers {
		announced[h.lease.Token] = true
		if !w.announced[h.lease.Token] {
			w.b.left(w.manager, h.lease.Key, h.lease.Owner)
			handle(driver.Event{Kind: driver.EventGrant, Ticket: h.ticket, Lease: h.lease})
		}
	}
	w.announced = announced
}

// close ends the lane, but does not wait for a look that the disk holds up:
// Backend.Close does.
func (w *watch) close() {
	go func() {
		defer w.b.listening.Done()
		_ = w.lane.close() // a connection that only reads has nothing to lose
	}()
}
