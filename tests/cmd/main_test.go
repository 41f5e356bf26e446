package cmd_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

// binary is the command, built once.
var binary string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "dlm-cmd-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "dlm")
	build := exec.Command("go", "build", "-o", binary, ".")
	build.Dir = filepath.Join("..", "..", "cmd", "dlm")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// patience is for waits that only a fault makes long.
const patience = time.Minute

// store is a store as dlm is told of it.
type store struct {
	url string
	env []string
}

// process is a running dlm.
type process struct {
	*exec.Cmd
	t      testing.TB
	stdin  io.WriteCloser
	stdout *bufio.Reader
	stderr *bufio.Reader
	feeds  [2]*os.File  // what stdout and stderr read from
	said   bytes.Buffer // what has been read of stderr
	ended  chan struct{}
}

// start starts dlm on a store.
func (s store) start(t testing.TB, args ...string) *process {
	t.Helper()
	cmd := exec.Command(binary, args...)
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "DLM_") {
			cmd.Env = append(cmd.Env, entry)
		}
	}
	cmd.Env = append(append(cmd.Env, "DLM_BACKEND="+s.url), s.env...)
	p := &process{Cmd: cmd, t: t, ended: make(chan struct{})}
	pipe := func() (r, w *os.File) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		return r, w
	}
	in, stdin := pipe()
	stdout, out := pipe()
	stderr, msg := pipe()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, msg
	p.feeds = [2]*os.File{stdout, stderr}
	p.stdin, p.stdout, p.stderr = stdin, bufio.NewReader(stdout), bufio.NewReader(stderr)
	err := cmd.Start()
	for _, f := range []*os.File{in, out, msg} {
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait() // the exit code is in ProcessState
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		<-p.ended
		stdin.Close()
		stdout.Close()
		stderr.Close()
	})
	return p
}

// hurry bounds the wait for what it says next.
func (p *process) hurry() {
	for _, f := range p.feeds {
		if err := f.SetReadDeadline(time.Now().Add(patience)); err != nil {
			p.t.Fatal(err)
		}
	}
}

// line returns the next line of its standard output.
func (p *process) line() string {
	p.t.Helper()
	p.hurry()
	line, err := p.stdout.ReadString('\n')
	if err != nil {
		p.t.Fatalf("no line on standard output: %v; standard error:\n%s%s", err, &p.said, p.rest())
	}
	return strings.TrimSuffix(line, "\n")
}

// says waits for a line with the text on its standard error.
func (p *process) says(text string) {
	p.t.Helper()
	p.hurry()
	for {
		line, err := p.stderr.ReadString('\n')
		p.said.WriteString(line)
		if strings.Contains(line, text) {
			return
		}
		if err != nil {
			p.t.Fatalf("standard error ended without %q:\n%s", text, &p.said)
		}
	}
}

func (p *process) rest() string {
	p.hurry()
	text, _ := io.ReadAll(p.stderr)
	return string(text)
}

// expect waits for its end, and checks the exit code, and that all messages are
// dlm's own.
func (p *process) expect(code int) {
	p.t.Helper()
	p.said.WriteString(p.rest())
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatalf("dlm %q does not end; standard error:\n%s", p.Args[1:], &p.said)
	}
	got := p.ProcessState.ExitCode()
	if status := p.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		got = -int(status.Signal())
	}
	if got != code {
		p.t.Errorf("dlm %q: exit code %d, want %d; standard error:\n%s", p.Args[1:], got, code, &p.said)
	}
	for line := range strings.Lines(p.said.String()) {
		if !strings.HasPrefix(line, "dlm: ") {
			p.t.Errorf("dlm %q: message %q", p.Args[1:], line)
		}
	}
}

// let lets a command end that waits for the end of its standard input.
func (p *process) let() {
	p.t.Helper()
	p.stdin.Close()
	p.expect(0)
}

func (p *process) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// run runs dlm to its end and returns its standard output.
func (s store) run(t testing.TB, code int, args ...string) string {
	t.Helper()
	p := s.start(t, args...)
	p.stdin.Close()
	out, err := io.ReadAll(p.stdout)
	if err != nil {
		t.Fatal(err)
	}
	p.expect(code)
	return string(out)
}

// untilEOF is a command that says its token, and ends with its input.
var untilEOF = []string{"--", "sh", "-c", "echo $DLM_TOKEN; read x; exit 0"}

// hold starts a holder, and returns when its command runs, with its token.
func (s store) hold(t testing.TB, key string, flags ...string) (p *process, token string) {
	t.Helper()
	p = s.start(t, append(append(append([]string{"run"}, flags...), key), untilEOF...)...)
	return p, p.line()
}

// queue starts a dlm that is to wait for a key, and returns when it does.
func (s store) queue(t testing.TB, key string, flags ...string) *process {
	t.Helper()
	p := s.start(t, append(append(append([]string{"run"}, flags...), key), untilEOF...)...)
	p.says("waiting for")
	return p
}

// info is what dlm get says.
type info struct {
	Holders []struct{ Owner, Token string }
	Waiters []struct{ Owner string }
}

func (s store) get(t testing.TB, key string) (i info) {
	t.Helper()
	out := s.run(t, 0, "get", "--json", key)
	if err := json.Unmarshal([]byte(out), &i); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return i
}

// eventually waits for a condition of which no event tells.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	servers.Until(t, what, condition)
}

// alive says whether there is a process with this number that runs.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) || err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}
