package sqlitelock_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
)

// childRole is the environment variable that makes the test binary play a part
// in a test of several processes.
const childRole = "DLM_SQLITELOCK_TEST_CHILD"

// childWindow is the liveness window of all processes in these tests.
const childWindow = 2 * time.Second

var childOptions = &sqlitelock.Options{LivenessWindow: childWindow}

// childCommand is the test binary in a role.
func childCommand(ctx context.Context, role string, args ...string) *exec.Cmd {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Env = append(os.Environ(), childRole+"="+role)
	return cmd
}

// child is a process that plays a role.
type child struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines *bufio.Scanner
}

// start starts a process, which is killed at the end of the test at the latest.
func start(t testing.TB, role string, args ...string) *child {
	t.Helper()
	cmd := childCommand(t.Context(), role, args...)
	cmd.Stderr = os.Stderr
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: cmd, stdin: in, lines: bufio.NewScanner(out)}
	t.Cleanup(c.kill)
	return c
}

// line waits for the child's next line.
func (c *child) line(t testing.TB) string {
	t.Helper()
	if !c.lines.Scan() {
		t.Fatalf("the child said no more: %v", c.lines.Err())
	}
	return c.lines.Text()
}

// kill kills the process and waits until it has gone.
func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}

// roles is the other side.
var roles = map[string]func(ctx context.Context, args []string) error{
	"cycles": cycles,
	"hold":   hold,
	"queue":  queue,
	"churn":  churn,
	"relay":  relay,
}

func runChild(role string) int {
	if err := roles[role](context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// cycles takes the key n times, and each time notes its token in a file next to
// the lock file. It fails if anybody else is inside.
func cycles(ctx context.Context, args []string) error {
	path, name, n := args[0], args[1], args[2]
	count, err := strconv.Atoi(n)
	if err != nil {
		return err
	}
	b, err := sqlitelock.New(path, childOptions)
	if err != nil {
		return err
	}
	w := newWaiter(ctx, b, name)
	log, err := os.OpenFile(path+".log", os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	for i := range count {
		lease, err := w.lock(ctx, ask("k", fmt.Sprint(name, "-", i)), nil)
		if err != nil {
			return err
		}
		inside, err := os.OpenFile(path+".inside", os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("somebody else is inside: %w", err)
		}
		_, err = fmt.Fprintln(log, lease.Token)
		if err := errors.Join(err, inside.Close(), os.Remove(inside.Name())); err != nil {
			return err
		}
		if err := b.Release(ctx, lease); err != nil {
			return err
		}
	}
	return errors.Join(w.close(), b.Close())
}

// hold takes the key and never gives it back.
func hold(ctx context.Context, args []string) error {
	path, key, ttl := args[0], args[1], args[2]
	b, err := sqlitelock.New(path, childOptions)
	if err != nil {
		return err
	}
	req := ask(key, "holder")
	if req.TTL, err = time.ParseDuration(ttl); err != nil {
		return err
	}
	lease, err := b.Acquire(ctx, req)
	if err != nil {
		return err
	}
	fmt.Println(lease.Token)
	select {}
}

// queue waits for a key that is held.
func queue(ctx context.Context, args []string) error {
	path, owner := args[0], args[1]
	b, err := sqlitelock.New(path, childOptions)
	if err != nil {
		return err
	}
	w := newWaiter(ctx, b, owner)
	_, err = w.lock(ctx, ask("k", owner), func() { fmt.Println("queued") })
	if err != nil {
		return err
	}
	fmt.Println("granted")
	select {}
}

// churn uses the file as hard as it can until it is killed.
func churn(ctx context.Context, args []string) error {
	b, err := sqlitelock.New(args[0], childOptions)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for i := 0; ; i++ {
		req := ask(fmt.Sprint("churn", rand.N(5)), fmt.Sprint(os.Getpid(), "-", i))
		req.TTL = 50 * time.Millisecond
		lease, err := b.Acquire(ctx, req)
		switch {
		case errors.Is(err, driver.ErrHeld):
			err = b.Release(ctx, driver.Lease{Key: req.Key, Owner: req.Owner})
		case err == nil:
			err = errors.Join(lossIsFine(extend(ctx, b, lease)), lossIsFine(b.Release(ctx, lease)))
		}
		if err != nil {
			return err
		}
	}
}

func lossIsFine(err error) error {
	if errors.Is(err, driver.ErrLost) {
		return nil
	}
	return err
}

// relay takes the key and gives it back for as long as it is told to.
func relay(ctx context.Context, args []string) error {
	b, err := sqlitelock.New(args[0], childOptions)
	if err != nil {
		return err
	}
	w := newWaiter(ctx, b, "relay")
	fmt.Println("ready")
	in := bufio.NewReader(os.Stdin)
	for i := 0; ; i++ {
		lease, err := w.lock(ctx, ask("k", fmt.Sprint("relay", i)), nil)
		if err != nil {
			return err
		}
		fmt.Println(strings.Join([]string{"granted", fmt.Sprint(time.Now().UnixNano())}, " "))
		if _, err := in.ReadByte(); err != nil {
			if err == io.EOF {
				err = nil
			}
			return errors.Join(err, b.Release(ctx, lease), w.close(), b.Close())
		}
		if err := b.Release(ctx, lease); err != nil {
			return err
		}
	}
}
