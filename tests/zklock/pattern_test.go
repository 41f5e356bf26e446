package zklock_test

import (
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/patterntest"
	"github.com/go-dlm/dlm/tests/servers"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	nodes := servers.StartZooKeeper(t, nil)
	patterntest.Run(t, patterntest.Over(func(tb testing.TB) *drivertest.Harness { return harness(tb, nodes) }))
}
