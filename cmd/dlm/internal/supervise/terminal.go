//go:build unix

package supervise

import (
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// Terminal is the controlling terminal of this process.
type Terminal struct{ fd int }

// OpenTerminal returns the controlling terminal, or nil if there is none.
func OpenTerminal() *Terminal {
	for {
		fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		switch err {
		case nil:
			return &Terminal{fd: fd}
		case unix.EINTR:
		default:
			return nil
		}
	}
}

// Close closes the terminal.
func (t *Terminal) Close() { _ = unix.Close(t.fd) }

// Foreground returns the terminal's foreground process group, or 0.
func (t *Terminal) Foreground() int {
	group, err := foreground(t.fd)
	if err != nil {
		return 0
	}
	return group
}

// SetForeground makes a process group the foreground group. The caller may be
// in the background itself.
func (t *Terminal) SetForeground(group int) error {
	// A process in the background is stopped for this, unless it ignores the
	// signal.
	signal.Ignore(syscall.SIGTTOU)
	defer signal.Reset(syscall.SIGTTOU)
	return unix.IoctlSetPointerInt(t.fd, unix.TIOCSPGRP, group)
}

// IsForeground says whether fd is the controlling terminal, and this process in
// its foreground.
func IsForeground(fd int) bool {
	group, err := foreground(fd)
	return err == nil && group == unix.Getpgrp()
}

// CanSuspend says whether somebody will continue this process if it stops: a
// shell with job control. That is so if its process group has a parent outside
// of the group in the same session.
func CanSuspend() bool {
	group := unix.Getpgrp()
	session, err := unix.Getsid(0)
	if err != nil {
		return false
	}
	for pid := unix.Getppid(); pid > 0; {
		g, err := unix.Getpgid(pid)
		if err != nil {
			return false
		}
		if g != group {
			s, err := unix.Getsid(pid)
			return err == nil && s == session
		}
		// Where the parent is not known, believe that there is a shell.
		if pid, err = parentOf(pid); err != nil {
			return true
		}
	}
	return false
}

// Suspend stops the process group of this process, as Ctrl-Z at the terminal
// does. It may return a moment before that takes effect.
func Suspend() error { return unix.Kill(0, unix.SIGSTOP) }
