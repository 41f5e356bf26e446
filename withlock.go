package dlm

import (
	"context"
	"errors"
	"time"
)

// releaseTimeout bounds the release at the end of WithDistributedLock.
const releaseTimeout = 5 * time.Second

// WithDistributedLock takes the key, calls fn, and releases the lock after fn
// has returned. The context passed to fn is derived from ctx and ends when the
// lock is lost; fn should stop then, because somebody else may soon hold the
// key. [LockFromContext] gets the lock, with its fencing token, out of it.
//
// The error joins that of fn and that of the lock: a loss while fn ran is an
// error matching [ErrLost] even if fn returned nil, because fn may not have
// been alone. If the lock could not be taken, fn is not called. If ctx ends
// while fn runs, the lock is still released. A panic in fn releases the lock
// and goes on.
//
// ctx bounds the wait for the lock and the work of fn, but not the release,
// which takes 5s at most.
func WithDistributedLock(
	ctx context.Context, m LockManager, key string, ttl time.Duration, fn func(ctx context.Context) error,
) (err error) {
	switch {
	case ctx == nil:
		return invalidf("context is nil")
	case m == nil:
		return invalidf("manager is nil")
	case fn == nil:
		return invalidf("function is nil")
	}
	lock, err := m.AcquireLock(ctx, key, ttl)
	if err != nil {
		return err
	}
	defer func() {
		// This runs, too, when fn panics.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		err = errors.Join(err, m.ReleaseLock(ctx, lock))
	}()
	return fn(lock.Context(ctx))
}
