package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
)

// childAttributes makes a child a process group of its own, so that Ctrl-C
// reaches the test first, and has it killed when this process dies.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// pause stops the process and waits until it has stopped.
func (p *process) pause() error {
	if err := p.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	p.paused.Store(true)
	return poll(startPatience, func(context.Context) error {
		switch s := state(p.pid()); {
		case p.exited():
			return fmt.Errorf("%w: %s", errHopeless, p.death())
		case s != 'T':
			return fmt.Errorf("process %d is in state %c and not T", p.pid(), s)
		}
		return nil
	})
}

// resume lets a paused process go on.
func (p *process) resume() error {
	if err := p.signal(syscall.SIGCONT); err != nil {
		return err
	}
	p.paused.Store(false)
	return poll(startPatience, func(context.Context) error {
		if !p.exited() && state(p.pid()) == 'T' {
			return errors.New("it is still stopped")
		}
		return nil
	})
}

// state returns the letter of a process's state, X if there is no such process.
func state(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 'X'
	}
	// The name of the program, in parentheses, may contain anything.
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 || len(stat) < i+3 {
		return 'X'
	}
	return stat[i+2]
}
