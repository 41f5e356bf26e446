package consullock_test

import (
	"testing"

	"github.com/go-dlm/dlm/backends/consullock"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/patterntest"
	"github.com/go-dlm/dlm/tests/servers"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	list := servers.StartConsulCluster(t, 1, nil)
	patterntest.Run(t, patterntest.Over(func(tb testing.TB) *drivertest.Harness {
		return harness(tb, list, consullock.Options{})
	}))
}
