package sqlitelock

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// firstTimeNamespace is the time namespace of the machine itself. In another
// one the clock may be off.
const firstTimeNamespace = "time:[4026531834]"

func systemClock() (clock, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return clock{}, fmt.Errorf("cannot tell this boot of the machine from others: %w", err)
	}
	id = bytes.TrimSpace(id)
	if len(id) == 0 {
		return clock{}, errors.New("cannot tell this boot of the machine from others: the boot id is empty")
	}
	boot := string(id)
	// Kernels before 5.6 have no time namespaces and no such link.
	if ns, err := os.Readlink("/proc/self/ns/time"); err == nil && ns != firstTimeNamespace {
		boot += " " + ns
	}
	return newClock(boot, unix.CLOCK_BOOTTIME)
}
