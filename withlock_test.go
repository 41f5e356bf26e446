package dlm_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
)

func TestWithDistributedLock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		failure := errors.New("failure")
		free := func() {
			t.Helper()
			if tokens := c.holders(t, "k"); len(tokens) != 0 {
				t.Errorf("left behind: %v", tokens)
			}
		}

		type ctxKey struct{}
		ctx := context.WithValue(t.Context(), ctxKey{}, "value")
		err := dlm.WithDistributedLock(ctx, c, "k", time.Minute, func(ctx context.Context) error {
			if len(c.holders(t, "k")) != 1 || ctx.Value(ctxKey{}) != "value" {
				t.Error("not under the lock, or without the caller's values")
			}
			time.Sleep(time.Hour)
			return ctx.Err()
		})
		if err != nil {
			t.Error(err)
		}
		free()

		if err := dlm.WithDistributedLock(ctx, c, "k", time.Minute, func(context.Context) error { return failure }); !errors.Is(err, failure) {
			t.Errorf("fn's error: %v", err)
		}
		free()

		// A loss is an error, whatever fn returns, and ends fn's context.
		err = dlm.WithDistributedLock(ctx, c, "k", time.Minute, func(ctx context.Context) error {
			if _, err := other.ForceRelease(t.Context(), "k", 0); err != nil {
				t.Error(err)
			}
			<-ctx.Done()
			wantLoss(t, context.Cause(ctx), dlm.ReasonGone)
			return nil
		})
		wantLoss(t, err, dlm.ReasonGone)

		// A panic, or the end of the goroutine, releases.
		func() {
			defer func() {
				if err, _ := recover().(error); !errors.Is(err, failure) {
					t.Errorf("recovered %v", err)
				}
			}()
			_ = dlm.WithDistributedLock(ctx, c, "k", time.Minute, func(context.Context) error { panic(failure) })
		}()
		free()
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = dlm.WithDistributedLock(ctx, c, "k", time.Minute, func(context.Context) error {
				runtime.Goexit()
				return nil
			})
		}()
		<-gone
		free()

		// When the caller's context ends, fn is told, and the lock is kept
		// until it has returned.
		ctx, cancel := context.WithCancel(ctx)
		err = dlm.WithDistributedLock(ctx, c, "k", time.Minute, func(ctx context.Context) error {
			cancel()
			<-ctx.Done()
			synctest.Wait()
			if len(c.holders(t, "k")) != 1 {
				t.Error("released while fn ran")
			}
			return ctx.Err()
		})
		if !errors.Is(err, context.Canceled) || errors.Is(err, dlm.ErrLost) {
			t.Errorf("cancelled: %v", err)
		}
		free()

		if err := dlm.WithDistributedLock(ctx, c, "k", time.Minute, func(context.Context) error {
			t.Error("fn was called without the lock")
			return nil
		}); !errors.Is(err, context.Canceled) {
			t.Errorf("without a lock: %v", err)
		}
	})
}

// LOST10: when the observer is told of a loss, the handle says so too. REN12:
// an observer that panics or blocks does no harm.
func TestObserver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *dlm.Lock
		release := make(chan struct{})
		told := make(chan dlm.Event, 100)
		c := open(t, memlock.NewStore(), &dlm.LockConfig{AutoRenew: dlm.Off, Observer: observerFunc(func(e dlm.Event) {
			if e.Kind == dlm.EventLost {
				if l.Err() == nil {
					t.Error("told of a loss, but the lock looks held")
				}
				<-release
			}
			told <- e
			panic("observer")
		})})
		l = c.lock(t, "k", 10*time.Second)
		if e := <-told; e.Kind != dlm.EventAcquired || e.Token != l.Token || e.Value != l.Value || e.Backend != "memory" {
			t.Errorf("event %+v", e)
		}
		second := c.lock(t, "k2", 11*time.Second)
		<-told
		<-l.Done()
		start := time.Now()
		<-second.Done() // though the observer blocks
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("the second loss came after %v", d)
		}
		close(release)
		if e := <-told; e.Kind != dlm.EventLost || e.Reason != dlm.ReasonExpired || e.Duration < 9*time.Second {
			t.Errorf("event %+v", e)
		}
		<-told
	})
}

type observerFunc func(dlm.Event)

func (f observerFunc) Observe(e dlm.Event) { f(e) }

func ExampleWithDistributedLock() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer m.Close(context.Background())

	err = dlm.WithDistributedLock(context.Background(), m, "payment:42", 30*time.Second, func(ctx context.Context) error {
		fmt.Println("charging once")
		return ctx.Err()
	})
	fmt.Println(err)
	// Output:
	// charging once
	// <nil>
}

func ExampleManager_TryLock() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	defer m.Close(ctx)

	lock, err := m.TryLock(ctx, "nightly-report", time.Minute)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = m.TryLock(ctx, "nightly-report", time.Minute)
	fmt.Println("taken:", errors.Is(err, dlm.ErrHeld), "token:", lock.Token)
	fmt.Println(lock.Release(ctx))
	// Output:
	// taken: true token: 1
	// <nil>
}

func ExampleWithOwner() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := dlm.WithOwner(context.Background(), "order 7")
	defer m.Close(ctx)

	outer, _ := m.AcquireLock(ctx, "stock", time.Minute)
	inner, err := m.AcquireLock(ctx, "stock", time.Minute) // does not wait for itself
	fmt.Println(err, inner.Token == outer.Token)
	fmt.Println(inner.Release(ctx), outer.Release(ctx))
	// Output:
	// <nil> true
	// <nil> <nil>
}
