package secure_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

func TestSemaphoreThroughTheWrapper(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{MaxPermits: 2, PerClient: secure.Limits{Held: 1}}, nil)
		sem, err := dlm.NewDistributedSemaphore(s, "pool", 2)
		if err != nil {
			t.Fatal(err)
		}
		a, err := sem.Acquire(as(t, "a"), ttl)
		if err != nil {
			t.Fatal(err)
		}
		_, err = sem.TryAcquire(as(t, "a"), ttl)
		wantDenied(t, err, secure.ReasonHeld)
		if _, err = sem.TryAcquire(as(t, "b"), ttl); err != nil {
			t.Fatal(err)
		}
		if _, err = sem.TryAcquire(as(t, "c"), ttl); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("a third permit of two: %v", err)
		}
		s.want(t, 2, 0)
		usage, err := sem.Usage(as(t, "c"))
		if err != nil || usage != (dlm.SemaphoreUsage{Capacity: 2, Held: 2}) {
			t.Errorf("usage: %+v, %v", usage, err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := sem.Acquire(as(t, "c"), ttl); err != nil {
				t.Errorf("the waiter: %v", err)
			}
		})
		synctest.Wait()
		s.want(t, 2, 1)
		wantDenied(t, s.ReleaseLock(as(t, "c"), a), secure.ReasonNotHolder)
		if err := s.ReleaseLock(as(t, "a"), a); err != nil {
			t.Error(err)
		}
		wg.Wait()
		s.want(t, 2, 0)

		larger, err := dlm.NewDistributedSemaphore(s, "pool", 3)
		if err != nil {
			t.Fatal(err)
		}
		_, err = larger.TryAcquire(as(t, "d"), ttl)
		wantDenied(t, err, secure.ReasonPermits)
	})
}

func TestReadWriteLockThroughTheWrapper(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), nil, nil)
		rw, err := dlm.NewReadWriteLock(s, "key")
		if err != nil {
			t.Fatal(err)
		}
		var readers []*dlm.Lock
		for _, client := range []string{"a", "b"} {
			l, err := rw.AcquireRead(as(t, client), ttl)
			if err != nil || l.Mode != dlm.Shared {
				t.Fatalf("reader: %v, %v", l, err)
			}
			readers = append(readers, l)
		}
		if _, err := rw.TryWrite(as(t, "c"), ttl); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("a writer beside readers: %v", err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			l, err := rw.AcquireWrite(as(t, "c"), ttl)
			if err != nil || l.Mode != dlm.Exclusive {
				t.Errorf("writer: %v, %v", l, err)
			}
		})
		synctest.Wait()
		s.want(t, 2, 1)
		for i, client := range []string{"a", "b"} {
			if err := s.ReleaseLock(as(t, client), readers[i]); err != nil {
				t.Error(err)
			}
		}
		wg.Wait()
		s.want(t, 1, 0)

		owner := dlm.WithOwner(as(t, "d"), "me")
		free, err := dlm.NewReadWriteLock(s, "free")
		if err != nil {
			t.Fatal(err)
		}
		if _, err = free.AcquireRead(owner, ttl); err != nil {
			t.Fatal(err)
		}
		if _, err = free.AcquireWrite(owner, ttl); err == nil {
			t.Error("an owner that reads may write")
		} else if _, ok := errors.AsType[*dlm.UpgradeError](err); !ok {
			t.Errorf("upgrade: %v", err)
		}
		s.want(t, 2, 0)
	})
}

// Patterns are refused through the wrapper as they are without it.
func TestUnsupportedPatterns(t *testing.T) {
	t.Parallel()
	b, err := memlock.New(memlock.NewStore(), nil)
	if err != nil {
		t.Fatal(err)
	}
	props := b.Properties()
	props.Permits, props.SharedMode = false, false
	m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
		Properties: func() driver.Properties { return props },
	}), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close(context.Background()) })
	s, err := secure.New(m, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dlm.NewDistributedSemaphore(s, "key", 2); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("semaphore: %v", err)
	}
	if _, err := dlm.NewReadWriteLock(s, "key"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("read-write lock: %v", err)
	}
}

func TestMultiLockThroughTheWrapper(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{PerClient: secure.Limits{Held: 2}}, &dlm.LockConfig{AutoRenew: dlm.Off})
		basic, err := secure.NewBasic(s.inner, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range []dlm.LockManager{s, basic} {
			l, err := dlm.AcquireMulti(as(t, "a"), m, []string{"y", "x"}, ttl)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Extend(as(t, "a"), ttl); err != nil {
				t.Error(err)
			}
			if err := l.Release(as(t, "a")); err != nil {
				t.Error(err)
			}
		}
		// The third is refused, and the first two are given back.
		_, err = dlm.AcquireMulti(as(t, "a"), s, []string{"x", "y", "z"}, ttl)
		wantDenied(t, err, secure.ReasonHeld)
		s.want(t, 0, 0)
	})
}

func TestWithDistributedLockThroughTheWrapper(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), nil, nil)
	ctx, cancel := context.WithCancel(as(t, "a"))
	err := dlm.WithDistributedLock(ctx, s, "key", ttl, func(context.Context) error {
		s.want(t, 1, 0)
		cancel()
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	s.want(t, 0, 0)
	if info, err := s.GetLock(as(t, "b"), "key"); err != nil || len(info.Holders) != 0 {
		t.Errorf("the key is not free: %+v, %v", info, err)
	}
}

// One wrapper may stand behind another, each with a bound on waiting.
func TestWrappersNest(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{MaxWait: time.Second}, nil)
		outer, err := secure.New(s, &secure.Policy{MaxWait: 2 * time.Second, Client: func(context.Context) (string, error) { return "outer", nil }})
		if err != nil {
			t.Fatal(err)
		}
		l, err := outer.TryLock(as(t, "a"), "key", ttl)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		_, err = outer.AcquireLock(as(t, "a"), "key", ttl)
		if denied := wantDenied(t, err, secure.ReasonWait, "1s"); denied.Client != "a" || time.Since(began) != time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		if err := outer.ReleaseLock(as(t, "a"), l); err != nil {
			t.Error(err)
		}
	})
}
