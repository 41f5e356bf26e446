package drivertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

var managerWaitCases = []Case{
	{
		Name: "Manager/CancelledWaitLeavesNothing", Guarantee: "I4, I11, ACQ4",
		Why: "a waiter that gave up would be promoted, and the key lie idle until its grant ends",
		run: cancelledWaitLeavesNothing,
	},
	{
		Name: "Manager/CancelRacesRelease", Guarantee: "I4, ACQ3",
		Why: "a lock that is reported as not acquired, but is, belongs to nobody; the reverse has two holders",
		run: cancelRacesRelease,
	},
	{
		Name: "Manager/HandOverIsPrompt", Guarantee: "WAIT8",
		Why: "turns that take a poll interval each make a queue out of a busy key",
		run: handOverIsPrompt,
	},
	{
		Name: "Manager/DroppedWakeUpsAreMadeGood", Guarantee: "I11, RED7, WAIT7",
		Why: "delivery of wake-ups is not guaranteed, and a waiter that relies on them waits for ever",
		run: droppedWakeUpsAreMadeGood,
	},
	{
		Name: "Manager/BrokenSubscriptionIsRenewed", Guarantee: "RED7, WAIT10",
		Why: "after a failover of the store all waiters of a process would be deaf",
		run: brokenSubscriptionIsRenewed,
	},
}

func cancelledWaitLeavesNothing(e *env) {
	a, b, c := e.openManaged(), e.manage(quick()), e.openManaged()
	ttl := e.long
	for _, cause := range []error{context.Canceled, context.DeadlineExceeded} {
		held := e.take(a, "k", want{})
		ctx, cancel := context.WithCancel(e.within(e.patience))
		if errors.Is(cause, context.DeadlineExceeded) {
			ctx, cancel = context.WithTimeout(e.within(e.patience), e.unit/2)
		}
		g := e.group()
		before := e.history.waiting("k")
		gaveUp := make(chan struct{})
		g.start(func() {
			defer close(gaveUp)
			l, err := b.AcquireLock(ctx, "k", ttl)
			if l != nil || !errors.Is(err, cause) || !errors.Is(err, dlm.ErrHeld) {
				e.fatalf("AcquireLock: %v, %v, want no lock and an error that matches %v and ErrHeld", l, err, cause)
			}
			conflict, ok := errors.AsType[*dlm.LockConflictError](err)
			if !ok || conflict.Holder != held.owner {
				e.fatalf("AcquireLock: %#v, want a LockConflictError that names %q", err, held.owner)
			}
			if errors.Is(err, dlm.ErrIndeterminate) {
				e.fatalf("AcquireLock could not withdraw: %w", err)
			}
		})
		e.eventually("a waiter is in the queue", func() bool { return e.history.waiting("k") > before })
		behind := e.queue(g, c, "k", want{})
		if errors.Is(cause, context.Canceled) {
			cancel()
		}
		await(e, gaveUp, "the return of a waiter whose context ended")
		cancel()
		// No ticket is left, so the next one is at the head.
		if info, ok := e.open().inspect("k"); ok && len(info.Waiters) != 1 {
			e.fatalf("%d wait, want one: %+v", len(info.Waiters), info.Waiters)
		}
		e.drop(held)
		e.drop(await(e, behind, "the grant of the waiter behind one that gave up"))
		g.wait()
		e.free("k")
	}
}

// withdrawPatience is for how long AcquireLock waits for its withdrawal.
const withdrawPatience = 500 * time.Millisecond

func cancelRacesRelease(e *env) {
	a, b := e.openManaged(), e.manage(quick())
	cl := e.open()
	const rounds = 100
	slow := 0
	for round := range rounds {
		held := e.take(a, "k", want{})
		ctx, cancel := context.WithCancel(e.within(e.patience))
		cancelled := make(chan time.Time, 1)
		context.AfterFunc(ctx, func() { cancelled <- time.Now() })
		g := e.group()
		before := e.history.waiting("k")
		var l *dlm.Lock
		var err error
		var ended time.Time
		returned := make(chan struct{})
		g.start(func() {
			defer close(returned)
			l, err = b.AcquireLock(ctx, "k", e.long)
			ended = time.Now()
		})
		e.eventually("a waiter is in the queue", func() bool { return e.history.waiting("k") > before })
		pause := func() { time.Sleep(time.Duration(rand.IntN(200)) * time.Microsecond) }
		switch round % 5 {
		case 0: // the release comes first, by a little
			g.start(func() {
				pause()
				cancel()
			})
			e.drop(held)
		case 1: // the cancellation does
			g.start(cancel)
			pause()
			e.drop(held)
		case 2:
			g.start(cancel)
			e.drop(held)
		default: // the waiter asks, and is cancelled when its answer comes, or before
			fault := b.faults.Inject(Fault{Kind: HangAfter, Op: OpAcquire, Times: 1})
			e.drop(held)
			select {
			case <-fault.Hit():
			case <-returned: // it was told, and need not ask
			}
			if round%5 == 3 {
				fault.Remove()
			}
			cancel()
			g.wait()
			fault.Remove()
		}
		g.wait()
		cancel()
		info, ok := cl.inspect("k")
		switch {
		case err == nil:
			e.isHeld(l)
			if ok && (len(info.Holders) != 1 || info.Holders[0].Owner != l.Value || info.Holders[0].Token != l.Token) {
				e.fatalf("AcquireLock gave %v, but the holders are %+v", l, info.Holders)
			}
			e.denied(a, "k", want{})
			b.unlock(l)
		case l != nil:
			e.fatalf("AcquireLock gave both %v and %w", l, err)
		case !errors.Is(err, context.Canceled):
			e.fatalf("AcquireLock: %w, want context.Canceled", err)
		case errors.Is(err, dlm.ErrIndeterminate):
			// If it took longer than AcquireLock waits for, the machine is busy. That
			// may happen, but not often, and nothing may be left all the same.
			waited := ended.Sub(<-cancelled)
			if slow++; slow > rounds/20 || waited < withdrawPatience*4/5 {
				e.fatalf("AcquireLock could not withdraw within %v, %d times by now: %w", waited, slow, err)
			}
			e.eventually("what was not withdrawn in time is withdrawn", func() bool {
				info, _ := cl.inspect("k")
				return len(info.Holders)+len(info.Waiters) == 0
			})
		case ok && len(info.Holders)+len(info.Waiters) != 0:
			e.fatalf("AcquireLock was cancelled and left %+v", info)
		}
		e.drop(e.take(a, "k", want{}))
	}
}

func handOverIsPrompt(e *env) {
	const turns = 12
	lockers := []*managed{e.manage(quick()), e.manage(quick()), e.manage(quick())}
	_, notified := driver.As[driver.Notifier](e.open().backend)
	held := e.take(&managedLocker{lockers[0]}, "k", want{})
	g := e.group()
	served := make(chan time.Time, turns)
	for i := range turns {
		e.queueFunc(g, &managedLocker{lockers[i%len(lockers)]}, "k", want{}, func(held *grip) {
			served <- time.Now()
			e.drop(held)
		})
	}
	if notified {
		// Subscriptions that do not stand yet would spoil the measurement.
		for _, m := range lockers {
			e.eventually("the subscription is asked for", func() bool { return m.faults.Calls(OpListen) > 0 })
		}
	}
	asked := 0
	for _, m := range lockers {
		asked += m.faults.Calls(OpAcquire)
	}
	begin := time.Now()
	e.drop(held)
	g.wait()
	close(served)
	var last time.Time
	for at := range served {
		last = at
	}
	took := last.Sub(begin)
	poll := e.props.PollInterval
	if poll == 0 {
		poll = time.Second
	}
	// With wake-ups, a turn takes no more than messages do; without, half a poll
	// interval on average. In between lies what a busy machine may add.
	limit := turns * 2 * poll
	if notified && e.h.exact {
		limit = 0
	} else if notified {
		limit = turns * max(100*time.Millisecond, poll/4)
	}
	if took > limit {
		e.fatalf("%d turns took %v, want at most %v", turns, took, limit)
	}
	if !notified {
		return
	}
	again := -asked
	for _, m := range lockers {
		again += m.faults.Calls(OpAcquire)
	}
	// Each turn may cost a request, and refreshing the tickets some more.
	if most := turns * (3 + int(8*took/max(e.props.LivenessWindow, time.Second))); again > most {
		e.fatalf("%d turns took %d requests to the store, want at most %d", turns, again, most)
	}
}

func droppedWakeUpsAreMadeGood(e *env) {
	a, b := e.openManaged(), e.manage(quick())
	b.faults.DropEvents(func(event driver.Event) bool { return event.Kind != driver.EventUp })
	held := e.take(a, "k", want{})
	g := e.group()
	first := e.queue(g, &managedLocker{b}, "k", want{})
	second := e.queue(g, &managedLocker{b}, "k", want{})
	e.drop(held)
	e.drop(await(e, first, "the grant of a waiter whose wake-up was dropped"))
	e.drop(await(e, second, "the grant of the second waiter whose wake-up was dropped"))
	g.wait()

	// Not even EventUp gets through.
	c := e.manage(quick())
	c.faults.DropEvents(func(driver.Event) bool { return true })
	held = e.take(a, "k", want{})
	first = e.queue(g, &managedLocker{c}, "k", want{})
	e.drop(held)
	e.drop(await(e, first, "the grant of a waiter that is deaf"))
	g.wait()
}

func brokenSubscriptionIsRenewed(e *env) {
	a, b := e.openManaged(), e.manage(quick())
	_, notified := driver.As[driver.Notifier](e.open().backend)
	held := e.take(a, "k", want{})
	g := e.group()
	waiter := e.queue(g, &managedLocker{b}, "k", want{})
	if notified {
		e.eventually("the subscription is asked for", func() bool { return b.faults.Calls(OpListen) == 1 })
	}
	// The subscription breaks, and cannot be had for a while, in which the key
	// becomes free.
	fault := b.faults.Inject(Fault{Kind: Fail, Op: OpListen})
	b.faults.BreakListen()
	if notified {
		await(e, fault.Hit(), "an attempt to subscribe again")
	}
	e.drop(held)
	fault.Remove()
	e.drop(await(e, waiter, "the grant of a waiter whose subscription was broken"))
	g.wait()

	// Once it stands again, wake-ups come as before.
	if !notified {
		return
	}
	up := make(chan struct{}, 1)
	b.faults.DropEvents(func(event driver.Event) bool {
		if event.Kind == driver.EventUp {
			select {
			case up <- struct{}{}:
			default:
			}
		}
		return false
	})
	b.faults.BreakListen()
	await(e, up, "a subscription after the one that was broken")
	held = e.take(a, "k", want{})
	waiter = e.queue(g, &managedLocker{b}, "k", want{})
	released := time.Now()
	e.drop(held)
	e.drop(await(e, waiter, "the grant of a waiter with a new subscription"))
	if took := time.Since(released); took > 500*time.Millisecond {
		e.fatalf("with a new subscription a hand-over took %v", took)
	}
	g.wait()
}
