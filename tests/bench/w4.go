package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// waiters is how many wait in W4.
func waiters(scale float64) int { return scaledCount(1000, scale, 20) }

// crowd is W4: 1000 goroutines ask at the same time for a lock that is held.
// After three seconds it is given up, and each of them gives it up as soon as
// it has it. The drain lasts from that first release until the last one has
// had the lock. Then the same once more with at most 200 that begin to wait
// one millisecond apart, which says whether they are served in turn.
func (f *run) crowd(ctx context.Context) error {
	limit := f.scaled(time.Minute, 20*time.Second)
	ctx, cancel := context.WithTimeout(ctx, 2*limit+time.Minute)
	defer cancel()
	n := waiters(f.scale)
	q, err := f.queue(ctx, n, 0)
	if err != nil {
		return err
	}
	start, err := f.read(ctx)
	if err != nil {
		return err
	}
	q.begin()
	time.Sleep(f.scaled(time.Second, 100*time.Millisecond))
	idle, err := f.read(ctx)
	if err != nil {
		return err
	}
	f.figures["goroutines"] = float64(runtime.NumGoroutine())
	time.Sleep(f.scaled(2*time.Second, 200*time.Millisecond))
	before, err := f.read(ctx)
	if err != nil {
		return err
	}
	q.release()
	drained := within(limit, q.wg.Wait)
	after, err := f.read(ctx)
	if err != nil {
		return err
	}

	waiting, drain := before.since(idle), after.since(before)
	q.mu.Lock()
	f.figures["waiters"] = float64(n)
	f.figures["served"] = float64(len(q.served))
	f.figures["unserved"] = float64(n - len(q.served))
	f.figures["drain"] = millis(q.last.Sub(q.released))
	f.figures["inversions"] = float64(inversions(q.served))
	q.mu.Unlock()
	f.figures["idleSent"] = waiting.sent / waiting.seconds
	f.figures["idleClient"] = waiting.client / waiting.seconds
	f.figures["sent"], f.figures["all"] = drain.sent, drain.all
	f.figures["total"] = after.since(start).sent
	f.figures["client"], f.figures["server"] = drain.client, drain.server
	f.figures["early"] = float64(q.early.Load())
	f.figures["violations"] = float64(q.watch.violations.Load())
	if !drained {
		return nil // the others still fight for the lock
	}

	q, err = f.queue(ctx, min(n, 200), time.Millisecond)
	if err != nil {
		return err
	}
	q.begin()
	time.Sleep(f.scaled(300*time.Millisecond, 100*time.Millisecond))
	q.release()
	if within(limit, q.wg.Wait) {
		f.figures["inversionsApart"] = float64(inversions(q.served))
	}
	return nil
}

// queue is a number of goroutines that wait for the same lock, and who got it.
type queue struct {
	f     *run
	ctx   context.Context
	key   string
	n     int
	apart time.Duration // between the beginnings of two waits
	first held

	wg    sync.WaitGroup
	began atomic.Int64
	open  atomic.Bool // the first holder has let go
	early atomic.Int64
	watch watch

	mu       sync.Mutex
	released time.Time // when the first holder let go
	served   []int64   // in which place they had begun, in the order of service
	last     time.Time // when the last of them had the lock
}

// queue takes the lock that the goroutines are to wait for.
func (f *run) queue(ctx context.Context, n int, apart time.Duration) (*queue, error) {
	q := &queue{f: f, ctx: ctx, key: prefix(w4), n: n, apart: apart}
	var err error
	if q.first, err = f.locker.Lock(ctx, n, q.key, f.ttl); err != nil {
		return nil, fmt.Errorf("first lock: %w", err)
	}
	return q, nil
}

func (q *queue) begin() {
	for worker := range q.n {
		q.wg.Go(func() { q.wait(worker) })
		if q.apart > 0 {
			time.Sleep(q.apart)
		}
	}
}

func (q *queue) wait(worker int) {
	place := q.began.Add(1)
	l, err := q.f.locker.Lock(q.ctx, worker, q.key, q.f.ttl)
	if err != nil {
		if q.ctx.Err() == nil {
			q.f.failures.add("lock", err)
		}
		return
	}
	if !q.open.Load() {
		q.early.Add(1) // the first holder still has it
	}
	q.watch.enter()
	q.mu.Lock()
	q.served, q.last = append(q.served, place), time.Now()
	q.mu.Unlock()
	q.watch.leave()
	if err := l.Unlock(q.ctx); err != nil && q.ctx.Err() == nil {
		q.f.failures.add("unlock", err)
	}
}

// release lets the first of them have the lock.
func (q *queue) release() {
	q.mu.Lock()
	q.released = time.Now()
	q.last = q.released
	q.open.Store(true)
	q.mu.Unlock()
	if err := q.first.Unlock(q.ctx); err != nil {
		q.f.failures.add("first unlock", err)
	}
}

// within waits for a call to return, and reports whether it did in time.
func within(limit time.Duration, call func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		call()
	}()
	select {
	case <-done:
		return true
	case <-time.After(limit):
		return false
	}
}
