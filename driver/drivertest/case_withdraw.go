package drivertest

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/go-dlm/dlm/driver"
)

var withdrawCases = slices.Concat(
	both("RefusalLeavesNothing", "I4, SEM7",
		"an attempt that failed would be granted later, to nobody",
		refusalLeavesNothing),
	[]Case{
		{
			Name: "Backend/WithdrawnTicketIsSkipped", Guarantee: "I4, ACQ4",
			Why: "a waiter that gave up would be promoted, and the key lie idle until its grant ends",
			run: withdrawnTicketIsSkipped,
		},
		{
			Name: "Backend/WithdrawnGrantIsFreed", Guarantee: "I4",
			Why: "after an unanswered request core withdraws without knowing whether it has a grant, a ticket or nothing",
			run: withdrawnGrantIsFreed,
		},
		{
			Name: "Backend/DoneContextHasNoEffect", Guarantee: "I4, I11, ACQ12",
			Why: "a caller that has already gone would be given a lock",
			run: doneContextHasNoEffect,
		},
		{
			Name: "Backend/CallsEndWithTheirContexts", Guarantee: "I11, contract of Backend",
			Why: "a caller with a deadline would hang with the store, and so would Close",
			run: callsEndWithTheirContexts,
		},
	},
)

func refusalLeavesNothing(e *env, open func() locker) {
	a, b, c := open(), open(), open()
	held := e.take(a, "k", want{})
	for range 5 {
		e.denied(b, "k", want{})
	}
	cl := e.open()
	if info, ok := cl.inspect("k"); ok && len(info.Waiters) != 0 {
		e.fatalf("refused attempts left %d tickets", len(info.Waiters))
	}
	e.drop(held)
	e.drop(e.take(c, "k", want{}))
	if !e.props.Permits {
		return
	}
	p1, p2 := e.take(a, "p", want{limit: 2}), e.take(b, "p", want{limit: 2})
	for range 5 {
		e.denied(c, "p", want{limit: 2})
	}
	e.drop(p1)
	e.drop(p2)
	// With nothing left of it, the key may have another limit.
	e.drop(e.take(c, "p", want{}))
}

func withdrawnTicketIsSkipped(e *env) {
	a, b, c := e.open(), e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	b.enqueue(driver.Request{Key: "k", Owner: "b"})
	e.wantPosition(c.enqueue(driver.Request{Key: "k", Owner: "c"}), 2)
	b.withdraw("k", "b")
	e.wantPosition(c.enqueue(driver.Request{Key: "k", Owner: "c"}), 1)
	a.mustRelease(lease)
	c.mustRelease(c.grant(driver.Request{Key: "k", Owner: "c"}))
	a.mustRelease(a.grant(driver.Request{Key: "k", Owner: "d"}))
}

func withdrawnGrantIsFreed(e *env) {
	a, b := e.open(), e.open()
	a.withdraw("k", "nobody") // nothing there is no error
	a.grant(driver.Request{Key: "k", Owner: "a"})
	a.withdraw("k", "a")
	a.withdraw("k", "a")
	// The same once more, with a waiter to hand the key to.
	a.grant(driver.Request{Key: "k", Owner: "a"})
	b.enqueue(driver.Request{Key: "k", Owner: "b"})
	b.enqueue(driver.Request{Key: "k", Owner: "c"})
	a.withdraw("k", "a")
	// The key is b's, which does not know of it yet, and gives up.
	b.withdraw("k", "b")
	b.mustRelease(b.grant(driver.Request{Key: "k", Owner: "c"}))
	a.mustRelease(a.grant(driver.Request{Key: "k", Owner: "d"}))
}

func doneContextHasNoEffect(e *env) {
	cl := e.open()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	wantErr := func(what string, err error) {
		if err == nil {
			e.fatalf("%s with a context that was done succeeded", what)
		}
		if !errors.Is(err, context.Canceled) {
			e.fatalf("%s with a context that was done: %w, want context.Canceled to match", what, err)
		}
	}
	req := driver.Request{Key: "k", Owner: "done", TTL: e.long, Limit: 1, Enqueue: true}
	_, err := cl.backend.Acquire(ctx, req)
	wantErr("Acquire", err)
	if info, ok := cl.inspect("k"); ok && len(info.Holders) != 0 {
		e.fatalf("Acquire with a context that was done made a grant")
	}
	lease := cl.grant(driver.Request{Key: "k", Owner: "a"})
	_, err = cl.backend.Acquire(ctx, req)
	wantErr("Acquire of a held key", err)
	if info, ok := cl.inspect("k"); ok && len(info.Waiters) != 0 {
		e.fatalf("Acquire with a context that was done left a ticket")
	}
	batch := []driver.Renewal{{Lease: lease}, {Lease: lease}}
	cl.backend.Extend(ctx, batch)
	for _, r := range batch {
		wantErr("Extend", r.Err)
	}
	wantErr("Release", cl.backend.Release(ctx, lease))
	cl.refuse(driver.Request{Key: "k", Owner: "b"})
	cl.mustRelease(lease)
	cl.mustRelease(cl.grant(driver.Request{Key: "k", Owner: "b"}))
}

func callsEndWithTheirContexts(e *env) {
	cl := e.open()
	lease := cl.grant(driver.Request{Key: "k", Owner: "a"})
	const given = "Acquire of a held key" // its owner gives up beside it
	calls := map[string]func(context.Context) error{
		"Acquire": func(ctx context.Context) error {
			return second(cl.backend.Acquire(ctx, driver.Request{Key: "free", Owner: "a", TTL: e.unit, Limit: 1, Enqueue: true}))
		},
		given: func(ctx context.Context) error {
			return second(cl.backend.Acquire(ctx, driver.Request{Key: "k", Owner: "b", TTL: e.unit, Limit: 1, Enqueue: true}))
		},
		"Extend": func(ctx context.Context) error {
			batch := []driver.Renewal{{Lease: lease}, {Lease: lease}}
			cl.backend.Extend(ctx, batch)
			if (batch[0].Err == nil) != (batch[1].Err == nil) {
				e.fatalf("one failed call to Extend answered %v and %w", batch[0].Err, batch[1].Err)
			}
			return batch[0].Err
		},
		"withdrawing": func(ctx context.Context) error {
			return cl.backend.Release(ctx, driver.Lease{Key: "k", Owner: "b"})
		},
		"Release": func(ctx context.Context) error {
			return cl.backend.Release(ctx, driver.Lease{Key: "k", Owner: "nobody", Token: lease.Token})
		},
	}
	if in, ok := driver.As[driver.Inspector](cl.backend); ok {
		calls["Inspect"] = func(ctx context.Context) error { return second(in.Inspect(ctx, "k")) }
		calls["List"] = func(ctx context.Context) error { return second(in.List(ctx, "", "", 0)) }
	}
	if f, ok := driver.As[driver.Forcer](cl.backend); ok {
		calls["ForceRelease"] = func(ctx context.Context) error { return second(f.ForceRelease(ctx, "nothing", 0)) }
	}
	// With contexts that end at any moment of the call, or before it.
	for what, call := range calls {
		for i := range 20 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i*i)*5*time.Microsecond)
			err := call(ctx)
			cancel()
			if err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, driver.ErrHeld) && !errors.Is(err, driver.ErrLost) {
				e.fatalf("%s with a context that ended: %w, want context.DeadlineExceeded to match", what, err)
			}
		}
	}
	if e.h.Freeze != nil {
		thaw := e.h.Freeze(e.t)
		g := e.group()
		for what, call := range calls {
			g.start(func() {
				// That the call comes back at all is checked by guard.
				err := call(e.within(e.unit))
				if what == given && errors.Is(err, driver.ErrNotApplied) {
					return
				}
				if !errors.Is(err, context.DeadlineExceeded) {
					e.fatalf("%s on a store that hangs: %v, want context.DeadlineExceeded to match", what, err)
				}
			})
		}
		err := g.join()
		thaw()
		if err != nil {
			e.fatalf("%w", err)
		}
	}
	cl.withdraw("free", "a")
	cl.withdraw("k", "b")
	cl.mustExtend(lease, e.long)
	cl.mustRelease(lease)
}
