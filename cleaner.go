package dlm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// withdrawPatience is how long a failed acquisition waits for its withdrawal
// before it leaves it to the background.
const withdrawPatience = 500 * time.Millisecond

// maxCleaners bounds the goroutines of the cleaner, so that a few calls that
// hang do not hold up the rest.
const maxCleaners = 4

// cleaner frees what a call had to leave in the store: a lease whose release
// was not answered, a ticket that could not be withdrawn. Its goroutines live
// only while there is something to free. It gives up when the store must have
// dropped the lease by itself.
type cleaner struct {
	mu      sync.Mutex
	queue   []leftover
	running int
}

type leftover struct {
	lease  driver.Lease
	giveUp instant
	lock   *Lock // whose Release is still to be answered, or nil
}

// cleanLater leaves a lease to the cleaner. A lease without a token stands for
// whatever its owner has on the key.
func (m *Manager) cleanLater(left leftover) {
	c := &m.cleaner
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, left)
	if c.running < maxCleaners && m.ctx.Err() == nil {
		c.running++
		m.calls.Go(func() {
			c.run(m)
		})
	}
}

// giveUp is when to give a leftover up that the store drops at this time; a
// store whose leases last as long as a session does not.
func (m *Manager) giveUp(gone instant) instant {
	if m.props.SessionLeases {
		return forever
	}
	return gone
}

// run frees leftovers until there are none, or until the manager closes.
func (c *cleaner) run(m *Manager) {
	failures := 0
	for {
		c.mu.Lock()
		if len(c.queue) == 0 || m.ctx.Err() != nil {
			c.running--
			c.mu.Unlock()
			return
		}
		next := c.queue[0]
		c.queue = c.queue[1:]
		c.mu.Unlock()

		if m.clock.now() >= next.giveUp {
			continue
		}
		err := m.clean(m.ctx, next)
		if err == nil || permanent(err) && m.ctx.Err() == nil {
			failures = 0
			continue
		}
		m.report(Event{Kind: EventStoreError, Op: "withdraw", Key: next.lease.Key, Err: err})
		c.mu.Lock()
		c.queue = append(c.queue, next)
		c.mu.Unlock()
		failures++
		sleep(m.ctx, m.ctx, m.cfg.backoff(failures))
	}
}

// clean frees one leftover.
func (m *Manager) clean(ctx context.Context, left leftover) error {
	err := m.freeOnce(ctx, left.lease)
	if l := left.lock; l != nil && err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !l.answered {
			l.answered, l.answer = true, nil
		}
	}
	if lossOf(err, &left.lease) != nil {
		return nil
	}
	return err
}

// finish tries once more to free all that is left, and says what was not.
func (c *cleaner) finish(ctx context.Context, m *Manager) error {
	c.mu.Lock()
	queue := c.queue
	c.queue = nil
	c.mu.Unlock()
	var errs []error
	for _, left := range queue {
		if m.clock.now() >= left.giveUp {
			continue
		}
		if err := m.clean(ctx, left); err != nil {
			errs = append(errs, fmt.Errorf("withdraw from %q: %w", left.lease.Key, err))
		}
	}
	return errors.Join(errs...)
}

// withdraw removes whatever the owner of a failed acquisition may have left on
// the key, though the caller's own context may have ended. If that is not
// confirmed soon, it goes on in the background and returns the failure.
func (m *Manager) withdraw(ctx context.Context, req *driver.Request) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawPatience)
	defer cancel()
	lease := driver.Lease{Key: req.Key, Owner: req.Owner, Mode: req.Mode}
	err := m.freeOnce(ctx, lease)
	if err == nil {
		return nil
	}
	m.observe(Event{Kind: EventStoreError, Op: "withdraw", Key: req.Key, Err: err})
	giveUp := m.giveUp(m.clock.now() + max(req.TTL, 2*m.props.LivenessWindow) + m.cfg.CallTimeout)
	m.cleanLater(leftover{lease: lease, giveUp: giveUp})
	return fmt.Errorf("%w: withdrawal: %w", ErrIndeterminate, err)
}
