package clockskew_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/clockskew"
	"github.com/go-dlm/dlm/memlock"
)

func manager(t *testing.T) *dlm.Manager {
	t.Helper()
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// ways are all ways to a new lock through both guards.
func ways(t *testing.T, m *dlm.Manager, c *clockskew.Checker, opts *clockskew.GuardOptions) map[string]func(context.Context, string) (*dlm.Lock, error) {
	t.Helper()
	g, err := clockskew.NewGuard(m, c, opts)
	if err != nil {
		t.Fatal(err)
	}
	b, err := clockskew.NewBasicGuard(m, c, opts)
	if err != nil {
		t.Fatal(err)
	}
	s, err := dlm.NewDistributedSemaphore(g, "sem", 100)
	if err != nil {
		t.Fatal(err)
	}
	const ttl = time.Minute
	return map[string]func(context.Context, string) (*dlm.Lock, error){
		"acquire":       func(ctx context.Context, key string) (*dlm.Lock, error) { return g.AcquireLock(ctx, key, ttl) },
		"try":           func(ctx context.Context, key string) (*dlm.Lock, error) { return g.TryLock(ctx, key, ttl) },
		"acquire, opts": func(ctx context.Context, key string) (*dlm.Lock, error) { return g.Acquire(ctx, key, ttl, nil) },
		"try, opts": func(ctx context.Context, key string) (*dlm.Lock, error) {
			return g.Acquire(ctx, key, ttl, &dlm.AcquireOptions{NoWait: true})
		},
		"acquire, basic": func(ctx context.Context, key string) (*dlm.Lock, error) { return b.AcquireLock(ctx, key, ttl) },
		"try, basic":     func(ctx context.Context, key string) (*dlm.Lock, error) { return b.TryLock(ctx, key, ttl) },
		"acquire, semaphore": func(ctx context.Context, _ string) (*dlm.Lock, error) {
			return s.Acquire(ctx, ttl)
		},
	}
}

// wantAll asks for a lock in all ways. A nil want means that all are granted.
func wantAll(t *testing.T, all map[string]func(context.Context, string) (*dlm.Lock, error), want error) {
	t.Helper()
	for name, acquire := range all {
		l, err := acquire(t.Context(), name)
		if want == nil {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			} else if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
			continue
		}
		refused, ok := errors.AsType[*clockskew.RefusedError](err)
		if !ok || l != nil || !errors.Is(err, want) || !errors.Is(err, dlm.ErrNotApplied) ||
			errors.Is(err, clockskew.ErrSkewed) == errors.Is(err, clockskew.ErrUnknown) {
			t.Errorf("%s: %v, want %v", name, err, want)
			continue
		}
		op, _, _ := strings.Cut(name, ",")
		if refused.Op != op || !strings.Contains(err.Error(), fmt.Sprintf("%s %q: %v", op, refused.Key, want)) {
			t.Errorf("%s: %v for op %q", name, err, refused.Op)
		}
	}
}

func TestGuardSkewed(t *testing.T) {
	t.Parallel()
	m := manager(t)
	n := &network{say: good}
	c := checker(t, []string{"a"}, nil)
	c.SetQuery(n.answer)
	all := ways(t, m, c, nil)
	g, err := clockskew.NewGuard(m, c, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, all, nil) // before the first check
	held, err := g.AcquireLock(t.Context(), "held", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		say  clockskew.Answer
		want error
	}{
		{good, nil},
		{off, clockskew.ErrSkewed},
		{dead, clockskew.ErrSkewed}, // silence sets no clock right
		{off, clockskew.ErrSkewed},
		{good, nil},
		{dead, nil},
		{off, clockskew.ErrSkewed},
	} {
		n.set(step.say)
		check(t, c)
		wantAll(t, all, step.want)
		if err := g.ExtendLock(t.Context(), held, time.Minute); err != nil {
			t.Error(err)
		}
		if info, err := g.GetLock(t.Context(), "held"); err != nil || len(info.Holders) != 1 {
			t.Errorf("%v, %v", info, err)
		}
	}
	if err := g.ReleaseLock(t.Context(), held); err != nil {
		t.Error(err)
	}
	if g.Properties().Name != m.Properties().Name {
		t.Error("the guard describes another store")
	}
}

func TestGuardUnknown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := manager(t)
		n := &network{say: dead}
		c := checker(t, []string{"a"}, &clockskew.Options{Interval: time.Minute})
		c.SetQuery(n.answer)
		all := ways(t, m, c, &clockskew.GuardOptions{MaxUnknown: 10 * time.Minute})
		time.Sleep(10 * time.Minute)
		wantAll(t, all, nil)
		time.Sleep(time.Nanosecond)
		wantAll(t, all, clockskew.ErrUnknown)
		check(t, c)
		wantAll(t, all, clockskew.ErrUnknown)
		n.set(good)
		check(t, c)
		wantAll(t, all, nil)
		time.Sleep(10 * time.Minute)
		n.set(dead)
		check(t, c)
		wantAll(t, all, nil)
		time.Sleep(time.Nanosecond)
		wantAll(t, all, clockskew.ErrUnknown) // whether or not anybody checks
		n.set(off)
		check(t, c)
		wantAll(t, all, clockskew.ErrSkewed)
		time.Sleep(time.Hour)
		wantAll(t, all, clockskew.ErrSkewed)
	})
}

// TestElection: a node with a skewed clock is not elected, but tries on; a leader
// goes on leading.
func TestElection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &network{say: off}
		c := checker(t, []string{"a"}, &clockskew.Options{Interval: time.Minute})
		c.SetQuery(n.answer)
		run(t, c)
		synctest.Wait()
		g, err := clockskew.NewGuard(manager(t), c, nil)
		if err != nil {
			t.Fatal(err)
		}
		e, err := dlm.NewLeaderElection(g, "leader", "node", nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		terms := 0
		done := make(chan error)
		go func() {
			done <- e.Run(ctx, &dlm.ElectionCallbacks{OnElected: func(ctx context.Context, _ int64) {
				terms++
				<-ctx.Done()
			}})
		}()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if terms != 0 || e.IsLeader() {
			t.Errorf("elected with a skewed clock, %d terms", terms)
		}
		n.set(good)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		n.set(off)
		time.Sleep(time.Hour)
		synctest.Wait()
		if terms != 1 || !e.IsLeader() || c.Snapshot().Last.Verdict != clockskew.Skewed {
			t.Errorf("leads: %v, in %d terms", e.IsLeader(), terms)
		}
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

func TestNewGuard(t *testing.T) {
	t.Parallel()
	m := manager(t)
	c := checker(t, []string{"a"}, &clockskew.Options{Interval: time.Minute})
	for _, x := range []struct {
		name string
		m    *dlm.Manager
		c    *clockskew.Checker
		max  time.Duration
		text string
	}{
		{"none", m, c, 0, ""},
		{"lowest", m, c, 2 * time.Minute, ""},
		{"highest", m, c, 7 * 24 * time.Hour, ""},
		{"no manager", nil, c, 0, "manager is nil"},
		{"no checker", m, nil, 0, "checker is nil"},
		{"negative", m, c, -1, "GuardOptions.MaxUnknown"},
		{"too low", m, c, 2*time.Minute - 1, "GuardOptions.MaxUnknown"},
		{"too high", m, c, 7*24*time.Hour + 1, "GuardOptions.MaxUnknown"},
	} {
		t.Run(x.name, func(t *testing.T) {
			opts := &clockskew.GuardOptions{MaxUnknown: x.max}
			var inner dlm.OptionsManager
			if x.m != nil {
				inner = x.m
			}
			_, err := clockskew.NewGuard(inner, x.c, opts)
			_, basic := clockskew.NewBasicGuard(inner, x.c, opts)
			for _, err := range []error{err, basic} {
				if x.text == "" {
					if err != nil {
						t.Error(err)
					}
				} else if !errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), x.text) {
					t.Errorf("%v, want it to contain %q", err, x.text)
				}
			}
		})
	}
}

func ExampleNewGuard() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close(context.Background())

	c, err := clockskew.New([]string{"ntp1.internal", "ntp2.internal", "ntp3.internal"}, &clockskew.Options{
		OnChange: func(_, now clockskew.Result) { log.Printf("the clock is %v: %v", now.Verdict, now) },
	})
	if err != nil {
		log.Fatal(err)
	}
	// Somewhere: go c.Run(ctx)

	g, err := clockskew.NewGuard(m, c, &clockskew.GuardOptions{MaxUnknown: time.Hour})
	if err != nil {
		log.Fatal(err)
	}
	lock, err := g.AcquireLock(context.Background(), "invoice:42", 30*time.Second)
	if err != nil {
		log.Fatal(err) // errors.Is(err, clockskew.ErrSkewed)
	}
	fmt.Println(lock.Key, c.Snapshot().Last)
	if err := lock.Release(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output: invoice:42 not checked yet
}
