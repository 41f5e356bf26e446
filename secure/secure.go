package secure

import (
	"context"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// Manager admits calls to a [dlm.OptionsManager], so that semaphores, read-write
// locks and all other patterns work through it. It owns no goroutine and needs no
// closing: close the manager behind it. It is safe for concurrent use.
//
// The errors of all methods are those of the manager behind it, or a
// [*DeniedError]; a nil context is one that matches [dlm.ErrInvalid]. A panic of the
// manager behind it, or of a function of the [Policy], goes on to the caller.
//
// Owners for re-entry (see [dlm.WithOwner]) are those of one client: two clients
// with the same owner exclude each other.
type Manager struct {
	*gate
	m dlm.OptionsManager
}

// Basic admits calls to a [dlm.LockManager] that knows no options: [Manager] without
// Acquire, GetLock and Properties.
type Basic struct {
	*gate
}

var (
	_ dlm.OptionsManager = (*Manager)(nil)
	_ dlm.LockManager    = (*Basic)(nil)
)

// New returns a wrapper of the manager, whose policy a nil p leaves at the defaults.
// The error matches [dlm.ErrInvalid] and names the field that is wrong.
func New(m dlm.OptionsManager, p *Policy) (*Manager, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	g, err := newGate(m, p)
	if err != nil {
		return nil, err
	}
	return &Manager{gate: g, m: m}, nil
}

// NewBasic is [New] for a manager that knows no options. It refuses Policy.MaxHold,
// which it could not pass on.
func NewBasic(m dlm.LockManager, p *Policy) (*Basic, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	g, err := newGate(m, p)
	if err != nil {
		return nil, err
	}
	if hold := g.policy.MaxHold; hold != 0 {
		return nil, invalidf("Policy.MaxHold is %v, must be 0 for a manager without options", hold)
	}
	return &Basic{gate: g}, nil
}

// plain acquires a lock without options.
func (g *gate) plain(
	ctx context.Context, op, key string, ttl time.Duration,
	ask func(context.Context, string, time.Duration) (*dlm.Lock, error),
) (*dlm.Lock, error) {
	c, err := g.admit(ctx, op, key)
	if err != nil {
		return nil, err
	}
	if err := c.checkTTL(ttl); err != nil {
		return nil, err
	}
	return c.acquire(ctx, func(ctx context.Context) (*dlm.Lock, error) { return ask(ctx, key, ttl) })
}

// ReleaseLock is [dlm.Manager.ReleaseLock] for a lock that the client of the context
// acquired here; any other is refused with ReasonNotHolder. No rate and no quota
// refuses it. It may be repeated, also after the lock was lost.
func (g *gate) ReleaseLock(ctx context.Context, lock *dlm.Lock) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	if lock == nil {
		return invalidf("lock is nil")
	}
	c, err := g.begin(context.WithoutCancel(ctx), "release", lock.Key)
	if err != nil {
		return err
	}
	if err := c.own(lock); err != nil {
		return err
	}
	return g.m.ReleaseLock(ctx, lock)
}

// ExtendLock is [dlm.Manager.ExtendLock] for a lock that the client of the context
// acquired here; any other is refused with ReasonNotHolder. It counts for the rate
// of the client, not for that of all.
func (g *gate) ExtendLock(ctx context.Context, lock *dlm.Lock, ttl time.Duration) error {
	if lock == nil {
		return invalidf("lock is nil")
	}
	c, err := g.begin(ctx, "extend", lock.Key)
	if err != nil {
		return err
	}
	// Only holders get as far as the table of clients, since the rate of all
	// does not bound them here.
	if err := c.own(lock); err != nil {
		return err
	}
	if err := c.allow(false); err != nil {
		return err
	}
	if err := c.checkTTL(ttl); err != nil {
		return err
	}
	return g.m.ExtendLock(ctx, lock, ttl)
}

// Stats returns what is counted at this moment.
func (g *gate) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Stats{Held: g.held, Waiting: g.waiting, Clients: len(g.table.clients)}
}

// AcquireLock is [dlm.Manager.AcquireLock] for the client of the context. When
// Policy.MaxWait is over before ctx ends, the error is a [*DeniedError] with
// ReasonWait, and matches [context.DeadlineExceeded], and [dlm.ErrHeld] if the key
// was held.
func (m *Manager) AcquireLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	return m.Acquire(ctx, key, ttl, nil)
}

// TryLock is [dlm.Manager.TryLock] for the client of the context. It is bounded as
// AcquireLock is.
func (m *Manager) TryLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	return m.Acquire(ctx, key, ttl, &dlm.AcquireOptions{NoWait: true})
}

// Acquire is [dlm.Manager.Acquire] for the client of the context. It is bounded as
// AcquireLock is.
func (m *Manager) Acquire(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
	var o dlm.AcquireOptions
	if opts != nil {
		o = *opts
	}
	op := "acquire"
	if o.NoWait {
		op = "try"
	}
	c, err := m.admit(ctx, op, key)
	if err != nil {
		return nil, err
	}
	if err := c.checkTTL(ttl); err != nil {
		return nil, err
	}
	p := &m.policy
	if o.Limit > p.MaxPermits {
		return nil, c.deny(ReasonPermits, 0, "AcquireOptions.Limit is %d, must be at most %d (Policy.MaxPermits)", o.Limit, p.MaxPermits)
	}
	if p.MaxHold > 0 {
		if o.MaxHold > p.MaxHold {
			return nil, c.deny(ReasonHold, 0, "AcquireOptions.MaxHold is %v, must be at most %v (Policy.MaxHold)", o.MaxHold, p.MaxHold)
		}
		if o.MaxHold == 0 {
			o.MaxHold = p.MaxHold
		}
	}
	return c.acquire(ctx, func(ctx context.Context) (*dlm.Lock, error) { return m.m.Acquire(ctx, key, ttl, &o) })
}

// GetLock is [dlm.Manager.GetLock] for the client of the context, who must be allowed
// to use the key. It shows locks of other clients on that key, too.
func (m *Manager) GetLock(ctx context.Context, key string) (*dlm.LockInfo, error) {
	if _, err := m.admit(ctx, "get", key); err != nil {
		return nil, err
	}
	return m.m.GetLock(ctx, key)
}

// AcquireLock is [dlm.Manager.AcquireLock] for the client of the context, bounded as
// [Manager.AcquireLock] is.
func (b *Basic) AcquireLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	return b.plain(ctx, "acquire", key, ttl, b.m.AcquireLock)
}

// TryLock is [dlm.Manager.TryLock] for the client of the context, bounded as
// AcquireLock is.
func (b *Basic) TryLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	return b.plain(ctx, "try", key, ttl, b.m.TryLock)
}

// Properties describes the store.
func (m *Manager) Properties() driver.Properties { return m.m.Properties() }
