package drivertest

import (
	"slices"
	"sync"

	"github.com/go-dlm/dlm/driver"
)

var queueCases = slices.Concat(
	both("FirstComeFirstServed", "I6",
		"without an order somebody waits for ever",
		firstComeFirstServed),
	both("TryDoesNotJumpTheQueue", "I6",
		"callers that try in a loop would starve those that wait their turn",
		tryDoesNotJumpTheQueue),
	[]Case{{
		Name: "Backend/RefusalTellsTheState", Guarantee: "contract of HeldError",
		Why: "callers plan their next attempt by holder, remaining time and place",
		run: refusalTellsTheState,
	}},
)

func firstComeFirstServed(e *env, open func() locker) {
	const waiters = 50
	lockers := []locker{open(), open(), open()}
	held := e.take(lockers[0], "k", want{})
	g := e.group()
	var (
		mu    sync.Mutex
		order []int
	)
	for i := range waiters {
		e.queueFunc(g, lockers[i%len(lockers)], "k", want{}, func(held *grip) {
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
			e.drop(held)
		})
	}
	e.drop(held)
	g.wait()
	if len(order) != waiters {
		e.fatalf("%d of %d waiters were served", len(order), waiters)
	}
	if e.props.FairQueue && !slices.IsSorted(order) {
		e.fatalf("waiters were served in the order %v", order)
	}
	e.drop(e.take(lockers[0], "k", want{}))
}

// queueFunc starts a waiter that calls use with its lock, and returns when it
// is in the queue.
func (e *env) queueFunc(g *group, l locker, key string, w want, use func(*grip)) {
	before := e.history.waiting(key)
	g.start(func() { use(e.obtain(l, key, w)) })
	e.eventually("a waiter is in the queue", func() bool { return e.history.waiting(key) > before })
}

func tryDoesNotJumpTheQueue(e *env, open func() locker) {
	if !e.props.FairQueue {
		// There is no queue to jump, but everybody gets his turn.
		a, b := open(), open()
		held := e.take(a, "k", want{})
		g := e.group()
		waiter := e.queue(g, b, "k", want{})
		e.drop(held)
		e.drop(await(e, waiter, "the grant of the waiter"))
		g.wait()
		return
	}
	// After a release: the key is the waiter's, whether it has called again or
	// not.
	a, b := e.open(), open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	waiting := driver.Request{Key: "k", Owner: "w"}
	a.enqueue(waiting)
	a.mustRelease(lease)
	for range 3 {
		e.denied(b, "k", want{})
	}
	a.mustRelease(a.grant(waiting))
	e.drop(e.take(b, "k", want{}))

	// After an expiry: from before it until the waiter has the key, nobody
	// else gets it.
	e.take(b, "k", want{ttl: e.unit})
	c, d := open(), open()
	g := e.group()
	waiter := e.queue(g, c, "k", want{})
	b.die()
	e.eventually("the waiter has the key", func() bool {
		e.denied(d, "k", want{})
		select {
		case held := <-waiter:
			e.denied(d, "k", want{})
			e.drop(held)
			return true
		default:
			return false
		}
	})
	g.wait()
	e.drop(e.take(d, "k", want{}))
}

func refusalTellsTheState(e *env) {
	a, b := e.open(), e.open()
	ttl := e.long
	lease := a.grant(driver.Request{Key: "k", Owner: "a", TTL: ttl})
	check := func(held *driver.HeldError, position int) {
		if held.Holder != lease.Owner || held.Token != lease.Token {
			e.fatalf("the refusal names %q (token %d), the holder is %q (token %d)", held.Holder, held.Token, lease.Owner, lease.Token)
		}
		if held.Remaining > lease.TTL && !e.props.SessionLeases {
			e.fatalf("%v remain of a TTL of %v", held.Remaining, lease.TTL)
		}
		e.wantPosition(held, position)
	}
	check(b.refuse(driver.Request{Key: "k", Owner: "try"}), 0)
	tickets := make(map[int64]string)
	ticket := func(owner string, position int) {
		held := b.enqueue(driver.Request{Key: "k", Owner: owner})
		check(held, position)
		if other := tickets[held.Ticket]; held.Ticket != 0 && other != "" {
			e.fatalf("ticket %d was given to %q, and to %q before", held.Ticket, owner, other)
		}
		tickets[held.Ticket] = owner
	}
	for i, owner := range []string{"w1", "w2", "w3"} {
		ticket(owner, i+1)
	}
	check(b.refuse(driver.Request{Key: "k", Owner: "try"}), 0)
	b.withdraw("k", "w1")
	check(b.enqueue(driver.Request{Key: "k", Owner: "w3"}), 2)
	check(b.enqueue(driver.Request{Key: "k", Owner: "w2"}), 1)
	// He who withdrew comes back at the tail.
	ticket("w1", 3)
	for _, owner := range []string{"w1", "w2", "w3"} {
		b.withdraw("k", owner)
	}
	a.mustRelease(lease)
}
