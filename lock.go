package dlm

import (
	"context"
	"fmt"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// Mode is how a lock is held.
type Mode = driver.Mode

// The modes of a lock.
const (
	Exclusive = driver.Exclusive
	Shared    = driver.Shared
)

// Lock is a lock that has been granted. It exists only once obtained; it is
// held from then on until it is released or lost, and never again after that.
// Its exported fields are fixed. It is safe for concurrent use, and may be
// used and released by any goroutine.
type Lock struct {
	// Key is what is locked.
	Key string
	// Value is the owner value: unique to this acquisition, and shared by
	// nested locks of the same owner only (see [WithOwner]).
	Value string
	// Token is the fencing token: larger than that of every earlier lock of
	// this key, never 0, below 2^53.
	Token int64
	// TTL is the time to live that was granted: at least what was asked for,
	// more where the store has a floor.
	TTL time.Duration
	// Mode is Exclusive or Shared.
	Mode Mode
	// AcquiredAt is the local time of the grant.
	AcquiredAt time.Time

	g     *grant
	since instant
	done  chan struct{}

	// The rest is guarded by Manager.mu.
	err       error // why the lock is no longer held, nil while it is
	lost      bool  // err is a loss, not a release
	contexts  map[*lockContext]struct{}
	releasing chan struct{} // closed when the Release call under way is over
	final     instant       // the deadline when it ended
	silent    bool          // it has not been handed out: no events
	reported  bool          // EventReleased has been sent
	doubtful  bool          // a release may have reached the store unanswered
	answered  bool          // answer is final
	answer    error
}

// grant is what the store gave: the lease behind one lock, or behind the
// nested locks of one owner.
type grant struct {
	m     *Manager
	key   string
	value string
	token int64
	mode  Mode
	limit int
	owned *ownedKey // its entry in Manager.owned, if it is open to re-entry

	// The rest is guarded by Manager.mu, except where said otherwise.
	lease    driver.Lease
	locks    []*Lock // the handles that are held; none once the grant is over
	deadline instant
	maxEnd   instant // end of the longest hold allowed, or forever
	renewAt  instant // when to renew next, or forever
	slack    instant // from the renewal that was planned when deadline was set to deadline
	failures int     // failed renewals since the last success
	lastErr  error   // of the last failed renewal
	ending   bool    // it is not renewed any more
	kept     bool    // the manager leaves it in the store as it closes

	due    instant       // when the keeper looks at it next
	slot   int           // index in the keeper's heap, or -1
	busy   bool          // a renewal is queued or under way
	lane   *lane         // where it is queued, or nil
	place  int           // its place there
	alone  bool          // its last renewal failed while the store answered others
	cancel func()        // cancels the renewal under way, or nil
	idle   chan struct{} // closed when busy ends; made by whoever waits
}

const forever = instant(1<<63 - 1)

// newLock adds a handle to a grant. The manager's mutex is held.
func (g *grant) newLock(now instant) *Lock {
	l := &Lock{
		Key: g.key, Value: g.value, Token: g.token, TTL: g.lease.TTL, Mode: g.mode, AcquiredAt: time.Now(),
		g: g, since: now, done: make(chan struct{}),
	}
	g.locks = append(g.locks, l)
	return l
}

// end ends one handle. The manager's mutex is held.
func (l *Lock) end(err error, lost bool) {
	l.err, l.lost = err, lost
	l.final = min(l.g.deadline, l.g.maxEnd)
	cause := err
	if !lost {
		cause = context.Canceled
	}
	for c := range l.contexts {
		c.cancel(cause)
	}
	l.contexts = nil
	// Last, so that what goes with the contexts has gone when Done closes.
	close(l.done)
}

// check makes sure that a deadline which has passed has been acted on. Timers
// may be late, above all after the process was stopped; a method of the handle
// never is.
func (l *Lock) check() {
	if l.g == nil {
		return
	}
	m := l.g.m
	now := m.clock.exactly()
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.err == nil {
		m.keeper.expire(l.g, now)
	}
}

// Deadline returns the local time until which the lock is surely ours, unless
// somebody removes it from the store by force: the moment just before the
// request that won or last renewed it was sent, plus the TTL, less a margin of
// 1% and 1ms for clocks that run at different rates. It moves on with every
// renewal; a key that was handed over to a waiter can have a nearer deadline
// until its first renewal. It is measured on the monotonic clock, so compare
// it with time.Now, and do not send it elsewhere. It stays where it was once
// the lock is no longer held.
func (l *Lock) Deadline() time.Time {
	if l.g == nil {
		return time.Time{}
	}
	m := l.g.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.err != nil {
		return m.clock.time(l.final)
	}
	return m.clock.time(min(l.g.deadline, l.g.maxEnd))
}

var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Done returns a channel that is closed when the lock is no longer held: at
// once when Release is called, when the manager is closed, and when the lock
// is lost, at its deadline at the latest. It never waits for the store.
//
// What is not guaranteed: a process that was stopped (by a debugger, SIGSTOP,
// a suspended machine) past the deadline may run on for a moment before the
// channel closes, though the methods of the handle then answer correctly at
// once. Only a resource that checks the Token is safe from that.
func (l *Lock) Done() <-chan struct{} {
	if l.g == nil {
		return closedChan
	}
	l.check()
	return l.done
}

// Err returns nil while the lock is held. After that it matches [ErrReleased]
// or [ErrLost], for good.
func (l *Lock) Err() error {
	if l.g == nil {
		return ErrReleased
	}
	l.check()
	l.g.m.mu.Lock()
	defer l.g.m.mu.Unlock()
	return l.err
}

// lockContext ends with its lock.
type lockContext struct {
	context.Context
	cancel context.CancelCauseFunc
	l      *Lock
}

// Err makes the context end on time even if the timers are late.
func (c *lockContext) Err() error {
	c.l.check()
	return c.Context.Err()
}

// lockKey finds the innermost lock of a context.
type lockKey struct{}

// Value also answers for the lock, see LockFromContext and ownContext.
func (c *lockContext) Value(key any) any {
	if key == any(c.l) || key == any(lockKey{}) {
		return c.l
	}
	return c.Context.Value(key)
}

// LockFromContext returns the lock that a context belongs to, or nil: the one
// whose [Lock.Context] made it or is the nearest of its parents. The function
// that [WithDistributedLock] calls gets at its fencing token that way.
func LockFromContext(ctx context.Context) *Lock {
	l, _ := ctx.Value(lockKey{}).(*Lock)
	return l
}

// ownContext says whether ctx ends with the lock.
func (l *Lock) ownContext(ctx context.Context) bool { return ctx.Value(l) != nil }

// Context returns a context that ends with the parent or with the lock,
// whichever is first. Its [context.Cause] is the loss, matching [ErrLost] and
// a [*LostError]; after a release it is [context.Canceled]. The context that
// the lock was acquired with plays no part, unless it is the parent.
func (l *Lock) Context(parent context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(parent)
	if l.g == nil {
		cancel(nil)
		return ctx
	}
	c := &lockContext{Context: ctx, cancel: cancel, l: l}
	l.check()
	m := l.g.m
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case l.lost:
		cancel(l.err)
	case l.err != nil:
		cancel(nil)
	default:
		if l.contexts == nil {
			l.contexts = make(map[*lockContext]struct{})
		}
		l.contexts[c] = struct{}{}
		// Do not keep the context of a parent that has ended.
		context.AfterFunc(ctx, func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			delete(l.contexts, c)
		})
	}
	return c
}

// Extend renews the lock: it then runs for at least ttl from now. It never
// shortens the lock. If ttl is longer than the TTL until now, later automatic
// renewals use it, too.
//
// If the lock is no longer held, the error matches [ErrLost] or [ErrReleased].
// If the store did not answer, it matches [ErrIndeterminate]; the lock is still
// held, and its deadline is unchanged.
func (l *Lock) Extend(ctx context.Context, ttl time.Duration) error {
	if l == nil || l.g == nil {
		return invalidf("lock is nil or was not acquired")
	}
	m := l.g.m
	return m.wrap("extend", l.Key, m.extend(ctx, l, ttl))
}

// lease returns the lock's deadline, how long before it the next renewal was to
// be when it was set, and the present instant.
func (l *Lock) lease() (deadline, slack, now instant) {
	if l.g == nil {
		return 0, 0, 0
	}
	m := l.g.m
	now = m.clock.exactly()
	m.mu.Lock()
	defer m.mu.Unlock()
	return min(l.g.deadline, l.g.maxEnd), l.g.slack, now
}

// keep makes the lease outlive its manager: Close ends the lock, but leaves the
// lease in the store, where it lasts until its TTL has run out. Where leases
// belong to a session, it ends with the session all the same.
func (l *Lock) keep() {
	if l.g == nil {
		return
	}
	l.g.m.mu.Lock()
	defer l.g.m.mu.Unlock()
	l.g.kept = true
}

// finalize stops the renewal of the lock if its lease lasts until then without,
// in the store as well. Where leases belong to a session, it does nothing: the
// session may be older than the lease.
func (l *Lock) finalize(until time.Time) {
	if l.g == nil || l.g.m.props.SessionLeases || l.Deadline().Before(until) {
		return
	}
	l.g.m.mu.Lock()
	defer l.g.m.mu.Unlock()
	l.g.ending = true
	l.g.renewAt = forever
	if l.err == nil {
		l.g.m.keeper.schedule(l.g)
	}
}

// Release gives the lock up. Its Done channel closes before the store is
// asked; the key is free, or the next waiter's, when Release returns nil.
//
// If the lock was lost before, the error matches [ErrLost], and nobody else's
// lock was touched. If no answer came, it matches [ErrIndeterminate] (or
// [ErrNotApplied], if the store certainly did not release): the manager goes
// on trying in the background, the key is free after one TTL at the latest, and
// Release may be called again. Otherwise another Release repeats the first
// answer.
//
// Of the nested locks of one owner, only the last Release asks the store. A
// context made by this lock's Context, which ends as Release begins, bounds the
// call by its deadline only, and by 5s.
func (l *Lock) Release(ctx context.Context) error {
	if l == nil || l.g == nil {
		return invalidf("lock is nil or was not acquired")
	}
	m := l.g.m
	return m.wrap("release", l.Key, m.release(ctx, l))
}

// String describes the lock.
func (l *Lock) String() string {
	return fmt.Sprintf("lock %q (token %d, %s)", l.Key, l.Token, l.Value)
}
