package dlm

import "time"

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
}

func newClock() clock {
	c := clock{base: time.Now(), suspended: systemSuspended}
	if c.suspended != nil {
		c.asleep = c.suspended()
	}
	return c
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

func (c *clock) now() instant { return time.Since(c.base) + c.slept() }

// time is the local time of an instant, if the machine is not suspended until
// then.
func (c *clock) time(i instant) time.Time { return c.base.Add(i - c.slept()) }
