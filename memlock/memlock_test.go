package memlock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
)

func TestMain(m *testing.M) { drivertest.Main(m) }

func harness(testing.TB) *drivertest.Harness {
	store := memlock.NewStore()
	return &drivertest.Harness{Open: func(t testing.TB) driver.Backend {
		b, err := memlock.New(store, &memlock.Options{LivenessWindow: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}}
}

func TestConformance(t *testing.T) {
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return harness(t) })
}

func TestConformanceInFakeTime(t *testing.T) {
	drivertest.RunSynctest(t, func(t *testing.T) *drivertest.Harness { return harness(t) })
}

func BenchmarkBackend(b *testing.B) {
	drivertest.Bench(b, func(b *testing.B) *drivertest.Harness { return harness(b) })
}

func TestOptions(t *testing.T) {
	store := memlock.NewStore()
	for _, window := range []time.Duration{-1, 1, time.Hour + 1} {
		if _, err := memlock.New(store, &memlock.Options{LivenessWindow: window}); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("window %v: %v", window, err)
		}
	}
	if _, err := memlock.NewLockManager(nil, nil, nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("nil store: %v", err)
	}
}

// The store forgets keys that nobody asks for any more, as it is used.
func TestForgetsKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		acquire := func(key string) {
			t.Helper()
			_, err := b.Acquire(ctx, driver.Request{Key: key, Owner: "o", TTL: time.Second, Limit: 1})
			if err != nil {
				t.Fatal(err)
			}
		}
		for i := range 10_000 {
			acquire(fmt.Sprint("abandoned", i))
		}
		time.Sleep(time.Minute)
		for i := range 20_000 {
			acquire(fmt.Sprint("used", i%10))
		}
		if n := memlock.Keys(b); n > 10 {
			t.Errorf("%d keys are kept, 10 are in use", n)
		}
	})
}

// A ticket that has lapsed keeps its place for a while, for a waiter that was
// only slow.
func TestLapsedTicket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, err := memlock.New(memlock.NewStore(), &memlock.Options{LivenessWindow: 4 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		ask := func(owner string) *driver.HeldError {
			t.Helper()
			_, err := b.Acquire(context.Background(), driver.Request{Key: "k", Owner: owner, TTL: time.Hour, Limit: 1, Enqueue: true})
			held, ok := errors.AsType[*driver.HeldError](err)
			if !ok && owner != "holder" {
				t.Fatalf("%s: %v", owner, err)
			}
			return held
		}
		ask("holder")
		first := ask("slow")
		time.Sleep(4 * time.Second) // its ticket lapsed after 3s
		if held := ask("quick"); held.Position != 1 {
			t.Errorf("a lapsed ticket counts: position %d", held.Position)
		}
		if held := ask("slow"); held.Position != 1 || held.Ticket != first.Ticket {
			t.Errorf("position %d with ticket %d, want the place of ticket %d", held.Position, held.Ticket, first.Ticket)
		}
		time.Sleep(7 * time.Second) // now it is gone
		if held := ask("slow"); held.Ticket == first.Ticket {
			t.Error("a dead ticket was revived")
		}
	})
}

func ExampleNewLockManager() {
	store := memlock.NewStore() // share it between managers that are to exclude each other
	m, err := memlock.NewLockManager(store, nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	defer m.Close(ctx)
	lock, err := m.AcquireLock(ctx, "key", time.Minute)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(lock.Token, lock.Release(ctx))
	// Output: 1 <nil>
}
