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

func TestRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		l := c.lock(t, "k", time.Minute)
		ctx := l.Context(t.Context())
		if l.Err() != nil || isDone(l.Done()) || ctx.Err() != nil {
			t.Error("a held lock looks ended")
		}
		// The handle has ended before the request leaves.
		fault := c.Inject(drivertest.Fault{Kind: drivertest.HangAfter, Op: drivertest.OpRelease})
		released := make(chan error, 1)
		go func() { released <- l.Release(t.Context()) }()
		<-fault.Hit()
		if !errors.Is(l.Err(), dlm.ErrReleased) || !isDone(l.Done()) || !errors.Is(context.Cause(ctx), context.Canceled) {
			t.Errorf("during the release: Err %v, cause %v", l.Err(), context.Cause(ctx))
		}
		fault.Remove()
		if err := <-released; err != nil {
			t.Error(err)
		}
		for range 2 {
			if err := c.ReleaseLock(t.Context(), l); err != nil {
				t.Errorf("released again: %v", err)
			}
		}
		if err := l.Extend(t.Context(), time.Minute); !errors.Is(err, dlm.ErrReleased) {
			t.Errorf("Extend after Release: %v", err)
		}
		if ctx := l.Context(t.Context()); ctx.Err() == nil || !errors.Is(context.Cause(ctx), context.Canceled) {
			t.Error("a context made after the release goes on")
		}
	})
}

// OWN1: a release that comes too late frees nobody else's lock.
func TestLateRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, &dlm.LockConfig{AutoRenew: dlm.Off}), open(t, store, nil)
		a := c.lock(t, "k", 300*time.Millisecond)
		time.Sleep(500 * time.Millisecond)
		b := other.lock(t, "k", time.Minute)
		wantLoss(t, a.Release(t.Context()), dlm.ReasonExpired)
		if tokens := c.holders(t, "k"); len(tokens) != 1 || tokens[0] != b.Token {
			t.Errorf("the store has %v, want %d", tokens, b.Token)
		}
		if _, err := c.TryLock(t.Context(), "k", time.Minute); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("a third one: %v", err)
		}
	})
}

// REL5: a hundred releases of one handle, beside a loss and a close.
func TestConcurrentRelease(t *testing.T) {
	for range 50 {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		l := c.lock(t, "k", time.Minute)
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if err := l.Release(t.Context()); err != nil && !errors.Is(err, dlm.ErrLost) && !errors.Is(err, dlm.ErrClosed) {
					t.Error(err)
				}
			})
		}
		wg.Go(func() { _, _ = other.ForceRelease(context.Background(), "k", 0) })
		wg.Go(func() { _ = c.Close(context.Background()) })
		wg.Wait()
	}
}

func TestReleaseUnanswered(t *testing.T) {
	for _, tt := range []struct {
		name string
		kind drivertest.FaultKind
		want error
	}{
		{"not sent", drivertest.Fail, dlm.ErrIndeterminate},
		{"answer lost", drivertest.Swallow, dlm.ErrIndeterminate},
		{"refused", drivertest.Refuse, dlm.ErrNotApplied},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := memlock.NewStore()
				c, other := open(t, store, &dlm.LockConfig{MaxRetries: 2}), open(t, store, nil)
				l := c.lock(t, "k", time.Minute)
				fault := c.Inject(drivertest.Fault{Kind: tt.kind, Op: drivertest.OpRelease, Times: 1})
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("one fault, which a retry mends: %v", err)
				}
				fault.Remove()

				l = c.lock(t, "k", time.Minute)
				fault = c.Inject(drivertest.Fault{Kind: tt.kind, Op: drivertest.OpRelease})
				err := l.Release(t.Context())
				if !errors.Is(err, tt.want) && !(tt.kind == drivertest.Swallow && err == nil) {
					t.Errorf("Release: %v, want %v", err, tt.want)
				}
				if !errors.Is(l.Err(), dlm.ErrReleased) {
					t.Errorf("Err: %v", l.Err())
				}
				fault.Remove()
				// The background frees it, or the second call.
				start := time.Now()
				next, err := other.AcquireLock(t.Context(), "k", time.Minute)
				if err != nil {
					t.Fatal(err)
				}
				if d := time.Since(start); d > 3*time.Second {
					t.Errorf("free after %v", d)
				}
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("released again: %v", err)
				}
				if tokens := c.holders(t, "k"); len(tokens) != 1 || tokens[0] != next.Token {
					t.Errorf("the store has %v, want %d", tokens, next.Token)
				}
			})
		})
	}
}

func TestReleaseObeysContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		l := c.lock(t, "k", time.Minute)
		heal := c.Sever()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		err := l.Release(ctx)
		if !errors.Is(err, dlm.ErrIndeterminate) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Release: %v", err)
		}
		if d := time.Since(start); d != time.Second {
			t.Errorf("returned after %v", d)
		}
		heal()
	})
}

func TestExtend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, &dlm.LockConfig{AutoRenew: dlm.Off}), open(t, store, nil)
		l := c.lock(t, "k", 10*time.Second)
		remaining := func() time.Duration {
			info, err := other.GetLock(t.Context(), "k")
			if err != nil || len(info.Holders) != 1 {
				t.Fatalf("GetLock: %+v, %v", info, err)
			}
			return info.Holders[0].Remaining
		}
		if err := l.Extend(t.Context(), time.Minute); err != nil || remaining() != time.Minute {
			t.Errorf("Extend: %v, %v remain", err, remaining())
		}
		// It does not shorten.
		if err := c.ExtendLock(t.Context(), l, time.Second); err != nil || remaining() != time.Minute {
			t.Errorf("Extend: %v, %v remain", err, remaining())
		}
		if left := time.Until(l.Deadline()); left < 59*time.Second {
			t.Errorf("the deadline is %v ahead", left)
		}

		// An unreachable store makes it fail, but ends nothing before its time.
		heal := c.Sever()
		deadline := l.Deadline()
		if err := l.Extend(t.Context(), time.Hour); !errors.Is(err, dlm.ErrIndeterminate) {
			t.Errorf("Extend: %v", err)
		}
		if l.Err() != nil || !l.Deadline().Equal(deadline) {
			t.Errorf("after a failed Extend: %v, deadline moved by %v", l.Err(), l.Deadline().Sub(deadline))
		}
		<-l.Done()
		if !time.Now().Equal(deadline) {
			t.Errorf("lost %v after the deadline", time.Since(deadline))
		}
		heal()
	})
}

// REL4: one release that fails does not keep the others from being released.
func TestCloseReleases(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		var locks []*dlm.Lock
		for i := range 10 {
			locks = append(locks, c.lock(t, fmt.Sprint("k", i), time.Minute))
		}
		c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpRelease, Key: "k3"})
		waiting := make(chan error, 1)
		other.lock(t, "held", time.Hour)
		go func() {
			_, err := c.AcquireLock(t.Context(), "held", time.Minute)
			waiting <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		start := time.Now()
		err := c.Close(ctx)
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("Close took %v", d)
		}
		if err == nil || !strings.Contains(err.Error(), `"k3"`) || strings.Contains(err.Error(), `"k4"`) {
			t.Errorf("Close: %v", err)
		}
		if err := <-waiting; !errors.Is(err, dlm.ErrClosed) || !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("the wait ended with %v", err)
		}
		list, err := other.ListLocks(t.Context(), "", "", 0)
		if err != nil || len(list) != 2 || list[0].Key != "held" || len(list[0].Waiters) != 0 || list[1].Key != "k3" {
			t.Errorf("left in the store: %+v, %v", list, err)
		}
		for _, l := range locks {
			wantLoss(t, l.Err(), dlm.ReasonClosed)
			if !errors.Is(l.Err(), dlm.ErrClosed) {
				t.Errorf("the loss %v does not match ErrClosed", l.Err())
			}
			wantLoss(t, l.Release(t.Context()), dlm.ReasonClosed)
		}
		if err := c.Close(t.Context()); !errors.Is(err, dlm.ErrClosed) {
			t.Errorf("closed again: %v", err)
		}
	})
}

func TestReentry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		ctx := dlm.WithOwner(t.Context(), "job 7")
		if owner := dlm.OwnerFromContext(ctx); owner != "job 7" {
			t.Errorf("the owner of the context is %q", owner)
		}
		outer, err := c.AcquireLock(ctx, "k", 20*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		calls := c.AllCalls()
		inner, err := c.TryLock(ctx, "k", 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if c.AllCalls() != calls {
			t.Error("re-entry asked the store")
		}
		if inner.Token != outer.Token || inner.Value != outer.Value || inner == outer {
			t.Errorf("inner %v, outer %v", inner, outer)
		}
		// A longer one prolongs the whole, and a shorter one did not shorten it.
		longest, err := c.TryLock(ctx, "k", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if left := time.Until(outer.Deadline()); left < 59*time.Minute {
			t.Errorf("the deadline is %v ahead", left)
		}
		// Neither another owner, nor another manager, nor no owner gets in.
		for _, try := range []func() (*dlm.Lock, error){
			func() (*dlm.Lock, error) { return c.TryLock(t.Context(), "k", time.Minute) },
			func() (*dlm.Lock, error) {
				return c.TryLock(dlm.WithOwner(t.Context(), "job 8"), "k", time.Minute)
			},
			func() (*dlm.Lock, error) { return other.TryLock(ctx, "k", time.Minute) },
		} {
			if _, err := try(); !errors.Is(err, dlm.ErrHeld) {
				t.Errorf("another one got in: %v", err)
			}
		}
		if _, err := c.Acquire(ctx, "k", time.Minute, &dlm.AcquireOptions{Limit: 2}); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("re-entry with another limit: %v", err)
		}

		for i, l := range []*dlm.Lock{outer, longest, inner} {
			for range 2 { // a second release of a handle counts once
				if err := l.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if held := len(c.holders(t, "k")) == 1; held != (i < 2) {
				t.Errorf("after %d releases, held is %v", i+1, held)
			}
		}
		if again, err := c.TryLock(ctx, "k", time.Minute); err != nil || again.Token == outer.Token {
			t.Errorf("a new lock: %v, %v", again, err)
		}
	})
}

// All levels of a nested lock are lost together.
func TestReentryLoss(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), &dlm.LockConfig{AutoRenew: dlm.Off})
		ctx := dlm.WithOwner(t.Context(), "o")
		var locks []*dlm.Lock
		for range 3 {
			l, err := c.AcquireLock(ctx, "k", 10*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			locks = append(locks, l)
		}
		time.Sleep(10 * time.Second)
		for _, l := range locks {
			wantLoss(t, l.Err(), dlm.ReasonExpired)
		}
		next, err := c.AcquireLock(ctx, "k", 10*time.Second)
		if err != nil || next.Token == locks[0].Token {
			t.Fatalf("after the loss: %v, %v", next, err)
		}
	})
}

// Goroutines of one owner that come together share one grant.
func TestConcurrentReentry(t *testing.T) {
	c := open(t, memlock.NewStore(), nil)
	for range 100 {
		ctx := dlm.WithOwner(t.Context(), "o")
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				l, err := c.AcquireLock(ctx, "k", time.Minute)
				if err != nil {
					t.Error(err)
					return
				}
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if tokens := c.holders(t, "k"); len(tokens) != 0 {
			t.Fatalf("left behind: %v", tokens)
		}
	}
}

// OWN6: one manager shared by goroutines keeps their locks apart.
func TestSharedManager(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), &dlm.LockConfig{AutoRenew: dlm.Off})
		first := c.lock(t, "k", 200*time.Millisecond)
		second, err := c.AcquireLock(t.Context(), "k", time.Minute) // OWN8
		if err != nil {
			t.Fatal(err)
		}
		wantLoss(t, first.Release(t.Context()), dlm.ReasonExpired)
		if _, err := c.TryLock(t.Context(), "k", time.Minute); !errors.Is(err, dlm.ErrHeld) || second.Err() != nil {
			t.Errorf("a third one: %v; the second: %v", err, second.Err())
		}
	})
}

// A lock's own context, or that of a nested one, may be used for anything.
func TestLockContextAsArgument(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		outer := c.lock(t, "outer", time.Minute)
		ctx := outer.Context(t.Context())
		inner, err := c.AcquireLock(ctx, "inner", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		both := inner.Context(ctx)
		if dlm.LockFromContext(both) != inner || dlm.LockFromContext(ctx) != outer || dlm.LockFromContext(t.Context()) != nil {
			t.Error("LockFromContext finds the wrong lock")
		}
		if _, err := c.GetLock(both, "inner"); err != nil {
			t.Error(err)
		}
		if err := outer.Extend(both, time.Minute); err != nil {
			t.Error(err)
		}
		// Releasing a lock ends its context, but not the call.
		if err := outer.Release(both); err != nil {
			t.Errorf("released with its own context: %v", err)
		}
		if ctx.Err() == nil || both.Err() == nil {
			t.Error("the context of a released lock goes on")
		}
		if err := c.Close(inner.Context(t.Context())); err != nil {
			t.Errorf("closed with the context of a lock: %v", err)
		}
		if list, err := other.ListLocks(t.Context(), "", "", 0); err != nil || len(list) != 0 {
			t.Errorf("left behind: %v, %v", list, err)
		}
	})
}

// parent is a context that notes whether Done of a lock was closed when the lock's
// context let go of its parent.
type parent struct {
	context.Context
	done   func() <-chan struct{}
	before bool
}

// AfterFunc implements what package context looks for in a parent.
func (p *parent) AfterFunc(func()) func() bool {
	return func() bool {
		p.before = !isDone(p.done())
		return true
	}
}

func TestContextsEndBeforeDone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := open(t, memlock.NewStore(), nil)
	l := c.lock(t, "key", time.Minute)
	done := l.Done()
	// Without Value it does not look like the context that is in it.
	p := &parent{Context: opaqueContext{ctx}, done: func() <-chan struct{} { return done }}
	lockCtx := l.Context(p)
	if err := l.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if lockCtx.Err() == nil || !p.before {
		t.Errorf("Done was closed before the contexts had ended, %v", lockCtx.Err())
	}
}

// opaqueContext hides the values of a context.
type opaqueContext struct{ context.Context }

func (opaqueContext) Value(any) any { return nil }

// The loss of one lock, which its context carries into other calls, is not
// taken for that of another.
func TestForeignLoss(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		a, b := c.lock(t, "a", 30*time.Second), c.lock(t, "b", time.Hour)
		ctx := a.Context(t.Context())
		if _, err := other.ForceRelease(t.Context(), "a", 0); err != nil {
			t.Fatal(err)
		}
		<-a.Done()
		if err := b.Extend(ctx, time.Hour); errors.Is(b.Err(), dlm.ErrLost) || err == nil {
			t.Errorf("Extend: %v, Err: %v", err, b.Err())
		}
		if err := b.Release(ctx); err == nil {
			t.Error("released on a context that had ended")
		}
		time.Sleep(time.Second) // the background releases it
		if tokens := other.holders(t, "b"); len(tokens) != 0 {
			t.Errorf("still held: %v", tokens)
		}
		if err := b.Release(t.Context()); err != nil {
			t.Errorf("released again: %v", err)
		}

		// Nor does it keep a nested lock from being freed.
		l := c.lock(t, "a", 30*time.Second)
		owner := dlm.WithOwner(t.Context(), "o")
		outer, err := c.AcquireLock(owner, "c", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		lost := dlm.WithOwner(l.Context(t.Context()), "o")
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpExtend})
		go func() {
			time.Sleep(time.Second)
			_, _ = other.ForceRelease(context.Background(), "a", 0)
			fault.Remove()
		}()
		if inner, err := c.AcquireLock(lost, "c", time.Hour); err == nil {
			if err := inner.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if err := outer.Release(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
		if tokens := other.holders(t, "c"); len(tokens) != 0 {
			t.Errorf("still held: %v", tokens)
		}
	})
}

// Close does not go on asking a dead store for longer than a TTL.
func TestCloseDeadStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), nil)
		if err != nil {
			t.Fatal(err)
		}
		faults := drivertest.NewFaults(b)
		m, err := dlm.NewManager(faults.Backend(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 1000 {
			if _, err := m.TryLock(t.Context(), fmt.Sprint("k", i), 10*time.Second); err != nil {
				t.Fatal(err)
			}
		}
		heal := faults.Sever()
		defer heal()
		start := time.Now()
		if err := m.Close(t.Context()); err == nil {
			t.Error("Close did not say that locks were left")
		}
		if d := time.Since(start); d > 16*time.Second {
			t.Errorf("Close took %v", d)
		}
	})
}

// Close leaves no call to the backend under way, not even a renewal of a lock
// that was lost before.
func TestCloseJoinsRenewals(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), nil)
		if err != nil {
			t.Fatal(err)
		}
		under := 0 // calls; all goroutines of a bubble are joined by Close
		closed := false
		m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				under++
				<-ctx.Done()
				time.Sleep(time.Second) // a slow one
				if closed {
					t.Error("the backend was closed under a call")
				}
				under--
			},
			Close: func() error {
				closed = true
				return b.Close()
			},
		}), nil)
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.Acquire(t.Context(), "k", 30*time.Second, &dlm.AcquireOptions{MaxHold: 11 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		<-l.Done()
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if under != 0 {
			t.Errorf("%d calls under way after Close", under)
		}
	})
}

// A release does not wait for an Extend that hangs.
func TestReleaseBesideExtend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), &dlm.LockConfig{CallTimeout: time.Minute})
		l := c.lock(t, "k", time.Hour)
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpExtend})
		extended := make(chan error, 1)
		go func() { extended <- l.Extend(t.Context(), time.Hour) }()
		<-fault.Hit()
		start := time.Now()
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if d := time.Since(start); d > time.Second {
			t.Errorf("the release took %v", d)
		}
		if err := <-extended; !errors.Is(err, dlm.ErrReleased) {
			t.Errorf("Extend: %v", err)
		}
	})
}
