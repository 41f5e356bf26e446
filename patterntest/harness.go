package patterntest

import (
	"context"
	"testing"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver/drivertest"
)

// Over is the configuration for a store that has a harness for the conformance
// suite of backends.
func Over(harness func(tb testing.TB) *drivertest.Harness) *Config {
	return &Config{Open: func(tb testing.TB) func(*dlm.LockConfig) *dlm.Manager {
		h := harness(tb)
		return func(cfg *dlm.LockConfig) *dlm.Manager {
			m, err := dlm.NewManager(h.Open(tb), cfg)
			if err != nil {
				tb.Fatal(err)
			}
			tb.Cleanup(func() {
				if err := m.Close(context.Background()); err != nil {
					tb.Error(err)
				}
			})
			return m
		}
	}}
}
