package sqlitelock_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
)

func harness(tb testing.TB) *drivertest.Harness {
	path := file(tb)
	unit, window := 300*time.Millisecond, time.Second
	if raceEnabled {
		unit, window = time.Second, 3*time.Second
	}
	return &drivertest.Harness{
		Unit: unit,
		Open: func(t testing.TB) driver.Backend {
			b, err := sqlitelock.New(path, &sqlitelock.Options{LivenessWindow: window})
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
	}
}

func TestConformance(t *testing.T) {
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return harness(t) })
}

func TestOperations(t *testing.T) {
	t.Parallel()
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness { return harness(t) })
		})
	}
}
