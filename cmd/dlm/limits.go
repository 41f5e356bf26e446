package main

import (
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"
)

const (
	maxGrace = 10 * time.Second
	maxLead  = 2 * time.Second
	// shortNotice is the time between the SIGTERM and the SIGKILL of a command
	// whose lock was taken away. Somebody else may hold it already, so it is
	// just enough to remove a temporary file.
	shortNotice = 250 * time.Millisecond
)

// limits say how long before a lock's deadline its command is stopped.
//
// A lock is renewed every third of its TTL, so without failures its deadline is
// never nearer than two thirds of it. A grace of half the TTL leaves a sixth of
// it for renewals to be late or to be repeated.
type limits struct {
	grace time.Duration // SIGTERM
	lead  time.Duration // SIGKILL
}

// newLimits returns the limits for a TTL. A grace of 0 means the default.
func newLimits(ttl, grace time.Duration) limits {
	if grace == 0 {
		grace = min(ttl/3, maxGrace)
	}
	return limits{grace: grace, lead: min(ttl/12, maxLead)}
}

// notice is the time between SIGTERM and SIGKILL.
func (l limits) notice() time.Duration { return max(l.grace-l.lead, 0) }

// schedule is when to stop the command if the lock is not renewed again.
func (l limits) schedule(lock *dlm.Lock) supervise.Schedule {
	// The clock is read first: what passes meanwhile makes it earlier.
	now := supervise.Now()
	deadline := now.Add(time.Until(lock.Deadline()))
	return supervise.Schedule{
		Term: deadline.Add(-l.grace),
		Kill: deadline.Add(-l.lead),
		Hard: deadline.Add(-l.lead / 2),
	}
}

// lost is when to stop the command of a lock that was lost.
func (l limits) lost(reason dlm.LostReason) supervise.Schedule {
	now := supervise.Now()
	s := supervise.Schedule{Term: now, Kill: now.Add(min(shortNotice, l.notice()))}
	switch reason {
	case dlm.ReasonGone, dlm.ReasonTaken, dlm.ReasonSession:
	default:
		// The deadline has passed, and with it all notice.
		s.Kill = now
	}
	s.Hard = s.Kill.Add(shortNotice)
	return s
}
