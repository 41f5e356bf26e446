package dlm_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
)

// guard returns the guard of job "job".
func guard(t *testing.T, m dlm.LockManager, minHold time.Duration) *dlm.Once {
	t.Helper()
	o, err := dlm.NewOnce(m, "job", minHold)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestOnceConfig(t *testing.T) {
	t.Parallel()
	newManager := func(cfg *dlm.LockConfig) *dlm.Manager {
		m, err := memlock.NewLockManager(memlock.NewStore(), cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close(context.Background()) })
		return m
	}
	plain := newManager(nil)
	for _, c := range []struct {
		name    string
		m       dlm.LockManager
		job     string
		minHold time.Duration
		want    string // part of the error, or empty
	}{
		{"good", plain, "job", time.Minute, ""},
		{"shortest", plain, "job", time.Millisecond, ""},
		{"longest", plain, "job", dlm.MaxTTL / 2, ""},
		{"no manager", nil, "job", time.Minute, "manager is nil"},
		{"no job", plain, "", time.Minute, "job is empty"},
		{"long job", plain, strings.Repeat("j", dlm.MaxKeyLen), time.Minute, "key has 513 bytes"},
		{"no hold", plain, "job", 0, "minimum hold is 0s, must be between 1ms and"},
		{"long hold", plain, "job", dlm.MaxTTL, "minimum hold is"},
		{"no renewal", newManager(&dlm.LockConfig{AutoRenew: dlm.Off}), "job", time.Minute, "LockConfig.AutoRenew is Off"},
		{
			"bounded", newManager(&dlm.LockConfig{MaxHold: time.Second}), "job", time.Minute,
			"minimum hold is 1m0s, must not exceed LockConfig.MaxHold, 1s",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, err := dlm.NewOnce(c.m, c.job, c.minHold)
			switch {
			case c.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.want != "" && (!errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), c.want)):
				t.Errorf("error is %v, want %q", err, c.want)
			}
		})
	}
	// A wrapper cannot hide what its locks are like.
	type wrapper struct{ dlm.LockManager }
	bounded := guard(t, wrapper{newManager(&dlm.LockConfig{MaxHold: time.Second})}, time.Minute)
	if _, err := bounded.Claim(t.Context(), "t"); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("a manager that bounds holds, in a wrapper: %v", err)
	}
}

// TTL8: a tick is run once, also by nodes whose clocks are behind and after a run
// of no time; the next one is run.
func TestOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		const n, interval, skew = 5, time.Minute, 200 * time.Millisecond
		runs := make(map[string]int)
		start := time.Now()
		for tick := range 10 {
			planned := start.Add(time.Duration(tick) * interval)
			for i := range n {
				o := guard(t, open(t, store, nil), 10*time.Second)
				time.Sleep(time.Until(planned.Add(time.Duration(i) * skew)))
				err := o.Do(t.Context(), dlm.TickAt(planned.In(time.FixedZone("", i*3600))), func(context.Context) error {
					runs[dlm.TickAt(planned)]++
					return nil
				})
				if conflict, ok := errors.AsType[*dlm.LockConflictError](err); i == 0 && err != nil || i > 0 && !ok {
					t.Errorf("node %d: %v, %v", i, err, conflict)
				}
			}
		}
		if len(runs) != 10 {
			t.Errorf("%d ticks were run", len(runs))
		}
		for tick, times := range runs {
			if times != 1 {
				t.Errorf("%s was run %d times", tick, times)
			}
		}
		time.Sleep(interval)
	})
}

// The hold lasts as long as it should: from the start of the run, not less, not
// much more, and as long as the run.
func TestOnceHold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c := open(t, store, nil)
		o, late := guard(t, c, 10*time.Second), guard(t, open(t, store, nil), 10*time.Second)
		refused := func(when string) {
			t.Helper()
			if _, err := late.Claim(t.Context(), "t"); !errors.Is(err, dlm.ErrHeld) {
				t.Errorf("%s: %v", when, err)
			}
		}
		failure := errors.New("failure")
		for _, run := range []time.Duration{0, 4 * time.Second, 9999 * time.Millisecond, 10 * time.Second, time.Hour} {
			start := time.Now()
			if err := o.Do(t.Context(), "t", func(context.Context) error {
				time.Sleep(run)
				refused("within the run")
				return failure
			}); !errors.Is(err, failure) {
				t.Errorf("Do: %v", err)
			}
			if d := time.Since(start); d != run {
				t.Errorf("a run of %v took %v", run, d)
			}
			if d := time.Until(start.Add(10 * time.Second)); d > 0 {
				time.Sleep(d - time.Millisecond)
				refused("within the hold")
				time.Sleep(time.Millisecond)
			}
			synctest.Wait()
			if err := o.Wait(t.Context()); err != nil {
				t.Error(err)
			}
			if tokens := c.holders(t, "job@t"); len(tokens) != 0 {
				t.Errorf("held after a run of %v, and %v", run, time.Since(start))
			}
		}
	})
}

// The hold outlasts the manager, by its TTL, and the process with it.
func TestOnceOutlivesManager(t *testing.T) {
	for _, c := range []struct {
		name  string
		leave func(t *testing.T, c *client)
	}{
		{"closed", func(t *testing.T, c *client) {
			if err := c.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}},
		{"dead", func(t *testing.T, c *client) { t.Cleanup(c.Sever()) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, run := range []time.Duration{0, 4 * time.Second} {
				bubble(t, func(t *testing.T) {
					store := memlock.NewStore()
					first, second := open(t, store, nil), open(t, store, nil)
					o, late := guard(t, first, 10*time.Second), guard(t, second, 10*time.Second)
					other := first.lock(t, "other", time.Minute)
					start := time.Now()
					if err := o.Do(t.Context(), "t", func(context.Context) error {
						time.Sleep(run)
						return nil
					}); err != nil {
						t.Error(err)
					}
					c.leave(t, first)
					time.Sleep(time.Until(start.Add(10*time.Second - time.Millisecond)))
					if _, err := late.Claim(t.Context(), "t"); !errors.Is(err, dlm.ErrHeld) {
						t.Errorf("within the hold: %v", err)
					}
					// A run that was renewed is held for longer.
					time.Sleep(time.Until(start.Add(run + 10521*time.Millisecond)))
					if err := late.Do(t.Context(), "t", func(context.Context) error { return nil }); err != nil {
						t.Errorf("after the hold: %v", err)
					}
					if c.name == "closed" && other.Err() == nil {
						t.Error("another lock outlives its manager")
					}
					if err := late.Wait(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

func TestOnceClaim(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		o := guard(t, c, 10*time.Second)
		var none context.Context
		_, noContext := o.Claim(none, "t")
		_, badTick := o.Claim(t.Context(), "t@1")
		for _, err := range []error{noContext, badTick, o.Do(t.Context(), "t", nil), o.Wait(none)} {
			if !errors.Is(err, dlm.ErrInvalid) {
				t.Errorf("bad argument: %v", err)
			}
		}
		if err := o.Wait(t.Context()); err != nil {
			t.Error(err)
		}

		// Not even the same owner runs a tick within its run.
		ctx := dlm.WithOwner(t.Context(), "owner")
		claim, err := o.Claim(ctx, "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := o.Claim(ctx, ""); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("claimed twice: %v", err)
		}
		if err := claim.End(none); !errors.Is(err, dlm.ErrInvalid) {
			t.Error(err)
		}
		ended, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := o.Wait(ended); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait: %v", err)
		}
		if err := errors.Join(claim.End(ctx), claim.End(ctx), o.Wait(ctx)); err != nil {
			t.Error(err)
		}
		if claim.Lock().Err() == nil {
			t.Error("Wait returned while the tick was held")
		}

		// A loss ends the run's context and is an error.
		err = o.Do(ctx, "lost", func(ctx context.Context) error {
			if _, err := c.ForceRelease(t.Context(), "job@lost", 0); err != nil {
				t.Error(err)
			}
			<-ctx.Done()
			return nil
		})
		wantLoss(t, err, dlm.ReasonGone)

		// A panic goes on, and counts as a run.
		func() {
			defer func() {
				if p := recover(); p != "panic" {
					t.Errorf("recovered %v", p)
				}
			}()
			_ = o.Do(ctx, "panic", func(context.Context) error { panic("panic") })
		}()
		if _, err := o.Claim(ctx, "panic"); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("after a panic: %v", err)
		}
		if err := o.Wait(ctx); err != nil {
			t.Error(err)
		}
	})
}

func ExampleOnce() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	defer m.Close(ctx)

	report, err := dlm.NewOnce(m, "nightly-report", time.Minute)
	if err != nil {
		fmt.Println(err)
		return
	}
	planned := time.Date(2026, 1, 31, 2, 0, 0, 0, time.UTC)
	for node := range 3 { // as three nodes would, one a little after the other
		err := report.Do(ctx, dlm.TickAt(planned), func(context.Context) error {
			fmt.Println("node", node, "writes the report")
			return nil
		})
		fmt.Println("node", node, "was late:", errors.Is(err, dlm.ErrHeld))
	}
	// Output:
	// node 0 writes the report
	// node 0 was late: false
	// node 1 was late: true
	// node 2 was late: true
}

// closing is a manager that is closed as it grants a lock.
type closing struct{ *dlm.Manager }

func (c closing) TryLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	l, err := c.Manager.TryLock(ctx, key, ttl)
	return l, errors.Join(err, c.Close(context.Background()))
}

// A tick whose manager closes just as it is claimed, and gives it back, is not run.
func TestOnceClosedInClaim(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := open(t, store, nil), open(t, store, nil)
		for i, m := range []dlm.LockManager{closing{a.Manager}, b} {
			o, err := dlm.NewOnce(m, "job", time.Second)
			if err != nil {
				t.Fatal(err)
			}
			ran := false
			err = o.Do(t.Context(), "tick", func(context.Context) error { ran = true; return nil })
			if ran != (i == 1) || ran != (err == nil) {
				t.Errorf("%d: ran: %v, %v", i, ran, err)
			}
			if err := o.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}
