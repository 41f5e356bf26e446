package dlm

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// frontPoll is how often a waiter near the head of its queue looks again
	// though nobody wakes it: it is the one to notice that a holder died.
	frontPoll = time.Second
	// front is how far from the head that is.
	front = 3
	// steady is how long a subscription must have stood for the next attempt
	// to come at once when it breaks.
	steady = 5 * time.Second
	// upSpread is over how long the waiters' questions are spread when a
	// subscription comes up again: a millisecond each, and this at most.
	upSpread = time.Second
	// sessionPoll is how often a waiter looks again whose ticket needs no
	// refreshing.
	sessionPoll = 5 * time.Second
)

// waiter is the address for events of an acquisition that may wait.
type waiter struct {
	value string
	wake  chan struct{} // has room for one
	grant *driver.Event // an EventGrant that arrived; guarded by Manager.mu
}

// listener is the manager's one subscription. It is guarded by Manager.mu.
type listener struct {
	started bool
	up      bool
	ups     int // how often it came up
}

// wait waits until it is worth asking the store again, and returns nil, or
// until the key was handed over, and returns the grant.
func (a *acquisition) wait(ctx context.Context, held *driver.HeldError) (*grant, error) {
	m := a.m
	if !a.queued {
		a.queued, a.waiting = true, a.asked
		m.observe(Event{Kind: EventWaiting, Key: a.req.Key, Mode: a.req.Mode})
	}
	m.mu.Lock()
	m.listenNow()
	missed := m.listen.ups != a.ups
	pause := m.pollPause(held)
	m.mu.Unlock()
	if missed {
		return nil, nil // the subscription came up too late for this answer
	}

	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return nil, a.ended(ctx)
	case <-m.ctx.Done():
		return nil, a.ended(ctx)
	case <-timer.C:
	case <-a.waiter.wake:
	}

	return a.granted(), nil
}

// granted returns the grant that has been handed over, if there is one and it
// lasts long enough to be used without asking again, which would confirm it.
func (a *acquisition) granted() *grant {
	if a.waiter == nil {
		return nil
	}
	m := a.m
	m.mu.Lock()
	event := a.waiter.grant
	a.waiter.grant = nil
	m.mu.Unlock()
	if event == nil || event.Ticket == 0 || event.Ticket != a.ticket {
		return nil
	}
	// The grant was made after our last question, so it surely lasts that long
	// from then: as long as our ticket would have.
	lease := event.Lease
	lasts := lease
	if m.props.LivenessWindow > 0 {
		lasts.TTL = min(lease.TTL, m.props.LivenessWindow/4*3)
	}
	deadline := validUntil(a.asked, &lasts)
	enough := lasts.TTL / 2
	if m.cfg.AutoRenew == Off {
		enough = lease.TTL - driftMargin(lease.TTL) - lease.TTL/10
	}
	if deadline-m.clock.now() < enough {
		return nil
	}
	return a.grant(&lease, deadline, a.asked)
}

// pollPause is how long a waiter sleeps if nobody wakes it. The mutex is held.
func (m *Manager) pollPause(held *driver.HeldError) time.Duration {
	pause := sessionPoll
	if m.props.LivenessWindow > 0 {
		pause = m.props.LivenessWindow / 4
	}
	if !m.listen.up {
		pause = min(pause, m.pollInterval())
	}
	if held.Position <= front {
		pause = min(pause, frontPoll)
	}
	pause -= rand.N(pause/4 + 1)
	if held.Position <= 1 && held.Remaining > 0 {
		// Be there when the holder's time is up.
		pause = min(pause, held.Remaining) + rand.N(5*time.Millisecond)
	}
	return max(pause, time.Millisecond)
}

func (m *Manager) pollInterval() time.Duration {
	if m.props.PollInterval > 0 {
		return m.props.PollInterval
	}
	return time.Second
}

func (m *Manager) addWaiter(value string) *waiter {
	w := &waiter{value: value, wake: make(chan struct{}, 1)}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiters[value] = w
	return w
}

func (m *Manager) removeWaiter(w *waiter) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.waiters, w.value)
}

// listenNow starts the subscription, once in the manager's life. The mutex is
// held.
func (m *Manager) listenNow() {
	if m.notifier == nil || m.listen.started || m.closed {
		return
	}
	m.listen.started = true
	m.calls.Go(func() {
		m.listenLoop()
	})
}

// subscriptions is how often the subscription has come up.
func (m *Manager) subscriptions() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.listen.ups
}

// listenLoop keeps the subscription up until the manager closes.
func (m *Manager) listenLoop() {
	failures := 0
	for m.ctx.Err() == nil {
		start := m.clock.now()
		err := guard(m.ctx, m.props.Name, func(ctx context.Context) error {
			return m.notifier.Listen(ctx, m.id, m.handle)
		})
		m.mu.Lock()
		m.listen.up = false
		m.mu.Unlock()
		if m.ctx.Err() != nil {
			return
		}
		if m.clock.now()-start > steady {
			failures = 0
		}
		failures++
		m.observe(Event{Kind: EventStoreError, Op: "listen", Err: err})
		sleep(m.ctx, m.ctx, m.cfg.backoff(failures))
	}
}

// handle takes an event from the store.
func (m *Manager) handle(e driver.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch e.Kind {
	case driver.EventUp:
		// What happened since a waiter last asked may have been missed.
		m.listen.up = true
		m.listen.ups++
		spread := min(time.Duration(len(m.waiters))*time.Millisecond, upSpread)
		for _, w := range m.waiters {
			if m.listen.ups == 1 {
				w.signal()
			} else {
				time.AfterFunc(rand.N(spread), w.signal)
			}
		}
	case driver.EventGrant, driver.EventWake:
		w := m.waiters[e.Lease.Owner]
		if w == nil {
			return
		}
		if e.Kind == driver.EventGrant {
			w.grant = &e
		}
		w.signal()
	case driver.EventLost:
		g := m.grants[e.Lease.Owner]
		if g == nil || g.key != e.Lease.Key {
			return
		}
		if loss := lossOf(e.Err, &g.lease); loss != nil {
			m.keeper.lose(g, loss.Reason, loss.Cause)
		}
	}
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
