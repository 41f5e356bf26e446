package etcdlock_test

import (
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/patterntest"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	members := single(t)
	patterntest.Run(t, patterntest.Over(func(tb testing.TB) *drivertest.Harness { return harness(tb, members) }))
}
