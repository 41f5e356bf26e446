//go:build unix && !linux

package supervise

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the present moment. On macOS the clock also counts the time that
// the machine is suspended; elsewhere that time may be missing.
func Now() Instant {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return Instant(ts.Nano())
}

// alarm bounds the time-out of poll, and so wakes at a given moment. It looks
// at the clock twice a second in case the machine was suspended.
type alarm struct {
	fd int // none: poll ignores negative descriptors
	at Instant
}

func newAlarm() (*alarm, error) { return &alarm{fd: -1}, nil }

func (a *alarm) set(at Instant) { a.at = at }

func (a *alarm) timeout() time.Duration {
	if a.at == Never {
		return -1
	}
	return min(max(a.at.Sub(Now()), 0), 500*time.Millisecond)
}

func (a *alarm) clear() {}
