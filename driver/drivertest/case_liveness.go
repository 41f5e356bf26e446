package drivertest

import (
	"context"
	"time"

	"github.com/go-dlm/dlm/driver"
)

var livenessCases = []Case{
	{
		Name: "Backend/DeadWaitersCostOneWindow", Guarantee: "I7",
		Why: "a crashed fleet of waiters would hold up the living for a window each",
		run: deadWaitersCostOneWindow,
	},
	{
		Name: "Backend/GrantOfADeadWaiterLapses", Guarantee: "I7, ACQ4",
		Why: "a key that is handed to a dead waiter would be lost for the whole TTL that it once asked for",
		run: grantOfADeadWaiterLapses,
	},
	{
		Name: "Backend/GrantIsConfirmed", Guarantee: "contract of Acquire and EventGrant",
		Why: "a waiter that has been handed the key and says so must not lose it as if it were dead",
		run: grantIsConfirmed,
	},
	{
		Name: "Backend/LiveWaiterKeepsItsPlace", Guarantee: "I7, I6",
		Why: "a waiter that does what the contract asks for must not be taken for dead, however long it waits",
		run: liveWaiterKeepsItsPlace,
	},
}

// bound is how long dead waiters may hold up a live one.
func (e *env) bound() time.Duration {
	if e.props.LivenessWindow == 0 {
		return e.patience // their session's time
	}
	// They lapse after three quarters of a window; the rest is for slow
	// machines.
	return 2 * e.props.LivenessWindow
}

func deadWaitersCostOneWindow(e *env) {
	const crowd = 10
	a, dead, live := e.open(), e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	for range crowd {
		dead.enqueue(driver.Request{Key: "k", Owner: e.name("dead")})
	}
	dead.die()
	live.enqueue(driver.Request{Key: "k", Owner: "live"})
	released := time.Now()
	a.mustRelease(lease)
	held := live.wait(driver.Request{Key: "k", Owner: "live"})
	if took := time.Since(released); took > e.bound() {
		e.fatalf("%d dead waiters held up a live one for %v, want at most %v", crowd, took, e.bound())
	}
	live.mustRelease(held)
	a.mustRelease(a.wait(driver.Request{Key: "k", Owner: "after"}))
}

func grantOfADeadWaiterLapses(e *env) {
	a, dead, live := e.open(), e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	asked := time.Now()
	dead.enqueue(driver.Request{Key: "k", Owner: "dead", TTL: 10 * e.long})
	dead.die()
	released := time.Now()
	a.mustRelease(lease)
	held := live.wait(driver.Request{Key: "k", Owner: "live"})
	if life := e.props.LivenessWindow / 4 * 3; e.props.FairQueue && time.Since(asked) < life-drift(life) {
		e.fatalf("the key was granted to somebody else %v after the waiter was last heard of", time.Since(asked))
	}
	if took := time.Since(released); took > e.bound() {
		e.fatalf("a grant that was handed to a dead waiter held up a live one for %v, want at most %v", took, e.bound())
	}
	if e.props.LivenessWindow > 0 && !e.props.SessionLeases {
		// The dead one rises again.
		dead.refuse(driver.Request{Key: "k", Owner: "dead"})
		dead.withdraw("k", "dead")
	}
	live.mustRelease(held)
	a.mustRelease(a.wait(driver.Request{Key: "k", Owner: "after"}))
}

func grantIsConfirmed(e *env) {
	a, b, c := e.open(), e.open(), e.open()
	n, notified := driver.As[driver.Notifier](b.backend)
	events := make(chan driver.Event, 10)
	if notified {
		ctx, cancel := context.WithCancel(e.ctx)
		defer cancel()
		e.group().start(func() {
			_ = n.Listen(ctx, "m", func(event driver.Event) { events <- event })
		})
		await(e, events, "EventUp")
	}
	// One is confirmed by Acquire.
	lease := a.grant(driver.Request{Key: "k1", Owner: "a"})
	req := driver.Request{Key: "k1", Owner: "b", Manager: "m"}
	b.enqueue(req)
	a.mustRelease(lease)
	confirmed := []driver.Lease{b.grant(req)}
	if notified {
		// The other one by Extend, if the event told of it.
		lease = a.grant(driver.Request{Key: "k2", Owner: "a"})
		req.Key = "k2"
		b.enqueue(req)
		a.mustRelease(lease)
		event := await(e, events, "the wake-up of a waiter")
		for event.Lease.Key != "k2" {
			event = await(e, events, "the wake-up of a waiter") // news of k1 came late
		}
		if event.Kind == driver.EventGrant {
			b.mustExtend(event.Lease, e.long)
			confirmed = append(confirmed, event.Lease)
		} else {
			b.mustRelease(b.grant(req))
		}
	}
	pass(time.Now().Add(e.props.LivenessWindow))
	for _, lease := range confirmed {
		c.refuse(driver.Request{Key: lease.Key, Owner: "c"})
		b.mustExtend(lease, e.long)
		b.mustRelease(lease)
	}
}

func liveWaiterKeepsItsPlace(e *env) {
	a, b := e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	// The waiters repeat their requests as seldom as the contract allows.
	window := e.props.LivenessWindow
	if window == 0 {
		window = 4 * e.unit
	}
	begin := time.Now()
	stop := begin.Add(window * 7 / 4)
	waiters := []string{"w1", "w2", "w3"}
	tickets := make([]int64, len(waiters))
	for i, owner := range waiters {
		held := b.enqueue(driver.Request{Key: "k", Owner: owner})
		e.wantPosition(held, i+1)
		tickets[i] = held.Ticket
	}
	g := e.group()
	for i, owner := range waiters {
		g.start(func() {
			for time.Now().Before(stop) {
				time.Sleep(window / 4)
				held := b.enqueue(driver.Request{Key: "k", Owner: owner})
				e.wantPosition(held, i+1)
				if held.Ticket != tickets[i] {
					e.fatalf("ticket %d became %d while it was refreshed in time", tickets[i], held.Ticket)
				}
			}
		})
	}
	g.wait()
	a.mustRelease(lease)
	for i, owner := range waiters {
		for _, later := range waiters[i+1:] {
			if e.props.FairQueue {
				b.enqueue(driver.Request{Key: "k", Owner: later})
			}
		}
		b.mustRelease(b.wait(driver.Request{Key: "k", Owner: owner}))
	}
}
