package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/go-dlm/dlm/examples/internal/procs"
)

// process is a process that prints numbers, until its standard input ends or
// it is killed.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	out   *os.File
	lines *bufio.Scanner
}

// start starts a process, which must be stopped.
func start(ctx context.Context, name string, args ...string) (*process, error) {
	cmd := procs.Command(ctx, name, args...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	// Unlike StdoutPipe, this pipe stays open when the process has been waited
	// for: it ends when all processes that write to it have ended.
	out, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return &process{cmd: cmd, stdin: stdin, out: out, lines: bufio.NewScanner(out)}, nil
}

// number waits for the next number.
func (p *process) number() (int64, error) {
	if !p.lines.Scan() {
		err := p.lines.Err()
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		return 0, fmt.Errorf("process %d: %w", p.cmd.Process.Pid, err)
	}
	return strconv.ParseInt(p.lines.Text(), 10, 64)
}

// kill kills the process, but none that it has started.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return err
	}
	if err := p.cmd.Wait(); p.cmd.ProcessState == nil {
		return err
	}
	return nil
}

// gone waits until no process is left of this one and those that it has
// started.
func (p *process) gone(timeout time.Duration) error {
	if err := p.out.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	for p.lines.Scan() {
	}
	return p.lines.Err()
}

// end tells the process to end, and waits for it.
func (p *process) end() error {
	return errors.Join(p.stdin.Close(), p.cmd.Wait())
}

// stop ends the process if it has not ended yet.
func (p *process) stop() {
	if p.cmd.ProcessState == nil {
		_ = p.kill()
	}
	_ = p.out.Close()
}
