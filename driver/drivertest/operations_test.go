package drivertest

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/memlock"
)

// exactMemory is a harness whose tickets lapse between whole milliseconds.
func exactMemory(t testing.TB) *Harness {
	store := memlock.NewStore()
	return &Harness{exact: true, Open: func(testing.TB) driver.Backend {
		b, err := memlock.New(store, &memlock.Options{LivenessWindow: time.Second + 20*time.Microsecond})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}}
}

// FuzzOperations compares memlock, the reference backend, with the model in
// every detail, down to the nanosecond.
func FuzzOperations(f *testing.F) {
	f.Add([]byte{0, 0, 1, 0, 1, 1, 8, 0, 0, 0, 1, 1})
	for seed := range 64 {
		script := make([]byte, 200*opBytes)
		x := uint32(seed)
		for i := range script {
			x = x*1664525 + 1013904223
			script[i] = byte(x >> 24)
		}
		f.Add(script)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		synctest.Test(t, func(t *testing.T) {
			if err := operate(t, exactMemory(t), script[:min(len(script), 2000*opBytes)]); err != nil {
				t.Error(err)
			}
		})
	})
}

func TestOperations(t *testing.T) {
	for _, s := range sound {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(20) {
				synctest.Test(t, func(t *testing.T) {
					Operations(t, seed, func(t *testing.T) *Harness { return overMemory(t, s.wrap) })
				})
			}
		})
	}
}

// TestOperationsFindBreakages checks that random operations find what is
// broken, without any case about it.
func TestOperationsFindBreakages(t *testing.T) {
	for _, b := range breakages {
		switch b.name {
		case "a release is lost", "tokens are reused", "the token is ignored", "a withdrawn ticket stays", "grants never expire",
			"a renewal shortens", "a try jumps the queue", "last come, first served", "a refreshed ticket loses its place",
			"dead waiters stay", "a refused try leaves a ticket", "shared is exclusive", "exclusive is shared", "one permit too many",
			"one permit too few", "any limit goes", "ForceRelease ignores the token", "losses are hidden", "Close releases":
		default:
			continue
		}
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			for seed := range byte(20) {
				var err error
				synctest.Test(t, func(t *testing.T) {
					h := exactMemory(t)
					open := h.Open
					wrap := b.wrap()
					h.Open = func(t testing.TB) driver.Backend { return wrap(open(t)) }
					script := make([]byte, 200*opBytes)
					x := uint32(seed) + 1000
					for i := range script {
						x = x*1664525 + 1013904223
						script[i] = byte(x >> 24)
					}
					err = operate(t, h, script)
				})
				if err != nil {
					t.Logf("seed %d: %v", seed, err)
					return
				}
			}
			t.Errorf("20 random runs did not find out that %s", b.name)
		})
	}
}
