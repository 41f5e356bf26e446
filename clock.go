package dlm

import (
	"sync/atomic"
	"time"
)

// instant is a moment on a manager's own clock: the time since the manager was
// made, on the monotonic clock, plus whatever the machine was suspended since.
// Wall clocks play no part.
type instant = time.Duration

// clock tells the time of one manager.
type clock struct {
	base time.Time
	// suspended is how long the machine has been suspended since it booted,
	// or nil where the system does not tell.
	suspended func() time.Duration
	asleep    time.Duration // suspended() at base

	// The last reading of suspended, which costs system calls, and when that
	// was, by time.Since(base).
	lastSlept, lastRead *atomic.Int64
}

// staleness is how old a reading of suspended may be.
const staleness = time.Millisecond

func newClock() clock {
	c := clock{base: time.Now(), suspended: systemSuspended, lastSlept: new(atomic.Int64), lastRead: new(atomic.Int64)}
	if c.suspended != nil {
		c.asleep = c.suspended()
	}
	return c
}

// now is the present instant. It may lag behind for a millisecond after the
// machine was suspended.
func (c *clock) now() instant {
	awake := time.Since(c.base)
	if awake-time.Duration(c.lastRead.Load()) < staleness {
		return awake + time.Duration(c.lastSlept.Load())
	}
	return c.exactly()
}

// exactly is the present instant, whatever happened just before.
func (c *clock) exactly() instant {
	awake := time.Since(c.base)
	slept := c.slept()
	c.lastSlept.Store(int64(slept))
	c.lastRead.Store(int64(awake))
	return awake + slept
}

// slept is how long the machine has been suspended since the manager was made.
// Less than the error of the measurement counts as nothing.
func (c *clock) slept() time.Duration {
	if c.suspended == nil {
		return 0
	}
	if d := c.suspended() - c.asleep; d > 2*time.Millisecond {
		return d
	}
	return 0
}

// time is the local time of an instant, if the machine is not suspended until
// then.
func (c *clock) time(i instant) time.Time {
	c.now()
	return c.base.Add(i - time.Duration(c.lastSlept.Load()))
}
