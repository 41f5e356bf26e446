package main

import (
	"context"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"
)

// The command has a process group of its own, so that it can be signalled as a
// whole. At a terminal, dlm therefore does for it what a shell does for its
// jobs: it puts the group into the foreground, and when the command is
// suspended, it suspends itself, so that the shell takes over.

// inForeground says whether the command's group has the terminal.
func (j *job) inForeground() bool { return j.tty != nil && j.tty.Foreground() == j.proc.Group() }

// restoreTerminal takes the terminal back from the command.
func (j *job) restoreTerminal() {
	if j.inForeground() {
		_ = j.tty.SetForeground(unix.Getpgrp())
	}
}

// forward passes a signal on to the command.
func (j *job) forward(sig syscall.Signal) {
	if sig == syscall.SIGCONT && supervise.IsForeground(0) && j.tty != nil && !j.exited {
		// Resumed in the foreground, or brought there.
		_ = j.tty.SetForeground(j.proc.Group())
	}
	j.proc.Signal(sig)
}

// suspended deals with a command that was stopped by a signal.
func (j *job) suspended(sig syscall.Signal) {
	if j.tty == nil {
		// Somebody has stopped it and will continue it. The lock stays held.
		return
	}
	wantsTTY := sig == syscall.SIGTTIN || sig == syscall.SIGTTOU
	switch front := j.tty.Foreground(); {
	case wantsTTY && front == unix.Getpgrp():
		// It wants the terminal, and we have it.
		_ = j.tty.SetForeground(j.proc.Group())
		j.proc.Signal(syscall.SIGCONT)
	case sig == syscall.SIGSTOP && front != j.proc.Group():
		// Not from the terminal.
	case supervise.CanSuspend():
		j.suspend()
	case wantsTTY:
		// Nobody can ever give it the terminal: as the kernel does with the
		// jobs of a shell that is gone, hang up.
		j.proc.Signal(syscall.SIGHUP)
		j.proc.Signal(syscall.SIGCONT)
	case sig == syscall.SIGTSTP:
		j.proc.Signal(syscall.SIGCONT) // there is no shell to resume it
	}
}

// suspend stops this process and its group, until the shell continues them.
func (j *job) suspend() {
	j.restoreTerminal()
	// The command may be resumed until the deadline, so put that off. And a
	// process must not be stopped in the middle of a call to the store, where
	// it could keep others waiting: the next one is not due for a while now.
	ctx, cancel := context.WithTimeout(context.Background(), storePatience)
	defer cancel()
	if j.lock.Extend(ctx, j.lock.TTL) == nil {
		j.reschedule(j.limits.schedule(j.lock))
	}
	_ = supervise.Suspend()
}

// dieOfInterrupt ends this process as Ctrl-C ends one. At a terminal only the
// command has seen the signal; shells that run dlm in a loop or a script must
// see it too, or they would go on.
func dieOfInterrupt() {
	signal.Reset(syscall.SIGINT)
	_ = unix.Kill(0, unix.SIGINT)
	// Another thread may be the one to die of it.
	time.Sleep(time.Second)
}
