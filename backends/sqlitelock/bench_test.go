package sqlitelock_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// quantiles reports the median and the 99th percentile.
func quantiles(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e3, "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100])/1e3, "p99-µs")
}

// BenchmarkPair is an acquisition and a release of a free key.
func BenchmarkPair(b *testing.B) {
	be := open(b, file(b), nil)
	var took []time.Duration
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		release(b, be, acquire(b, be, ask("payment:42", "owner")))
		took = append(took, time.Since(start))
	}
	quantiles(b, took)
}

// BenchmarkExtend is a batch of 100 renewals.
func BenchmarkExtend(b *testing.B) {
	be := open(b, file(b), nil)
	batch := renewals(b, be, 100)
	b.ReportAllocs()
	for b.Loop() {
		be.Extend(b.Context(), batch)
		if batch[0].Err != nil {
			b.Fatal(batch[0].Err)
		}
	}
}

// BenchmarkHandOver is the way from a release in one process to the waiter in
// another, from just before the call to just after the answer that confirms
// the grant.
func BenchmarkHandOver(b *testing.B) {
	path := file(b)
	be := open(b, path, nil)
	w := newWaiter(b.Context(), be, "m")
	defer w.close()
	lease := acquire(b, be, ask("k", "first"))
	relay := start(b, "relay", path)
	if got := relay.line(b); got != "ready" {
		b.Fatal(got)
	}
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		for len(inspect(b, be, "k").Waiters) == 0 { // until the other has queued
			time.Sleep(time.Millisecond)
		}
		released := time.Now().UnixNano()
		release(b, be, lease)
		at, err := strconv.ParseInt(strings.TrimPrefix(relay.line(b), "granted "), 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Duration(at-released))
		// The way back is not measured.
		next, queued := make(chan error, 1), make(chan struct{})
		go func() {
			var err error
			lease, err = w.lock(b.Context(), ask("k", "back"+strconv.Itoa(i)), func() { close(queued) })
			next <- err
		}()
		<-queued
		if _, err := relay.stdin.Write([]byte{'\n'}); err != nil {
			b.Fatal(err)
		}
		if err := <-next; err != nil {
			b.Fatal(err)
		}
	}
	quantiles(b, took)
}
