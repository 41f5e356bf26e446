package dlm_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
)

// At most two workers, on all machines together, call the service at a time.
func ExampleSemaphore() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	defer m.Close(ctx)

	sem, err := dlm.NewDistributedSemaphore(m, "geocoder", 2)
	if err != nil {
		fmt.Println(err) // the store has no permits
		return
	}
	for worker := range 3 {
		permit, err := sem.TryAcquire(ctx, 30*time.Second)
		if errors.Is(err, dlm.ErrHeld) {
			fmt.Println("worker", worker, "comes back later")
			continue
		}
		if err != nil {
			fmt.Println(err)
			return
		}
		defer permit.Release(ctx)
		fmt.Println("worker", worker, "works") // under permit.Context(ctx)
	}
	usage, err := sem.Usage(ctx)
	fmt.Println(usage.Held, "of", usage.Capacity, err)
	// Output:
	// worker 0 works
	// worker 1 works
	// worker 2 comes back later
	// 2 of 2 <nil>
}

// Many read a catalogue; whoever changes it is alone.
func ExampleReadWriteLock() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	defer m.Close(ctx)

	catalogue, err := dlm.NewReadWriteLock(m, "catalogue")
	if err != nil {
		fmt.Println(err) // the store has no shared locks
		return
	}
	first, err := catalogue.AcquireRead(ctx, 30*time.Second)
	if err != nil {
		fmt.Println(err)
		return
	}
	second, err := catalogue.AcquireRead(ctx, 30*time.Second)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = catalogue.TryWrite(ctx, 30*time.Second)
	fmt.Println("beside readers:", errors.Is(err, dlm.ErrHeld))
	fmt.Println(first.Release(ctx), second.Release(ctx))
	writer, err := catalogue.TryWrite(ctx, 30*time.Second)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(writer.Mode, writer.Release(ctx))
	// Output:
	// beside readers: true
	// <nil> <nil>
	// exclusive <nil>
}

// Money moves between two accounts, which nobody else may touch meanwhile.
func ExampleAcquireMulti() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	defer m.Close(ctx)

	lock, err := dlm.AcquireMulti(ctx, m, []string{"account:9", "account:4"}, 30*time.Second)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release(ctx)
	work := lock.Context(ctx) // ends if one of the two is lost
	fmt.Println(lock.Keys(), work.Err())
	fmt.Println(lock.Token("account:4") > 0, lock.Token("account:9") > 0)
	// Output:
	// [account:4 account:9] <nil>
	// true true
}
