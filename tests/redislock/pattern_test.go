package redislock_test

import (
	"testing"

	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/patterntest"
	"github.com/go-dlm/dlm/tests/servers"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	patterntest.Run(t, patterntest.Over(func(tb testing.TB) *drivertest.Harness {
		return harness(tb, single(s), redislock.Options{})
	}))
}

func TestPatternsQuorum(t *testing.T) {
	t.Parallel()
	nodes := servers.StartMasters(t, 3, nil)
	patterntest.Run(t, patterntest.Over(func(tb testing.TB) *drivertest.Harness { return quorumHarness(tb, nodes) }))
}
