package sqlitelock_test

import (
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
)

func TestConformance(t *testing.T) {
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		path := file(t)
		return &drivertest.Harness{
			Open: func(t testing.TB) driver.Backend {
				b, err := sqlitelock.New(path, &sqlitelock.Options{LivenessWindow: time.Second})
				if err != nil {
					t.Fatal(err)
				}
				return b
			},
		}
	})
}
