package dlm

import (
	"syscall"
	"time"
	"unsafe"
)

const (
	clockMonotonic = 1
	clockBoottime  = 7
)

// systemSuspended returns how long this machine has been suspended since it
// booted: CLOCK_BOOTTIME counts that time, CLOCK_MONOTONIC, which Go's timers
// follow, does not. The answer is never too high, as that would end locks
// early for no reason, and too low by a millisecond at most.
var systemSuspended = func() func() time.Duration {
	if _, ok := readClock(clockBoottime); !ok {
		return nil
	}
	return func() time.Duration {
		var least time.Duration
		for range 3 {
			before, _ := readClock(clockMonotonic)
			boot, _ := readClock(clockBoottime)
			after, _ := readClock(clockMonotonic)
			least = max(least, boot-after)
			if after-before < time.Millisecond {
				break
			}
		}
		return least
	}
}()

func readClock(id uintptr) (time.Duration, bool) {
	var ts syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0)
	return time.Duration(ts.Nano()), errno == 0
}
