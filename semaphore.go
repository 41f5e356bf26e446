package dlm

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Semaphore is a number of permits that any number of processes share. A permit
// is a [Lock] with everything that belongs to it: a fencing token that is larger
// than that of every permit granted before, a time to live, renewal, a loss
// signal. The permit of a holder that has died is free again after its TTL at
// the latest. A Semaphore keeps no state of its own, needs no closing, and is
// safe for concurrent use.
//
// All who use a semaphore at the same time must name the same capacity: whoever
// comes with another one gets a [*LimitError] with both numbers. See
// [Semaphore.Resize] for how a capacity changes.
//
// Permits are granted in the order in which the store saw the requests, where its
// Properties say FairQueue. The name is the key of the permits: a plain lock on
// the same key is a semaphore of capacity 1 and disagrees with any other.
//
// With a [WithOwner] context, an owner that has a permit gets a further handle of
// that permit, not a second permit. Acquisitions without an owner each take one.
// There are no weights: a queue of weights starves those who want many or holds
// up those who want few, and a caller that takes several permits one after
// another can wait for ever for another caller that does the same.
type Semaphore struct {
	m        OptionsManager
	name     string
	capacity int
}

// NewDistributedSemaphore returns the semaphore of this name, which is a key,
// with a capacity from 1 to 2^30. It asks nothing of the store. A store without
// permits is refused, whatever the capacity, with an error that matches
// [errors.ErrUnsupported]; a wrong argument with one that matches [ErrInvalid].
func NewDistributedSemaphore(m OptionsManager, name string, capacity int) (*Semaphore, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	if err := checkKeyAs("semaphore name", name); err != nil {
		return nil, err
	}
	if capacity < 1 || capacity > maxLimit {
		return nil, invalidf("semaphore capacity is %d, must be between 1 and %d", capacity, maxLimit)
	}
	if p := m.Properties(); !p.Permits {
		return nil, unsupported("%s has no semaphores", p.Name)
	}
	return &Semaphore{m: m, name: name, capacity: capacity}, nil
}

// Name is the name of the semaphore, and the key of its permits.
func (s *Semaphore) Name() string { return s.name }

// Capacity is the number of permits that this Semaphore asks for.
func (s *Semaphore) Capacity() int { return s.capacity }

// Acquire takes a permit for at least ttl, waiting in the queue until the context
// ends. It is [Manager.AcquireLock] for permits, with the same errors; if others
// use the semaphore with another capacity, the error is a [*LimitError].
func (s *Semaphore) Acquire(ctx context.Context, ttl time.Duration) (*Lock, error) {
	return s.m.Acquire(ctx, s.name, ttl, &AcquireOptions{Limit: s.capacity})
}

// TryAcquire is Acquire without the wait: if no permit is free, or if others wait
// for one, the error matches [ErrHeld].
func (s *Semaphore) TryAcquire(ctx context.Context, ttl time.Duration) (*Lock, error) {
	return s.m.Acquire(ctx, s.name, ttl, &AcquireOptions{Limit: s.capacity, NoWait: true})
}

// How often Resize looks whether the others have gone.
const (
	firstResizePause   = 10 * time.Millisecond
	longestResizePause = time.Second
)

// Resize puts the capacity of s in force in place of another one. It is an Acquire
// that does not fail while others hold permits of the other capacity, or wait for
// them, but waits until nobody does. As long as the permit that it returns is
// held, or any after it, those with the other capacity get a [*LimitError].
//
// So a change is rolled out by processes with the new capacity that begin with
// Resize, while those with the old one finish. What it does not do: no stores
// change the capacity under those who hold or wait, so Resize stands in no queue,
// looks again once a second, and can wait for ever if the others always have
// somebody inside. When ctx ends first, the error matches its error, and is a
// [*LimitError] with the capacity in force if that was the obstacle. An owner (see
// [WithOwner]) that itself holds a permit of the other capacity waits in vain.
//
// To have fewer permits for a while, or at once, acquire some of them and keep
// them: those who are inside stay until they release, and nobody enters before
// enough have.
func (s *Semaphore) Resize(ctx context.Context, ttl time.Duration) (*Lock, error) {
	for pause := firstResizePause; ; pause = min(2*pause, longestResizePause) {
		l, err := s.Acquire(ctx, ttl)
		if _, ok := errors.AsType[*LimitError](err); !ok {
			return l, err
		}
		sleep(ctx, ctx, jitter(pause))
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w; %w", ctxErr(ctx), err)
		}
	}
}

// SemaphoreUsage is a snapshot of a semaphore.
type SemaphoreUsage struct {
	// Capacity is the one in force; that of the [Semaphore] if nobody holds a
	// permit or waits for one.
	Capacity int
	// Held is how many permits are held, Waiting how many callers wait for one.
	Held, Waiting int
}

// Usage counts the permits that are held and the callers that wait, in the whole
// of the store. The answer may be old by the time it arrives; do not decide by it
// whether to act. A store whose records cannot be read returns an error that
// matches [errors.ErrUnsupported].
func (s *Semaphore) Usage(ctx context.Context) (SemaphoreUsage, error) {
	info, err := s.m.GetLock(ctx, s.name)
	if err != nil {
		return SemaphoreUsage{}, err
	}
	u := SemaphoreUsage{Capacity: info.Limit, Held: len(info.Holders), Waiting: len(info.Waiters)}
	if u.Capacity == 0 {
		u.Capacity = s.capacity
	}
	return u, nil
}
