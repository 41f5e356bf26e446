//go:build race

package sqlitelock_test

// raceEnabled says that the tests run under the race detector, which makes
// SQLite ten times as slow.
const raceEnabled = true
