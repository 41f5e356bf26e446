package dlm_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
)

func TestRenewalOutlivesTTL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		l := c.lock(t, "k", 30*time.Second)
		for range 20 {
			time.Sleep(15 * time.Second)
			if err := l.Err(); err != nil {
				t.Fatal(err)
			}
			if left := time.Until(l.Deadline()); left < 19*time.Second || left > 30*time.Second {
				t.Fatalf("the deadline is %v ahead, want about two thirds of the TTL at least", left)
			}
			if _, err := other.TryLock(t.Context(), "k", time.Second); !errors.Is(err, dlm.ErrHeld) {
				t.Fatalf("TryLock of another: %v, want ErrHeld", err)
			}
		}
		info, err := other.GetLock(t.Context(), "k")
		if err != nil || len(info.Holders) != 1 || info.Holders[0].Owner != l.Value || info.Holders[0].Token != l.Token {
			t.Errorf("GetLock: %+v, %v; want the value %s and token %d", info, err, l.Value, l.Token)
		}
		if got := c.Calls(drivertest.OpExtend); got > 35 {
			t.Errorf("%d renewals in 300s with a TTL of 30s, want about 30", got)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		calls := c.Calls(drivertest.OpExtend)
		time.Sleep(time.Minute)
		if c.Calls(drivertest.OpExtend) != calls {
			t.Error("renewals went on after the release")
		}
	})
}

// A loss is told at the deadline by a local timer, though every call hangs.
func TestLossAtDeadline(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fault drivertest.Fault
	}{
		{"hanging", drivertest.Fault{Kind: drivertest.Hang}},
		{"failing", drivertest.Fault{Kind: drivertest.Fail}},
		{"refusing", drivertest.Fault{Kind: drivertest.Refuse}},
		{"answers lost", drivertest.Fault{Kind: drivertest.HangAfter}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := memlock.NewStore()
				c, other := open(t, store, nil), open(t, store, nil)
				start := time.Now()
				l := c.lock(t, "k", 30*time.Second)
				ctx := l.Context(t.Context())
				fault := c.Inject(tt.fault)
				<-l.Done()
				if got, want := time.Since(start), 30*time.Second-dlm.DriftMargin(30*time.Second); got != want {
					t.Errorf("lost after %v, want %v", got, want)
				}
				wantLoss(t, l.Err(), dlm.ReasonExpired)
				if ctx.Err() == nil {
					t.Error("the lock's context goes on")
				}
				wantLoss(t, context.Cause(ctx), dlm.ReasonExpired)
				if !errors.Is(l.Err(), drivertest.ErrFault) && tt.fault.Kind != drivertest.HangAfter {
					t.Errorf("the loss %v does not say what went wrong", l.Err())
				}
				wantLoss(t, l.Release(t.Context()), dlm.ReasonExpired)
				wantLoss(t, l.Extend(t.Context(), time.Minute), dlm.ReasonExpired)
				fault.Remove()

				next, err := other.AcquireLock(t.Context(), "k", 30*time.Second)
				if err != nil {
					t.Fatal(err)
				}
				if next.Token <= l.Token || next.Value == l.Value {
					t.Errorf("the next lock is %v after %v", next, l)
				}
				wantLoss(t, l.Err(), dlm.ReasonExpired)
			})
		})
	}
}

// REN7: a fault that is shorter than the TTL costs nothing but retries.
func TestTransientFaults(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fault time.Duration
		lost  bool
	}{
		{"one call", 0, false},
		{"2s", 2 * time.Second, false},
		{"8s", 8 * time.Second, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				c := open(t, memlock.NewStore(), nil)
				l := c.lock(t, "k", 6*time.Second)
				fault := c.Inject(drivertest.Fault{Kind: drivertest.Fail, Op: drivertest.OpExtend})
				<-fault.Hit()
				time.Sleep(tt.fault)
				fault.Remove()
				healed := time.Now()
				if tt.lost {
					wantLoss(t, l.Err(), dlm.ReasonExpired)
					if n := c.Calls(drivertest.OpExtend); n < 10 || n > 100 {
						t.Errorf("%d attempts in the 4s before the deadline, want more of them the closer it is", n)
					}
					return
				}
				for n := c.Calls(drivertest.OpExtend); c.Calls(drivertest.OpExtend) == n; {
					time.Sleep(time.Millisecond)
				}
				if d := time.Since(healed); d > 600*time.Millisecond {
					t.Errorf("the next attempt came %v after the fault", d)
				}
				time.Sleep(20 * time.Second)
				if err := l.Err(); err != nil {
					t.Error(err)
				}
				if len(c.events.of(dlm.EventExtendFailed)) == 0 {
					t.Error("the observer was not told of the failure")
				}
			})
		})
	}
}

// REN9: a renewal that hangs costs its own lock, and no other.
func TestHangingRenewal(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		locks := make([]*dlm.Lock, 500)
		for i := range locks {
			locks[i] = c.lock(t, fmt.Sprint("k", i), 3*time.Second)
		}
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpExtend, Key: "k77"})
		time.Sleep(30 * time.Second)
		for i, l := range locks {
			if err := l.Err(); (err != nil) != (i == 77) {
				t.Errorf("lock %d: %v", i, err)
			}
		}
		fault.Remove()
	})
}

// After an outage, renewals go out in batches, not one by one.
func TestRenewalsAfterOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const n = 4096
		c := open(t, memlock.NewStore(), nil)
		locks := make([]*dlm.Lock, n)
		for i := range locks {
			locks[i] = c.lock(t, fmt.Sprint("k", i), 30*time.Second)
		}
		heal := c.Sever()
		time.Sleep(20 * time.Second)
		heal()
		before := c.Calls(drivertest.OpExtend)
		time.Sleep(9500 * time.Millisecond)
		if got := c.Calls(drivertest.OpExtend) - before; got > n/4 {
			t.Errorf("%d calls renewed %d locks after the outage", got, n)
		}
		for _, l := range locks {
			if err := l.Err(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// I9: ten thousand locks cost one goroutine, and renewals in large batches,
// even when they were taken one after another.
func TestManyLocks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const n = 10_000
		c := open(t, memlock.NewStore(), nil)
		base := runtime.NumGoroutine()
		for i := range n {
			c.lock(t, fmt.Sprint("k", i), 30*time.Second)
			if i%10 == 0 {
				time.Sleep(10 * time.Millisecond)
			}
		}
		time.Sleep(time.Minute)
		before := c.Calls(drivertest.OpExtend)
		time.Sleep(time.Minute)
		calls := c.Calls(drivertest.OpExtend) - before
		if perCall := n * 6 / calls; perCall < 100 {
			t.Errorf("%d calls a minute renew %d locks, about %d at a time; want 100 at least", calls, n, perCall)
		}
		synctest.Wait()
		if got := runtime.NumGoroutine(); got > base+2 {
			t.Errorf("%d goroutines with %d locks, %d without", got, n, base)
		}
	})
}

// REN2, REL2: a release waits for the renewal under way, for a short time, and
// no renewal follows it.
func TestReleaseJoinsRenewal(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		l := c.lock(t, "k", 30*time.Second)
		fault := c.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpExtend})
		<-fault.Hit()
		start := time.Now()
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d > time.Second {
			t.Errorf("the release took %v", d)
		}
		other.lock(t, "k", time.Second)
		calls := c.Calls(drivertest.OpExtend)
		time.Sleep(time.Minute)
		if c.Calls(drivertest.OpExtend) != calls {
			t.Error("renewals went on after the release")
		}
	})
}

// REN3: with renewals at every moment, a release is never mistaken for a loss.
func TestReleaseRacesRenewal(t *testing.T) {
	c := open(t, memlock.NewStore(), &dlm.LockConfig{RenewInterval: time.Millisecond})
	for range 2000 {
		l := c.lock(t, "k", 10*time.Second)
		if err := l.Extend(t.Context(), 10*time.Second); err != nil {
			t.Fatal(err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if lost := c.events.of(dlm.EventLost); len(lost) > 0 {
		t.Errorf("lost: %v", lost[0].Err)
	}
}

// A suspended machine stops Go's timers, but not the lease.
func TestSuspend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		var suspended atomic.Int64
		dlm.SetSuspended(c.Manager, func() time.Duration { return time.Duration(suspended.Load()) })
		checked := c.lock(t, "checked", 30*time.Second)
		watched := c.lock(t, "watched", 30*time.Second)
		done := watched.Done()
		time.Sleep(time.Second)

		suspended.Store(int64(time.Minute))
		// The methods of a handle know at once, timers soon.
		wantLoss(t, checked.Err(), dlm.ReasonExpired)
		wantLoss(t, checked.Release(t.Context()), dlm.ReasonExpired)
		start := time.Now()
		<-done
		if d := time.Since(start); d > time.Second {
			t.Errorf("the loss was noticed after %v", d)
		}
	})
}

func TestMaxHold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, &dlm.LockConfig{MaxHold: time.Hour}), open(t, store, nil)
		l, err := c.Acquire(t.Context(), "k", 30*time.Second, &dlm.AcquireOptions{MaxHold: 50 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		next, err := other.AcquireLock(t.Context(), "k", 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 50*time.Second {
			t.Errorf("the next holder came after %v, want 50s", d)
		}
		wantLoss(t, l.Err(), dlm.ReasonMaxHold)
		if err := next.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// LOST8, ETC5: when the store says that the grant has gone, it is lost at once.
func TestLossByStore(t *testing.T) {
	for _, tt := range []struct {
		name   string
		take   bool
		listen bool
		reason dlm.LostReason
		within time.Duration
	}{
		{"removed", false, false, dlm.ReasonGone, 11 * time.Second},
		{"taken", true, false, dlm.ReasonTaken, 11 * time.Second},
		{"told", true, true, dlm.ReasonGone, time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := memlock.NewStore()
				c, other := open(t, store, nil), open(t, store, nil)
				if tt.listen { // as every manager does that has ever waited
					first := other.lock(t, "other", time.Hour)
					go func() {
						time.Sleep(time.Second)
						_ = first.Release(context.Background())
					}()
					if _, err := c.AcquireLock(t.Context(), "other", time.Hour); err != nil {
						t.Fatal(err)
					}
				}
				l := c.lock(t, "k", 30*time.Second)
				removed, err := other.ForceRelease(t.Context(), "k", 0)
				if err != nil || len(removed) != 1 || removed[0].Token != l.Token {
					t.Fatalf("ForceRelease: %v, %v", removed, err)
				}
				if tt.take {
					other.lock(t, "k", 30*time.Second)
				}
				start := time.Now()
				<-l.Done()
				if d := time.Since(start); d > tt.within {
					t.Errorf("the loss was noticed after %v", d)
				}
				wantLoss(t, l.Err(), tt.reason)
				wantLoss(t, l.Release(t.Context()), tt.reason)
				if tt.take && len(other.holders(t, "k")) != 1 {
					t.Error("the late release freed somebody else's lock")
				}
			})
		})
	}
}

// A backend that panics, or answers late, does no harm to the others.
func TestBackendPanics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), nil)
		if err != nil {
			t.Fatal(err)
		}
		m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
			Extend:  func(context.Context, []driver.Renewal) { panic("extend") },
			Release: func(context.Context, driver.Lease) error { panic("release") },
		}), &dlm.LockConfig{MaxRetries: 1})
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.TryLock(t.Context(), "k", 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		<-l.Done()
		wantLoss(t, l.Err(), dlm.ReasonExpired)
		l, err = m.TryLock(t.Context(), "k2", 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Release(t.Context()); !errors.Is(err, dlm.ErrIndeterminate) {
			t.Errorf("Release: %v", err)
		}
		if err := m.Close(t.Context()); err == nil {
			t.Error("Close did not say that a lock was left")
		}
	})
}

// A lock of a session-like store is released at its deadline by its manager.
func TestSessionLeases(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		b, err := memlock.New(store, nil)
		if err != nil {
			t.Fatal(err)
		}
		// This store keeps a grant for an hour, whatever was asked for.
		faults := drivertest.NewFaults(drivertest.Intercept(b, drivertest.Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				ttl := req.TTL
				req.TTL = time.Hour
				lease, err := b.Acquire(ctx, req)
				lease.TTL = ttl
				return lease, err
			},
			Properties: func() driver.Properties {
				p := b.Properties()
				p.SessionLeases = true
				return p
			},
		}))
		m, err := dlm.NewManager(faults.Backend(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close(context.Background())
		other := open(t, store, nil)
		l, err := m.TryLock(t.Context(), "k", 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		fault := faults.Inject(drivertest.Fault{Kind: drivertest.Fail, Op: drivertest.OpExtend})
		defer fault.Remove()
		start := time.Now()
		next, err := other.AcquireLock(t.Context(), "k", 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		wantLoss(t, l.Err(), dlm.ReasonExpired)
		if d := time.Since(start); d > 11*time.Second {
			t.Errorf("the next holder came after %v", d)
		}
		if err := next.Release(t.Context()); err != nil {
			t.Fatal(err)
		}

		// However long the store is away, what it would keep is freed after.
		for _, end := range []func(*dlm.Lock){
			func(l *dlm.Lock) { _ = l.Release(t.Context()) },
			func(l *dlm.Lock) { <-l.Done() },
		} {
			l, err := m.TryLock(t.Context(), "k", 10*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			heal := faults.Sever()
			end(l)
			time.Sleep(10 * time.Minute)
			heal()
			time.Sleep(5 * time.Second)
			if tokens := other.holders(t, "k"); len(tokens) != 0 {
				t.Errorf("still held: %v", tokens)
			}
		}
	})
}

// A minority of renewals that hang does not starve the others.
func TestManyHangingRenewals(t *testing.T) {
	for _, tt := range []struct {
		ttl          time.Duration
		locks, every int
	}{
		{30 * time.Second, 600, 3},
		{30 * time.Second, 3000, 20},
		{3 * time.Second, 500, 5},
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				b, err := memlock.New(memlock.NewStore(), nil)
				if err != nil {
					t.Fatal(err)
				}
				hangs := func(key string) bool { return key[0] == 'h' }
				m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
					Extend: func(ctx context.Context, batch []driver.Renewal) {
						for i := range batch {
							if hangs(batch[i].Lease.Key) {
								<-ctx.Done()
								for i := range batch {
									batch[i].Err = ctx.Err()
								}
								return
							}
						}
						b.Extend(ctx, batch)
					},
				}), nil)
				if err != nil {
					t.Fatal(err)
				}
				var locks []*dlm.Lock
				for i := range tt.locks {
					key := fmt.Sprint("k", i)
					if i%tt.every == 0 {
						key = "h" + key
					}
					l, err := m.TryLock(t.Context(), key, tt.ttl)
					if err != nil {
						t.Fatal(err)
					}
					locks = append(locks, l)
				}
				time.Sleep(3 * tt.ttl)
				lost := 0
				for _, l := range locks {
					if l.Err() != nil && !hangs(l.Key) {
						lost++
					}
				}
				if lost > 0 {
					t.Errorf("%d healthy locks were lost", lost)
				}
				if err := m.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// REN9: renewals that take most of the interval between them are in time.
func TestSlowRenewals(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		c.Inject(drivertest.Fault{Kind: drivertest.Delay, Op: drivertest.OpExtend, Delay: 800 * time.Millisecond})
		var locks []*dlm.Lock
		for i := range 500 {
			locks = append(locks, c.lock(t, fmt.Sprint("k", i), 3*time.Second))
		}
		time.Sleep(time.Minute)
		for _, l := range locks {
			if err := l.Err(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A renewal is planned by the deadline that there is, not by the TTL.
func TestShortExtend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := open(t, store, nil), open(t, store, nil)
		l := c.lock(t, "k", 30*time.Second)
		for range 20 {
			time.Sleep(9 * time.Second)
			if err := l.Extend(t.Context(), time.Second); err != nil {
				t.Fatal(err)
			}
		}

		// The same for a key that was handed over with little time to live.
		first := other.lock(t, "long", time.Hour)
		go func() {
			time.Sleep(time.Second)
			_ = first.Release(context.Background())
		}()
		l, err := c.AcquireLock(t.Context(), "long", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Extend(t.Context(), time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if err := l.Err(); err != nil {
			t.Error(err)
		}
	})
}

// A lease that is older than the answer about it is renewed in time.
func TestLeaseAge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), nil)
		if err != nil {
			t.Fatal(err)
		}
		m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				lease, err := b.Acquire(ctx, req)
				lease.Age = req.TTL / 10 * 9
				return lease, err
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				b.Extend(ctx, batch)
				for i := range batch {
					batch[i].Lease.Age = batch[i].Lease.TTL / 10 * 8
				}
			},
		}), nil)
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.TryLock(t.Context(), "k", 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if left := time.Until(l.Deadline()); left > 3*time.Second {
			t.Errorf("%v left, want a tenth of the TTL at most", left)
		}
		time.Sleep(time.Minute)
		if err := l.Err(); err != nil {
			t.Error(err)
		}
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A loss that the store reports late is not taken for that of a later lock.
func TestLateLossEvent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		b, err := memlock.New(store, nil)
		if err != nil {
			t.Fatal(err)
		}
		var handle func(driver.Event)
		m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
			Listen: func(ctx context.Context, manager string, h func(driver.Event)) error {
				handle = h
				return b.Listen(ctx, manager, h)
			},
		}), nil)
		if err != nil {
			t.Fatal(err)
		}
		other := open(t, store, nil)
		first := other.lock(t, "k", time.Hour)
		go func() {
			time.Sleep(time.Second)
			_ = first.Release(context.Background())
		}()
		l, err := m.AcquireLock(t.Context(), "k", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		handle(driver.Event{
			Kind:  driver.EventLost,
			Lease: driver.Lease{Key: "k", Owner: l.Value},
			Err:   &driver.LostError{Key: "k", Token: l.Token - 1, Reason: driver.ReasonGone},
		})
		if err := l.Err(); err != nil {
			t.Errorf("a loss of token %d ended token %d: %v", l.Token-1, l.Token, err)
		}
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A backend that forgets to answer is not believed to have renewed.
func TestSilentBackend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), nil)
		if err != nil {
			t.Fatal(err)
		}
		m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
			Extend: func(context.Context, []driver.Renewal) {},
		}), nil)
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.TryLock(t.Context(), "k", 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Extend(t.Context(), 10*time.Second); err == nil {
			t.Error("Extend believed it")
		}
		<-l.Done()
		wantLoss(t, l.Err(), dlm.ReasonExpired)
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// BenchmarkKeeper renews 100,000 locks, all of them once per operation.
func BenchmarkKeeper(b *testing.B) {
	const n = 100_000
	var renewed atomic.Int64
	store := memlock.NewStore()
	inner, err := memlock.New(store, nil)
	if err != nil {
		b.Fatal(err)
	}
	round := make(chan struct{}, 1)
	m, err := dlm.NewManager(drivertest.Intercept(inner, drivertest.Hooks{
		Extend: func(ctx context.Context, batch []driver.Renewal) {
			inner.Extend(ctx, batch)
			if renewed.Add(int64(len(batch)))%n < int64(len(batch)) {
				select {
				case round <- struct{}{}:
				default:
				}
			}
		},
	}), &dlm.LockConfig{RenewInterval: 250 * time.Millisecond})
	if err != nil {
		b.Fatal(err)
	}
	for i := range n {
		if _, err := m.TryLock(context.Background(), fmt.Sprint("k", i), time.Hour); err != nil {
			b.Fatal(err)
		}
	}
	<-round
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := renewed.Load()
	b.ResetTimer()
	for b.Loop() {
		<-round
	}
	b.StopTimer()
	runtime.ReadMemStats(&after)
	total := float64(renewed.Load() - start)
	b.ReportMetric(float64(after.Mallocs-before.Mallocs)/total, "allocs/renewal")
	b.ReportMetric(float64(runtime.NumGoroutine()), "goroutines")
	if err := m.Close(context.Background()); err != nil {
		b.Fatal(err)
	}
}
