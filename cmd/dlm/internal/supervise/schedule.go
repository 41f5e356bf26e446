//go:build unix

package supervise

import (
	"syscall"
	"time"
)

// Instant is a moment on the boot clock in nanoseconds. It means the same in
// all processes of a machine.
type Instant int64

// Never is no moment at all.
const Never Instant = 0

// Add returns the moment d later.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Sub returns the time from j to i.
func (i Instant) Sub(j Instant) time.Duration { return time.Duration(i - j) }

// Schedule says by when a command must be gone.
type Schedule struct {
	// Term is when the command gets SIGTERM; it is final from then on.
	Term Instant
	// Kill is when everything that is left gets SIGKILL.
	Kill Instant
	// Hard is when the caller's process takes over the killing from a shim
	// that has not done it. It leaves the shim some time after Kill.
	Hard Instant
}

// allows says whether a command may still be started.
func (s Schedule) allows(now Instant) bool { return now < s.Term && now < s.Kill }

// Spec is what to run.
type Spec struct {
	// Path is the file to execute; see [LookPath].
	Path string
	// Args are the arguments, the name of the command first.
	Args []string
	// Env is the environment. The command inherits everything else: working
	// directory, standard input and outputs, and all descriptors of the
	// caller that are not marked close-on-exec.
	Env []string
	// Schedule is the first schedule.
	Schedule Schedule
	// Leftover is how long processes that the command has left behind live on
	// after their SIGTERM.
	Leftover time.Duration
	// Foreground makes the command's process group the foreground group of
	// the controlling terminal.
	Foreground bool
}

// EventKind is the kind of an [Event].
type EventKind uint8

// What happens to a command.
const (
	// Stopped: the command was stopped by Signal.
	Stopped EventKind = iota + 1
	// Ending: the command was sent SIGTERM because of the schedule.
	Ending
	// Exited: the command has ended with Status. Its descendants may live on.
	Exited
	// Leftovers: processes that the command left behind were sent SIGTERM.
	Leftovers
	// Stuck: process Pid could not be killed, because of Err.
	Stuck
	// ShimDied: the shim is dead, and all processes are being killed.
	ShimDied
	// Done: no process is left. It is the last event.
	Done
)

// Event is news of a command.
type Event struct {
	Kind   EventKind
	Signal syscall.Signal
	Status syscall.WaitStatus
	Pid    int
	Err    error
}
