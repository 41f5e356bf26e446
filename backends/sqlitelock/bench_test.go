package sqlitelock_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver/drivertest"
)

func BenchmarkBackend(b *testing.B) {
	drivertest.Bench(b, func(b *testing.B) *drivertest.Harness { return harness(b) })
}

// BenchmarkProcessHandOver is the way from a release in one process to the waiter in
// another, from just before the call to just after the answer that confirms
// the grant.
func BenchmarkProcessHandOver(b *testing.B) {
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
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
}
