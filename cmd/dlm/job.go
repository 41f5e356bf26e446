package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"
)

const (
	// withdrawPatience and leavePatience bound what happens between a signal
	// in the wait and the end of the process. Together they are below 1s.
	withdrawPatience = 550 * time.Millisecond
	leavePatience    = 150 * time.Millisecond
	// storePatience bounds a release, and a renewal out of turn.
	storePatience = 5 * time.Second
)

// job is one `dlm run`.
type job struct {
	*app
	opts    runOptions
	key     string
	args    []string
	signals chan os.Signal
	renewed chan struct{} // has room for one

	lock   *dlm.Lock
	limits limits
	sched  supervise.Schedule // the last one
	proc   *supervise.Process
	tty    *supervise.Terminal // nil without a controlling terminal

	status  syscall.WaitStatus // of the command
	exited  bool               // status is known
	stopped bool               // the command was stopped because of the schedule
	crashed bool               // the command was killed because its supervisor died
	lost    bool               // the lock was lost before all had ended
	tellTTY bool               // the command died of Ctrl-C at the terminal

	mu       sync.Mutex // guards renewErr
	renewErr error      // of the last renewal
}

func newJob(a *app, opts runOptions, key string, args []string) *job {
	return &job{
		app: a, opts: opts, key: key, args: args,
		signals: make(chan os.Signal, 32),
		renewed: make(chan struct{}, 1),
	}
}

// run is the whole job. The error carries the exit code.
func (j *job) run(ctx context.Context, open opener) error {
	signal.Notify(j.signals, heeded(append(slices.Clone(endings), syscall.SIGUSR1, syscall.SIGUSR2)...)...)
	defer signal.Stop(j.signals)
	m, err := j.acquire(ctx, open)
	if err != nil {
		return err
	}
	err = j.supervise(ctx)
	closeManager(m, closePatience)
	if j.tellTTY {
		dieOfInterrupt()
	}
	return err
}

// Observe implements [dlm.Observer].
func (j *job) Observe(e dlm.Event) {
	switch e.Kind {
	case dlm.EventWaiting:
		j.notice("waiting for %s; to see who holds it: dlm get %s", j.opts.describe(j.key), shellQuote(j.key))
	case dlm.EventExtended:
		if j.setRenewErr(nil) != nil {
			j.notice("%s was renewed", j.opts.describe(j.key))
		}
		select {
		case j.renewed <- struct{}{}:
		default:
		}
	case dlm.EventExtendFailed:
		if j.setRenewErr(e.Err) == nil {
			j.notice("%s could not be renewed, and is held for %v more: %v; trying again",
				j.opts.describe(j.key), round(e.Margin), e.Err)
		}
	}
}

// setRenewErr keeps the error of the last renewal and returns the one before.
func (j *job) setRenewErr(err error) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	old := j.renewErr
	j.renewErr = err
	return old
}

// notice says something that is no error.
func (j *job) notice(format string, args ...any) {
	if !j.opts.quiet {
		j.say(format, args...)
	}
}

// acquire opens the store and takes the lock. A signal ends it within a second,
// whatever the store does.
func (j *job) acquire(parent context.Context, open opener) (*dlm.Manager, error) {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	type result struct {
		m    *dlm.Manager
		lock *dlm.Lock
		err  error
	}
	results := make(chan result, 1)
	go func() {
		m, err := open(&dlm.LockConfig{Observer: j})
		if err != nil {
			results <- result{err: err}
			return
		}
		lock, err := j.take(ctx, m)
		results <- result{m, lock, err}
	}()
	for {
		select {
		case r := <-results:
			if r.err == nil {
				j.lock = r.lock
				return r.m, nil
			}
			if r.m != nil {
				closeManager(r.m, closePatience)
			}
			return nil, r.err
		case sig := <-j.signals:
			if !slices.Contains(endings, sig) {
				continue
			}
			cause := signalError{sig.(syscall.Signal)}
			cancel(cause)
			timer := time.NewTimer(withdrawPatience)
			defer timer.Stop()
			select {
			case r := <-results:
				if r.m != nil {
					closeManager(r.m, leavePatience) // and release, if the lock came at last
				}
			case <-timer.C:
			}
			return nil, exitWith(codeOf(cause), "%v while waiting for %s; the command was not started",
				cause, j.opts.describe(j.key))
		}
	}
}

// take takes the lock.
func (j *job) take(ctx context.Context, m *dlm.Manager) (*dlm.Lock, error) {
	if j.opts.wait > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, j.opts.wait)
		defer stop()
	}
	lock, err := m.Acquire(ctx, j.key, j.opts.ttl, &j.opts.acq)
	if err == nil {
		return lock, nil
	}
	if held, ok := errors.AsType[*dlm.LockConflictError](err); ok {
		return nil, exitWith(exitNotAcquired, "not acquired: %s; the command was not started; to see more: dlm get %s",
			j.whoHolds(held), shellQuote(j.key))
	}
	if limit, ok := errors.AsType[*dlm.LimitError](err); ok {
		return nil, usageError("%s is in use with --slots %d, not %d; all must ask for the same number",
			quote(j.key), limit.Have, limit.Want)
	}
	return nil, classify(err)
}

// whoHolds says why the lock was refused.
func (j *job) whoHolds(held *dlm.LockConflictError) string {
	s := j.opts.describe(j.key) + " is not free"
	if held.Holder == "" {
		s += ", others wait for it"
	} else {
		s += ", it is held by " + quote(held.Holder)
	}
	if j.opts.wait > 0 {
		s += fmt.Sprintf(", and the wait of %v is over", j.opts.wait)
	}
	return s
}

// supervise runs the command under the lock, and releases the lock when all
// processes are gone.
func (j *job) supervise(ctx context.Context) error {
	j.limits = newLimits(j.lock.TTL, j.opts.grace)
	path, err := supervise.LookPath(j.args[0])
	if err == nil {
		err = j.start(ctx, path)
	}
	if err != nil {
		return j.notStarted(err)
	}
	j.loop(ctx)
	j.restoreTerminal()
	return j.finish()
}

// start starts the command.
func (j *job) start(ctx context.Context, path string) error {
	// A lock that was handed over to a waiter may have little time left until
	// its first renewal.
	if time.Until(j.lock.Deadline()) < j.lock.TTL/3*2 {
		ctx, cancel := context.WithTimeout(ctx, storePatience)
		defer cancel()
		if err := j.lock.Extend(ctx, j.lock.TTL); err != nil && j.lock.Err() != nil {
			return j.lock.Err()
		}
	}
	j.sched = j.limits.schedule(j.lock)
	j.tty = supervise.OpenTerminal()
	signal.Notify(j.signals, heeded(syscall.SIGWINCH, syscall.SIGTSTP, syscall.SIGCONT)...)
	proc, err := supervise.Start(supervise.Spec{
		Path:       path,
		Args:       j.args,
		Env:        j.environ(),
		Schedule:   j.sched,
		Leftover:   j.limits.notice(),
		Foreground: j.tty != nil && supervise.IsForeground(0),
	})
	j.proc = proc
	return err
}

// notStarted releases the lock of a command that was not started, and says why
// it was not.
func (j *job) notStarted(err error) error {
	lost := j.lock.Err()
	j.release()
	name := quote(j.args[0])
	start, isStart := errors.AsType[*supervise.StartError](err)
	switch {
	case isStart && start.Err == syscall.ENOENT && fileExists(start.Path):
		return exitWith(exitCannotRun, "%s: the interpreter that it names was not found", name)
	case errors.Is(err, fs.ErrNotExist):
		return exitWith(exitNotFound, "%s: command not found", name)
	case errors.Is(err, syscall.ENOEXEC):
		return exitWith(exitCannotRun, "%s: cannot be executed: no program, nor a script that begins with #!", name)
	case isStart, errors.Is(err, fs.ErrPermission):
		return exitWith(exitCannotRun, "%s: cannot be executed: %w", name, err)
	case lost != nil:
		return exitWith(exitLost, "%w; the command was not started", lost)
	case errors.Is(err, supervise.ErrTooLate):
		return exitWith(exitLost, "%s was not renewed in time; the command was not started", j.opts.describe(j.key))
	}
	return exitWith(exitInternal, "%w", err)
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// environ is the environment of the command.
func (j *job) environ() []string {
	// The deadline is a moment on the monotonic clock; the command gets what
	// the wall clock will show then.
	deadline := time.Now().Add(time.Until(j.lock.Deadline())).UTC()
	vars := []string{
		"DLM_KEY=" + j.key,
		"DLM_TOKEN=" + strconv.FormatInt(j.lock.Token, 10),
		"DLM_DEADLINE=" + deadline.Format(time.RFC3339Nano),
	}
	env := slices.DeleteFunc(os.Environ(), func(entry string) bool {
		return slices.ContainsFunc(vars, func(v string) bool {
			return strings.HasPrefix(entry, v[:strings.IndexByte(v, '=')+1])
		})
	})
	return append(env, vars...)
}

// loop accompanies the command until no process is left.
func (j *job) loop(ctx context.Context) {
	lost, cancelled := j.lock.Done(), ctx.Done()
	for {
		select {
		case e, more := <-j.proc.Events():
			if !more {
				return
			}
			j.happened(e)
		case sig := <-j.signals:
			j.forward(sig.(syscall.Signal))
		case <-j.renewed:
			if !j.lost {
				j.reschedule(j.limits.schedule(j.lock))
			}
		case <-lost:
			lost = nil
			j.lose(j.lock.Err())
		case <-cancelled:
			cancelled = nil
			j.proc.Signal(syscall.SIGTERM)
		}
	}
}

func (j *job) reschedule(s supervise.Schedule) {
	j.sched = s
	j.proc.Reschedule(s)
}

// happened takes note of an event.
func (j *job) happened(e supervise.Event) {
	switch e.Kind {
	case supervise.Stopped:
		j.suspended(e.Signal)
	case supervise.Ending:
		j.stopped = true
		if !j.lost {
			j.say("%s", j.notRenewed())
		}
	case supervise.Exited:
		j.status, j.exited = e.Status, true
		j.tellTTY = e.Status.Signaled() && e.Status.Signal() == syscall.SIGINT && j.inForeground()
	case supervise.Leftovers:
		j.notice("the command has ended, and left processes behind; they are stopped before the lock is released")
	case supervise.Stuck:
		j.say("process %d cannot be killed: %v; waiting for it to end", e.Pid, e.Err)
	case supervise.ShimDied:
		if j.exited {
			break
		}
		if supervise.Now() >= j.sched.Term {
			j.stopped = true
			j.say("the supervisor of the command did not stop it in time; killing the command")
		} else {
			j.crashed = true
			j.say("the supervisor of the command was killed; killing the command")
		}
	}
}

// notRenewed says that the schedule has come to its end.
func (j *job) notRenewed() string {
	s := j.opts.describe(j.key) + " was not renewed in time; stopping the command before somebody else can have it"
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.renewErr != nil {
		s += fmt.Sprintf(": %v", j.renewErr)
	}
	return s
}

// lose stops the command after the loss of the lock.
func (j *job) lose(err error) {
	j.lost = true
	var reason dlm.LostReason
	if loss, ok := errors.AsType[*dlm.LostError](err); ok {
		reason = loss.Reason
	}
	j.reschedule(j.limits.lost(reason))
	why := map[dlm.LostReason]string{
		dlm.ReasonExpired: "it was not renewed in time",
		dlm.ReasonGone:    "somebody has removed it from the store",
		dlm.ReasonTaken:   "somebody has removed it from the store, and somebody else holds it",
		dlm.ReasonSession: "the store has ended the session",
	}[reason]
	if why == "" {
		why = err.Error()
	}
	j.say("lost %s (token %d): %s; stopping the command", j.opts.describe(j.key), j.lock.Token, why)
}

// finish releases the lock when all processes are gone, and turns what happened
// into the exit code.
func (j *job) finish() error {
	lost := j.lost || j.lock.Err() != nil
	if !lost {
		err := j.release()
		if loss, ok := errors.AsType[*dlm.LostError](err); ok && loss.Reason != dlm.ReasonExpired {
			// It was taken away while the command ran, and not noticed.
			lost = true
			j.say("lost %s (token %d) before the command had ended: %v", j.opts.describe(j.key), j.lock.Token, loss)
		} else if err != nil {
			j.say("%s could not be released, and becomes free after %v at most: %v",
				j.opts.describe(j.key), j.lock.TTL, err)
		}
	}
	switch {
	case lost, j.stopped:
		j.tellTTY = false
		return &exitError{code: exitLost}
	case j.crashed, !j.exited:
		return &exitError{code: exitInternal} // said before
	case j.status.Signaled():
		return &exitError{code: exitSignal + int(j.status.Signal())}
	case j.status.ExitStatus() != 0:
		return &exitError{code: j.status.ExitStatus()}
	}
	return nil
}

func (j *job) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), storePatience)
	defer cancel()
	return j.lock.Release(ctx)
}
