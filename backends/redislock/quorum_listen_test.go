package redislock

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// TestEar shows when the news of three nodes are passed on.
func TestEar(t *testing.T) {
	type tale struct {
		after time.Duration
		node  int
		kind  driver.EventKind
	}
	const wake, lost = driver.EventWake, driver.EventLost
	const ms = time.Millisecond
	tests := []struct {
		name  string
		tales []tale
		want  []time.Duration
	}{
		{"a majority is believed at once", []tale{{0, 0, wake}, {5 * ms, 1, wake}}, []time.Duration{5 * ms}},
		{"one node is believed later", []tale{{0, 0, wake}}, []time.Duration{20 * ms}},
		{
			"the third node may tell of another wake-up",
			[]tale{{0, 0, wake}, {0, 1, wake}, {50 * ms, 2, wake}},
			[]time.Duration{0, 100 * ms},
		},
		{
			"another node after one alone",
			[]tale{{0, 0, wake}, {30 * ms, 2, wake}},
			[]time.Duration{20 * ms, 120 * ms},
		},
		{
			"the next wake-up",
			[]tale{{0, 0, wake}, {0, 1, wake}, {30 * ms, 0, wake}, {31 * ms, 1, wake}},
			[]time.Duration{0, 31 * ms},
		},
		{
			"long after",
			[]tale{{0, 0, wake}, {0, 1, wake}, {time.Second, 2, wake}},
			[]time.Duration{0, 1020 * ms},
		},
		{"a loss needs a majority", []tale{{0, 0, lost}}, nil},
		{"which may take its time", []tale{{0, 0, lost}, {900 * ms, 2, lost}}, []time.Duration{900 * ms}},
		{"and is told once", []tale{{0, 0, lost}, {0, 1, lost}, {1 * ms, 2, lost}, {2 * ms, 0, lost}}, []time.Duration{0}},
		{"but not for ever", []tale{{0, 0, lost}, {1100 * ms, 2, lost}}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				var told []time.Duration
				e := &ear{
					q:      &Quorum{nodes: make([]*node, 3), majority: 2},
					handle: func(driver.Event) { told = append(told, time.Since(start)) },
					up:     make([]bool, 3), heard: make([]bool, 3), votes: make(map[news]*votes),
				}
				for _, tale := range test.tales {
					time.Sleep(time.Until(start.Add(tale.after)))
					synctest.Wait()
					e.hear(tale.node, driver.Event{Kind: tale.kind, Lease: driver.Lease{Key: "k", Owner: "o"}})
				}
				time.Sleep(5 * time.Second)
				synctest.Wait()
				e.close()
				if !slices.Equal(told, test.want) {
					t.Errorf("told after %v, want %v", told, test.want)
				}
				if n := len(e.votes); n != 0 {
					t.Errorf("%d news are kept", n)
				}
			})
		})
	}
}
