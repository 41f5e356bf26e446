package main

import (
	"context"
	"fmt"
	"time"
)

// uncontended is W1: one goroutine takes a lock and gives it up again, each
// time of a new key; then again and again of the same key, with an extension
// in between where the row has one. The figure to look at is the time of a
// pair, acquire and release. Much of it is the kernel's choice of a core for
// each side, which stays for a whole process, so it takes many rounds.
func (f *run) uncontended(ctx context.Context) error {
	const warm, pairs = 100, 3000
	n := scaledCount(pairs, f.scale, 10)
	keys := prefix(w1)
	for i := range warm {
		f.pair(ctx, fmt.Sprintf("%swarm-%d", keys, i%10), true)
	}
	var total, acquire, release, same, extend []time.Duration
	before, err := f.read(ctx)
	if err != nil {
		return err
	}
	for i := range n {
		if t, ok := f.pair(ctx, fmt.Sprint(keys, i), false); ok {
			total = append(total, t.acquire+t.release)
			acquire, release = append(acquire, t.acquire), append(release, t.release)
		}
	}
	after, err := f.read(ctx)
	if err != nil {
		return err
	}
	for range n / 3 {
		if t, ok := f.pair(ctx, keys+"same", true); ok {
			same = append(same, t.acquire+t.release)
			if t.extend > 0 {
				extend = append(extend, t.extend)
			}
		}
	}
	f.figures["pairP50"] = percentile(total, 0.50)
	f.figures["pairP95"] = percentile(total, 0.95)
	f.figures["pairP99"] = percentile(total, 0.99)
	f.figures["acquireP50"] = percentile(acquire, 0.50)
	f.figures["releaseP50"] = percentile(release, 0.50)
	f.figures["sameP50"] = percentile(same, 0.50)
	f.figures["extendP50"] = percentile(extend, 0.50)
	f.figures["sent"] = after.since(before).sent / float64(n)
	return nil
}

// times are those of one pair. The extension is zero if there was none.
type times struct {
	acquire, extend, release time.Duration
}

// pair takes a lock and gives it up. It returns false if one of them failed.
func (f *run) pair(ctx context.Context, key string, extend bool) (t times, ok bool) {
	began := time.Now()
	h, err := f.locker.TryLock(ctx, 0, key, f.ttl)
	if err != nil {
		f.failures.add("lock", err)
		return t, false
	}
	t.acquire = time.Since(began)
	if e, can := h.(extender); can && extend {
		began = time.Now()
		if err := e.Extend(ctx, f.ttl); err != nil {
			f.failures.add("extend", err)
		}
		t.extend = time.Since(began)
	}
	began = time.Now()
	if err := h.Unlock(ctx); err != nil {
		f.failures.add("unlock", err)
		return t, false
	}
	t.release = time.Since(began)
	return t, true
}
