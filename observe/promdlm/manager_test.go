package promdlm_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/observe/promdlm"
)

// newManager returns a manager that the collector observes.
func newManager(t *testing.T, store *memlock.Store, c *promdlm.Collector, cfg dlm.LockConfig) *dlm.Manager {
	t.Helper()
	cfg.Observer = c
	m, err := memlock.NewLockManager(store, &cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// atRest compares the gauges with the store, once nothing moves any more.
func atRest(t *testing.T, m *dlm.Manager, g prometheus.Gatherer) {
	t.Helper()
	synctest.Wait()
	var held, waiting int
	for after := ""; ; {
		keys, err := m.ListLocks(t.Context(), "", after, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			held += len(k.Holders)
			waiting += len(k.Waiters)
			after = k.Key
		}
		if len(keys) < 1000 {
			break
		}
	}
	if got := value(t, g, "dlm_locks_held"); got != float64(held) {
		t.Errorf("dlm_locks_held is %v, the store has %d", got, held)
	}
	if got := value(t, g, "dlm_locks_waiting"); got != float64(waiting) {
		t.Errorf("dlm_locks_waiting is %v, the store has %d", got, waiting)
	}
}

func TestManager(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		c, reg := setup(t, nil)
		store := memlock.NewStore()
		m := newManager(t, store, c, dlm.LockConfig{})
		check := func(want float64, metric string, labels ...string) {
			t.Helper()
			synctest.Wait()
			if got := value(t, reg, metric, labels...); got != want {
				t.Errorf("%s%q is %v, want %v", metric, labels, got, want)
			}
		}

		// A lock that is renewed while others are refused or give up.
		l, err := m.AcquireLock(ctx, "a", 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		atRest(t, m, reg)
		if _, err := m.TryLock(ctx, "a", time.Second); !errors.Is(err, dlm.ErrHeld) {
			t.Fatalf("TryLock on a held key: %v", err)
		}
		check(1, "dlm_lock_conflicts_total", "backend", "memory")
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if _, err := m.AcquireLock(short, "a", time.Second); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("AcquireLock on a held key: %v", err)
		}
		check(1, "dlm_lock_timeouts_total")
		check(1, "dlm_lock_wait_seconds")
		check(0, "dlm_lock_errors_total")
		time.Sleep(time.Minute)
		synctest.Wait()
		if value(t, reg, "dlm_lock_extensions_total") < 4 {
			t.Error("fewer than 4 renewals in a minute")
		}
		atRest(t, m, reg)

		// A caller that waits, then gets the lock.
		got := make(chan *dlm.Lock)
		go func() {
			l, err := m.AcquireLock(ctx, "a", 10*time.Second)
			if err != nil {
				t.Error(err)
			}
			got <- l
		}()
		synctest.Wait()
		check(1, "dlm_locks_waiting")
		atRest(t, m, reg)
		if err := l.Release(ctx); err != nil {
			t.Fatal(err)
		}
		l = <-got
		check(0, "dlm_locks_waiting")
		check(1, "dlm_lock_acquisition_duration_seconds", "waited", "true")
		check(1, "dlm_locks_released_total")
		check(1, "dlm_locks_held")

		// An operator takes it away.
		if _, err := m.ForceRelease(ctx, "a", l.Token); err != nil {
			t.Fatal(err)
		}
		<-l.Done()
		check(1, "dlm_lock_forced_releases_total")
		check(1, "dlm_locks_lost_total")
		check(0, "dlm_locks_held")
		// The loss was told; releasing again must not count.
		if err := l.Release(ctx); !errors.Is(err, dlm.ErrLost) {
			t.Fatalf("release of a lost lock: %v", err)
		}
		check(1, "dlm_locks_released_total")
		atRest(t, m, reg)

		// A shared lock that outlives its manager.
		if _, err := m.Acquire(ctx, "b", time.Minute, &dlm.AcquireOptions{Shared: true}); err != nil {
			t.Fatal(err)
		}
		check(1, "dlm_locks_held", "mode", "shared")
		if err := m.Close(ctx); err != nil {
			t.Fatal(err)
		}
		check(0, "dlm_locks_held")
		if _, err := m.TryLock(ctx, "b", time.Minute); !errors.Is(err, dlm.ErrClosed) {
			t.Fatalf("TryLock on a closed manager: %v", err)
		}
		check(1, "dlm_lock_errors_total", "operation", "acquire", "kind", "closed")
		acquired := value(t, reg, "dlm_locks_acquired_total")
		check(acquired, "dlm_lock_hold_seconds")
		check(acquired-value(t, reg, "dlm_locks_released_total"), "dlm_locks_lost_total")
	})
}

// Two managers that take, leave, lose and re-enter locks for a while agree
// with the store when they come to rest.
func TestManagersUnderChaos(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, reg := setup(t, nil)
		store := memlock.NewStore()
		managers := []*dlm.Manager{
			newManager(t, store, c, dlm.LockConfig{}),
			newManager(t, store, c, dlm.LockConfig{AutoRenew: dlm.Off}),
		}
		var workers sync.WaitGroup
		for w := range 40 {
			m := managers[w%len(managers)]
			workers.Go(func() {
				for range 50 {
					work(t, m)
				}
			})
		}
		running := make(chan struct{})
		go func() {
			workers.Wait()
			close(running)
		}()
		for busy := true; busy; {
			select {
			case <-running:
				busy = false
			case <-time.After(time.Second):
			}
			if held := value(t, reg, "dlm_locks_held"); held < 0 {
				t.Errorf("dlm_locks_held is %v", held)
			}
		}
		atRest(t, managers[0], reg)
		for _, m := range managers {
			if err := m.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		synctest.Wait()
		for _, gauge := range []string{"dlm_locks_held", "dlm_locks_waiting"} {
			if got := value(t, reg, gauge); got != 0 {
				t.Errorf("%s is %v after the managers were closed", gauge, got)
			}
		}
		acquired := value(t, reg, "dlm_locks_acquired_total")
		ended := value(t, reg, "dlm_locks_released_total") + value(t, reg, "dlm_locks_lost_total")
		if acquired == 0 || acquired != ended {
			t.Errorf("%v locks acquired, %v ended", acquired, ended)
		}
	})
}

// work takes a lock and ends it in one of the ways in which locks end.
func work(t *testing.T, m *dlm.Manager) {
	key := strconv.Itoa(rand.N(5))
	ctx, cancel := context.WithTimeout(t.Context(), rand.N(3*time.Second))
	defer cancel()
	owner := dlm.WithOwner(ctx, strconv.FormatUint(rand.Uint64(), 36))
	opts := &dlm.AcquireOptions{Shared: rand.N(3) == 0, NoWait: rand.N(4) == 0}
	l, err := m.Acquire(owner, key, time.Second, opts)
	if err != nil {
		if !errors.Is(err, dlm.ErrHeld) && ctx.Err() == nil {
			t.Error(err)
		}
		return
	}
	time.Sleep(rand.N(200 * time.Millisecond))
	switch rand.N(5) {
	case 0: // lost
		if _, err := m.ForceRelease(t.Context(), key, l.Token); err != nil {
			t.Error(err)
		}
		<-l.Done()
	case 1: // runs out or is renewed
		time.Sleep(2 * time.Second)
	case 2: // re-entered, for the same time or a longer one, and maybe lost before
		if rand.N(3) == 0 {
			if _, err := m.ForceRelease(t.Context(), key, l.Token); err != nil {
				t.Error(err)
			}
		}
		inner, err := m.Acquire(owner, key, time.Duration(1+rand.N(2))*time.Second, opts)
		if err == nil {
			err = inner.Release(t.Context())
		}
		if err != nil && !errors.Is(err, dlm.ErrHeld) && !errors.Is(err, dlm.ErrLost) && ctx.Err() == nil {
			t.Error(err)
		}
	}
	if err := l.Release(t.Context()); err != nil && !errors.Is(err, dlm.ErrLost) {
		t.Error(err)
	}
}
