package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// hold is W5: 64 goroutines take 10,000 locks with a lease of ten seconds, and
// the library renews them on its own for half a minute. Then 200 of them are
// tried through another client: one that can be had was lost. A renewal round
// is a third of the lease, the interval at which this project renews.
func (f *run) hold(ctx context.Context) error {
	n := scaledCount(10_000, f.scale, 100)
	keys := prefix(w5)
	memory, goroutines := residentMB(), runtime.NumGoroutine()
	start, err := f.read(ctx)
	if err != nil {
		return err
	}
	locks := f.takeAll(ctx, keys, n)
	end, err := f.read(ctx)
	if err != nil {
		return err
	}
	have := 0
	for _, h := range locks {
		if h != nil {
			have++
		}
	}
	taken := end.since(start)
	f.figures["held"] = float64(have)
	f.figures["seconds"] = taken.seconds
	f.figures["acquireSent"] = per(taken.sent, float64(have))

	time.Sleep(f.ttl / 5)
	before, err := f.read(ctx)
	if err != nil {
		return err
	}
	time.Sleep(3 * f.ttl)
	after, err := f.read(ctx)
	if err != nil {
		return err
	}
	used := after.since(before)
	f.figures["goroutines"] = float64(runtime.NumGoroutine())
	f.figures["idleGoroutines"] = float64(goroutines)
	f.figures["resident"] = residentMB()
	f.figures["idleResident"] = memory
	f.figures["grown"] = f.figures["resident"] - memory
	f.figures["client"], f.figures["server"] = used.client, used.server
	f.figures["rate"] = used.sent / used.seconds
	f.figures["round"] = f.figures["rate"] * (f.ttl / 3).Seconds()

	lost, err := f.countLost(ctx, keys, locks)
	if err != nil {
		return err
	}
	f.figures["lost"] = float64(lost)
	return nil
}

// takeAll takes the locks. One that could not be had is nil.
func (f *run) takeAll(ctx context.Context, keys string, n int) []held {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	take := f.locker.Lock
	if f.row.holdByTry {
		take = f.locker.TryLock
	}
	locks := make([]held, n)
	var next atomic.Int64
	var wg sync.WaitGroup
	for worker := range w5.workers(f.scale) {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				h, err := take(ctx, worker, fmt.Sprint(keys, i), f.ttl)
				if err != nil {
					f.failures.add("lock", err)
					continue
				}
				locks[i] = h
			}
		})
	}
	wg.Wait()
	return locks
}

// countLost tries 200 of the locks as somebody else.
func (f *run) countLost(ctx context.Context, keys string, locks []held) (int, error) {
	other, err := f.open(ctx, 1)
	if err != nil {
		return 0, fmt.Errorf("open another client: %w", err)
	}
	lost := 0
	for i := 0; i < len(locks); i += max(1, len(locks)/200) {
		if locks[i] == nil {
			continue
		}
		held, err := isHeld(ctx, other, fmt.Sprint(keys, i), f.ttl)
		if err != nil {
			f.failures.add("check", err)
		} else if !held {
			lost++
		}
	}
	runtime.KeepAlive(locks)
	return lost, nil
}

func isHeld(ctx context.Context, l locker, key string, ttl time.Duration) (bool, error) {
	if l, ok := l.(looker); ok {
		return l.Held(ctx, key)
	}
	_, err := l.TryLock(ctx, 0, key, ttl)
	if errors.Is(err, errConflict) {
		return true, nil
	}
	return false, err
}
