package secure_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

// one is a policy of one lock for each client, and of no more than that in all.
func one(total int) *secure.Policy {
	return &secure.Policy{PerClient: secure.Limits{Held: 1}, Total: secure.Limits{Held: total}}
}

// However a lock ends, its place is free at the moment when Done has closed: not
// before, and not later.
func TestHeldUntilDone(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		cfg  dlm.LockConfig
		end  func(t *testing.T, s *server, l *dlm.Lock)
	}{
		{"ReleaseLock", dlm.LockConfig{}, func(t *testing.T, s *server, l *dlm.Lock) {
			if err := s.ReleaseLock(as(t, "a"), l); err != nil {
				t.Error(err)
			}
		}},
		{"Lock.Release", dlm.LockConfig{}, func(t *testing.T, _ *server, l *dlm.Lock) {
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}},
		{"the manager's ReleaseLock", dlm.LockConfig{}, func(t *testing.T, s *server, l *dlm.Lock) {
			if err := s.inner.ReleaseLock(t.Context(), l); err != nil {
				t.Error(err)
			}
		}},
		{"a release without an answer", dlm.LockConfig{}, func(t *testing.T, s *server, l *dlm.Lock) {
			hung := s.faults.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpRelease})
			defer hung.Remove()
			ctx, cancel := context.WithTimeout(as(t, "a"), time.Second)
			defer cancel()
			if err := s.ReleaseLock(ctx, l); !errors.Is(err, dlm.ErrIndeterminate) && !errors.Is(err, dlm.ErrNotApplied) {
				t.Error(err)
			}
		}},
		{"expiry", dlm.LockConfig{AutoRenew: dlm.Off}, func(*testing.T, *server, *dlm.Lock) {}},
		{"store away", dlm.LockConfig{}, func(t *testing.T, s *server, l *dlm.Lock) {
			heal := s.faults.Sever()
			<-l.Done()
			heal()
		}},
		{"force", dlm.LockConfig{}, func(t *testing.T, s *server, l *dlm.Lock) {
			if _, err := s.inner.ForceRelease(t.Context(), l.Key, l.Token); err != nil {
				t.Error(err)
			}
		}},
		{"longest hold", dlm.LockConfig{MaxHold: time.Minute}, func(*testing.T, *server, *dlm.Lock) {}},
	} {
		for _, policy := range []*secure.Policy{one(100), {Total: secure.Limits{Held: 1}}} {
			t.Run(fmt.Sprintf("%s/%d", tt.name, policy.PerClient.Held), func(t *testing.T) {
				t.Parallel()
				bubble(t, func(t *testing.T) {
					s := open(t, memlock.NewStore(), policy, &tt.cfg)
					for range 50 {
						l := s.lock(t, "a", "key")
						s.want(t, 1, 0)
						_, err := s.TryLock(as(t, "a"), "other", ttl)
						denied := wantDenied(t, err, heldReason(policy))
						if !errors.Is(err, secure.ErrQuota) || denied.RetryAfter <= 0 {
							t.Errorf("retry after %v: %v", denied.RetryAfter, err)
						}
						done := l.Done()
						tt.end(t, s, l)
						<-done
						s.want(t, 0, 0)
						again, err := s.TryLock(as(t, "a"), "other", ttl)
						if err != nil {
							t.Fatalf("at once after the end of a lock: %v", err)
						}
						if err := again.Release(t.Context()); err != nil {
							t.Fatal(err)
						}
						synctest.Wait() // for what is still released in the background
						time.Sleep(time.Second)
					}
				})
			})
		}
	}
}

func heldReason(p *secure.Policy) secure.Reason {
	if p.PerClient.Held == 1 {
		return secure.ReasonHeld
	}
	return secure.ReasonTotalHeld
}

// In real time, with real parallelism: who sees Done close finds the place free.
func TestFreeWhenDoneIsSeen(t *testing.T) {
	t.Parallel()
	none := secure.Limits{Rate: secure.Unlimited}
	policy := &secure.Policy{PerClient: none, Total: none}
	policy.PerClient.Held = 1
	s := open(t, memlock.NewStore(), policy, nil)
	for range 500 {
		l := s.lock(t, "a", "key")
		done := l.Done()
		var wg sync.WaitGroup
		wg.Go(func() {
			<-done
			l, err := s.TryLock(as(t, "a"), "other", ttl)
			if err != nil {
				t.Errorf("as soon as Done was closed: %v", err)
				return
			}
			if err := s.ReleaseLock(as(t, "a"), l); err != nil {
				t.Error(err)
			}
		})
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
}

func TestCloseEndsAll(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), nil, nil)
	for i := range 10 {
		s.lock(t, "a", fmt.Sprint(i))
	}
	s.want(t, 10, 0)
	if err := s.inner.Close(t.Context()); err != nil {
		t.Error(err)
	}
	s.want(t, 0, 0)
	if _, err := s.TryLock(as(t, "a"), "key", ttl); !errors.Is(err, dlm.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestReentryCountsHandles(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), &secure.Policy{PerClient: secure.Limits{Held: 2}}, nil)
	ctx := dlm.WithOwner(as(t, "a"), "me")
	outer, err := s.AcquireLock(ctx, "key", ttl)
	if err != nil {
		t.Fatal(err)
	}
	inner, err := s.AcquireLock(ctx, "key", ttl)
	if err != nil || inner.Token != outer.Token {
		t.Fatalf("re-entry: %v, %v", inner, err)
	}
	s.want(t, 2, 0)
	_, err = s.TryLock(ctx, "key", ttl)
	wantDenied(t, err, secure.ReasonHeld, "2 locks", "Policy.PerClient.Held")
	for range 3 {
		if err := s.ReleaseLock(as(t, "a"), inner); err != nil {
			t.Errorf("release, repeated: %v", err)
		}
		s.want(t, 1, 0)
	}
	_ = outer.Release(t.Context())
	_ = s.ReleaseLock(as(t, "a"), outer)
	s.want(t, 0, 0)
}

// A client cannot enter the lock of another by naming the same owner.
func TestOwnersAreOfOneClient(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), nil, nil)
	l, err := s.TryLock(dlm.WithOwner(as(t, "a"), "me"), "key", ttl)
	if err != nil {
		t.Fatal(err)
	}
	for _, ctx := range []context.Context{
		dlm.WithOwner(as(t, "b"), "me"),
		dlm.WithOwner(as(t, "b"), "a\x00me"),
		as(t, "a"),
	} {
		if _, err := s.TryLock(ctx, "key", ttl); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("with another identity: %v", err)
		}
	}
	if err := s.ReleaseLock(as(t, "a"), l); err != nil {
		t.Error(err)
	}
}

func TestWaiting(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{
			PerClient: secure.Limits{Waiting: 2, Held: 4}, Total: secure.Limits{Waiting: 3, Held: 5},
		}, nil)
		l := s.lock(t, "a", "key")
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var granted atomic.Int32
		wait := func(client string) {
			wg.Go(func() {
				_, err := s.AcquireLock(secure.WithClient(ctx, client), "key", ttl)
				if err == nil {
					granted.Add(1)
				} else if !errors.Is(err, context.Canceled) {
					t.Errorf("the wait ended: %v", err)
				}
			})
			synctest.Wait()
		}
		wait("b")
		wait("b")
		s.want(t, 1, 2)
		_, err := s.TryLock(as(t, "b"), "free", ttl)
		wantDenied(t, err, secure.ReasonWaiting, "2 acquisitions", "Policy.PerClient.Waiting")
		wait("c")
		_, err = s.TryLock(as(t, "d"), "free", ttl)
		wantDenied(t, err, secure.ReasonTotalWaiting, "3 acquisitions", "Policy.Total.Waiting")
		s.want(t, 1, 3)
		// A release is served although all limits are met.
		if err := s.ReleaseLock(as(t, "a"), l); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		s.want(t, 1, 2) // one of them has it now
		cancel()
		synctest.Wait()
		s.want(t, 1, 0)
		wg.Wait()
		if n := granted.Load(); n != 1 {
			t.Errorf("%d of the waiters got the lock, want 1", n)
		}
	})
}

// A lock that is asked for counts as held: it may be at any time.
func TestWaitersReserveTheirLock(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{
			PerClient: secure.Limits{Held: 2}, Total: secure.Limits{Held: 3},
		}, nil)
		first := s.lock(t, "other", "key")
		s.lock(t, "a", "mine")
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := s.AcquireLock(as(t, "a"), "key", ttl); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		_, err := s.TryLock(as(t, "a"), "third", ttl)
		wantDenied(t, err, secure.ReasonHeld)
		_, err = s.TryLock(as(t, "other"), "third", ttl)
		wantDenied(t, err, secure.ReasonTotalHeld, "3 locks", "Policy.Total.Held")
		if err := first.Release(t.Context()); err != nil {
			t.Error(err)
		}
		wg.Wait()
		s.want(t, 2, 0)
	})
}

// Whatever goes wrong on the way to the store, nothing stays counted.
func TestFailuresGiveBack(t *testing.T) {
	t.Parallel()
	kinds := map[string]drivertest.FaultKind{
		"refuse": drivertest.Refuse, "fail": drivertest.Fail, "swallow": drivertest.Swallow,
		"hang": drivertest.Hang, "hang after": drivertest.HangAfter,
	}
	for name, kind := range kinds {
		for _, cancelled := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/cancelled=%t", name, cancelled), func(t *testing.T) {
				t.Parallel()
				bubble(t, func(t *testing.T) {
					s := open(t, memlock.NewStore(), one(1), &dlm.LockConfig{MaxRetries: 2, CallTimeout: time.Second})
					for range 10 {
						fault := s.faults.Inject(drivertest.Fault{Kind: kind, Op: drivertest.OpAcquire})
						ctx, cancel := context.WithCancel(as(t, "a"))
						var wg sync.WaitGroup
						wg.Go(func() {
							if l, err := s.AcquireLock(ctx, "key", ttl); err == nil {
								t.Errorf("the acquisition did not fail: %v", l)
							}
						})
						<-fault.Hit()
						if cancelled {
							cancel()
						}
						wg.Wait()
						s.want(t, 0, 0)
						fault.Remove()
						cancel()
						time.Sleep(time.Minute)
						l := s.lock(t, "a", "key")
						if err := s.ReleaseLock(as(t, "a"), l); err != nil {
							t.Error(err)
						}
					}
				})
			})
		}
	}
}

func TestPanicsAndOddManagersGiveBack(t *testing.T) {
	t.Parallel()
	var acquire func(context.Context) (*dlm.Lock, error)
	s, err := secure.NewBasic(&fake{acquire: func(ctx context.Context) (*dlm.Lock, error) { return acquire(ctx) }}, one(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		acquire = func(context.Context) (*dlm.Lock, error) { panic("oh") }
		func() {
			defer func() {
				if p := recover(); p != "oh" {
					t.Errorf("the panic that came through is %v", p)
				}
			}()
			_, _ = s.TryLock(as(t, "a"), "key", ttl)
		}()
		acquire = func(context.Context) (*dlm.Lock, error) { runtime.Goexit(); return nil, nil }
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = s.TryLock(as(t, "a"), "key", ttl) })
		wg.Wait()
		acquire = func(context.Context) (*dlm.Lock, error) { return nil, nil }
		if l, err := s.TryLock(as(t, "a"), "key", ttl); l != nil || err == nil {
			t.Errorf("neither lock nor error became %v, %v", l, err)
		}
		// One that was never held has ended when it comes.
		acquire = func(context.Context) (*dlm.Lock, error) { return &dlm.Lock{Key: "key"}, nil }
		if _, err := s.TryLock(as(t, "a"), "key", ttl); err != nil {
			t.Error(err)
		}
		if got := s.Stats(); got.Held != 0 || got.Waiting != 0 {
			t.Errorf("still counted: %+v", got)
		}
	}
}

type panicking struct{}

func (panicking) Observe(secure.Event) { panic("observer") }

func TestObserverPanics(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), &secure.Policy{Observer: panicking{}}, nil)
	l := s.lock(t, "a", "key")
	if _, err := s.TryLock(as(t, "a"), " ", ttl); !errors.Is(err, secure.ErrDenied) {
		t.Error(err)
	}
	if err := s.ReleaseLock(as(t, "a"), l); err != nil {
		t.Error(err)
	}
}
