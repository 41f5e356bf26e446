//go:build !race

package sqlitelock_test

const raceEnabled = false
