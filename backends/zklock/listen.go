package zklock

import (
	"context"

	"github.com/go-dlm/dlm/driver"
)

// listener is the mailbox of one Listen call. It is guarded by Backend.mu.
type listener struct {
	events []driver.Event
	ready  chan struct{} // has room for one
}

func (l *listener) push(e driver.Event) {
	l.events = append(l.events, e)
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

// push tells a manager of something, if it listens. The mutex is held.
func (b *Backend) push(manager string, e driver.Event) {
	if l := b.listeners[manager]; l != nil {
		l.push(e)
	}
}

// wake tells waiters that what they wait for may have come. The mutex is held.
func (b *Backend) wake(w *watch) {
	for r := range w.waiters {
		delete(w.waiters, r)
		r.woken = true
		if r.name != "" && !r.held {
			b.push(r.manager, driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: r.key, Owner: r.owner}})
		}
	}
}

// lose ends a grant. The mutex is held.
func (b *Backend) lose(r *record, reason driver.LostReason) {
	lost := &driver.LostError{Key: r.key, Token: r.token, Reason: reason}
	b.push(r.manager, driver.Event{Kind: driver.EventLost, Lease: driver.Lease{Key: r.key, Owner: r.owner}, Err: lost})
	r.clear()
}

// Listen implements [driver.Notifier]. It sends EventUp whenever there is a
// connection again.
func (b *Backend) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l := &listener{ready: make(chan struct{}, 1)}
	b.mu.Lock()
	if b.ended {
		b.mu.Unlock()
		return driver.ErrClosed
	}
	b.listeners[manager] = l
	if b.session.up {
		l.push(driver.Event{Kind: driver.EventUp})
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
		case <-ctx.Done():
			return ctx.Err()
		case <-b.closed:
			return driver.ErrClosed
		case <-l.ready:
		}
		b.mu.Lock()
		events := l.events
		l.events = nil
		b.mu.Unlock()
		for _, e := range events {
			handle(e)
		}
	}
}
