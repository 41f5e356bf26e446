package main

import (
	"context"
	"sync"
	"time"
)

// contended is W3: 16 goroutines want the same lock again and again, for eight
// seconds, and each holds it for a millisecond. The gap runs from the call of
// one holder's Unlock until the next holder's Lock returns; some gaps lie
// between two turns of the same goroutine, which took the lock again before
// anybody else got it. The longest wait counts waits that were not over at
// the end, too.
func (f *run) contended(ctx context.Context) error {
	var (
		key     = prefix(w3)
		workers = w3.workers(f.scale)
		length  = f.scaled(8*time.Second, 200*time.Millisecond)
		log     = newTurns(workers)
		wg      sync.WaitGroup
	)
	ctx, cancel := context.WithTimeout(ctx, length+time.Minute)
	defer cancel()
	before, err := f.read(ctx)
	if err != nil {
		return err
	}
	end := time.Now().Add(length)
	for worker := range workers {
		wg.Go(func() {
			for f.turn(ctx, worker, key, end, log) {
			}
		})
	}
	time.Sleep(time.Until(end))
	after, err := f.read(ctx)
	if err != nil {
		return err
	}
	cancel()
	f.figures["stuck"] = 0
	if !within(20*time.Second, wg.Wait) {
		f.figures["stuck"] = 1 // the goroutines end with the process
	}
	log.report(f.figures, after.since(before))
	return nil
}

// turn waits for the lock, holds it, and gives it up. It returns false when
// the time is over.
func (f *run) turn(ctx context.Context, worker int, key string, end time.Time, log *turns) bool {
	began := time.Now()
	if !began.Before(end) {
		return false
	}
	h, err := f.locker.Lock(ctx, worker, key, f.ttl)
	got := time.Now()
	// Somebody may wait for the lock without looking at the context.
	unlockCtx := context.WithoutCancel(ctx)
	if !got.Before(end) {
		log.waited(end.Sub(began))
		if err == nil {
			_ = h.Unlock(unlockCtx) // the measurement is over
		}
		return false
	}
	log.waited(got.Sub(began))
	if err != nil {
		f.failures.add("lock", err)
		return true
	}
	log.begin(worker, got)
	time.Sleep(time.Millisecond)
	log.end(worker)
	if err := h.Unlock(unlockCtx); err != nil && ctx.Err() == nil {
		f.failures.add("unlock", err)
	}
	return true
}

// turns keeps the record of who had the lock when.
type turns struct {
	watch watch

	mu        sync.Mutex
	counts    []int         // turns of each worker
	longest   time.Duration // of all waits
	released  time.Time     // when the last turn ended, zero before the first
	releaser  int           // and whose it was
	gaps      []time.Duration
	otherGaps []time.Duration // those between two workers
	selfGaps  int             // number of the others
}

func newTurns(workers int) *turns { return &turns{counts: make([]int, workers)} }

// waited records a wait, whether it ended well or not.
func (t *turns) waited(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.longest = max(t.longest, d)
}

// begin records that the worker has the lock since a time.
func (t *turns) begin(worker int, since time.Time) {
	t.watch.enter()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counts[worker]++
	if t.released.IsZero() {
		return
	}
	gap := since.Sub(t.released)
	t.gaps = append(t.gaps, gap)
	if worker == t.releaser {
		t.selfGaps++
	} else {
		t.otherGaps = append(t.otherGaps, gap)
	}
}

// end records that the worker is about to give the lock up.
func (t *turns) end(worker int) {
	t.watch.leave()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.releaser, t.released = worker, time.Now()
}

// report works the figures out.
func (t *turns) report(to figures, used spent) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var n, never int
	for _, c := range t.counts {
		n += c
		if c == 0 {
			never++
		}
	}
	total := float64(n)
	to["rate"] = total / used.seconds
	to["handOvers"] = float64(len(t.otherGaps)) / used.seconds
	to["gapP50"], to["gapP99"] = percentile(t.gaps, 0.50), percentile(t.gaps, 0.99)
	to["otherP50"], to["otherP99"] = percentile(t.otherGaps, 0.50), percentile(t.otherGaps, 0.99)
	to["self"] = per(float64(t.selfGaps)*100, float64(len(t.gaps)))
	to["jain"] = jain(t.counts)
	to["longest"] = millis(t.longest)
	to["never"] = float64(never)
	to["violations"] = float64(t.watch.violations.Load())
	to["sent"], to["all"] = per(used.sent, total), per(used.all, total)
	to["client"], to["server"] = per(used.client*1000, total), per(used.server*1000, total)
}
