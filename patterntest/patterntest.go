// Package patterntest is the suite that the patterns of package dlm (semaphores,
// read-write locks, locks on several keys, elections, scheduled jobs) pass on every
// backend.
package patterntest

import (
	"testing"

	"github.com/go-dlm/dlm"
)

// Config says what the suite runs on.
type Config struct {
	// Open makes an empty store, or an empty part of one, and returns what makes a
	// manager over it with a client of its own, as another process would be. A nil
	// configuration means the defaults. Managers are closed when the test ends.
	Open func(tb testing.TB) (newManager func(cfg *dlm.LockConfig) *dlm.Manager)
}

// pattern is the cases of one pattern.
type pattern struct {
	name string
	run  func(t *testing.T, cfg *Config)
}

// patterns are all there are.
var patterns = []pattern{
	{"Semaphore", semaphores},
	{"ReadWriteLock", readWriteLocks},
	{"MultiLock", multiLocks},
	{"LeaderElection", elections},
	{"Once", onces},
}

// Run runs the suite, each case as a parallel subtest of t.
func Run(t *testing.T, cfg *Config) {
	t.Helper()
	for _, p := range patterns {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			p.run(t, cfg)
		})
	}
}
