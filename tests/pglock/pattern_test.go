package pglock_test

import (
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/patterntest"
	"github.com/go-dlm/dlm/tests/servers"
)

func patterns(t *testing.T, sh *shelf) {
	patterntest.Run(t, patterntest.Over(func(tb testing.TB) *drivertest.Harness { return sh.harness(tb.(*testing.T)) }))
}

func TestPatternsPg(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	patterns(t, newShelf(t, s, s.Addr(), unit, overPool(s.URL("postgres"))))
}

func TestPatternsPgAdvisory(t *testing.T) {
	t.Parallel()
	patterns(t, advisoryShelf(t, servers.StartPostgres(t, nil)))
}
