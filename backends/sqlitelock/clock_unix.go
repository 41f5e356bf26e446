//go:build linux || darwin

package sqlitelock

import (
	"fmt"

	"golang.org/x/sys/unix"
)

func newClock(boot string, id int32) (clock, error) {
	c := clock{boot: boot, now: func() (int64, error) {
		var ts unix.Timespec
		if err := unix.ClockGettime(id, &ts); err != nil {
			return 0, fmt.Errorf("cannot read the clock that leases are measured by: %w", err)
		}
		return ts.Nano(), nil
	}}
	_, err := c.now()
	return c, err
}
