package drivertest

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm/driver"
)

func faulty(t *testing.T) (*Faults, driver.Backend) {
	h := overMemory(t, nil)
	return NewFaults(h.Open(t)), h.Open(t)
}

func request(key, owner string) driver.Request {
	return driver.Request{Key: key, Owner: owner, TTL: time.Minute, Limit: 1, Enqueue: true}
}

func TestFaultKinds(t *testing.T) {
	for _, tt := range []struct {
		name    string
		kind    FaultKind
		applied bool
		want    error // nil if the answer gets through
		takes   time.Duration
	}{
		{"refuse", Refuse, false, driver.ErrNotApplied, 0},
		{"fail", Fail, false, ErrFault, 0},
		{"swallow", Swallow, true, ErrFault, 0},
		{"hang", Hang, false, context.DeadlineExceeded, time.Second},
		{"hang after", HangAfter, true, context.DeadlineExceeded, time.Second},
		{"delay", Delay, true, nil, time.Second / 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, direct := faulty(t)
				b := f.Backend()
				fault := f.Inject(Fault{Kind: tt.kind, Op: OpAcquire, Key: "k", Times: 1, Delay: time.Second / 2})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if _, err := b.Acquire(ctx, request("other", "a")); err != nil {
					t.Fatalf("another key: %v", err)
				}
				start := time.Now()
				lease, err := b.Acquire(ctx, request("k", "a"))
				if tt.want == nil && (err != nil || lease.Token == 0) || tt.want != nil && (!errors.Is(err, tt.want) || lease != driver.Lease{}) {
					t.Errorf("Acquire: %+v, %v, want %v", lease, err, tt.want)
				}
				if tt.kind != Refuse && errors.Is(err, driver.ErrNotApplied) {
					t.Errorf("Acquire: %v, which says too much", err)
				}
				if took := time.Since(start); took != tt.takes {
					t.Errorf("Acquire took %v, want %v", took, tt.takes)
				}
				if info := look(direct, "k"); (len(info.Holders) == 1) != tt.applied {
					t.Errorf("the store has %+v, want a holder: %v", info.Holders, tt.applied)
				}
				select {
				case <-fault.Hit():
				default:
					t.Error("the fault was not hit")
				}
				// Once is enough.
				if lease, err = b.Acquire(t.Context(), request("k", "a")); err != nil {
					t.Errorf("Acquire after the fault: %v", err)
				}
				if n := f.Calls(OpAcquire); n != 3 || fault.Hits() != 1 || f.AllCalls() != 3 {
					t.Errorf("%d calls, %d in all, %d of them faulty", n, f.AllCalls(), fault.Hits())
				}
			})
		})
	}
}

func TestFaultsInEveryCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _ := faulty(t)
		b, ctx := f.Backend(), t.Context()
		lease, err := b.Acquire(ctx, request("k", "a"))
		if err != nil {
			t.Fatal(err)
		}
		in, _ := driver.As[driver.Inspector](b)
		forcer, _ := driver.As[driver.Forcer](b)
		calls := map[Op]func() error{
			OpAcquire: func() error { return second(b.Acquire(ctx, request("k", "a"))) },
			OpExtend: func() error {
				batch := []driver.Renewal{{Lease: lease}, {Lease: driver.Lease{Key: "x", Owner: "y", Token: 1}}}
				b.Extend(ctx, batch)
				if f := batch[1].Err; !errors.Is(f, ErrFault) && !errors.Is(f, driver.ErrLost) {
					t.Errorf("the second entry of Extend: %v", f)
				}
				return batch[0].Err
			},
			OpWithdraw: func() error { return b.Release(ctx, driver.Lease{Key: "k", Owner: "nobody"}) },
			OpInspect:  func() error { return second(in.Inspect(ctx, "k")) },
			OpList:     func() error { return second(in.List(ctx, "", "", 0)) },
			OpForce:    func() error { return second(forcer.ForceRelease(ctx, "other", 0)) },
		}
		for op, call := range calls {
			fault := f.Inject(Fault{Kind: Swallow, Op: op})
			for other, call := range calls {
				if err := call(); errors.Is(err, ErrFault) != (other == op) {
					t.Errorf("%s with a fault in %s: %v", other, op, err)
				}
			}
			fault.Remove()
			if err := call(); err != nil {
				t.Errorf("%s after the fault: %v", op, err)
			}
		}
		f.Inject(Fault{Kind: Swallow, Op: OpRelease})
		if err := b.Release(ctx, lease); !errors.Is(err, ErrFault) {
			t.Errorf("a faulty release: %v", err)
		}
		all := f.Inject(Fault{Kind: Fail, Key: "k", Owner: "a"})
		if err := calls[OpAcquire](); !errors.Is(err, ErrFault) {
			t.Errorf("a fault in all calls: %v", err)
		}
		if err := calls[OpInspect](); err != nil {
			t.Errorf("a fault of one owner in a call about nobody: %v", err)
		}
		all.Remove()
	})
}

func TestHangEndsWithTheFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _ := faulty(t)
		for _, kind := range []FaultKind{Hang, HangAfter} {
			fault := f.Inject(Fault{Kind: kind})
			done := make(chan error)
			go func() { done <- second(f.Backend().Acquire(t.Context(), request("k", "a"))) }()
			<-fault.Hit()
			synctest.Wait()
			fault.Remove()
			fault.Remove()
			if err := <-done; (err == nil) != (kind == HangAfter) {
				t.Errorf("kind %d: %v", kind, err)
			}
		}
	})
}

func TestSever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, direct := faulty(t)
		b, n := f.Backend(), notifier(f.Backend())
		up, broken := make(chan driver.Event, 9), make(chan error, 1)
		listen := func() {
			go func() { broken <- n.Listen(t.Context(), "m", func(e driver.Event) { up <- e }) }()
		}
		listen()
		<-up
		// An answer that is under way does not arrive either.
		late := f.Inject(Fault{Kind: HangAfter, Op: OpAcquire, Times: 1})
		answer := make(chan error)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		go func() { answer <- second(b.Acquire(ctx, request("late", "a"))) }()
		<-late.Hit()
		synctest.Wait()

		heal := f.Sever()
		if err := <-broken; !errors.Is(err, ErrFault) {
			t.Errorf("Listen returned %v", err)
		}
		late.Remove()
		start := time.Now()
		if err := <-answer; !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Minute {
			t.Errorf("a call under way returned %v after %v", err, time.Since(start))
		}
		if err := n.Listen(t.Context(), "m", nil); !errors.Is(err, ErrFault) {
			t.Errorf("Listen while severed: %v", err)
		}
		go func() { answer <- second(b.Acquire(t.Context(), request("k", "a"))) }()
		synctest.Wait()
		heal()
		heal()
		if err := <-answer; !errors.Is(err, ErrFault) {
			t.Errorf("a call that hung until it was healed: %v", err)
		}
		if info := look(direct, "k"); len(info.Holders) != 0 {
			t.Errorf("the call got through: %+v", info)
		}
		if _, err := b.Acquire(t.Context(), request("k", "a")); err != nil {
			t.Errorf("Acquire after heal: %v", err)
		}
		listen()
		if e := <-up; e.Kind != driver.EventUp {
			t.Errorf("the first event is %+v", e)
		}
		f.BreakListen()
		<-broken
	})
}

func TestDropEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, direct := faulty(t)
		events := make(chan driver.Event, 9)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- notifier(f.Backend()).Listen(ctx, "m", func(e driver.Event) { events <- e }) }()
		<-events
		f.DropEvents(func(e driver.Event) bool { return e.Lease.Owner == "w1" })
		lease, err := direct.Acquire(t.Context(), request("k", "a"))
		if err != nil {
			t.Fatal(err)
		}
		for _, owner := range []string{"w1", "w2"} {
			req := request("k", owner)
			req.Manager = "m"
			_, _ = direct.Acquire(t.Context(), req)
		}
		_ = direct.Release(t.Context(), lease)
		_ = direct.Release(t.Context(), driver.Lease{Key: "k", Owner: "w1"})
		if e := <-events; e.Lease.Owner != "w2" {
			t.Errorf("got %+v, want the event of w2", e)
		}
		cancel()
		<-done
	})
}
