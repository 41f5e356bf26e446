package dlm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// MaxMultiKeys is how many different keys a [MultiLock] may have.
const MaxMultiKeys = 64

// MultiLock is locks on several keys that are held and given up as one: it is
// held as long as all of them are. It exists only once obtained, and is safe for
// concurrent use.
//
// Release it in any case, also after a loss: the loss of one key ends the whole,
// but the locks on the other keys stay held, and are renewed, until Release, so
// that what they protect is not open to others before the caller has stopped.
type MultiLock struct {
	m     LockManager
	locks []*Lock // by rising key
	done  <-chan struct{}

	mu  sync.Mutex
	err error // why it is no longer held, nil while it is
}

// AcquireMulti takes all of the keys for at least ttl, waiting until the context
// ends, or none of them. A key that is given several times counts once; there
// may be up to [MaxMultiKeys] others. The context bounds the wait only.
//
// The keys are taken one after another, in the order of their bytes and not in
// that in which they are given, so that callers who take all they need in one call
// never wait for each other in a circle. Those who hold a lock, or a MultiLock, and
// ask for more can, unless they keep to the same order. While AcquireMulti waits
// for a key, it holds those before it, and others wait for these; it keeps them
// alive even if LockConfig.AutoRenew is Off, and in the end all of them have nearly
// ttl before them. No store takes the keys in one step.
//
// With a [WithOwner] context each key is entered again if its owner holds it.
//
// If it fails, the error is that of the key that failed; it matches [ErrLost] if a
// key that it had already was lost meanwhile. What it had taken is given back; if
// that could not be confirmed, the error also matches [ErrIndeterminate], the
// manager goes on trying in the background, and what is left ends with its TTL.
func AcquireMulti(ctx context.Context, m LockManager, keys []string, ttl time.Duration) (*MultiLock, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	return acquireMulti(ctx, m, m.AcquireLock, keys, ttl)
}

// TryMulti is AcquireMulti without the wait: if one of the keys is held, or others
// wait for it, the error matches [ErrHeld], and none is kept.
func TryMulti(ctx context.Context, m LockManager, keys []string, ttl time.Duration) (*MultiLock, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	return acquireMulti(ctx, m, m.TryLock, keys, ttl)
}

// take is how one key is taken.
type take func(ctx context.Context, key string, ttl time.Duration) (*Lock, error)

func acquireMulti(ctx context.Context, m LockManager, one take, keys []string, ttl time.Duration) (*MultiLock, error) {
	if ctx == nil {
		return nil, invalidf("context is nil")
	}
	keys, err := multiKeys(keys)
	if err != nil {
		return nil, err
	}
	if err := checkTTL(ttl); err != nil {
		return nil, err
	}
	l := &MultiLock{m: m}
	if err = l.takeAll(ctx, one, keys, ttl); err == nil {
		err = l.freshen(ctx, ttl)
	}
	if err != nil {
		return nil, l.giveBack(ctx, err)
	}
	l.done = l.chain(context.Background()).Done()
	return l, nil
}

// multiKeys sorts the keys, drops those given twice, and says what is wrong.
func multiKeys(keys []string) ([]string, error) {
	for i, key := range keys {
		if checkKey(key) != nil {
			return nil, checkKeyAs(fmt.Sprintf("keys[%d]", i), key)
		}
	}
	keys = slices.Clone(keys)
	slices.Sort(keys)
	keys = slices.Compact(keys)
	if n := len(keys); n < 1 || n > MaxMultiKeys {
		return nil, invalidf("there are %d different keys, must be between 1 and %d", n, MaxMultiKeys)
	}
	return keys, nil
}

// takeAll takes the keys in turn.
func (l *MultiLock) takeAll(ctx context.Context, one take, keys []string, ttl time.Duration) error {
	// The wait ends with any lock that is there already.
	waitCtx, cancel := context.WithCancel(ctx)
	var prolonging sync.WaitGroup
	defer prolonging.Wait()
	defer cancel()
	for i, key := range keys {
		lock, err := one(waitCtx, key, ttl)
		if err != nil {
			if lost := l.lost(); lost != nil && ctx.Err() == nil {
				lost = fmt.Errorf("while %q was waited for: %w", key, lost)
				if errors.Is(err, ErrIndeterminate) {
					return fmt.Errorf("%w; %w", lost, err)
				}
				return lost
			}
			return err
		}
		l.locks = append(l.locks, lock)
		if i == len(keys)-1 {
			break
		}
		//lint:ignore fatcontext there are few, and they end with the call
		waitCtx = lock.Context(waitCtx)
		if !lock.renews() {
			lockCtx := waitCtx
			prolonging.Go(func() {
				l.prolong(lockCtx, lock, ttl)
			})
		}
	}
	return nil
}

// renews says whether the manager renews the lock by itself.
func (l *Lock) renews() bool { return l.g != nil && l.g.m.cfg.AutoRenew != Off }

// prolong renews a lock, which nobody else does, until the context ends. The next
// renewal comes after a third of the time that is left, so that one that failed is
// repeated, the sooner the closer the deadline is.
func (l *MultiLock) prolong(ctx context.Context, lock *Lock, ttl time.Duration) {
	const shortest = 100 * time.Microsecond
	for ctx.Err() == nil {
		sleep(ctx, ctx, max(time.Until(lock.Deadline())/3, shortest))
		// A loss ends the context, and is found out there.
		callCtx, cancel := context.WithTimeout(ctx, max(time.Until(lock.Deadline())/2, shortest))
		_ = l.m.ExtendLock(callCtx, lock, ttl)
		cancel()
	}
}

// freshen sees to it that all locks are held, and have nearly all of their TTL
// before them if nobody renews them from here on.
func (l *MultiLock) freshen(ctx context.Context, ttl time.Duration) error {
	old := func(lock *Lock) bool {
		return !lock.renews() && time.Until(lock.Deadline()) < lock.TTL-driftMargin(lock.TTL)-lock.TTL/10
	}
	if len(l.locks) == 1 || !slices.ContainsFunc(l.locks, old) {
		return l.lost()
	}
	// All of them, since the others get older meanwhile.
	err := l.each(func(lock *Lock) error {
		if lock.renews() {
			return nil
		}
		err := l.m.ExtendLock(ctx, lock, ttl)
		if errors.Is(err, ErrIndeterminate) { // which is not so of what is left of the lock
			return fmt.Errorf("extending %q in the end: %v", lock.Key, err)
		}
		return err
	})
	if err != nil && ctx.Err() != nil {
		err = errors.Join(ctxErr(ctx), err)
	}
	return errors.Join(err, l.lost())
}

// lost returns the loss of one of the locks, or nil.
func (l *MultiLock) lost() error {
	for _, lock := range l.locks {
		if err := lock.Err(); errors.Is(err, ErrLost) {
			return err
		}
	}
	return nil
}

// giveBack releases what was taken before err.
func (l *MultiLock) giveBack(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawPatience)
	defer cancel()
	left := l.each(func(lock *Lock) error {
		if err := l.m.ReleaseLock(ctx, lock); !errors.Is(err, ErrLost) {
			return err
		}
		return nil // nothing is left of it
	})
	if left != nil {
		return fmt.Errorf("%w; %w: giving back: %w", err, ErrIndeterminate, left)
	}
	return err
}

// each calls f for all locks side by side, and joins its errors in the order of
// the keys.
func (l *MultiLock) each(f func(*Lock) error) error {
	errs := make([]error, len(l.locks))
	var wg sync.WaitGroup
	for i, lock := range l.locks {
		if i == len(l.locks)-1 {
			errs[i] = f(lock)
			break
		}
		wg.Go(func() {
			errs[i] = f(lock)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Keys lists the keys, in the order of their bytes, each once.
func (l *MultiLock) Keys() []string {
	keys := make([]string, len(l.locks))
	for i, lock := range l.locks {
		keys[i] = lock.Key
	}
	return keys
}

// Token is the fencing token of one of the keys, or 0 if it has no such key. The
// tokens of different keys have nothing to do with each other.
func (l *MultiLock) Token(key string) int64 {
	for _, lock := range l.locks {
		if lock.Key == key {
			return lock.Token
		}
	}
	return 0
}

// Deadline is the earliest of its locks' deadlines, see [Lock.Deadline]: the local
// time until which all of them are surely ours.
func (l *MultiLock) Deadline() time.Time {
	var first time.Time
	for i, lock := range l.locks {
		if d := lock.Deadline(); i == 0 || d.Before(first) {
			first = d
		}
	}
	return first
}

// Done returns a channel that is closed when the lock is no longer held: when
// Release is called, when the manager is closed, and when one of the locks is
// lost. It never waits for the store; see [Lock.Done] for what is not guaranteed.
func (l *MultiLock) Done() <-chan struct{} {
	if l.done == nil {
		return closedChan
	}
	l.check()
	return l.done
}

// check ends the locks whose time is up, though timers may be late.
func (l *MultiLock) check() {
	for _, lock := range l.locks {
		lock.check()
	}
}

// Err returns nil while all of the locks are held. After that it matches
// [ErrReleased], or [ErrLost] with the [*LostError] of the key that was lost, for
// good.
func (l *MultiLock) Err() error { return l.over(nil) }

// over finds out why the lock is no longer held. If it is, ending is the reason
// from now on.
func (l *MultiLock) over(ending error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	if l.done == nil {
		ending = ErrReleased // never acquired
	}
	if l.err = l.lost(); l.err == nil {
		l.err = ending
	}
	return l.err
}

// Context returns a context that ends with the parent or with the lock, whichever
// is first. Its [context.Cause] is the loss, matching [ErrLost] and a [*LostError]
// with the key; after a release it is [context.Canceled]. [LockFromContext] finds
// no lock in it, because a token counts for one key only.
func (l *MultiLock) Context(parent context.Context) context.Context {
	if l.done == nil {
		ctx, cancel := context.WithCancel(parent)
		cancel()
		return ctx
	}
	return &multiContext{Context: l.chain(parent), l: l}
}

// chain returns a context that ends with the parent or with one of the locks.
func (l *MultiLock) chain(ctx context.Context) context.Context {
	for _, lock := range l.locks {
		//lint:ignore fatcontext there are few, and none is kept
		ctx = lock.Context(ctx)
	}
	return ctx
}

// multiContext ends with its lock.
type multiContext struct {
	context.Context
	l *MultiLock
}

// Err makes the context end on time even if the timers are late.
func (c *multiContext) Err() error {
	c.l.check()
	return c.Context.Err()
}

// Value hides the locks from LockFromContext.
func (c *multiContext) Value(key any) any {
	if key == any(lockKey{}) {
		return nil
	}
	return c.Context.Value(key)
}

// Extend renews all of the locks: each then runs for at least ttl from now, as
// [Lock.Extend] says. The errors are joined: if one matches [ErrLost], the whole
// is lost; after any other some locks may have been renewed and others not, and
// [MultiLock.Deadline] is still right.
func (l *MultiLock) Extend(ctx context.Context, ttl time.Duration) error {
	if l == nil || l.done == nil {
		return invalidf("lock is nil or was not acquired")
	}
	if err := l.Err(); err != nil {
		return err
	}
	return l.each(func(lock *Lock) error { return l.m.ExtendLock(ctx, lock, ttl) })
}

// Release gives all of the locks up, whatever becomes of each, and joins the
// errors: see [Lock.Release] for what they match. If one of the locks was lost
// before, the error matches [ErrLost], and the others have been released.
// Another Release repeats the first answer of each lock, and asks the store again
// for those that had none. A context made by [MultiLock.Context], which ends as
// Release begins, or has ended with a loss, bounds the call by its deadline only,
// and by 5s.
func (l *MultiLock) Release(ctx context.Context) error {
	if l == nil || l.done == nil {
		return invalidf("lock is nil or was not acquired")
	}
	if ctx == nil {
		return invalidf("context is nil")
	}
	if l.endsContext(ctx) {
		var cancel context.CancelFunc
		ctx, cancel = detach(ctx)
		defer cancel()
	}
	_ = l.over(ErrReleased)
	return l.each(func(lock *Lock) error { return l.m.ReleaseLock(ctx, lock) })
}

// endsContext says whether ctx ends, or has ended, for no other reason than that
// one of the locks does: then it says nothing about the release of the others.
func (l *MultiLock) endsContext(ctx context.Context) bool {
	if !slices.ContainsFunc(l.locks, func(lock *Lock) bool { return lock.ownContext(ctx) }) {
		return false
	}
	if ctx.Err() == nil {
		return true
	}
	cause := context.Cause(ctx)
	return slices.ContainsFunc(l.locks, func(lock *Lock) bool {
		err := lock.Err()
		return errors.Is(err, ErrLost) && errors.Is(cause, err)
	})
}
