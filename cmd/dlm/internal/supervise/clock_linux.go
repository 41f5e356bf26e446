package supervise

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the present moment.
func Now() Instant {
	var ts unix.Timespec
	// It cannot fail: every kernel that Go supports has the clock.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return Instant(ts.Nano())
}

// alarm makes a file descriptor readable at a moment on the boot clock. Timers
// of Go, and time-outs of poll, stand still while the machine is suspended.
type alarm struct {
	fd int
	at Instant
}

func newAlarm() (*alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	return &alarm{fd: fd}, err
}

// set arms the alarm, or disarms it if at is [Never].
func (a *alarm) set(at Instant) {
	if at == a.at {
		return
	}
	a.at = at
	var spec unix.ItimerSpec
	if at != Never {
		spec.Value = unix.NsecToTimespec(max(int64(at), 1))
	}
	_ = unix.TimerfdSettime(a.fd, unix.TFD_TIMER_ABSTIME, &spec, nil)
}

// timeout is for how long poll may wait at most.
func (a *alarm) timeout() time.Duration { return -1 }

// clear makes the descriptor unreadable after the alarm has gone off.
func (a *alarm) clear() {
	var count [8]byte
	if n, _ := unix.Read(a.fd, count[:]); n == len(count) && binary.NativeEndian.Uint64(count[:]) > 0 {
		a.at = Never
	}
}
