//go:build unix

package supervise

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrTooLate says that a command was not started because its time was already
// over.
var ErrTooLate = errors.New("no time left to start the command")

// StartError says that the command could not be executed. It matches the
// system's error, and with it [io/fs.ErrNotExist] or [io/fs.ErrPermission].
type StartError struct {
	Path string
	Err  syscall.Errno
}

func (e *StartError) Error() string { return e.Path + ": " + e.Err.Error() }

// Unwrap returns the system's error.
func (e *StartError) Unwrap() error { return e.Err }

// Process is a command that runs. It is safe for concurrent use.
type Process struct {
	shim   *os.Process
	group  int
	ctl    *os.File
	events chan Event
	first  chan frame    // receives the outcome of the start
	over   chan struct{} // closed when the shim has ended

	kick chan struct{} // wakes the writer

	mu       sync.Mutex
	pending  []frame // to be sent to the shim
	takeover *time.Timer
}

// Start starts a command and returns when it is running. Unless the error is
// nil, no process is left. The error is a [*StartError] if the command could
// not be executed, and matches [ErrTooLate] if the schedule left no time.
//
// All events must be received, up to [Done].
func Start(spec Spec) (*Process, error) {
	if !spec.Schedule.allows(Now()) {
		return nil, ErrTooLate
	}
	// If the shim dies, its descendants become ours.
	if err := adoptOrphans(); err != nil {
		return nil, fmt.Errorf("prepare to start a command: %w", err)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("prepare to start a command: %w", err)
	}
	pid, err := startShim(theirs, &spec)
	_ = unix.Close(theirs)
	if err != nil {
		_ = unix.Close(ours)
		return nil, fmt.Errorf("start the supervisor of the command: %w", err)
	}
	shim, err := os.FindProcess(pid)
	if err != nil {
		_ = unix.Close(ours)
		return nil, fmt.Errorf("start the supervisor of the command: %w", err)
	}
	p := &Process{
		shim:   shim,
		ctl:    os.NewFile(uintptr(ours), "supervisor"),
		events: make(chan Event, 16),
		first:  make(chan frame, 1),
		over:   make(chan struct{}),
		kick:   make(chan struct{}, 1),
	}
	p.Reschedule(spec.Schedule)
	start := frame{op: opStart, a: int64(spec.Leftover)}
	if spec.Foreground {
		start.b = 1
	}
	p.send(start)
	go p.write()
	go p.watch()

	f := <-p.first
	if f.op == opStarted {
		return p, nil
	}
	for range p.events { // until all has ended
	}
	switch {
	case f.op == opFailed:
		return nil, &StartError{Path: spec.Path, Err: syscall.Errno(f.a)}
	case f.op == opTooLate, !spec.Schedule.allows(Now()):
		return nil, ErrTooLate
	}
	return nil, errors.New("the supervisor of the command died")
}

// socketPair returns two connected sockets that no command inherits. The first
// is fit for Go's poller.
func socketPair() (ours, theirs int, err error) {
	syscall.ForkLock.RLock()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		unix.CloseOnExec(pair[0])
		unix.CloseOnExec(pair[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return 0, 0, err
	}
	if err = unix.SetNonblock(pair[0], true); err != nil {
		_ = unix.Close(pair[0])
		_ = unix.Close(pair[1])
	}
	return pair[0], pair[1], err
}

// startShim starts this program as a shim, in a process group of its own, so
// that what is meant for the caller's group does not hit it.
func startShim(ctl int, spec *Spec) (int, error) {
	exe, err := selfExe()
	if err != nil {
		return 0, err
	}
	argv := append([]string{os.Args[0], shimArg, strconv.Itoa(ctl), spec.Path}, spec.Args...)
	return syscall.ForkExec(exe, argv, &syscall.ProcAttr{
		Env:   spec.Env,
		Files: inherited(ctl),
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
}

// inherited is the table of descriptors for the shim: each keeps its number,
// those marked close-on-exec are closed, except ctl.
func inherited(ctl int) []uintptr {
	files := make([]uintptr, ctl+1)
	for fd := range files {
		files[fd] = uintptr(fd)
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if fd > 2 && fd != ctl && (err != nil || flags&unix.FD_CLOEXEC != 0) {
			files[fd] = ^uintptr(0)
		}
	}
	return files
}

// Events delivers what happens to the command. It is closed after [Done].
func (p *Process) Events() <-chan Event { return p.events }

// Group is the command's process group, which is also the command's process
// id. It means nothing any more after [Exited].
func (p *Process) Group() int { return p.group }

// Signal sends a signal to the command's process group, and does nothing once
// the command has ended.
func (p *Process) Signal(sig syscall.Signal) { p.send(frame{op: opSignal, a: int64(sig)}) }

// Reschedule replaces the schedule. After the end of the command has begun, it
// can be brought forward, but not put off.
func (p *Process) Reschedule(s Schedule) {
	p.send(frame{op: opSchedule, a: int64(s.Term), b: int64(s.Kill)})
	wait := max(s.Hard.Sub(Now()), 0)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.takeover == nil {
		p.takeover = time.AfterFunc(wait, p.killShim)
	} else {
		p.takeover.Reset(wait)
	}
}

// killShim makes this process the one that kills, see watch.
func (p *Process) killShim() {
	// It fails if the shim has ended, also if its number was given away.
	_ = p.shim.Kill()
}

// send hands a frame to the writer. It never blocks: a shim that was stopped
// must not stop the caller.
func (p *Process) send(f frame) {
	p.mu.Lock()
	last := len(p.pending) - 1
	if f.op == opSchedule && last >= 0 && p.pending[last].op == opSchedule {
		p.pending[last] = f
	} else {
		p.pending = append(p.pending, f)
	}
	p.mu.Unlock()
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// write sends the pending frames to the shim.
func (p *Process) write() {
	var buf []byte
	for {
		select {
		case <-p.kick:
		case <-p.over:
			return
		}
		p.mu.Lock()
		buf = buf[:0]
		for _, f := range p.pending {
			buf = f.append(buf)
		}
		p.pending = p.pending[:0]
		p.mu.Unlock()
		if _, err := p.ctl.Write(buf); err != nil {
			return // the shim is dead, see watch
		}
	}
}

// watch passes on what the shim reports, and does its work if it dies.
func (p *Process) watch() {
	defer close(p.events)
	done, exited := p.read()
	_, _ = p.shim.Wait()
	close(p.over)
	_ = p.ctl.Close()
	p.mu.Lock()
	p.takeover.Stop()
	p.mu.Unlock()
	if !done {
		p.deliver(Event{Kind: ShimDied})
		p.sweep(exited)
	}
	p.deliver(Event{Kind: Done})
}

// deliver sends an event.
func (p *Process) deliver(e Event) { p.events <- e }

// read receives frames until the shim has ended. It says whether the shim has
// done its work, and whether it has reported the end of the command.
func (p *Process) read() (done, exited bool) {
	started := false
	begin := func(f frame) {
		if !started {
			started = true
			p.first <- f
		}
	}
	defer func() { begin(frame{}) }()
	var buf [frameLen]byte
	for {
		if _, err := io.ReadFull(p.ctl, buf[:]); err != nil {
			return done, exited
		}
		f := parseFrame(buf[:])
		switch f.op {
		case opStarted:
			p.group = int(f.a)
			begin(f)
		case opFailed, opTooLate:
			done = true
			begin(f)
		case opStopped:
			p.deliver(Event{Kind: Stopped, Signal: syscall.Signal(f.a)})
		case opEnding:
			p.deliver(Event{Kind: Ending})
		case opExited:
			exited = true
			p.deliver(Event{Kind: Exited, Status: syscall.WaitStatus(f.a)})
		case opLeftovers:
			p.deliver(Event{Kind: Leftovers})
		case opStuck:
			p.deliver(Event{Kind: Stuck, Pid: int(f.a), Err: syscall.Errno(f.b)})
		case opDone:
			done = true
		}
	}
}

// sweep kills what a dead shim has left behind.
func (p *Process) sweep(exited bool) {
	var t tree
	group, stuck, tick := p.group, false, time.Millisecond
	if exited {
		t.reaped(group)
		group = 0
	}
	for {
		childless := false
		for {
			var status syscall.WaitStatus
			pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG|waitFlags, nil)
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			if err != nil {
				childless = true
			}
			if err != nil || pid == 0 {
				break
			}
			if pid == group {
				t.reaped(group)
				group = 0
				p.deliver(Event{Kind: Exited, Status: status})
			}
		}
		if t.gone(group, childless) {
			return
		}
		if pid, err := t.kill(group); err != nil && !stuck {
			stuck = true
			p.deliver(Event{Kind: Stuck, Pid: pid, Err: err})
		}
		time.Sleep(tick)
		tick = min(tick*5/4, maxKillTick)
	}
}
