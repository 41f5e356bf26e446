package patterntest_test

import (
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/patterntest"
)

func TestMain(m *testing.M) { drivertest.Main(m) }

// over runs the suite on memory, seen through a wrapper.
func over(t *testing.T, wrap func(driver.Backend) driver.Backend) {
	t.Parallel()
	patterntest.Run(t, patterntest.Over(func(testing.TB) *drivertest.Harness {
		store := memlock.NewStore()
		return &drivertest.Harness{Open: func(tb testing.TB) driver.Backend {
			b, err := memlock.New(store, &memlock.Options{LivenessWindow: time.Second})
			if err != nil {
				tb.Fatal(err)
			}
			return wrap(b)
		}}
	}))
}

func TestMemory(t *testing.T) {
	over(t, func(b driver.Backend) driver.Backend { return b })
}

// The suite runs on stores that can do less, too.
func TestRefusals(t *testing.T) {
	over(t, func(b driver.Backend) driver.Backend {
		return drivertest.Intercept(b, drivertest.Hooks{Properties: func() driver.Properties {
			p := b.Properties()
			p.SharedMode, p.Permits, p.FairQueue = false, false, false
			return p
		}})
	})
}

func TestWithoutAbilities(t *testing.T) {
	over(t, func(b driver.Backend) driver.Backend {
		return drivertest.Hide(b, drivertest.Hidden{Notifier: true, Inspector: true, Forcer: true})
	})
}
