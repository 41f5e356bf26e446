//go:build unix

package supervise

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// shimArg is the first argument of a process that is a shim. The others
	// are the socket's descriptor, the file to execute, and its arguments.
	shimArg = "__supervise"
	// settle is how long processes that a command left behind may take to end
	// by themselves, such as the tee at the end of its output.
	settle = time.Second
	// killTick is how often what is being killed is looked for again, at first;
	// what cannot be killed is looked for less and less often, down to
	// maxKillTick.
	killTick    = 10 * time.Millisecond
	maxKillTick = time.Second
)

// Init must be the first thing that main does. It returns, unless this process
// is a shim: then it does the work of one, and ends the process.
func Init() {
	if len(os.Args) > 1 && os.Args[1] == shimArg {
		os.Exit(shimMain(os.Args[2:]))
	}
}

// exitMisused is the exit code of a shim that was not started by [Start].
const exitMisused = 64

func shimMain(args []string) int {
	// The command dies with the thread that has started it, which therefore
	// must not end before the process does.
	runtime.LockOSThread()
	if len(args) < 3 {
		return exitMisused
	}
	ctl, err := strconv.Atoi(args[0])
	if err != nil {
		return exitMisused
	}
	// Nobody but the shim may hold the socket: the caller must see its end.
	unix.CloseOnExec(ctl)
	if _, err := unix.GetsockoptInt(ctl, unix.SOL_SOCKET, unix.SO_TYPE); err != nil {
		return exitMisused
	}
	setName("lock-shim")
	s := &shim{ctl: ctl, path: args[1], args: args[2:]}
	if err := s.prepare(); err != nil {
		s.report(frame{op: opFailed, a: errnoOf(err)})
		s.flush()
		return 1
	}
	for !s.step() {
		s.wait()
	}
	return 0
}

// errnoOf is the system's number of an error.
func errnoOf(err error) int64 {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return int64(errno)
	}
	return int64(syscall.EIO)
}

// shim is the process between caller and command. All its work is done by one
// thread, which alone starts, signals and reaps: so the number of a process
// cannot come to mean another one between a look and a signal.
type shim struct {
	ctl    int    // socket to the caller, -1 once the caller is gone
	in     []byte // received, not yet a whole frame
	out    []byte // to be sent
	closed bool   // the caller is gone

	path string
	args []string

	tree    tree
	alarm   *alarm
	changes int // becomes readable when a child has changed its state

	term, kill Instant // of the schedule
	leftover   time.Duration
	pid        int  // the command, 0 before the start
	group      int  // its process group, 0 once the command has been reaped
	exited     bool // the command has been reaped
	childless  bool // this process has no children
	ending     bool // SIGTERM has been sent because of the schedule
	killing    bool // SIGKILL is being sent
	tick       time.Duration
	stuck      bool // opStuck has been sent
	over       bool // opDone, opFailed or opTooLate has been sent
}

// prepare makes the process a shim.
func (s *shim) prepare() error {
	if err := adoptOrphans(); err != nil {
		return err
	}
	if err := unix.SetNonblock(s.ctl, true); err != nil {
		return err
	}
	var err error
	if s.alarm, err = newAlarm(); err != nil {
		return err
	}
	s.changes, err = childSignals()
	return err
}

// childSignals returns a descriptor that becomes readable on SIGCHLD. It also
// makes the shim deaf to the signals that would end it: what the command should
// see, the caller passes on. They are caught and not ignored, since the command
// would inherit that; those that were ignored from the start remain so.
func childSignals() (int, error) {
	var deaf []os.Signal
	for _, sig := range []os.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
		syscall.SIGALRM, syscall.SIGPIPE, syscall.SIGTSTP,
	} {
		if !signal.Ignored(sig) {
			deaf = append(deaf, sig)
		}
	}
	signal.Notify(make(chan os.Signal, 1), deaf...)

	var pipe [2]int
	if err := unix.Pipe(pipe[:]); err != nil {
		return -1, err
	}
	for _, fd := range pipe {
		unix.CloseOnExec(fd)
		if err := unix.SetNonblock(fd, true); err != nil {
			return -1, err
		}
	}
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGCHLD)
	go func() {
		for range changes {
			// If the pipe is full, its reader wakes as well.
			_, _ = unix.Write(pipe[1], []byte{0})
		}
	}()
	return pipe[0], nil
}

// wait sleeps until there may be something to do.
func (s *shim) wait() {
	timeout := s.alarm.timeout()
	if s.killing || s.exited && !quiet {
		// Not every death is reported to us: there may be a process between,
		// or one that forked in the moment that we looked.
		timeout = max(s.tick, killTick)
		s.tick = min(timeout*5/4, maxKillTick)
	}
	ms := -1
	if timeout >= 0 {
		ms = int((timeout + time.Millisecond - 1) / time.Millisecond)
	}
	events := int16(unix.POLLIN)
	if len(s.out) > 0 {
		events |= unix.POLLOUT
	}
	// Descriptors below 0 are not looked at.
	_, _ = unix.Poll([]unix.PollFd{
		{Fd: int32(s.ctl), Events: events},
		{Fd: int32(s.changes), Events: unix.POLLIN},
		{Fd: int32(s.alarm.fd), Events: unix.POLLIN},
	}, ms)
	var drain [64]byte
	for {
		if n, err := unix.Read(s.changes, drain[:]); n <= 0 && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	s.alarm.clear()
}

// step does all that is to be done now, and says whether that was the last.
func (s *shim) step() bool {
	// The order matters: a shim that was stopped and goes on must learn of
	// the newest schedule before it looks at the clock.
	s.receive()
	s.reap()
	s.enforce()
	switch {
	case s.pid == 0:
		s.over = s.over || s.closed
	case s.exited && !s.over && s.tree.gone(s.group, s.childless):
		s.over = true
		s.report(frame{op: opDone})
	}
	s.flush()
	return s.over && (s.closed || len(s.out) == 0)
}

// receive carries out what the caller has sent.
func (s *shim) receive() {
	var buf [64 * frameLen]byte
	for !s.closed {
		n, err := unix.Read(s.ctl, buf[:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return
		case err != nil || n == 0:
			// The caller is dead.
			s.ctl, s.closed, s.killing = -1, true, true
			return
		}
		s.in = append(s.in, buf[:n]...)
		for len(s.in) >= frameLen {
			s.obey(parseFrame(s.in))
			s.in = s.in[frameLen:]
		}
	}
}

func (s *shim) obey(f frame) {
	switch f.op {
	case opSchedule:
		term, kill := Instant(f.a), Instant(f.b)
		if s.ending || s.exited {
			// Once it has begun, the end is not put off.
			term, kill = min(term, s.term), min(kill, s.kill)
		}
		s.term, s.kill = term, kill
	case opStart:
		s.start(time.Duration(f.a), f.b != 0)
	case opSignal:
		sig := syscall.Signal(f.a)
		switch {
		case s.group > 0:
			_ = unix.Kill(-s.group, sig)
		case s.exited && endsRun(sig):
			// Do not wait for what the command has left behind.
			s.term = Now()
		}
	}
}

// endsRun says whether a signal is a wish that all should end.
func endsRun(sig syscall.Signal) bool {
	switch sig {
	case syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT:
		return true
	}
	return false
}

// start starts the command.
func (s *shim) start(leftover time.Duration, foreground bool) {
	if s.pid != 0 || s.over {
		return
	}
	s.leftover = leftover
	if !(Schedule{Term: s.term, Kill: s.kill}).allows(Now()) {
		s.over = true
		s.report(frame{op: opTooLate})
		return
	}
	attr := &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	}
	if foreground {
		if tty := OpenTerminal(); tty != nil {
			attr.Sys.Foreground, attr.Sys.Ctty = true, tty.fd
			defer tty.Close()
		}
	}
	dieWithParent(attr.Sys)
	pid, err := syscall.ForkExec(s.path, s.args, attr)
	if err != nil {
		s.over = true
		s.report(frame{op: opFailed, a: errnoOf(err)})
		return
	}
	s.pid, s.group = pid, pid
	s.report(frame{op: opStarted, a: int64(pid)})
}

// reap takes note of the children that have died or stopped.
func (s *shim) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG|syscall.WUNTRACED|waitFlags, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			s.childless = true
			return
		case pid == 0:
			s.childless = false
			return
		case pid != s.pid || s.exited:
			continue
		case status.Stopped():
			s.report(frame{op: opStopped, a: int64(status.StopSignal())})
		default:
			s.tree.reaped(s.group)
			s.group, s.exited = 0, true
			s.report(frame{op: opExited, a: int64(status)})
			now := Now()
			s.term = min(s.term, now.Add(settle))
			s.kill = min(s.kill, now.Add(settle).Add(s.leftover))
		}
	}
}

// enforce ends the command when its time has come.
func (s *shim) enforce() {
	if s.pid == 0 || s.over || s.exited && s.tree.gone(s.group, s.childless) {
		s.alarm.set(Never)
		return
	}
	now := Now()
	if !s.ending && now >= min(s.term, s.kill) {
		s.ending = true
		if s.exited {
			s.report(frame{op: opLeftovers})
		} else {
			s.report(frame{op: opEnding})
		}
		s.tree.end(s.group)
	}
	if now >= s.kill {
		s.killing = true
	}
	if s.killing {
		if pid, err := s.tree.kill(s.group); err != nil && !s.stuck {
			s.stuck = true
			s.report(frame{op: opStuck, a: int64(pid), b: errnoOf(err)})
		}
	}
	switch {
	case s.killing:
		s.alarm.set(Never)
	case s.ending:
		s.alarm.set(s.kill)
	default:
		s.alarm.set(min(s.term, s.kill))
	}
}

// report sends a frame to the caller, now or later.
func (s *shim) report(f frame) { s.out = f.append(s.out) }

// flush sends what has been reported.
func (s *shim) flush() {
	for len(s.out) > 0 && !s.closed {
		n, err := unix.Write(s.ctl, s.out)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			// EAGAIN: later. Anything else: receive will see that the
			// caller is dead.
			return
		}
		s.out = s.out[n:]
	}
}
