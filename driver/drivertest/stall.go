package drivertest

import (
	"sync"
	"testing"
	"time"
)

// maxAttempts is how often a test is run on a machine that stands still.
const maxAttempts = 3

// attempts runs a test on a harness. If it fails while this process was kept
// from running for so long that short grants and tickets may have ended for no
// other reason, that says nothing, and it is run again on another harness.
func attempts(t *testing.T, open func(t *testing.T) *Harness, run func(*Harness) error) error {
	t.Helper()
	for attempt := 1; ; attempt++ {
		h := open(t)
		stalled, err := stallsDuring(func() error { return run(h) })
		if err == nil || stalled < h.unit()/4 || attempt == maxAttempts {
			return err
		}
		t.Logf("attempt %d failed, but this machine stood still for %v meanwhile: %v", attempt, stalled, err)
	}
}

// stallsDuring runs f and returns the longest time for which nothing else ran
// that wanted to.
func stallsDuring(f func() error) (time.Duration, error) {
	var longest time.Duration
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		const tick = 10 * time.Millisecond
		for last := time.Now(); ; {
			_, stopped := awaitFor(stop, tick)
			now := time.Now()
			longest = max(longest, now.Sub(last)-tick)
			last = now
			if stopped {
				return
			}
		}
	}()
	end := sync.OnceFunc(func() {
		close(stop)
		<-done
	})
	defer end() // f may end this goroutine
	err := f()
	end()
	return longest, err
}
