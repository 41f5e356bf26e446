package drivertest

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/go-dlm/dlm/driver"
)

var notifyCases = []Case{
	{
		Name: "Backend/ReleaseWakesTheHead", Guarantee: "contract of Notifier, I6",
		Why: "a wake-up that goes to nobody costs a poll interval; one that goes to all costs a herd; one with the wrong grant makes two holders",
		run: releaseWakesTheHead,
	},
	{
		Name: "Backend/ReadersAreWokenTogether", Guarantee: "contract of Notifier, RWM6",
		Why: "a reader that is let in and not told of it comes late",
		run: readersAreWokenTogether,
	},
	{
		Name: "Backend/SubscriptionSaysThatItStands", Guarantee: "contract of Listen",
		Why: "core trusts events from EventUp on, and asks by itself for what it may have missed before",
		run: subscriptionSaysThatItStands,
	},
	{
		Name: "Backend/ListenEnds", Guarantee: "I11, WAIT10",
		Why: "a subscription that outlives its context is a leak, and keeps Close waiting",
		run: listenEnds,
	},
}

// ear is a Listen call under way.
type ear struct {
	env    *env
	cancel context.CancelFunc
	done   chan error // delivers what Listen returned

	mu     sync.Mutex
	events []driver.Event
	busy   bool
	more   chan struct{} // closed and replaced with every event
}

// hearing says whether the backend can tell of changes. If not, it checks that
// a manager's waiters are served all the same.
func (e *env) hearing() bool {
	_, ok := driver.As[driver.Notifier](e.open().backend)
	if ok {
		return true
	}
	a, b := e.openManaged(), e.openManaged()
	held := e.take(a, "k", want{})
	g := e.group()
	waiter := e.queue(g, b, "k", want{})
	e.drop(held)
	e.drop(await(e, waiter, "the grant of a waiter that nobody can wake"))
	g.wait()
	return false
}

// listen subscribes, and returns once the subscription stands.
func (e *env) listen(cl *client, manager string) *ear {
	n, _ := driver.As[driver.Notifier](cl.backend)
	r := &ear{env: e, done: make(chan error, 1), more: make(chan struct{})}
	ctx, cancel := context.WithCancel(e.ctx)
	r.cancel = cancel
	e.group().start(func() { r.done <- n.Listen(ctx, manager, r.handle) })
	if first := r.event(0); first.Kind != driver.EventUp {
		e.fatalf("the first event is %+v, want EventUp", first)
	}
	return r
}

func (r *ear) handle(event driver.Event) {
	r.mu.Lock()
	if r.busy {
		r.mu.Unlock()
		r.env.history.mu.Lock()
		defer r.env.history.mu.Unlock()
		r.env.history.errorf("Listen calls handle concurrently")
		return
	}
	r.busy = true
	r.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy = false
	if event.Kind == driver.EventWake && slices.ContainsFunc(r.events, func(before driver.Event) bool {
		return before.Kind == event.Kind && before.Lease.Key == event.Lease.Key && before.Lease.Owner == event.Lease.Owner
	}) {
		return // it may be repeated
	}
	r.events = append(r.events, event)
	close(r.more)
	r.more = make(chan struct{})
}

// event waits for the n-th event.
func (r *ear) event(n int) driver.Event {
	for {
		r.mu.Lock()
		more := r.more
		if len(r.events) > n {
			defer r.mu.Unlock()
			return r.events[n]
		}
		r.mu.Unlock()
		await(r.env, more, "an event")
	}
}

// wake waits for the n-th event and checks that it is for a waiter.
func (r *ear) wake(n int, key string, owner string, held *driver.HeldError) driver.Event {
	event := r.event(n)
	if event.Kind != driver.EventGrant && event.Kind != driver.EventWake {
		r.env.fatalf("event %d is %+v, want EventGrant or EventWake", n, event)
	}
	if event.Lease.Key != key || event.Lease.Owner != owner {
		r.env.fatalf("event %d is for %q on %q, want %q on %q", n, event.Lease.Owner, event.Lease.Key, owner, key)
	}
	if event.Kind == driver.EventGrant && (held.Ticket == 0 || event.Ticket != held.Ticket) {
		r.env.fatalf("the grant of %q is for ticket %d, the refusal told ticket %d", owner, event.Ticket, held.Ticket)
	}
	return event
}

// confirm acquires what the event announced, and compares the two.
func (e *env) confirm(cl *client, req driver.Request, event driver.Event) driver.Lease {
	lease := cl.grant(req)
	if event.Kind == driver.EventGrant {
		told := event.Lease
		if told.Token != lease.Token || told.Mode != lease.Mode || told.TTL > lease.TTL || told.TTL <= 0 {
			e.fatalf("the event told of %+v, the grant is %+v", told, lease)
		}
	}
	return lease
}

func releaseWakesTheHead(e *env) {
	if !e.hearing() {
		return
	}
	a, b, c := e.open(), e.open(), e.open()
	m1, m2 := e.listen(b, "m1"), e.listen(c, "m2")
	lease := a.grant(driver.Request{Key: "k", Owner: "a", Manager: "m3"})
	b1 := driver.Request{Key: "k", Owner: "b1", Manager: "m1"}
	c1 := driver.Request{Key: "k", Owner: "c1", Manager: "m2"}
	b2 := driver.Request{Key: "k", Owner: "b2", Manager: "m1"}
	c2 := driver.Request{Key: "k", Owner: "c2", Manager: "m2"}
	t1, t2, t3, t4 := b.enqueue(b1), c.enqueue(c1), b.enqueue(b2), c.enqueue(c2)
	a.mustRelease(lease)
	b.mustRelease(e.confirm(b, b1, m1.wake(1, "k", "b1", t1)))
	c.mustRelease(e.confirm(c, c1, m2.wake(1, "k", "c1", t2)))
	// b2 gives up when it has been woken, and the next one is woken.
	m1.wake(2, "k", "b2", t3)
	b.withdraw("k", "b2")
	c.mustRelease(e.confirm(c, c2, m2.wake(2, "k", "c2", t4)))
	// Events come in order, so once another one is there, no more will come
	// from before.
	for _, l := range []struct {
		cl      *client
		ear     *ear
		manager string
	}{{b, m1, "m1"}, {c, m2, "m2"}} {
		lease := a.grant(driver.Request{Key: "last", Owner: "a"})
		req := driver.Request{Key: "last", Owner: l.manager, Manager: l.manager}
		ticket := l.cl.enqueue(req)
		a.mustRelease(lease)
		event := l.ear.wake(3, "last", l.manager, ticket)
		l.cl.mustRelease(e.confirm(l.cl, req, event))
	}
}

func readersAreWokenTogether(e *env) {
	if !e.hearing() || !e.props.SharedMode {
		return
	}
	a, b := e.open(), e.open()
	m := e.listen(b, "m")
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	owners := []string{"r1", "r2", "r3"}
	for _, owner := range owners {
		b.enqueue(driver.Request{Key: "k", Owner: owner, Mode: driver.Shared, Manager: "m"})
	}
	a.mustRelease(lease)
	told := make(map[string]driver.Event)
	for n := range owners {
		event := m.event(n + 1)
		told[event.Lease.Owner] = event
	}
	for _, owner := range owners {
		event, ok := told[owner]
		if !ok {
			e.fatalf("%q was not told of its grant; the events were %+v", owner, told)
		}
		b.mustRelease(e.confirm(b, driver.Request{Key: "k", Owner: owner, Mode: driver.Shared}, event))
	}
}

func subscriptionSaysThatItStands(e *env) {
	if !e.hearing() {
		return
	}
	a, b := e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	req := driver.Request{Key: "k", Owner: "b", Manager: "m"}
	// The waiter comes before its subscription, and the release in between.
	b.enqueue(req)
	a.mustRelease(lease)
	m := e.listen(b, "m")
	b.mustRelease(b.grant(req))
	// A subscription that ended begins anew, on the same client.
	m.cancel()
	await(e, m.done, "the return of Listen after its context ended")
	lease = a.grant(driver.Request{Key: "k2", Owner: "a"})
	m = e.listen(b, "m")
	req.Key = "k2"
	ticket := b.enqueue(req)
	a.mustRelease(lease)
	for n := 1; ; n++ {
		// Old news may come first.
		if event := m.event(n); event.Lease.Key == "k2" {
			b.mustRelease(e.confirm(b, req, m.wake(n, "k2", "b", ticket)))
			break
		}
	}
}

func listenEnds(e *env) {
	if !e.hearing() {
		return
	}
	cl := e.open()
	m := e.listen(cl, "m")
	m.cancel()
	if err := await(e, m.done, "the return of Listen after its context ended"); err == nil {
		e.fatalf("Listen returned no error when its context ended")
	}
	m = e.listen(cl, "m")
	if err := cl.backend.Close(); err != nil {
		e.fatalf("Close: %w", err)
	}
	if err := await(e, m.done, "the return of Listen after Close"); !errors.Is(err, driver.ErrClosed) {
		e.fatalf("Listen returned %v after Close, want ErrClosed", err)
	}
}
