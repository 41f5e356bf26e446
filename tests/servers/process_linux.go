package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// childAttributes makes a child a process group of its own, so that Ctrl-C
// reaches the test first, and has it killed when this process dies.
func childAttributes(who *account) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if who != nil {
		a.Credential = &syscall.Credential{Uid: uint32(who.uid), Gid: uint32(who.gid)}
	}
	return a
}

// descendants are the children of a process, and theirs.
func descendants(pid int) []int {
	var all []int
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // the pattern is right
	for _, file := range tasks {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		for field := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(field); err == nil {
				all = append(all, child)
				all = append(all, descendants(child)...)
			}
		}
	}
	return all
}

func sendSignal(pid int, s syscall.Signal) error { return syscall.Kill(pid, s) }

// ownerOf is the number of the user whom a file belongs to.
func ownerOf(f os.FileInfo) int {
	if s, ok := f.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid)
	}
	return -1
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
