package servers

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
)

// logName is the file in a server's folder that gets its output.
const logName = "output.log"

// logTail is how much of a log is worth showing.
const logTail = 4000

// process is a running or dead child. Its methods are safe for concurrent use.
type process struct {
	cmd    *exec.Cmd
	log    string        // file with its output and that of its predecessors
	from   int64         // where its own output begins
	done   chan struct{} // closed when it is dead and waited for
	noted  atomic.Bool   // the test knows that it is dead
	paused atomic.Bool
}

// startProcess runs a program in a folder. It must not be called by a goroutine
// that is locked to its thread: where the kernel kills orphans, an orphan is a
// child whose parent's thread ended.
func startProcess(dir, bin string, args []string) (*process, error) {
	return startProcessAs(nil, dir, bin, args)
}

// startProcessAs is startProcess for another user, nil for the same.
func startProcessAs(who *account, dir, bin string, args []string) (*process, error) {
	p := &process{log: filepath.Join(dir, logName), done: make(chan struct{})}
	f, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if p.from, err = f.Seek(0, io.SeekEnd); err != nil {
		return nil, err
	}
	p.cmd = exec.Command(bin, args...)
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = f, f
	p.cmd.SysProcAttr = childAttributes(who)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // how it died is in cmd.ProcessState
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// exited says whether the process is dead and waited for.
func (p *process) exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// kill ends the process, paused or not, and waits for it.
func (p *process) kill() {
	if !p.exited() {
		p.noted.Store(true)
		_ = p.cmd.Process.Kill() // fails only if it is dead
	}
	<-p.done
}

// signal sends a signal; it fails if the process is dead.
func (p *process) signal(s syscall.Signal) error {
	err := p.cmd.Process.Signal(s)
	if errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%w: process %d is dead", errHopeless, p.pid())
	}
	return err
}

// output returns the end of what the process itself has written.
func (p *process) output() string {
	f, err := os.Open(p.log)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, p.from, 1<<30))
	if err != nil {
		return err.Error()
	}
	if len(b) > logTail {
		b = b[len(b)-logTail:]
	}
	return strings.TrimSpace(string(b))
}

// death describes how a process died that is dead.
func (p *process) death() string {
	return fmt.Sprintf("process %d is dead (%v)", p.pid(), p.cmd.ProcessState)
}
