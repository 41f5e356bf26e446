package clockskew

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// The sentinels of a [*RefusedError].
var (
	// ErrSkewed: a check has found the clock to be skewed, and none since that it
	// is fine.
	ErrSkewed = errors.New("clockskew: the clock is skewed")
	// ErrUnknown: for GuardOptions.MaxUnknown no check has found the clock to be
	// fine.
	ErrUnknown = errors.New("clockskew: the clock has not been found right for too long")
)

// RefusedError says why a guard refused a new lock. The manager behind it was not
// asked, so it matches [dlm.ErrNotApplied], and one of [ErrSkewed] and
// [ErrUnknown].
type RefusedError struct {
	// Op is "acquire" or "try".
	Op string
	// Key is the key of the call.
	Key string
	// Result is the one that decided for ErrSkewed, and the last one for
	// ErrUnknown.
	Result Result

	reason error
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("%s %q: %v: %v", e.Op, e.Key, e.reason, e.Result)
}

// Unwrap returns what the error matches.
func (e *RefusedError) Unwrap() []error { return []error{e.reason, dlm.ErrNotApplied} }

// GuardOptions configures a guard. Nil means the defaults.
type GuardOptions struct {
	// MaxUnknown refuses new locks, too, if for longer than this no check has
	// found the clock to be fine, counted from the making of the guard at the
	// earliest. At least twice Options.Interval and at most 7 days. The time
	// that the machine is suspended does not count. Zero means that a clock of
	// which nothing is known is trusted.
	MaxUnknown time.Duration
}

const maxMaxUnknown = 7 * 24 * time.Hour

// gate decides on new locks, and lets everything else through.
type gate struct {
	m          dlm.LockManager
	c          *Checker
	maxUnknown time.Duration
	made       time.Time
}

func newGate(m dlm.LockManager, c *Checker, opts *GuardOptions) (*gate, error) {
	if c == nil {
		return nil, invalidf("checker is nil")
	}
	g := &gate{m: m, c: c, made: time.Now()}
	if opts != nil {
		g.maxUnknown = opts.MaxUnknown
	}
	if low := 2 * c.opts.Interval; g.maxUnknown != 0 && (g.maxUnknown < low || g.maxUnknown > maxMaxUnknown) {
		return nil, invalidf("GuardOptions.MaxUnknown is %v, must be 0 or between %v, twice Options.Interval, and %v",
			g.maxUnknown, low, maxMaxUnknown)
	}
	return g, nil
}

// admit decides on a new lock.
func (g *gate) admit(op, key string) error {
	decided := g.c.decided()
	if decided.Verdict == Skewed {
		return &RefusedError{Op: op, Key: key, Result: decided.clone(), reason: ErrSkewed}
	}
	if g.maxUnknown == 0 {
		return nil
	}
	since := g.made
	if decided.Time.After(since) {
		since = decided.Time
	}
	if time.Since(since) > g.maxUnknown {
		return &RefusedError{Op: op, Key: key, Result: g.c.Snapshot().Last, reason: ErrUnknown}
	}
	return nil
}

// AcquireLock is [dlm.Manager.AcquireLock], or a [*RefusedError]. A call that waits
// when the clock becomes skewed goes on waiting, and may be granted. A lock that is
// entered again by its owner (see [dlm.WithOwner]) is a new one here.
func (g *gate) AcquireLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	if err := g.admit("acquire", key); err != nil {
		return nil, err
	}
	return g.m.AcquireLock(ctx, key, ttl)
}

// TryLock is [dlm.Manager.TryLock], or a [*RefusedError].
func (g *gate) TryLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	if err := g.admit("try", key); err != nil {
		return nil, err
	}
	return g.m.TryLock(ctx, key, ttl)
}

// ReleaseLock is [dlm.Manager.ReleaseLock]. It is never refused.
func (g *gate) ReleaseLock(ctx context.Context, lock *dlm.Lock) error {
	return g.m.ReleaseLock(ctx, lock)
}

// ExtendLock is [dlm.Manager.ExtendLock]. It is never refused.
func (g *gate) ExtendLock(ctx context.Context, lock *dlm.Lock, ttl time.Duration) error {
	return g.m.ExtendLock(ctx, lock, ttl)
}

// Guard refuses new locks of a [dlm.OptionsManager] while the clock is skewed, so
// semaphores, read-write locks and all other patterns work through it. It owns no
// goroutine and needs no closing: close the manager behind it. It is safe for
// concurrent use. The errors of all methods are those of the manager behind it, or
// a [*RefusedError].
//
// The verdict is that of the last check, so [Checker.Run] must be running somewhere.
// Once the clock was found to be skewed, locks are refused until a check finds it
// fine: that servers do not answer does not set it right.
type Guard struct {
	*gate
	m dlm.OptionsManager
}

// BasicGuard is [Guard] for a manager that knows no options, without Acquire,
// GetLock and Properties.
type BasicGuard struct {
	*gate
}

var (
	_ dlm.OptionsManager = (*Guard)(nil)
	_ dlm.LockManager    = (*BasicGuard)(nil)
)

// NewGuard returns a guard in front of a manager. Its errors match [dlm.ErrInvalid]
// and name what is wrong.
func NewGuard(m dlm.OptionsManager, c *Checker, opts *GuardOptions) (*Guard, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	g, err := newGate(m, c, opts)
	if err != nil {
		return nil, err
	}
	return &Guard{gate: g, m: m}, nil
}

// NewBasicGuard is [NewGuard] for a manager that knows no options.
func NewBasicGuard(m dlm.LockManager, c *Checker, opts *GuardOptions) (*BasicGuard, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	g, err := newGate(m, c, opts)
	if err != nil {
		return nil, err
	}
	return &BasicGuard{gate: g}, nil
}

// Acquire is [dlm.Manager.Acquire], or a [*RefusedError], see AcquireLock.
func (g *Guard) Acquire(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
	op := "acquire"
	if opts != nil && opts.NoWait {
		op = "try"
	}
	if err := g.admit(op, key); err != nil {
		return nil, err
	}
	return g.m.Acquire(ctx, key, ttl, opts)
}

// GetLock is [dlm.Manager.GetLock]. It is never refused.
func (g *Guard) GetLock(ctx context.Context, key string) (*dlm.LockInfo, error) {
	return g.m.GetLock(ctx, key)
}

// Properties describes the store.
func (g *Guard) Properties() driver.Properties { return g.m.Properties() }
