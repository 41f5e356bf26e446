//go:build !linux && !darwin

package sqlitelock

import (
	"errors"
	"fmt"
	"runtime"
)

func systemClock() (clock, error) {
	return clock{}, fmt.Errorf("%w: no clock on %s that leases could be measured by", errors.ErrUnsupported, runtime.GOOS)
}
