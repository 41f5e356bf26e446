package dlm_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
)

// elect returns a node of the election on key "leader".
func elect(t *testing.T, m dlm.OptionsManager, node string, cfg *dlm.ElectionConfig) *dlm.LeaderElection {
	t.Helper()
	e, err := dlm.NewLeaderElection(m, "leader", node, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// eventually waits in a bubble until something is so.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for range 10_000 {
		synctest.Wait()
		if cond() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("never: %s", what)
}

func TestElectionConfig(t *testing.T) {
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
	slow := newManager(&dlm.LockConfig{RenewInterval: 6 * time.Second})
	for _, c := range []struct {
		name string
		m    *dlm.Manager
		key  string
		node string
		cfg  *dlm.ElectionConfig
		want string // part of the error, or empty
	}{
		{"defaults", plain, "k", "n", nil, ""},
		{"no grace", plain, "k", "n", &dlm.ElectionConfig{Grace: -1}, ""},
		{"one retry interval", plain, "k", "n", &dlm.ElectionConfig{MaxRetryInterval: 10 * time.Millisecond}, ""},
		{"the other retry interval", plain, "k", "n", &dlm.ElectionConfig{RetryInterval: time.Minute}, ""},
		{"short ttl", plain, "k", "n", &dlm.ElectionConfig{TTL: 10 * time.Millisecond}, ""},
		{"no key", plain, "", "n", nil, "key is empty"},
		{"no node", plain, "k", "", nil, "node id is empty"},
		{"bad node", plain, "k", "a b", nil, `node id "a b" must be printable`},
		{"long node", plain, "k", strings.Repeat("n", 129), nil, "node id has 129 bytes, must have at most 128"},
		{"ttl", plain, "k", "n", &dlm.ElectionConfig{TTL: 1}, "ElectionConfig.TTL is 1ns, must be 0 or between 1ms and"},
		{"negative ttl", plain, "k", "n", &dlm.ElectionConfig{TTL: -time.Second}, "ElectionConfig.TTL is -1s"},
		{"poll", plain, "k", "n", &dlm.ElectionConfig{PollInterval: -1}, "ElectionConfig.PollInterval"},
		{"retry", plain, "k", "n", &dlm.ElectionConfig{RetryInterval: -1}, "ElectionConfig.RetryInterval"},
		{"max retry", plain, "k", "n", &dlm.ElectionConfig{MaxRetryInterval: -1}, "ElectionConfig.MaxRetryInterval"},
		{
			"retries", plain, "k", "n", &dlm.ElectionConfig{RetryInterval: 2 * time.Second, MaxRetryInterval: time.Second},
			"ElectionConfig.MaxRetryInterval is 1s, must be at least RetryInterval, 2s",
		},
		{
			"grace", plain, "k", "n", &dlm.ElectionConfig{TTL: 3 * time.Second, Grace: 2 * time.Second},
			"ElectionConfig.Grace is 2s, must be below 1.469s for a TTL of 3s that is renewed every 1s",
		},
		{
			"renewal", slow, "k", "n", &dlm.ElectionConfig{TTL: 6 * time.Second},
			"ElectionConfig.TTL is 6s, which must exceed LockConfig.RenewInterval, 6s, and the drift margin, 61ms",
		},
		{"slow renewal", slow, "k", "n", &dlm.ElectionConfig{TTL: 7 * time.Second}, ""},
		{
			"slow renewal and grace", slow, "k", "n", &dlm.ElectionConfig{TTL: 7 * time.Second, Grace: time.Second},
			"must be below 0s for a TTL of 7s that is renewed every 6s",
		},
		{"no renewal", newManager(&dlm.LockConfig{AutoRenew: dlm.Off}), "k", "n", nil, "LockConfig.AutoRenew is Off, must be On"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e, err := dlm.NewLeaderElection(c.m, c.key, c.node, c.cfg)
			switch {
			case c.want == "" && (err != nil || e.NodeID() != c.node):
				t.Errorf("refused: %v", err)
			case c.want != "" && (!errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), c.want)):
				t.Errorf("error is %v, want %q", err, c.want)
			}
		})
	}
	if _, err := dlm.NewLeaderElection(nil, "k", "n", nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("no manager: %v", err)
	}
}

// LEAD10: work that takes long holds up neither renewal nor, once it has stopped,
// the others. The work has stopped before anyone else leads.
func TestElectionSlowWork(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := elect(t, open(t, store, nil), "a", nil), elect(t, open(t, store, nil), "b", nil)
		var log []string // written by one at a time, if the election does what it should
		elected := make(chan int64)
		if err := a.Start(t.Context(), &dlm.ElectionCallbacks{
			OnElected: func(ctx context.Context, term int64) {
				if !a.IsLeader() || a.Term() != term || dlm.LockFromContext(ctx).Token != term {
					t.Error("elected, but not the leader")
				}
				elected <- term
				<-ctx.Done()
				if a.IsLeader() || a.Term() != 0 {
					t.Error("the context has ended, but still the leader")
				}
				time.Sleep(time.Hour)
				log = append(log, "a stopped")
			},
			OnLost: func(int64) {
				if a.IsLeader() {
					t.Error("lost, but still the leader")
				}
				log = append(log, "a lost")
			},
			OnOverrun: func(int64) { t.Error("overrun") },
		}); err != nil {
			t.Fatal(err)
		}
		term := <-elected
		time.Sleep(time.Hour) // many TTLs
		if !a.IsLeader() {
			t.Error("not renewed while OnElected runs")
		}
		if err := b.Start(t.Context(), &dlm.ElectionCallbacks{OnElected: func(_ context.Context, next int64) {
			log = append(log, "b elected")
			if next <= term {
				t.Errorf("term %d after %d", next, term)
			}
		}}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := a.StepDown(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("StepDown before the work has stopped: %v", err)
		}
		if err := a.StepDown(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait() // no time passes: the hand-over is immediate
		if !b.IsLeader() {
			t.Error("no hand-over")
		}
		// OnElected of b has returned, and b leads on.
		time.Sleep(time.Hour)
		if !b.IsLeader() || a.IsLeader() {
			t.Error("b leads no more")
		}
		if err := errors.Join(a.Stop(t.Context()), b.Stop(t.Context())); err != nil {
			t.Error(err)
		}
		if want := []string{"a stopped", "a lost", "b elected"}; !slices.Equal(log, want) {
			t.Errorf("%q, want %q", log, want)
		}
	})
}

// LEAD10, LEAD4: an OnLost that blocks does not keep the others from leading for
// longer than a TTL, and no term begins before it has returned.
func TestElectionSlowOnLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := elect(t, open(t, store, nil), "a", nil), elect(t, open(t, store, nil), "b", nil)
		blocked := make(chan struct{})
		terms := 0
		if err := a.Start(t.Context(), &dlm.ElectionCallbacks{
			OnElected: func(context.Context, int64) { terms++ },
			OnLost:    func(int64) { <-blocked },
		}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a leads", a.IsLeader)
		if err := b.Start(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		start := time.Now()
		if err := a.StepDown(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if d := time.Since(start); !b.IsLeader() || d > 15*time.Second {
			t.Errorf("b leads: %v, after %v", b.IsLeader(), d)
		}
		if err := b.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Hour)
		if terms != 1 || a.IsLeader() {
			t.Errorf("%d terms before OnLost had returned", terms)
		}
		close(blocked)
		eventually(t, "a leads again", a.IsLeader)
		if err := a.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A loss ends the context at once, and OnOverrun and OnLost do not wait for work
// that goes on; the next term does.
func TestElectionLoss(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		e := elect(t, c, "a", nil)
		var mu sync.Mutex
		var log []string
		note := func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			log = append(log, fmt.Sprintf(format, args...))
		}
		if err := e.Start(t.Context(), &dlm.ElectionCallbacks{
			OnElected: func(ctx context.Context, term int64) {
				note("elected %d", term)
				<-ctx.Done()
				if !errors.Is(context.Cause(ctx), dlm.ErrLost) && term == 1 {
					t.Errorf("cause is %v", context.Cause(ctx))
				}
				time.Sleep(time.Minute)
				note("stopped %d", term)
			},
			OnOverrun: func(term int64) { note("overrun %d", term) },
			OnLost:    func(term int64) { note("lost %d", term) },
		}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "leads", e.IsLeader)
		if _, err := c.ForceRelease(t.Context(), "leader", 0); err != nil {
			t.Fatal(err)
		}
		eventually(t, "lost", func() bool { return !e.IsLeader() })
		time.Sleep(30 * time.Second)
		if e.IsLeader() {
			t.Error("the next term has begun while the work of the last goes on")
		}
		eventually(t, "leads again", e.IsLeader)
		if err := e.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		want := []string{"elected 1", "overrun 1", "lost 1", "stopped 1", "elected 2", "stopped 2", "lost 2"}
		if !slices.Equal(log, want) {
			t.Errorf("%q, want %q", log, want)
		}
	})
}

// A sudden loss is no overrun if no work goes on.
func TestElectionNoOverrun(t *testing.T) {
	for _, tt := range []struct {
		name string
		work func(ctx context.Context, term int64)
	}{
		{"no work", nil},
		{"work that has ended", func(context.Context, int64) {}},
		{"work that ends with its context", func(ctx context.Context, _ int64) { <-ctx.Done() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for range 20 {
				bubble(t, func(t *testing.T) {
					c := open(t, memlock.NewStore(), nil)
					e := elect(t, c, "a", nil)
					lost := make(chan int64, 10)
					if err := e.Start(t.Context(), &dlm.ElectionCallbacks{
						OnElected: tt.work,
						OnOverrun: func(int64) { t.Error("overrun") },
						OnLost:    func(term int64) { lost <- term },
					}); err != nil {
						t.Fatal(err)
					}
					eventually(t, "leads", e.IsLeader)
					if _, err := c.ForceRelease(t.Context(), "leader", 0); err != nil {
						t.Fatal(err)
					}
					<-lost
					if err := e.Stop(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

// A longest hold ends terms in time for the work to stop, and makes no hot loop.
func TestElectionMaxHold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c := open(t, store, &dlm.LockConfig{MaxHold: 3 * time.Second})
		_, err := dlm.NewLeaderElection(c.Manager, "leader", "a", &dlm.ElectionConfig{Grace: 3 * time.Second})
		wantInvalid(t, err, "LockConfig.MaxHold is 3s", "ElectionConfig.Grace, 3s")
		e := elect(t, c, "a", &dlm.ElectionConfig{Grace: 2999 * time.Millisecond})
		var terms atomic.Int64
		if err := e.Start(t.Context(), &dlm.ElectionCallbacks{OnElected: func(ctx context.Context, _ int64) {
			terms.Add(1)
			<-ctx.Done()
			if l := dlm.LockFromContext(ctx); l.Err() != nil {
				t.Errorf("the lock is over when the work is to stop: %v", l.Err())
			}
			time.Sleep(time.Millisecond)
		}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if n := terms.Load(); n < 5 || n > 30 {
			t.Errorf("%d terms in a minute", n)
		}
		if err := e.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// On a store whose leases live by the keep-alives of a session, a renewal may leave
// the deadline where it was; that is no failure.
func TestElectionSessionCadence(t *testing.T) {
	for _, tt := range []struct{ interval, grace time.Duration }{
		{0, 0}, {0, 7 * time.Second}, {time.Second, 9 * time.Second}, {time.Second, 12 * time.Second}, {2 * time.Second, 11 * time.Second},
	} {
		t.Run(fmt.Sprint(tt.interval, tt.grace), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				b, err := memlock.New(memlock.NewStore(), nil)
				if err != nil {
					t.Fatal(err)
				}
				began := time.Now()
				age := func(l *driver.Lease) { l.Age = time.Since(began) % (l.TTL / 3) }
				m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
					Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
						l, err := b.Acquire(ctx, req)
						age(&l)
						return l, err
					},
					Extend: func(ctx context.Context, batch []driver.Renewal) {
						b.Extend(ctx, batch)
						for i := range batch {
							age(&batch[i].Lease)
						}
					},
				}), &dlm.LockConfig{RenewInterval: tt.interval})
				if err != nil {
					t.Fatal(err)
				}
				e, err := dlm.NewLeaderElection(m, "leader", "a", &dlm.ElectionConfig{Grace: tt.grace})
				if err != nil {
					t.Fatal(err)
				}
				var terms atomic.Int64
				if err := e.Start(t.Context(), &dlm.ElectionCallbacks{OnElected: func(ctx context.Context, _ int64) {
					terms.Add(1)
					<-ctx.Done()
				}}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Hour)
				if err := errors.Join(e.Stop(t.Context()), m.Close(t.Context())); err != nil {
					t.Error(err)
				}
				if n := terms.Load(); n != 1 {
					t.Errorf("%d terms in an hour in which nothing failed", n)
				}
			})
		})
	}
}

// The context of a former term, or run, ends no later one.
func TestElectionFormerContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		e := elect(t, c, "a", nil)
		elected := make(chan context.Context, 10)
		work := &dlm.ElectionCallbacks{OnElected: func(ctx context.Context, _ int64) { elected <- ctx }}
		if err := e.Start(t.Context(), work); err != nil {
			t.Fatal(err)
		}
		former := <-elected
		if err := e.StepDown(t.Context()); err != nil {
			t.Fatal(err)
		}
		second := <-elected
		term := e.Term()
		if err := e.StepDown(former); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if e.Term() != term {
			t.Errorf("the context of a former term ended term %d", term)
		}
		if err := e.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := e.Start(t.Context(), work); err != nil {
			t.Fatal(err)
		}
		<-elected
		if err := e.Stop(second); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if !e.IsLeader() {
			t.Error("the context of a former run ended the present one")
		}
		if err := e.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// If the lease cannot be renewed, the context ends in time for the work to stop
// before anyone else leads, and the node campaigns again.
func TestElectionCutOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		c := open(t, store, nil)
		a, b := elect(t, c, "a", &dlm.ElectionConfig{Grace: 4 * time.Second}), elect(t, open(t, store, nil), "b", nil)
		var stopped, lost time.Time
		if err := a.Start(t.Context(), &dlm.ElectionCallbacks{
			OnElected: func(ctx context.Context, _ int64) {
				l := dlm.LockFromContext(ctx)
				<-ctx.Done()
				if stopped.IsZero() {
					if left := time.Until(l.Deadline()); l.Err() != nil || left < 3900*time.Millisecond || !errors.Is(context.Cause(ctx), dlm.ErrLost) {
						t.Errorf("%v left, %v, %v", left, l.Err(), context.Cause(ctx))
					}
					time.Sleep(3 * time.Second)
					stopped = time.Now()
				}
			},
			OnLost:    func(int64) { lost = time.Now() },
			OnOverrun: func(int64) { t.Error("overrun") },
		}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a leads", a.IsLeader)
		if err := b.Start(t.Context(), &dlm.ElectionCallbacks{OnElected: func(context.Context, int64) {
			if lost.IsZero() {
				t.Error("b leads while a works")
			}
		}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		heal := c.Sever()
		eventually(t, "b leads", b.IsLeader)
		time.Sleep(time.Hour) // a tries all the time
		if a.IsLeader() {
			t.Error("two leaders")
		}
		heal()
		eventually(t, "a waits", func() bool {
			info, err := c.GetLock(t.Context(), "leader")
			return err == nil && len(info.Waiters) == 1
		})
		if err := b.StepDown(t.Context()); err != nil {
			t.Error(err)
		}
		eventually(t, "a leads again", a.IsLeader)
		if err := errors.Join(a.Stop(t.Context()), b.Stop(t.Context())); err != nil {
			t.Error(err)
		}
	})
}

// A lease that was handed over is short, and its term lasts all the same.
func TestElectionGraceAfterHandOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		var nodes []*dlm.LeaderElection
		var terms atomic.Int64
		for i := range 2 {
			e := elect(t, open(t, store, nil), fmt.Sprint(i), &dlm.ElectionConfig{TTL: time.Minute, Grace: 29 * time.Second})
			nodes = append(nodes, e)
			if err := e.Start(t.Context(), &dlm.ElectionCallbacks{OnElected: func(context.Context, int64) { terms.Add(1) }}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		time.Sleep(13700 * time.Millisecond)
		if err := nodes[0].StepDown(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Hour)
		if !nodes[1].IsLeader() || terms.Load() != 2 {
			t.Errorf("%d terms", terms.Load())
		}
		for _, e := range nodes {
			if err := e.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// So is one that belongs to a session, for ever: here one of about 5s, which is
// renewed every 2s.
func TestElectionGraceOfSession(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), nil)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		age := func(l *driver.Lease) { l.Age = l.TTL*9/10 + time.Since(start)%(2*time.Second) }
		var stuck atomic.Bool
		m, err := dlm.NewManager(drivertest.Intercept(b, drivertest.Hooks{
			Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
				l, err := b.Acquire(ctx, req)
				age(&l)
				return l, err
			},
			Extend: func(ctx context.Context, batch []driver.Renewal) {
				if stuck.Load() {
					<-ctx.Done()
					return
				}
				b.Extend(ctx, batch)
				for i := range batch {
					age(&batch[i].Lease)
				}
			},
		}), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close(context.Background())
		e := elect(t, m, "a", &dlm.ElectionConfig{TTL: time.Minute})
		var terms atomic.Int64
		var left time.Duration
		if err := e.Start(t.Context(), &dlm.ElectionCallbacks{OnElected: func(ctx context.Context, _ int64) {
			terms.Add(1)
			l := dlm.LockFromContext(ctx)
			<-ctx.Done()
			left = time.Until(l.Deadline())
			_ = e.Stop(ctx)
		}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if !e.IsLeader() || terms.Load() != 1 {
			t.Errorf("%d terms", terms.Load())
		}
		stuck.Store(true)
		time.Sleep(10 * time.Second)
		if e.IsLeader() {
			t.Error("not renewed, but still the leader")
		}
		if err := e.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if left < 500*time.Millisecond {
			t.Errorf("ended %v before the deadline only", left)
		}
	})
}

func TestElectionLife(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		e := elect(t, c, "a", nil)
		if err := errors.Join(e.Stop(t.Context()), e.StepDown(t.Context())); err != nil || e.IsLeader() || e.Term() != 0 {
			t.Errorf("before Start: %v", err)
		}
		var none context.Context
		for _, err := range []error{
			e.Start(none, nil), e.Run(none, nil), e.Stop(none), e.StepDown(none),
			e.Watch(none, func(dlm.LeaderInfo) {}), e.Watch(t.Context(), nil),
		} {
			if !errors.Is(err, dlm.ErrInvalid) {
				t.Errorf("without an argument: %v", err)
			}
		}
		for range 2 {
			if err := e.Start(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			for _, err := range []error{e.Start(t.Context(), nil), e.Run(t.Context(), nil)} {
				if !errors.Is(err, dlm.ErrInvalid) {
					t.Errorf("started twice: %v", err)
				}
			}
			eventually(t, "leads", e.IsLeader)
			for range 2 {
				if err := e.Stop(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if tokens := c.holders(t, "leader"); len(tokens) != 0 || e.IsLeader() {
				t.Errorf("stopped, but still held: %v", tokens)
			}
		}

		// The end of the context is not an error.
		ctx, cancel := context.WithCancel(t.Context())
		err := e.Run(ctx, &dlm.ElectionCallbacks{OnElected: func(context.Context, int64) { cancel() }})
		if err != nil || len(c.holders(t, "leader")) != 0 {
			t.Errorf("Run: %v", err)
		}
		if err := e.Run(ctx, &dlm.ElectionCallbacks{OnElected: func(context.Context, int64) { t.Error("elected") }}); err != nil {
			t.Errorf("Run with an ended context: %v", err)
		}

		// From within, StepDown and Stop do not wait for themselves.
		var terms []int64
		if err := e.Run(t.Context(), &dlm.ElectionCallbacks{OnElected: func(ctx context.Context, term int64) {
			terms = append(terms, term)
			f := e.StepDown
			if len(terms) > 1 {
				f = e.Stop
			}
			if err := f(ctx); err != nil {
				t.Error(err)
			}
			if ctx.Err() == nil || e.IsLeader() {
				t.Error("still leading")
			}
		}}); err != nil || len(terms) != 2 || terms[0] >= terms[1] {
			t.Errorf("%v, terms %v", err, terms)
		}

		// Stop while waiting leaves nothing in the queue.
		l := c.lock(t, "leader", time.Minute)
		if err := e.Start(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := errors.Join(e.StepDown(t.Context()), e.Stop(t.Context()), l.Release(t.Context())); err != nil {
			t.Error(err)
		}
		if info, err := c.GetLock(t.Context(), "leader"); err != nil || len(info.Waiters)+len(info.Holders) != 0 {
			t.Errorf("%+v, %v", info, err)
		}

		// A closed manager ends the election.
		lost := 0
		if err := e.Start(t.Context(), &dlm.ElectionCallbacks{OnLost: func(int64) { lost++ }}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "leads", e.IsLeader)
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if err := e.Stop(t.Context()); !errors.Is(err, dlm.ErrClosed) || lost != 1 {
			t.Errorf("with a closed manager: %v, lost %d times", err, lost)
		}
	})
}

// A panic, or the end of the goroutine, gives the leadership up and goes on.
func TestElectionPanic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		e := elect(t, c, "a", nil)
		failure := errors.New("failure")
		for _, where := range []string{"OnElected", "OnLost"} {
			lost := 0
			func() {
				defer func() {
					if err, _ := recover().(error); !errors.Is(err, failure) {
						t.Errorf("%s: recovered %v", where, err)
					}
				}()
				_ = e.Run(t.Context(), &dlm.ElectionCallbacks{
					OnElected: func(ctx context.Context, _ int64) {
						if where == "OnElected" {
							panic(failure)
						}
						_ = e.StepDown(ctx)
					},
					OnLost: func(int64) {
						lost++
						if where == "OnLost" {
							panic(failure)
						}
					},
				})
			}()
			if lost != 1 || e.IsLeader() || len(c.holders(t, "leader")) != 0 {
				t.Errorf("%s: lost %d times", where, lost)
			}
		}
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = e.Run(t.Context(), &dlm.ElectionCallbacks{OnElected: func(context.Context, int64) { runtime.Goexit() }})
		}()
		<-gone
		if err := e.Stop(t.Context()); err != nil || len(c.holders(t, "leader")) != 0 {
			t.Errorf("after Goexit: %v", err)
		}
	})
}

// Two nodes of a process exclude each other, whatever owner their context has.
func TestElectionIgnoresOwner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		ctx := dlm.WithOwner(t.Context(), "same")
		a, b := elect(t, c, "a", nil), elect(t, c, "b", nil)
		if err := errors.Join(a.Start(ctx, nil), b.Start(ctx, nil)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if a.IsLeader() == b.IsLeader() {
			t.Errorf("leaders: %v, %v", a.IsLeader(), b.IsLeader())
		}
		if err := errors.Join(a.Stop(ctx), b.Stop(ctx)); err != nil {
			t.Error(err)
		}
	})
}

// LEAD7: an observer learns of every change that lasts, of "none" too, and
// survives a store that cannot be read.
func TestElectionWatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		observer := open(t, store, nil)
		o := elect(t, observer, "observer", nil)
		ctx, cancel := context.WithCancel(t.Context())
		var seen []string
		watched := make(chan error, 1)
		go func() {
			watched <- o.Watch(ctx, func(l dlm.LeaderInfo) { seen = append(seen, fmt.Sprint(l.NodeID, l.Term)) })
		}()
		time.Sleep(2 * time.Second)
		a, b := elect(t, open(t, store, nil), "a/1", nil), elect(t, open(t, store, nil), "b", nil)
		if err := a.Start(ctx, nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := b.Start(ctx, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		if l, err := o.Leader(ctx); err != nil || l.NodeID != "a/1" || l.Term != a.Term() {
			t.Errorf("%+v, %v", l, err)
		}
		if err := a.Stop(ctx); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * time.Second)
		heal := observer.Sever()
		time.Sleep(time.Minute)
		if err := b.Stop(ctx); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		heal()
		time.Sleep(time.Minute)
		cancel()
		if err := <-watched; !errors.Is(err, context.Canceled) {
			t.Errorf("Watch: %v", err)
		}
		if want := []string{"0", "a/11", "b2", "0"}; !slices.Equal(seen, want) {
			t.Errorf("%q, want %q", seen, want)
		}
		if err := observer.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := o.Watch(t.Context(), func(dlm.LeaderInfo) {}); !errors.Is(err, dlm.ErrClosed) {
			t.Errorf("Watch with a closed manager: %v", err)
		}
	})
}

// LEAD5, LEAD8: whatever happens, the callbacks of a node alternate, the last is
// OnLost, terms rise, and no two contexts are alive at once.
func TestElectionAtRandom(t *testing.T) {
	t.Parallel()
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			bubble(t, func(t *testing.T) { electAtRandom(t, rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func electAtRandom(t *testing.T, r *rand.Rand) {
	const n = 5
	store := memlock.NewStore()
	var mu sync.Mutex
	var alive context.Context // of the last leader
	last := int64(0)
	working := make([]bool, n)
	var clients []*client
	var nodes []*dlm.LeaderElection
	heals := make([]func(), n)
	for i := range heals {
		heals[i] = func() {}
	}
	callbacks := func(i int, slow time.Duration) *dlm.ElectionCallbacks {
		return &dlm.ElectionCallbacks{
			OnElected: func(ctx context.Context, term int64) {
				mu.Lock()
				if term <= last {
					t.Errorf("term %d after %d", term, last)
				}
				if alive != nil && alive.Err() == nil && ctx.Err() == nil {
					t.Errorf("two leaders, the second with term %d", term)
				}
				if working[i] {
					t.Errorf("node %d: elected twice", i)
				}
				last, alive, working[i] = term, ctx, true
				mu.Unlock()
				if slow < 0 {
					return
				}
				<-ctx.Done()
				time.Sleep(slow)
			},
			OnLost: func(int64) {
				mu.Lock()
				defer mu.Unlock()
				if !working[i] {
					t.Errorf("node %d: lost, but not elected", i)
				}
				working[i] = false
			},
		}
	}
	slow := []time.Duration{-1, 0, time.Millisecond, time.Second, 20 * time.Second}
	start := func(i int) {
		// It may be running already.
		_ = nodes[i].Start(t.Context(), callbacks(i, slow[r.IntN(len(slow))]))
	}
	for i := range n {
		clients = append(clients, open(t, store, nil))
		nodes = append(nodes, elect(t, clients[i], fmt.Sprint(i), nil))
		start(i)
	}
	for range 60 {
		time.Sleep(time.Duration(r.Int64N(int64(10 * time.Second))))
		i := r.IntN(n)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.Int64N(int64(30*time.Second))))
		switch r.IntN(7) {
		case 0:
			_ = nodes[i].Stop(ctx)
		case 1, 2:
			start(i)
		case 3:
			_ = nodes[i].StepDown(ctx)
		case 4:
			heals[i]()
			heals[i] = clients[i].Sever()
		case 5:
			heals[i]()
		case 6:
			f := clients[i].Inject(drivertest.Fault{Kind: drivertest.Swallow, Times: 1 + r.IntN(3)})
			defer f.Remove()
		}
		cancel()
	}
	for i := range n {
		heals[i]()
		start(i)
	}
	eventually(t, "somebody leads", func() bool {
		return slices.ContainsFunc(nodes, (*dlm.LeaderElection).IsLeader)
	})
	for i, e := range nodes {
		// A request may have been swallowed, and its withdrawal, too.
		if err := e.Stop(t.Context()); err != nil && !errors.Is(err, dlm.ErrIndeterminate) {
			t.Errorf("node %d: %v", i, err)
		}
		if working[i] {
			t.Errorf("node %d: the last callback is not OnLost", i)
		}
	}
}

func ExampleLeaderElection() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	defer m.Close(ctx)

	election, err := dlm.NewLeaderElection(m, "billing/leader", "node-1", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	err = election.Run(ctx, &dlm.ElectionCallbacks{
		OnElected: func(ctx context.Context, term int64) {
			leader, err := election.Leader(ctx)
			fmt.Println("leading term", term, "as", leader.NodeID, err)
			_ = election.Stop(ctx) // a real leader works until ctx ends
		},
		OnLost: func(term int64) { fmt.Println("no longer leading term", term) },
	})
	fmt.Println(err)
	// Output:
	// leading term 1 as node-1 <nil>
	// no longer leading term 1
	// <nil>
}

// The label of one lock takes the place of the manager's.
func TestLabel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), &dlm.LockConfig{Label: "manager"})
		for _, label := range []string{"", "node/1"} {
			l, err := c.Acquire(t.Context(), "k", time.Minute, &dlm.AcquireOptions{Label: label})
			if err != nil {
				t.Fatal(err)
			}
			if want := cmp.Or(label, "manager") + "/"; !strings.HasPrefix(l.Value, want) {
				t.Errorf("label %q: value %q", label, l.Value)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
		_, err := c.Acquire(t.Context(), "k", time.Minute, &dlm.AcquireOptions{Label: "a b"})
		if !errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), "AcquireOptions.Label") {
			t.Errorf("bad label: %v", err)
		}
	})
}
