package dlm_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
)

// multi takes keys and fails the test if that is not possible at once.
func (c *client) multi(t *testing.T, ttl time.Duration, keys ...string) *dlm.MultiLock {
	t.Helper()
	l, err := dlm.TryMulti(t.Context(), c, keys, ttl)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// free checks that nobody holds the keys or waits for them.
func (c *client) free(t *testing.T, keys ...string) {
	t.Helper()
	for _, key := range keys {
		info, err := c.GetLock(t.Context(), key)
		if err != nil || len(info.Holders)+len(info.Waiters) != 0 {
			t.Errorf("left behind on %q: %+v, %v", key, info, err)
		}
	}
}

func TestMultiArguments(t *testing.T) {
	c := open(t, memlock.NewStore(), nil)
	many := make([]string, dlm.MaxMultiKeys+1)
	for i := range many {
		many[i] = fmt.Sprint(i)
	}
	for _, acquire := range []func(context.Context, dlm.LockManager, []string, time.Duration) (*dlm.MultiLock, error){
		dlm.AcquireMulti, dlm.TryMulti,
	} {
		for _, tt := range []struct {
			keys  []string
			ttl   time.Duration
			words []string
		}{
			{nil, time.Minute, []string{"0 different keys", "between 1 and 64"}},
			{many, time.Minute, []string{"65 different keys", "between 1 and 64"}},
			{[]string{"a", ""}, time.Minute, []string{"keys[1] is empty"}},
			{[]string{strings.Repeat("x", 600)}, time.Minute, []string{"keys[0]", "600", "512"}},
			{[]string{"a"}, 0, []string{"ttl is 0s", "1ms"}},
		} {
			_, err := acquire(t.Context(), c, tt.keys, tt.ttl)
			wantInvalid(t, err, tt.words...)
		}
		_, err := acquire(t.Context(), nil, []string{"a"}, time.Minute)
		wantInvalid(t, err, "manager is nil")
		_, err = acquire(nil, c, []string{"a"}, time.Minute)
		wantInvalid(t, err, "context is nil")
	}
	if n := c.AllCalls(); n != 0 {
		t.Errorf("%d calls to the store", n)
	}

	// The caller's keys stay as they are, and duplicates do not count.
	keys := append(slices.Repeat([]string{"z"}, 100), many[1:]...)
	l, err := dlm.AcquireMulti(t.Context(), c, keys[:100+dlm.MaxMultiKeys-1], time.Minute)
	if err != nil || keys[0] != "z" || len(l.Keys()) != dlm.MaxMultiKeys {
		t.Fatal(l, err, keys[0])
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A MultiLock that was never acquired is one that is not held.
func TestMultiZero(t *testing.T) {
	var l dlm.MultiLock
	if !isDone(l.Done()) || !errors.Is(l.Err(), dlm.ErrReleased) || l.Context(t.Context()).Err() == nil {
		t.Error("it looks held")
	}
	if !l.Deadline().IsZero() || len(l.Keys()) != 0 || l.Token("a") != 0 {
		t.Error("it has something")
	}
	wantInvalid(t, l.Release(t.Context()))
	wantInvalid(t, l.Extend(t.Context(), time.Minute))
	var none *dlm.MultiLock
	wantInvalid(t, none.Release(t.Context()))
	wantInvalid(t, none.Extend(t.Context(), time.Minute))
}

// Keys that are held stay alive while others are waited for, and have nearly all of
// their time before them in the end.
func TestMultiLongWait(t *testing.T) {
	for _, renew := range []dlm.Toggle{dlm.On, dlm.Off} {
		t.Run(fmt.Sprint(renew), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := memlock.NewStore()
				a, b := open(t, store, nil), open(t, store, &dlm.LockConfig{AutoRenew: renew})
				const ttl = 10 * time.Second
				held := a.lock(t, "c", time.Minute)
				go func() {
					time.Sleep(25*ttl + ttl/3)
					if err := held.Release(context.Background()); err != nil {
						t.Error(err)
					}
				}()
				l, err := dlm.AcquireMulti(t.Context(), b, []string{"a", "b", "c"}, ttl)
				if err != nil {
					t.Fatal(err)
				}
				left := time.Until(l.Deadline())
				if renew == dlm.Off && left < ttl/10*8 || left < ttl/2 {
					t.Errorf("%v are left", left)
				}
				time.Sleep(left - time.Millisecond)
				if err := l.Err(); err != nil {
					t.Errorf("before its deadline: %v", err)
				}
				time.Sleep(time.Second)
				if renew == dlm.Off {
					wantLoss(t, l.Err(), dlm.ReasonExpired)
					return
				}
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A key that is lost while another is waited for ends the wait, and nothing is left.
func TestMultiLossWhileWaiting(t *testing.T) {
	for _, renew := range []dlm.Toggle{dlm.On, dlm.Off} {
		t.Run(fmt.Sprint(renew), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := memlock.NewStore()
				a, b := open(t, store, nil), open(t, store, &dlm.LockConfig{AutoRenew: renew})
				const ttl = 10 * time.Second
				held := a.lock(t, "c", time.Minute)
				fault := b.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpExtend, Key: "a"})
				began := time.Now()
				_, err := dlm.AcquireMulti(t.Context(), b, []string{"a", "b", "c"}, ttl)
				wantLoss(t, err, dlm.ReasonExpired)
				if lost, ok := errors.AsType[*dlm.LostError](err); !ok || lost.Key != "a" || errors.Is(err, context.Canceled) {
					t.Errorf("the error is %v", err)
				}
				if waited := time.Since(began); waited > ttl {
					t.Errorf("it ended after %v", waited)
				}
				fault.Remove()
				// The store lets go of what was lost a little later. That may be "b", too,
				// which was to be renewed together with "a".
				time.Sleep(dlm.DriftMargin(ttl))
				b.free(t, "a", "b")
				if err := held.Release(t.Context()); err != nil {
					t.Error(err)
				}
				b.free(t, "c")
			})
		})
	}
}

// Whatever happens to a key, nothing is left of it and of the others.
func TestMultiFaults(t *testing.T) {
	for _, tt := range []struct {
		name    string
		faults  []drivertest.Fault
		unknown bool
	}{
		{"acquire refused", []drivertest.Fault{{Kind: drivertest.Refuse, Op: drivertest.OpAcquire, Key: "b"}}, false},
		{"acquire without answer", []drivertest.Fault{{Kind: drivertest.Swallow, Op: drivertest.OpAcquire, Key: "b"}}, false},
		{"and no withdrawal", []drivertest.Fault{
			{Kind: drivertest.HangAfter, Op: drivertest.OpAcquire, Key: "b"},
			{Kind: drivertest.Hang, Op: drivertest.OpWithdraw, Key: "b", Times: 1},
		}, true},
		{"nor a release of the others", []drivertest.Fault{
			{Kind: drivertest.Fail, Op: drivertest.OpAcquire, Key: "c"},
			{Kind: drivertest.Hang, Op: drivertest.OpRelease, Times: 2},
		}, true},
		{"release refused", []drivertest.Fault{
			{Kind: drivertest.Fail, Op: drivertest.OpAcquire, Key: "c"},
			{Kind: drivertest.Refuse, Op: drivertest.OpRelease, Key: "a", Times: 20},
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := memlock.NewStore()
				a, b := open(t, store, nil), open(t, store, &dlm.LockConfig{MaxRetries: 2})
				var faults []*drivertest.Injected
				for _, f := range tt.faults {
					faults = append(faults, b.Inject(f))
				}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				l, err := dlm.AcquireMulti(ctx, b, []string{"a", "b", "c"}, time.Hour)
				if l != nil || err == nil || errors.Is(err, dlm.ErrIndeterminate) != tt.unknown {
					t.Errorf("%v, %v; want unknown: %v", l, err, tt.unknown)
				}
				if !tt.unknown {
					a.free(t, "a", "b", "c")
				}
				for _, f := range faults {
					f.Remove()
				}
				time.Sleep(time.Minute) // the background has cleaned up
				a.free(t, "a", "b", "c")
			})
		})
	}
}

// A cancelled acquisition returns at once, though the store does not answer.
func TestMultiCancelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpAcquire, Key: "c"})
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-fault.Hit()
			cancel()
		}()
		began := time.Now()
		_, err := dlm.AcquireMulti(ctx, c, []string{"a", "b", "c"}, time.Minute)
		if !errors.Is(err, context.Canceled) || errors.Is(err, dlm.ErrLost) || errors.Is(err, dlm.ErrIndeterminate) {
			t.Errorf("cancelled: %v", err)
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("it took %v", d)
		}
		c.free(t, "a", "b", "c")
	})
}

// Release gives up all, though some fail, and answers again what it answered.
func TestMultiRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		l := c.multi(t, time.Hour, "a", "b", "c")
		if _, err := c.ForceRelease(t.Context(), "c", 0); err != nil {
			t.Fatal(err)
		}
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpRelease, Key: "a"})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := l.Release(ctx)
		if !errors.Is(err, dlm.ErrIndeterminate) || !errors.Is(err, dlm.ErrLost) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("one hung, one lost: %v", err)
		}
		c.free(t, "b")
		fault.Remove()
		err = l.Release(t.Context())
		if errors.Is(err, dlm.ErrIndeterminate) || !errors.Is(err, dlm.ErrLost) {
			t.Errorf("the second release: %v", err)
		}
		if again := l.Release(t.Context()); again == nil || again.Error() != err.Error() {
			t.Errorf("the third release: %v; the second: %v", again, err)
		}
		c.free(t, "a", "b", "c")

		// Several at once all get the answer.
		l = c.multi(t, time.Hour, "a", "b", "c")
		answers := make(chan error)
		for range 10 {
			go func() { answers <- l.Release(t.Context()) }()
		}
		for range 10 {
			if err := <-answers; err != nil {
				t.Error(err)
			}
		}
		//lint:ignore SA1012 nil is what is tested
		wantInvalid(t, l.Release(nil), "context is nil")
	})
}

// The loss of one key is the loss of all, told on time, once and for good.
func TestMultiLoss(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := open(t, store, nil), open(t, store, nil)
		const ttl = 10 * time.Second
		l := a.multi(t, ttl, "a", "b", "c")
		parent := context.WithValue(t.Context(), ownKey{}, "value")
		ctx := l.Context(parent)
		below, cancel := context.WithCancel(ctx)
		defer cancel()
		if ctx.Value(ownKey{}) != "value" || dlm.LockFromContext(ctx) != nil {
			t.Error("wrong values in the context")
		}
		a.DropEvents(func(driver.Event) bool { return true })
		deadline := l.Deadline()
		if _, err := b.ForceRelease(t.Context(), "b", l.Token("b")); err != nil {
			t.Fatal(err)
		}
		<-l.Done() // a renewal found out
		if now := time.Now(); now.After(deadline) {
			t.Errorf("told %v after the deadline", now.Sub(deadline))
		}
		wantLoss(t, l.Err(), dlm.ReasonGone)
		wantLoss(t, context.Cause(ctx), dlm.ReasonGone)
		wantLoss(t, context.Cause(below), dlm.ReasonGone)
		wantLoss(t, context.Cause(l.Context(t.Context())), dlm.ReasonGone)
		wantLoss(t, l.Extend(t.Context(), ttl), dlm.ReasonGone)
		time.Sleep(3 * ttl)
		if _, err := b.TryLock(t.Context(), "a", ttl); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("the others are held until the release: %v", err)
		}
		if err := l.Release(ctx); !errors.Is(err, dlm.ErrLost) {
			t.Errorf("Release: %v", err)
		}
		wantLoss(t, l.Err(), dlm.ReasonGone)
		b.free(t, "a", "b", "c")

		// A context ends with its parent alone, and a manager that closes ends all.
		l = a.multi(t, ttl, "a", "b")
		parent, cancel = context.WithCancel(t.Context())
		ctx = l.Context(parent)
		cancel()
		if ctx.Err() == nil || l.Err() != nil {
			t.Errorf("the parent ended: %v, %v", ctx.Err(), l.Err())
		}
		if err := a.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantLoss(t, l.Err(), dlm.ReasonClosed)
		b.free(t, "a", "b")
	})
}

type ownKey struct{}

// The methods of the handle are right though the timers are late.
func TestMultiSuspended(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		l := c.multi(t, 10*time.Second, "a", "b")
		ctx := l.Context(t.Context())
		if isDone(l.Done()) || ctx.Err() != nil {
			t.Fatal("not held")
		}
		dlm.SetSuspended(c.Manager, func() time.Duration { return time.Minute })
		if ctx.Err() == nil || !isDone(l.Done()) {
			t.Error("it looks held after the machine was suspended")
		}
		wantLoss(t, l.Err(), dlm.ReasonExpired)
		wantLoss(t, l.Release(t.Context()), dlm.ReasonExpired)
	})
}

// Extend says if one of the keys was not renewed, and the deadline shows it.
func TestMultiExtend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), &dlm.LockConfig{AutoRenew: dlm.Off})
		l := c.multi(t, time.Minute, "a", "b")
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Refuse, Op: drivertest.OpExtend, Key: "b"})
		if err := l.Extend(t.Context(), time.Hour); !errors.Is(err, dlm.ErrNotApplied) || l.Err() != nil {
			t.Errorf("one is not renewed: %v, %v", err, l.Err())
		}
		if d := time.Until(l.Deadline()); d > time.Minute {
			t.Errorf("the deadline is in %v", d)
		}
		fault.Remove()
		if err := l.Extend(t.Context(), time.Hour); err != nil {
			t.Error(err)
		}
		if d := time.Until(l.Deadline()); d < 58*time.Minute {
			t.Errorf("the deadline is in %v", d)
		}
		wantInvalid(t, l.Extend(t.Context(), 0))
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// late is a manager that loses a lock just as it has taken the last.
type late struct {
	dlm.LockManager
	last string
	lose func()
}

func (m *late) AcquireLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	l, err := m.LockManager.AcquireLock(ctx, key, ttl)
	if key == m.last {
		m.lose()
	}
	return l, err
}

// A key that is lost as the last one is granted is noticed.
func TestMultiLossInTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		m := &late{c, "b", func() {
			if _, err := c.ForceRelease(t.Context(), "a", 0); err != nil {
				t.Error(err)
			}
			time.Sleep(30 * time.Second) // a renewal finds out
		}}
		l, err := dlm.AcquireMulti(t.Context(), m, []string{"a", "b"}, time.Minute)
		if l != nil {
			t.Error("it was granted without one of its keys")
		}
		wantLoss(t, err, dlm.ReasonGone)
		c.free(t, "a", "b")
	})
}

// wrapper is a manager that counts what goes through it.
type wrapper struct {
	dlm.LockManager
	released chan string
}

func (w *wrapper) ReleaseLock(ctx context.Context, l *dlm.Lock) error {
	w.released <- l.Key
	return w.LockManager.ReleaseLock(ctx, l)
}

// A wrapper of a manager sees what happens to each key.
func TestMultiOverWrapper(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		w := &wrapper{c, make(chan string, 10)}
		l, err := dlm.AcquireMulti(t.Context(), w, []string{"b", "a"}, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		close(w.released)
		var keys []string
		for key := range w.released {
			keys = append(keys, key)
		}
		if slices.Sort(keys); !slices.Equal(keys, []string{"a", "b"}) {
			t.Errorf("released %q", keys)
		}
		synctest.Wait()
	})
}

// A context of the lock that has ended with a loss bounds no release, whichever of
// several losses it was.
func TestMultiTwoLosses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		l := c.multi(t, 10*time.Second, "a", "b", "c")
		ctx := l.Context(t.Context())
		for _, key := range []string{"b", "a"} {
			if _, err := c.ForceRelease(t.Context(), key, 0); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second) // a renewal finds out
		}
		if err := l.Release(ctx); !errors.Is(err, dlm.ErrLost) || errors.Is(err, context.Canceled) || errors.Is(err, dlm.ErrIndeterminate) {
			t.Errorf("%v", err)
		}
		c.free(t, "a", "b", "c")
	})
}

// What takes long in the end leaves no key with little time; and what is not known
// of the last extension is known of what is left.
func TestMultiFreshened(t *testing.T) {
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprint(fails), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := memlock.NewStore()
				other := open(t, store, nil)
				held := other.lock(t, "b", time.Minute)
				b, err := memlock.New(store, nil)
				if err != nil {
					t.Fatal(err)
				}
				var slow atomic.Bool
				m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
					Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
						l, err := b.Acquire(ctx, req)
						if req.Key == "b" && err == nil {
							slow.Store(true)
						}
						return l, err
					},
					Extend: func(ctx context.Context, batch []driver.Renewal) {
						if b.Extend(ctx, batch); !slow.Load() {
							return
						}
						time.Sleep(300 * time.Millisecond)
						for i := range batch {
							if fails {
								batch[i].Err = errors.New("no answer")
							}
						}
					},
				}), &dlm.LockConfig{AutoRenew: dlm.Off})
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close(context.Background())
				go func() {
					time.Sleep(200 * time.Millisecond)
					if err := held.Release(context.Background()); err != nil {
						t.Error(err)
					}
				}()
				l, err := dlm.AcquireMulti(t.Context(), m, []string{"a", "b"}, time.Second)
				if fails {
					if err == nil || errors.Is(err, dlm.ErrIndeterminate) {
						t.Errorf("%v", err)
					}
					other.free(t, "a", "b")
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if left := time.Until(l.Deadline()); left < 650*time.Millisecond {
					t.Errorf("%v are left of a second, of which 300ms were the last extension", left)
				}
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
