package drivertest

import (
	"context"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/go-dlm/dlm"
)

var managerInputCases = []Case{
	{
		Name: "Manager/BadInputIsRefused", Guarantee: "I12, TTL2, X4, ACQ12",
		Why: "a TTL of zero that reaches a store can mean for ever; a bad key can mean another key",
		run: badInputIsRefused,
	},
	{
		Name: "Manager/ErrorsAreToldApart", Guarantee: "ACQ6",
		Why: "a caller that cannot tell busy from broken does the wrong thing about both",
		run: errorsAreToldApart,
	},
}

func badInputIsRefused(e *env) {
	m := e.manage(quick())
	ctx := e.within(e.patience)
	ttl := e.long
	done, cancel := context.WithCancel(ctx)
	cancel()
	foreign := e.manage(quick()).lock("foreign", ttl)

	// One lock of m is held, one has been released; both took calls.
	held, released := m.lock("held", ttl), m.lock("released", ttl)
	m.unlock(released)
	before := m.faults.AllCalls()

	acquire := func(ctx context.Context, key string, ttl time.Duration) error {
		l1, err1 := m.AcquireLock(ctx, key, ttl)
		l2, err2 := m.TryLock(ctx, key, ttl)
		l3, err3 := m.Acquire(ctx, key, ttl, &dlm.AcquireOptions{})
		if l1 != nil || l2 != nil || l3 != nil {
			e.fatalf("a lock was returned for key %q, ttl %v", key, ttl)
		}
		if err1 == nil || err2 == nil || err3 == nil {
			return nil
		}
		if errors.Is(err1, dlm.ErrInvalid) != errors.Is(err2, dlm.ErrInvalid) || errors.Is(err1, dlm.ErrInvalid) != errors.Is(err3, dlm.ErrInvalid) {
			e.fatalf("AcquireLock: %v, but TryLock: %v, and Acquire: %w", err1, err2, err3)
		}
		return err1
	}
	var none context.Context
	for _, c := range []struct {
		name string
		want error
		err  error
	}{
		{"an empty key", dlm.ErrInvalid, acquire(ctx, "", ttl)},
		{"a key of 513 bytes", dlm.ErrInvalid, acquire(ctx, strings.Repeat("x", dlm.MaxKeyLen+1), ttl)},
		{"a key of 171 characters of 3 bytes", dlm.ErrInvalid, acquire(ctx, strings.Repeat("世", 171), ttl)},
		{"a key that is no UTF-8", dlm.ErrInvalid, acquire(ctx, "a\xff", ttl)},
		{"a key cut within a character", dlm.ErrInvalid, acquire(ctx, "世"[:2], ttl)},
		{"a TTL of 0", dlm.ErrInvalid, acquire(ctx, "k", 0)},
		{"a TTL of -1ns", dlm.ErrInvalid, acquire(ctx, "k", -1)},
		{"a TTL of 1ns", dlm.ErrInvalid, acquire(ctx, "k", 1)},
		{"a TTL just below the least", dlm.ErrInvalid, acquire(ctx, "k", dlm.MinTTL-1)},
		{"a TTL just above the greatest", dlm.ErrInvalid, acquire(ctx, "k", dlm.MaxTTL+1)},
		{"the longest duration as TTL", dlm.ErrInvalid, acquire(ctx, "k", math.MaxInt64)},
		{"the most negative duration as TTL", dlm.ErrInvalid, acquire(ctx, "k", math.MinInt64)},
		{"a nil context", dlm.ErrInvalid, acquire(none, "k", ttl)},
		{"a context that is done", context.Canceled, acquire(done, "k", ttl)},
		{"a negative limit", dlm.ErrInvalid, second(m.Acquire(ctx, "k", ttl, &dlm.AcquireOptions{Limit: -1}))},
		{"a limit beyond reason", dlm.ErrInvalid, second(m.Acquire(ctx, "k", ttl, &dlm.AcquireOptions{Limit: math.MaxInt32}))},
		{"shared with a limit", dlm.ErrInvalid, second(m.Acquire(ctx, "k", ttl, &dlm.AcquireOptions{Shared: true, Limit: 2}))},
		{"a negative MaxHold", dlm.ErrInvalid, second(m.Acquire(ctx, "k", ttl, &dlm.AcquireOptions{MaxHold: -1}))},
		{"release of a nil lock", dlm.ErrInvalid, m.ReleaseLock(ctx, nil)},
		{"release of a lock that was made by hand", dlm.ErrInvalid, m.ReleaseLock(ctx, &dlm.Lock{Key: "held", Value: held.Value, Token: held.Token})},
		{"release of another manager's lock", dlm.ErrInvalid, m.ReleaseLock(ctx, foreign)},
		{"release with a nil context", dlm.ErrInvalid, m.ReleaseLock(none, held)},
		{"release of a released lock", nil, m.ReleaseLock(ctx, released)},
		{"renewal of a nil lock", dlm.ErrInvalid, m.ExtendLock(ctx, nil, ttl)},
		{"renewal of a lock that was made by hand", dlm.ErrInvalid, m.ExtendLock(ctx, &dlm.Lock{Key: "held"}, ttl)},
		{"renewal of another manager's lock", dlm.ErrInvalid, m.ExtendLock(ctx, foreign, ttl)},
		{"renewal of a released lock", dlm.ErrReleased, m.ExtendLock(ctx, released, ttl)},
		{"renewal with a nil context", dlm.ErrInvalid, m.ExtendLock(none, held, ttl)},
		{"renewal with a context that is done", context.Canceled, m.ExtendLock(done, held, ttl)},
		{"renewal for 0", dlm.ErrInvalid, m.ExtendLock(ctx, held, 0)},
		{"renewal for -1s", dlm.ErrInvalid, m.ExtendLock(ctx, held, -time.Second)},
		{"renewal for too long", dlm.ErrInvalid, m.ExtendLock(ctx, held, math.MaxInt64)},
		{"a look at an empty key", dlm.ErrInvalid, second(m.GetLock(ctx, ""))},
		{"a look at a key that is no UTF-8", dlm.ErrInvalid, second(m.GetLock(ctx, "\xff"))},
		{"forced release of an empty key", dlm.ErrInvalid, second(m.ForceRelease(ctx, "", 0))},
		{"forced release of a negative token", dlm.ErrInvalid, second(m.ForceRelease(ctx, "held", -1))},
	} {
		// What the backend cannot do at all may be refused for that reason.
		if !errors.Is(c.err, c.want) && !(errors.Is(c.want, dlm.ErrInvalid) && errors.Is(c.err, errors.ErrUnsupported)) {
			e.fatalf("%s: %v, want %v", c.name, c.err, c.want)
		}
	}
	if n := m.faults.AllCalls() - before; n != 0 {
		e.fatalf("%d calls reached the backend", n)
	}
	if held.Err() != nil || foreign.Err() != nil {
		e.fatalf("a lock was lost: %v, %v", held.Err(), foreign.Err())
	}
	m.unlock(held)
}

// second is the error of a call with two results.
func second[T any](_ T, err error) error { return err }

func errorsAreToldApart(e *env) {
	m, other := e.manage(quick()), e.manage(&dlm.LockConfig{MaxRetries: 1, RetryInterval: time.Millisecond})
	ttl := e.long
	l := m.lock("k", ttl)

	classes := map[string]error{
		"held": dlm.ErrHeld, "canceled": context.Canceled, "deadline": context.DeadlineExceeded, "not applied": dlm.ErrNotApplied,
		"fault": ErrFault, "invalid": dlm.ErrInvalid, "closed": dlm.ErrClosed, "lost": dlm.ErrLost, "released": dlm.ErrReleased,
	}
	check := func(what string, err error, want ...string) {
		for name, class := range classes {
			wanted := false
			for _, w := range want {
				wanted = wanted || w == name
			}
			if errors.Is(err, class) != wanted {
				e.fatalf("%s: %v; matches %q: %v, want %v", what, err, name, !wanted, wanted)
			}
		}
		if _, ok := errors.AsType[*dlm.Error](err); !ok {
			e.fatalf("%s: %v, want a *dlm.Error", what, err)
		}
	}
	_, err := other.TryLock(e.within(e.patience), "k", ttl)
	check("TryLock of a held key", err, "held")
	conflict, ok := errors.AsType[*dlm.LockConflictError](err)
	if !ok || conflict.Key != "k" || conflict.Holder != l.Value || conflict.Position != 0 {
		e.fatalf("TryLock of a held key: %#v, want a LockConflictError that names %q", err, l.Value)
	}

	_, err = other.AcquireLock(e.within(e.unit/4), "k", ttl)
	check("AcquireLock that ran out of time", err, "held", "deadline")

	ctx, cancel := context.WithCancel(e.within(e.patience))
	g := e.group()
	before := e.history.waiting("k")
	g.start(func() {
		_, err := other.AcquireLock(ctx, "k", ttl)
		check("AcquireLock that was cancelled", err, "held", "canceled")
	})
	e.eventually("a waiter is in the queue", func() bool { return e.history.waiting("k") > before })
	cancel()
	g.wait()

	refusal := other.faults.Inject(Fault{Kind: Refuse, Op: OpAcquire})
	_, err = other.AcquireLock(e.within(e.patience), "free", ttl)
	check("AcquireLock refused by the store", err, "not applied", "fault")
	refusal.Remove()
	failure := other.faults.Inject(Fault{Kind: Fail, Op: OpAcquire})
	_, err = other.TryLock(e.within(e.patience), "free", ttl)
	check("TryLock with a broken store", err, "fault")
	failure.Remove()
	_, err = other.TryLock(e.within(e.patience), "", ttl)
	check("TryLock with a bad key", err, "invalid")

	m.unlock(l)
	check("ExtendLock of a released lock", m.ExtendLock(e.within(e.patience), l, ttl), "released")
	l = m.lock("k", ttl)
	m.shut()
	if err := m.ExtendLock(e.within(e.patience), l, ttl); !errors.Is(err, dlm.ErrClosed) {
		e.fatalf("ExtendLock after Close: %v, want ErrClosed", err)
	}
	_, err = m.TryLock(e.within(e.patience), "k", ttl)
	check("TryLock after Close", err, "closed")
}
