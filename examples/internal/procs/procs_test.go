package procs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"testing"

	"github.com/go-dlm/dlm/examples/internal/procs"
)

func TestMain(m *testing.M) {
	switch strings.Join(os.Args[1:], " ") {
	case "succeed":
		return
	case "fail":
		os.Exit(3)
	case "wait":
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		defer stop()
		fmt.Println("ready")
		<-ctx.Done()
		return
	}
	os.Exit(m.Run())
}

// self is the test binary in a role.
func self(ctx context.Context, t *testing.T, role string) *exec.Cmd {
	t.Helper()
	cmd, err := procs.Self(ctx, role)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

func start(t *testing.T, g *procs.Group, cmd *exec.Cmd) {
	t.Helper()
	if err := g.Start(cmd); err != nil {
		t.Fatal(err)
	}
}

func TestAllSucceed(t *testing.T) {
	t.Parallel()
	g, ctx := procs.NewGroup(t.Context())
	for range 3 {
		start(t, g, self(ctx, t, "succeed"))
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// The failure of one ends the others, and is what Wait returns.
func TestOneFails(t *testing.T) {
	t.Parallel()
	g, ctx := procs.NewGroup(t.Context())
	for _, role := range []string{"wait", "fail", "wait"} {
		start(t, g, self(ctx, t, role))
	}
	err := g.Wait()
	if err == nil || !strings.HasSuffix(err.Error(), ": exit status 3") {
		t.Error(err)
	}
}

// The end of the context ends all of them, in good order.
func TestContextEnds(t *testing.T) {
	t.Parallel()
	parent, cancel := context.WithCancelCause(t.Context())
	g, ctx := procs.NewGroup(parent)
	cmd := self(ctx, t, "wait")
	ready := make(chan struct{})
	cmd.Stdout = writer(sync.OnceFunc(func() { close(ready) }))
	start(t, g, cmd)
	<-ready
	cause := errors.New("over")
	cancel(cause)
	if err := g.Wait(); !errors.Is(err, cause) {
		t.Error(err)
	}
	if !cmd.ProcessState.Success() {
		t.Error(cmd.ProcessState)
	}
}

// Stop ends what has been started, and can be deferred.
func TestStop(t *testing.T) {
	t.Parallel()
	g, ctx := procs.NewGroup(t.Context())
	cmd := self(ctx, t, "wait")
	start(t, g, cmd)
	g.Stop()
	if cmd.ProcessState == nil {
		t.Error("the process has not ended")
	}
	g.Stop()
}

// writer calls a function when something is written.
type writer func()

func (w writer) Write(b []byte) (int, error) {
	w()
	return len(b), nil
}
