package dlm_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
)

// Bad arguments get an error that names them, and reach no store.
func TestBadInput(t *testing.T) {
	c := open(t, memlock.NewStore(), &dlm.LockConfig{RenewInterval: time.Second})
	other := open(t, memlock.NewStore(), nil)
	foreign := other.lock(t, "k", time.Minute)
	ctx := t.Context()
	var none context.Context
	acquire := func(key string, ttl time.Duration, opts *dlm.AcquireOptions) func() error {
		return func() error {
			_, err := c.Acquire(ctx, key, ttl, opts)
			return err
		}
	}
	for _, tt := range []struct {
		name string
		call func() error
		want string
	}{
		{"empty key", acquire("", time.Minute, nil), "key is empty"},
		{"long key", acquire(strings.Repeat("x", 513), time.Minute, nil), "513 bytes, must have at most 512"},
		{"key not UTF-8", acquire("a\xff", time.Minute, nil), "not valid UTF-8"},
		{"ttl 0", acquire("k", 0, nil), "ttl is 0s, must be between 1ms and"},
		{"ttl -1", acquire("k", -1, nil), "ttl is -1ns"},
		{"ttl below 1ms", acquire("k", time.Millisecond-1, nil), "ttl is 999.999µs"},
		{"ttl too long", acquire("k", 1<<63-1, nil), "ttl is 2562047h47m16.854775807s, must be between"},
		{"ttl within RenewInterval", acquire("k", time.Second, nil), "RenewInterval is 1s, must be below 989ms"},
		{"limit -1", acquire("k", time.Minute, &dlm.AcquireOptions{Limit: -1}), "AcquireOptions.Limit is -1"},
		{"limit too large", acquire("k", time.Minute, &dlm.AcquireOptions{Limit: 1<<30 + 1}), "AcquireOptions.Limit"},
		{"limit and shared", acquire("k", time.Minute, &dlm.AcquireOptions{Limit: 2, Shared: true}), "for a shared lock"},
		{"max hold", acquire("k", time.Minute, &dlm.AcquireOptions{MaxHold: -1}), "AcquireOptions.MaxHold is -1ns"},
		{"nil context", func() error {
			_, err := c.AcquireLock(none, "k", time.Minute)
			return err
		}, "context is nil"},
		{"nil context in GetLock", func() error {
			_, err := c.GetLock(none, "k")
			return err
		}, "context is nil"},
		{"nil context in Release", func() error { return foreign.Release(none) }, "context is nil"},
		{"nil context in Extend", func() error { return foreign.Extend(none, time.Minute) }, "context is nil"},
		{"nil lock released", func() error { return c.ReleaseLock(ctx, nil) }, "lock is nil"},
		{"nil lock extended", func() error { return c.ExtendLock(ctx, nil, time.Minute) }, "lock is nil"},
		{"empty lock released", func() error { return c.ReleaseLock(ctx, &dlm.Lock{Key: "k"}) }, "was not acquired"},
		{"empty lock extended", func() error { return new(dlm.Lock).Extend(ctx, time.Minute) }, "was not acquired"},
		{"foreign lock released", func() error { return c.ReleaseLock(ctx, foreign) }, "another manager"},
		{"foreign lock extended", func() error { return c.ExtendLock(ctx, foreign, time.Minute) }, "another manager"},
		{"extend by 0", func() error { return other.ExtendLock(ctx, foreign, 0) }, "ttl is 0s"},
		{"get empty key", func() error {
			_, err := c.GetLock(ctx, "")
			return err
		}, "key is empty"},
		{"force empty key", func() error {
			_, err := c.ForceRelease(ctx, "", 0)
			return err
		}, "key is empty"},
		{"force token -1", func() error {
			_, err := c.ForceRelease(ctx, "k", -1)
			return err
		}, "token is -1"},
		{"nil function", func() error { return dlm.WithDistributedLock(ctx, c, "k", time.Minute, nil) }, "function is nil"},
		{"nil manager", func() error {
			return dlm.WithDistributedLock(ctx, nil, "k", time.Minute, func(context.Context) error { return nil })
		}, "manager is nil"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := c.AllCalls() + other.AllCalls()
			err := tt.call()
			if !errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error is %v, want one that matches ErrInvalid and contains %q", err, tt.want)
			}
			if c.AllCalls()+other.AllCalls() != before {
				t.Error("the store was asked")
			}
		})
	}
	var zero dlm.Lock
	if !isDone(zero.Done()) || zero.Err() == nil || zero.Context(ctx).Err() == nil || !zero.Deadline().IsZero() {
		t.Error("a lock that was not acquired looks held")
	}
}

func TestBadConfig(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  dlm.LockConfig
		want string
	}{
		{"RenewInterval", dlm.LockConfig{RenewInterval: -1}, "LockConfig.RenewInterval is -1ns"},
		{"RenewInterval without AutoRenew", dlm.LockConfig{RenewInterval: time.Second, AutoRenew: dlm.Off}, "AutoRenew is Off"},
		{"RetryInterval", dlm.LockConfig{RetryInterval: 1}, "LockConfig.RetryInterval is 1ns"},
		{"CallTimeout", dlm.LockConfig{CallTimeout: 1 << 62}, "LockConfig.CallTimeout"},
		{"MaxHold", dlm.LockConfig{MaxHold: -time.Hour}, "LockConfig.MaxHold is -1h0m0s"},
		{"AutoRenew", dlm.LockConfig{AutoRenew: 3}, "LockConfig.AutoRenew is 3"},
		{"Label with space", dlm.LockConfig{Label: "a b"}, "LockConfig.Label"},
		{"Label too long", dlm.LockConfig{Label: strings.Repeat("x", 129)}, "129 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			store := memlock.NewStore()
			m, err := memlock.NewLockManager(store, &tt.cfg, nil)
			if m != nil || !errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, %v; want an error that matches ErrInvalid and contains %q", m, err, tt.want)
			}
		})
	}
	if _, err := dlm.NewManager(nil, nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("nil backend: %v", err)
	}
	if _, err := memlock.New(nil, nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("nil store: %v", err)
	}
}

// What a backend does not have is refused before it is asked.
func TestUnsupported(t *testing.T) {
	b, err := memlock.New(memlock.NewStore(), nil)
	if err != nil {
		t.Fatal(err)
	}
	faults := drivertest.NewFaults(drivertest.Hide(drivertest.Intercept(b, drivertest.Hooks{
		Properties: func() driver.Properties { return driver.Properties{Name: "poor", MinTTL: time.Minute} },
	}), drivertest.Hidden{Notifier: true, Inspector: true, Forcer: true}))
	m, err := dlm.NewManager(faults.Backend(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	defer m.Close(ctx)
	_, errShared := m.Acquire(ctx, "k", time.Minute, &dlm.AcquireOptions{Shared: true})
	_, errLimit := m.Acquire(ctx, "k", time.Minute, &dlm.AcquireOptions{Limit: 2})
	_, errGet := m.GetLock(ctx, "k")
	_, errList := m.ListLocks(ctx, "", "", 0)
	_, errForce := m.ForceRelease(ctx, "k", 0)
	for i, err := range []error{errShared, errLimit, errGet, errList, errForce} {
		if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "poor") {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if faults.AllCalls() != 0 {
		t.Error("the backend was asked")
	}
	// A floor under the TTL is applied, and told.
	l, err := m.TryLock(ctx, "k", time.Second)
	if err != nil || l.TTL != time.Minute {
		t.Errorf("got %v, %v; want a TTL of 1m", l, err)
	}
}

func TestContextAlreadyDone(t *testing.T) {
	c := open(t, memlock.NewStore(), nil)
	why := errors.New("no time")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	_, err := c.AcquireLock(ctx, "k", time.Minute)
	if !errors.Is(err, context.Canceled) || !errors.Is(err, why) || c.AllCalls() != 0 {
		t.Errorf("got %v after %d calls", err, c.AllCalls())
	}
}

// ACQ6: every way to fail can be told from the others.
func TestErrorKinds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, &dlm.LockConfig{MaxRetries: 2}), open(t, store, nil)
		l := other.lock(t, "k", time.Hour)

		_, err := c.TryLock(t.Context(), "k", time.Minute)
		held, ok := errors.AsType[*dlm.LockConflictError](err)
		if !ok || !errors.Is(err, dlm.ErrHeld) || held.Holder != l.Value || held.Key != "k" || held.Position != 0 ||
			held.Remaining <= 0 || held.Remaining > time.Hour {
			t.Errorf("TryLock on a held key: %v (%+v)", err, held)
		}
		wrapped, ok := errors.AsType[*dlm.Error](err)
		if !ok || wrapped.Op != "try" || wrapped.Key != "k" || wrapped.Backend != "memory" {
			t.Errorf("TryLock: %+v", wrapped)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = c.AcquireLock(ctx, "k", time.Minute)
		if !errors.Is(err, dlm.ErrHeld) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, dlm.ErrIndeterminate) {
			t.Errorf("a wait that timed out: %v", err)
		}
		if held, ok := errors.AsType[*dlm.LockConflictError](err); !ok || held.Position != 1 {
			t.Errorf("a wait that timed out: %v", err)
		}

		fault := c.Inject(drivertest.Fault{Kind: drivertest.Refuse, Op: drivertest.OpAcquire})
		calls := c.Calls(drivertest.OpWithdraw)
		_, err = c.AcquireLock(t.Context(), "free", time.Minute)
		if !errors.Is(err, drivertest.ErrFault) || errors.Is(err, dlm.ErrHeld) || errors.Is(err, context.Canceled) {
			t.Errorf("a refusing store: %v", err)
		}
		if fault.Hits() != 3 || c.Calls(drivertest.OpWithdraw) != calls {
			t.Errorf("%d attempts with MaxRetries 2, %d needless withdrawals", fault.Hits(), c.Calls(drivertest.OpWithdraw)-calls)
		}
		fault.Remove()
		if err := c.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err = c.TryLock(t.Context(), "k", time.Minute); !errors.Is(err, dlm.ErrClosed) {
			t.Errorf("a closed manager: %v", err)
		}
	})
}

// I4: whatever happens to the answer, a failed acquisition leaves nothing.
func TestFailedAcquireLeavesNothing(t *testing.T) {
	for _, kind := range []drivertest.FaultKind{
		drivertest.Fail, drivertest.Swallow, drivertest.Hang, drivertest.HangAfter,
	} {
		for _, held := range []bool{false, true} {
			t.Run(fmt.Sprint(kind, held), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					store := memlock.NewStore()
					c, other := open(t, store, nil), open(t, store, nil)
					if held {
						other.lock(t, "k", time.Hour)
					}
					fault := c.Inject(drivertest.Fault{Kind: kind, Op: drivertest.OpAcquire})
					defer fault.Remove()
					ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
					defer cancel()
					_, err := c.AcquireLock(ctx, "k", time.Minute)
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("AcquireLock: %v", err)
					}
					info, err := other.GetLock(t.Context(), "k")
					if err != nil || len(info.Waiters) != 0 || (len(info.Holders) == 1) != held {
						t.Errorf("left behind: %+v, %v", info, err)
					}
				})
			})
		}
	}
}

// A swallowed answer is found out by asking again: the lock is got once.
func TestSwallowedAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		c.Inject(drivertest.Fault{Kind: drivertest.Swallow, Op: drivertest.OpAcquire, Times: 1})
		l := c.lock(t, "k", time.Minute)
		if l.Token != 1 {
			t.Errorf("token %d, want that of the first answer", l.Token)
		}
	})
}

// If not even the withdrawal gets through, the caller is told, and the
// manager goes on trying.
func TestWithdrawalInBackground(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		l := other.lock(t, "k", time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		var heal func()
		go func() {
			time.Sleep(time.Second)
			heal = c.Sever()
			cancel()
		}()
		start := time.Now()
		_, err := c.AcquireLock(ctx, "k", time.Hour)
		if !errors.Is(err, context.Canceled) || !errors.Is(err, dlm.ErrIndeterminate) || !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("AcquireLock: %v", err)
		}
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("the call returned %v after its context ended", d-time.Second)
		}
		time.Sleep(time.Second)
		heal()
		time.Sleep(6 * time.Second) // less than the ticket's life
		if info, err := other.GetLock(t.Context(), "k"); err != nil || len(info.Waiters) != 0 {
			t.Errorf("the ticket is still there: %+v, %v", info, err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// ACQ3: a cancellation that meets the hand-over ends in one of two ways.
func TestCancelMeetsHandOver(t *testing.T) {
	store := memlock.NewStore()
	c, other := open(t, store, nil), open(t, store, nil)
	for i := range 1500 {
		l := c.lock(t, "k", time.Minute)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var got *dlm.Lock
		var err error
		wg.Go(func() { got, err = other.AcquireLock(ctx, "k", time.Minute) })
		for {
			info, err := c.GetLock(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			if len(info.Waiters) == 1 {
				break
			}
		}
		wg.Go(cancel)
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		tokens := c.holders(t, "k")
		switch {
		case err == nil && (len(tokens) != 1 || tokens[0] != got.Token):
			t.Fatalf("round %d: got %v, but the store has %v", i, got, tokens)
		case err != nil && (!errors.Is(err, context.Canceled) || len(tokens) != 0):
			t.Fatalf("round %d: %v, and the store has %v", i, err, tokens)
		case err == nil:
			if err := got.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A hand-over costs the waiter no further call to the store.
func TestHandOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		for range 2 { // the first time, the subscription is not up yet
			l := other.lock(t, "k", 30*time.Second)
			before := c.Calls(drivertest.OpAcquire)
			go func() {
				time.Sleep(100 * time.Millisecond)
				_ = l.Release(context.Background())
			}()
			start := time.Now()
			got, err := c.AcquireLock(t.Context(), "k", 30*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if d := time.Since(start); d != 100*time.Millisecond {
				t.Errorf("handed over after %v, want 100ms", d)
			}
			if n := c.Calls(drivertest.OpAcquire) - before; n > 2 {
				t.Errorf("the waiter asked %d times", n)
			}
			// Its ticket's life of 7.5s is what it has until it is renewed.
			if left := time.Until(got.Deadline()); left < 7*time.Second || left > 7500*time.Millisecond {
				t.Errorf("the deadline is %v ahead", left)
			}
			time.Sleep(5 * time.Second)
			if left := time.Until(got.Deadline()); left < 20*time.Second {
				t.Errorf("after its first renewal the deadline is %v ahead", left)
			}
			time.Sleep(time.Minute)
			if err := got.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// REN11, WAIT11: without renewal, each of several waiters gets its whole TTL.
func TestWholeTTLWithoutRenewal(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		start := time.Now()
		var wg sync.WaitGroup
		for i := range 3 {
			c := open(t, store, &dlm.LockConfig{AutoRenew: dlm.Off})
			time.Sleep(time.Millisecond)
			wg.Go(func() {
				l, err := c.AcquireLock(t.Context(), "k", 20*time.Second)
				if err != nil {
					t.Error(err)
					return
				}
				at := time.Since(start).Round(time.Second)
				if want := time.Duration(i) * 20 * time.Second; at != want {
					t.Errorf("waiter %d got it after %v, want %v", i, at, want)
				}
				if left := time.Until(l.Deadline()); left < 19500*time.Millisecond {
					t.Errorf("waiter %d has %v left", i, left)
				}
				<-l.Done()
				wantLoss(t, l.Err(), dlm.ReasonExpired)
			})
		}
		wg.Wait()
	})
}

// A grant that arrives so late that it has lapsed, and that another ticket of
// the same waiter has followed, is not believed.
func TestStaleGrant(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		b, err := memlock.New(store, nil)
		if err != nil {
			t.Fatal(err)
		}
		// Events are held back, and calls too while the waiter "sleeps".
		events := make(chan driver.Event, 10)
		var handle func(driver.Event)
		faults := drivertest.NewFaults(drivertest.Intercept(b, drivertest.Hooks{
			Listen: func(ctx context.Context, manager string, h func(driver.Event)) error {
				handle = h
				return b.Listen(ctx, manager, func(e driver.Event) {
					if e.Kind == driver.EventUp {
						h(e)
						return
					}
					events <- e
				})
			},
		}))
		m, err := dlm.NewManager(faults.Backend(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close(context.Background())
		first, second := open(t, store, nil), open(t, store, nil)
		l := first.lock(t, "k", time.Hour)

		var got *dlm.Lock
		done := make(chan error, 1)
		go func() {
			var err error
			got, err = m.AcquireLock(t.Context(), "k", time.Hour)
			done <- err
		}()
		synctest.Wait()
		time.Sleep(3 * time.Second)
		fault := faults.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpAcquire})
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		stale := <-events // the key is handed to the sleeping waiter
		l2, err := second.AcquireLock(t.Context(), "k", time.Hour)
		if err != nil {
			t.Fatal(err) // whose grant lapses
		}
		fault.Remove()
		time.Sleep(3 * time.Second) // it asks again, and gets a new ticket
		handle(stale)
		time.Sleep(3 * time.Second)
		select {
		case err := <-done:
			t.Fatalf("the waiter has %v, %v, while %v is held", got, err, l2)
		default:
		}
		if err := l2.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil || got.Token <= l2.Token {
			t.Fatalf("got %v, %v after %v", got, err, l2)
		}
	})
}

// RED7: waiters are served by their own looking while the subscription is down.
func TestWaitersWithoutSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		c.Inject(drivertest.Fault{Kind: drivertest.Fail, Op: drivertest.OpListen})
		for range 5 {
			l := other.lock(t, "k", time.Hour)
			start := time.Now()
			go func() {
				time.Sleep(10 * time.Second)
				_ = l.Release(context.Background())
			}()
			got, err := c.AcquireLock(t.Context(), "k", time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			if d := time.Since(start); d > 11*time.Second {
				t.Errorf("served after %v", d)
			}
			if err := got.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// RED9: a store that refuses at once is not hammered, and waiters come through
// soon after it has healed.
func TestOutageBackoff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const waiters = 50
		c := open(t, memlock.NewStore(), &dlm.LockConfig{MaxRetries: -1})
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Refuse})
		var wg sync.WaitGroup
		start := time.Now()
		for i := range waiters {
			wg.Go(func() {
				l, err := c.AcquireLock(t.Context(), fmt.Sprint(i), time.Minute)
				if err != nil {
					t.Error(err)
					return
				}
				if d := time.Since(start); d > 33*time.Second {
					t.Errorf("served %v after the store healed", d-30*time.Second)
				}
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(30 * time.Second)
		if n := fault.Hits(); n > waiters*40 {
			t.Errorf("%d calls of %d waiters in 30s", n, waiters)
		}
		fault.Remove()
		wg.Wait()
	})
}

// QUO5: a grant that was over before its answer came is not handed out.
func TestLateAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), &dlm.LockConfig{MaxRetries: 3})
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Delay, Op: drivertest.OpAcquire, Delay: 600 * time.Millisecond})
		if l, err := c.TryLock(t.Context(), "k", 500*time.Millisecond); err == nil {
			t.Errorf("got %v with %v left", l, time.Until(l.Deadline()))
		}
		fault.Remove()
		if tokens := c.holders(t, "k"); len(tokens) != 0 {
			t.Errorf("left behind: %v", tokens)
		}
	})
}

// One manager's waiters cost one subscription, and one call each plus the
// refreshing of their tickets.
func TestManyWaiters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const n = 1000
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		l := other.lock(t, "k", time.Hour)
		var wg sync.WaitGroup
		order := make(chan int64, n)
		for range n {
			wg.Go(func() {
				got, err := c.AcquireLock(t.Context(), "k", time.Minute)
				if err != nil {
					t.Error(err)
					return
				}
				order <- got.Token
				if err := got.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		waited := c.AllCalls()
		if waited > n+10 {
			t.Errorf("%d calls for %d waiters to queue up", waited, n)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if served := c.AllCalls() - waited; served > n+10 {
			t.Errorf("%d calls to serve %d waiters", served, n)
		}
		if got := c.Calls(drivertest.OpListen); got != 1 {
			t.Errorf("%d subscriptions", got)
		}
		close(order)
		last := int64(0)
		for token := range order {
			if token <= last {
				t.Fatalf("token %d after %d", token, last)
			}
			last = token
		}
	})
}

// WAIT7: whatever a store says about the time that remains, a waiter looks
// again, and not all the time.
func TestRemainingNonsense(t *testing.T) {
	for _, tt := range []struct {
		remaining time.Duration
		most      int // questions in 10s
	}{
		{-1 << 63, 20},
		{-1, 20},
		{0, 20},
		{1, 10_000}, // it is always about to expire
		{1<<63 - 1, 20},
	} {
		t.Run(fmt.Sprint(tt.remaining), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				b, err := memlock.New(memlock.NewStore(), nil)
				if err != nil {
					t.Fatal(err)
				}
				calls := 0
				m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
					Acquire: func(context.Context, driver.Request) (driver.Lease, error) {
						calls++
						return driver.Lease{}, &driver.HeldError{Holder: "x", Token: 1, Remaining: tt.remaining, Position: 1}
					},
				}), nil)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if _, err := m.AcquireLock(ctx, "k", time.Minute); !errors.Is(err, dlm.ErrHeld) {
					t.Error(err)
				}
				if calls < 5 || calls > tt.most {
					t.Errorf("%d questions in 10s", calls)
				}
				if err := m.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// WAIT9: a subscription that comes and goes does not make all waiters ask all
// the time.
func TestFlappingSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		b, err := memlock.New(store, nil)
		if err != nil {
			t.Fatal(err)
		}
		faults := drivertest.NewFaults(drivertest.Intercept(b, drivertest.Hooks{
			Listen: func(_ context.Context, _ string, handle func(driver.Event)) error {
				handle(driver.Event{Kind: driver.EventUp})
				return errors.New("closed by the load balancer")
			},
		}))
		m, err := dlm.NewManager(faults.Backend(), nil)
		if err != nil {
			t.Fatal(err)
		}
		other := open(t, store, nil)
		other.lock(t, "k", time.Hour)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		const waiters = 100
		var wg sync.WaitGroup
		for range waiters {
			wg.Go(func() { _, _ = m.AcquireLock(ctx, "k", time.Minute) })
		}
		wg.Wait()
		if n := faults.Calls(drivertest.OpAcquire); n > waiters*60 {
			t.Errorf("%d questions of %d waiters in 30s", n, waiters)
		}
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A question that hangs does not keep a waiter from the key that is handed to
// it meanwhile.
func TestHandOverDuringQuestion(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, &dlm.LockConfig{CallTimeout: time.Minute}), open(t, store, nil)
		l := other.lock(t, "k", time.Hour)
		got := make(chan error, 1)
		go func() {
			_, err := c.AcquireLock(t.Context(), "k", time.Hour)
			got <- err
		}()
		time.Sleep(500 * time.Millisecond)
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpAcquire})
		<-fault.Hit()
		start := time.Now()
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-got; err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d > 3*time.Second {
			t.Errorf("the key idled for %v", d)
		}
		fault.Remove()
	})
}

// A call to the store that is not made any more, because the context has ended, is
// no failure of the store.
func TestEndIsNoFailure(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		held := open(t, store, nil).lock(t, "k", time.Minute)
		b, err := memlock.New(store, nil)
		if err != nil {
			t.Fatal(err)
		}
		calls := 0
		ctx, cancel := context.WithCancel(t.Context())
		m, err := dlm.NewManager(drivertest.Intercept(drivertest.Hide(b, drivertest.Hidden{Notifier: true}), drivertest.Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				if calls++; calls == 1 {
					return b.Acquire(ctx, req)
				}
				cancel() // in the moment in which the waiter looks again
				return driver.Lease{}, fmt.Errorf("%w: %w", driver.ErrNotApplied, context.Canceled)
			},
		}), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close(context.Background())
		_, err = m.AcquireLock(ctx, "k", time.Minute)
		if !errors.Is(err, context.Canceled) || !errors.Is(err, dlm.ErrHeld) || errors.Is(err, dlm.ErrNotApplied) {
			t.Errorf("%v", err)
		}
		if err := held.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
