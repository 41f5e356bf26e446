package drivertest

import (
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/memlock"
)

// window is the liveness window of the in-memory backends: short enough to be
// waited for, long enough for a busy machine.
const window = time.Second

// overMemory returns a harness on a new in-memory store, whose backends are
// changed by wrap.
func overMemory(t testing.TB, wrap func(driver.Backend) driver.Backend) *Harness {
	store := memlock.NewStore()
	return &Harness{Open: func(testing.TB) driver.Backend {
		b, err := memlock.New(store, &memlock.Options{LivenessWindow: window})
		if err != nil {
			t.Fatal(err)
		}
		if wrap == nil {
			return b
		}
		return wrap(b)
	}}
}

// Some of these can do less than others, but none does anything wrong.
var sound = []struct {
	name string
	wrap func(driver.Backend) driver.Backend
}{
	{"memory", nil},
	{"without notifications", hidden(Hidden{Notifier: true})},
	{"unreadable", hidden(Hidden{Inspector: true})},
	{"without force", hidden(Hidden{Forcer: true})},
	{"bare", hidden(Hidden{Notifier: true, Inspector: true, Forcer: true})},
	{"exclusive only", func(b driver.Backend) driver.Backend {
		p := b.Properties()
		p.SharedMode, p.Permits = false, false
		return Intercept(b, Hooks{Properties: func() driver.Properties { return p }})
	}},
	{"wakes without handing over", wakeOnly},
}

func hidden(h Hidden) func(driver.Backend) driver.Backend {
	return func(b driver.Backend) driver.Backend { return Hide(b, h) }
}

func TestSoundBackends(t *testing.T) {
	for _, s := range sound {
		t.Run(s.name, func(t *testing.T) {
			RunSynctest(t, func(t *testing.T) *Harness { return overMemory(t, s.wrap) })
		})
	}
}

func TestSoundFreezing(t *testing.T) {
	RunSynctest(t, func(t *testing.T) *Harness {
		wrap, freeze := freezing(false)
		h := overMemory(t, wrap)
		h.Freeze = freeze
		return h
	})
}

func TestRealTime(t *testing.T) {
	if testing.Short() {
		t.Skip("takes real time")
	}
	Run(t, func(t *testing.T) *Harness { return overMemory(t, nil) })
}
