package sqlitelock

import (
	"fmt"

	"golang.org/x/sys/unix"
)

func systemClock() (clock, error) {
	boot, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return clock{}, fmt.Errorf("cannot tell this boot of the machine from others: %w", err)
	}
	// On macOS this clock goes on while the machine sleeps.
	return newClock(boot, unix.CLOCK_MONOTONIC_RAW)
}
