package sqlitelock_test

import (
	"testing"

	"github.com/go-dlm/dlm/patterntest"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	patterntest.Run(t, patterntest.Over(harness))
}
