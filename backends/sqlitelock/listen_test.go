package sqlitelock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
)

// listen collects the events of a manager.
func listen(t *testing.T, b *sqlitelock.Backend, manager string) <-chan driver.Event {
	t.Helper()
	events := make(chan driver.Event, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.Listen(ctx, manager, func(e driver.Event) { events <- e }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
	})
	if e := next(t, events); e.Kind != driver.EventUp {
		t.Fatalf("first event is %+v", e)
	}
	return events
}

func next(t *testing.T, events <-chan driver.Event) driver.Event {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(10 * time.Second):
		t.Fatal("no event")
		panic("unreachable")
	}
}

// The release of another backend on the same file, as of another process,
// reaches the waiter's manager, and no other.
func TestGrantIsAnnounced(t *testing.T) {
	t.Parallel()
	path := file(t)
	a, b := open(t, path, nil), open(t, path, nil)
	events := listen(t, b, "m")
	others := listen(t, b, "other")
	lease := acquire(t, a, ask("k", "a"))
	for i := range 20 {
		owner := fmt.Sprint("b", i)
		held := refused(t, b, ask("k", owner))
		if b.Waiting() != 1 {
			t.Fatalf("%d tickets are watched for", b.Waiting())
		}
		release(t, a, lease)
		e := next(t, events)
		if e.Kind != driver.EventGrant || e.Ticket != held.Ticket || e.Lease.Owner != owner || e.Lease.Key != "k" ||
			e.Lease.Token <= lease.Token || e.Lease.TTL != time.Minute {
			t.Fatalf("event %+v for ticket %d", e, held.Ticket)
		}
		if b.Waiting() != 0 {
			t.Fatalf("%d tickets are watched for after the grant", b.Waiting())
		}
		lease = acquire(t, b, ask("k", owner))
		if lease.Token != e.Lease.Token {
			t.Fatalf("announced token %d, have %d", e.Lease.Token, lease.Token)
		}
	}
	if len(events) != 0 || len(others) != 0 {
		t.Fatal("too many events")
	}
}

// A grant is announced once, however often the file changes before it is
// confirmed.
func TestGrantIsAnnouncedOnce(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	events := listen(t, b, "m")
	lease := acquire(t, b, ask("k", "a"))
	refused(t, b, ask("k", "b"))
	release(t, b, lease)
	first := next(t, events)
	for i := range 50 {
		x := acquire(t, b, ask("x", fmt.Sprint("x", i)))
		refused(t, b, ask("x", fmt.Sprint("y", i)))
		release(t, b, x)
		if e := next(t, events); e.Lease.Key != "x" {
			t.Fatalf("announced again: %+v after %+v", e, first)
		}
		release(t, b, driver.Lease{Key: "x", Owner: fmt.Sprint("y", i)})
	}
}

// A grant made before anybody listened is announced too.
func TestGrantBeforeListening(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	lease := acquire(t, b, ask("k", "a"))
	refused(t, b, ask("k", "b"))
	release(t, b, lease)
	if e := next(t, listen(t, b, "m")); e.Kind != driver.EventGrant || e.Lease.Owner != "b" {
		t.Fatalf("%+v", e)
	}
}

// What is kept in memory for a waiter goes with the waiter, however it goes.
func TestWatchedTicketsDoNotPileUp(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), &sqlitelock.Options{LivenessWindow: 100 * time.Millisecond})
	listen(t, b, "m")
	acquire(t, b, ask("k", "a"))
	for i := range 200 {
		refused(t, b, ask("k", fmt.Sprint("withdrawn", i)))
		release(t, b, driver.Lease{Key: "k", Owner: fmt.Sprint("withdrawn", i)})
	}
	if n := b.Waiting(); n != 0 {
		t.Fatalf("%d withdrawn tickets are still watched for", n)
	}
	for i := range 200 {
		refused(t, b, ask("k", fmt.Sprint("dead", i)))
	}
	for start := time.Now(); b.Waiting() != 0; runtime.Gosched() {
		if time.Since(start) > 10*time.Second {
			t.Fatalf("%d dead tickets are still watched for", b.Waiting())
		}
	}
}

func TestListenEnds(t *testing.T) {
	t.Parallel()
	b, err := sqlitelock.New(file(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	up := make(chan struct{}, 3)
	done := make(chan error, 3)
	for _, m := range []string{"1", "2", "3"} {
		go func() { done <- b.Listen(t.Context(), m, func(driver.Event) { up <- struct{}{} }) }()
	}
	for range 3 {
		<-up
	}
	closeBackend(t, b)
	for range 3 {
		if err := <-done; !errors.Is(err, driver.ErrClosed) {
			t.Fatal(err)
		}
	}
}
