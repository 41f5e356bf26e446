// Package programtest runs the examples as what they are: programs.
package programtest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// timeout is how long a program may take, also on a busy machine.
const timeout = 2 * time.Minute

// program is the file that was built.
var program string

// Main is the TestMain of a program: it builds the one in the working
// directory, and runs the tests.
func Main(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "dlm-programtest-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "program")
	build := exec.CommandContext(context.Background(), "go", "build", "-buildvcs=false", "-o", program, ".")
	if out, err := build.CombinedOutput(); err != nil {
		return 1, fmt.Errorf("go build: %w\n%s", err, out)
	}
	return m.Run(), nil
}

// Folder returns the folder of the program, which lasts as long as the tests.
func Folder() string { return filepath.Dir(program) }

// Result is what has become of a program.
type Result struct {
	Code           int
	Stdout, Stderr string
}

// Run runs the program to its end.
func Run(t testing.TB, args ...string) Result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := command(t, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return Result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

func command(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir())
	return cmd
}

// Running is a program that runs.
type Running struct {
	cmd    *exec.Cmd
	output *os.File // of the program and of all its processes
	lines  *bufio.Scanner
	seen   strings.Builder
}

// Start starts the program.
func Start(t testing.TB, args ...string) *Running {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	p := &Running{cmd: command(t, args...), output: r, lines: bufio.NewScanner(r)}
	p.cmd.Stdout, p.cmd.Stderr = w, w
	if err := errors.Join(r.SetReadDeadline(time.Now().Add(timeout)), p.cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
		_ = r.Close()
	})
	return p
}

// Await waits for a line that contains a text.
func (p *Running) Await(t testing.TB, text string) {
	t.Helper()
	for p.lines.Scan() {
		fmt.Fprintln(&p.seen, p.lines.Text())
		if strings.Contains(p.lines.Text(), text) {
			return
		}
	}
	t.Fatalf("no line with %q: %v\n%s", text, p.lines.Err(), p.seen.String())
}

// Signal sends a signal to the program, but not to its processes. It returns
// the exit code, -1 if the signal killed the program, when all processes have
// ended.
func (p *Running) Signal(t testing.TB, sig os.Signal) int {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	// The output ends when nobody is left that could write to it.
	if err := p.output.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(&p.seen, p.output); err != nil {
		t.Fatalf("processes are left: %v\n%s", err, p.seen.String())
	}
	return p.cmd.ProcessState.ExitCode()
}
