package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// manyKeys is W2: 64 goroutines go round 1000 keys for five seconds, each from
// another one on, and try to take every lock and to give it up at once. Now
// and then two meet, which is a conflict. Costs are for each attempt, whether
// it got the lock or not.
func (f *run) manyKeys(ctx context.Context) error {
	const count = 1000
	var (
		keys      [count]string
		watches   [count]watch
		conflicts atomic.Int64
		workers   = w2.workers(f.scale)
		took      = make([][]time.Duration, workers)
		wg        sync.WaitGroup
	)
	start := prefix(w2)
	for i := range keys {
		keys[i] = fmt.Sprint(start, i)
	}
	before, err := f.read(ctx)
	if err != nil {
		return err
	}
	end := time.Now().Add(f.scaled(5*time.Second, 100*time.Millisecond))
	for worker := range workers {
		wg.Go(func() {
			for i := worker * count / workers; ; i++ {
				i %= count
				began := time.Now()
				if began.After(end) {
					return
				}
				h, err := f.locker.TryLock(ctx, worker, keys[i], f.ttl)
				if errors.Is(err, errConflict) {
					conflicts.Add(1)
					continue
				}
				if err != nil {
					f.failures.add("lock", err)
					continue
				}
				watches[i].enter()
				watches[i].leave()
				if err := h.Unlock(ctx); err != nil {
					f.failures.add("unlock", err)
					continue
				}
				took[worker] = append(took[worker], time.Since(began))
			}
		})
	}
	wg.Wait()
	after, err := f.read(ctx)
	if err != nil {
		return err
	}
	var violations int64
	for i := range watches {
		violations += watches[i].violations.Load()
	}
	all := slices.Concat(took...)
	used := after.since(before)
	pairs, lost := float64(len(all)), float64(conflicts.Load())
	f.figures["rate"] = pairs / used.seconds
	f.figures["conflicts"] = lost / used.seconds
	f.figures["violations"] = float64(violations)
	f.figures["pairP50"] = percentile(all, 0.50)
	f.figures["pairP99"] = percentile(all, 0.99)
	f.figures["client"] = per(used.client*1000, pairs+lost)
	f.figures["server"] = per(used.server*1000, pairs+lost)
	f.figures["sent"] = per(used.sent, pairs+lost)
	f.figures["all"] = per(used.all, pairs+lost)
	return nil
}
