// Package procs starts processes that do not outlive the program that has
// started them.
package procs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

// patience is how long a process may take to end after it was asked to.
const patience = 5 * time.Second

// Command prepares a command that ends with the context: it is interrupted
// then, and killed if it has not ended 5s later. On Linux it is also killed if
// this program dies. Its standard error is that of this program.
func Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = patience
	cmd.SysProcAttr = attributes()
	return cmd
}

// Self prepares a command that runs this program with other arguments.
func Self(ctx context.Context, args ...string) (*exec.Cmd, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return Command(ctx, exe, args...), nil
}

// Group is a number of processes that succeed or fail together. It is safe for
// concurrent use.
type Group struct {
	ctx  context.Context
	fail context.CancelCauseFunc
	wg   sync.WaitGroup
}

// NewGroup returns a group, and the context that its commands are to be made
// with: it ends as soon as one of them fails.
func NewGroup(ctx context.Context) (*Group, context.Context) {
	ctx, fail := context.WithCancelCause(ctx)
	return &Group{ctx: ctx, fail: fail}, ctx
}

// Start starts a process of the group.
func (g *Group) Start(cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	g.wg.Go(func() {
		if err := cmd.Wait(); err != nil {
			g.fail(fmt.Errorf("%s (process %d): %w", filepath.Base(cmd.Path), cmd.Process.Pid, err))
		}
	})
	return nil
}

// Wait waits until all processes have ended, and returns why the first of them
// failed, or why the context ended. No other method may be called after it.
func (g *Group) Wait() error {
	g.wg.Wait()
	err := context.Cause(g.ctx)
	g.fail(nil)
	return err
}

// Stop ends the processes and waits for them. It is for returning early, and
// does no harm after Wait.
func (g *Group) Stop() {
	g.fail(errors.New("stopped"))
	g.wg.Wait()
}
