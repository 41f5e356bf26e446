package pglock

import (
	"context"

	"github.com/go-dlm/dlm/driver"
)

// mailbox is that of one Listen call. It is guarded by Advisory.mu.
type mailbox struct {
	events []driver.Event
	ready  chan struct{} // has room for one
}

func (m *mailbox) push(e driver.Event) {
	m.events = append(m.events, e)
	select {
	case m.ready <- struct{}{}:
	default:
	}
}

// push tells a manager of something, if it listens. The mutex is held.
func (a *Advisory) push(manager string, e driver.Event) {
	if m := a.listeners[manager]; m != nil {
		m.push(e)
	}
}

// Listen implements [driver.Notifier]. It hears what the session hears, and sends
// EventUp whenever another one has begun: by the next call, for which those who
// wait are woken.
func (a *Advisory) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m := &mailbox{ready: make(chan struct{}, 1)}
	for up := false; !up; {
		if _, err := a.ready(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}
		a.mu.Lock()
		if up = a.session != nil; up {
			a.listeners[manager] = m
			m.push(driver.Event{Kind: driver.EventUp})
		}
		a.mu.Unlock()
	}
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.listeners[manager] == m {
			delete(a.listeners, manager)
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.ctx.Done():
			return driver.ErrClosed
		case <-m.ready:
		}
		a.mu.Lock()
		events := m.events
		m.events = nil
		a.mu.Unlock()
		for _, e := range events {
			handle(e)
		}
	}
}
