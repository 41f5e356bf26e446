package main

import (
	"bufio"
	"bytes"
	"context"
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

	"github.com/go-dlm/dlm/cmd/dlm/internal/proctest"
	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"
)

// binary is the program under test, built once.
var binary string

func TestMain(m *testing.M) {
	supervise.Init()
	proctest.Init()
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "dlm-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "dlm")
	args := []string{"build", "-o", binary}
	if raceEnabled {
		args = append(args, "-race", "-gcflags=modernc.org/sqlite/lib=-race=false")
	}
	if out, err := exec.Command("go", append(args, ".")...).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// newStore names a store that does not exist yet.
func newStore(t testing.TB) string {
	t.Helper()
	return "sqlite://" + filepath.Join(t.TempDir(), "locks.db")
}

// environ is the environment of the test without what dlm listens to.
func environ(extra ...string) []string {
	// Processes with the race detector would take a second to end.
	env := []string{"GORACE=atexit_sleep_ms=0"}
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "DLM_") && !strings.HasPrefix(entry, "XDG_") {
			env = append(env, entry)
		}
	}
	return append(env, extra...)
}

// process is a running dlm.
type process struct {
	*exec.Cmd
	t      testing.TB
	stdout bytes.Buffer
	stderr bytes.Buffer // what has been read of it
	lines  *bufio.Reader
	feed   *os.File // the other end of lines
	ended  chan struct{}
	err    error // of Wait, once ended is closed
}

// prepare makes a process of dlm on a store.
func prepare(t testing.TB, store string, args ...string) *process {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	p := &process{
		Cmd: exec.Command(binary, args...), t: t,
		lines: bufio.NewReader(r), feed: w, ended: make(chan struct{}),
	}
	p.Env = environ("DLM_BACKEND=" + store)
	p.Stdout, p.Stderr = &p.stdout, w
	return p
}

// start starts it.
func (p *process) start() *process {
	p.t.Helper()
	err := p.Start()
	p.feed.Close()
	if err != nil {
		p.t.Fatal(err)
	}
	go func() {
		p.err = p.Wait()
		close(p.ended)
	}()
	p.t.Cleanup(func() {
		p.Process.Kill()
		<-p.ended
	})
	return p
}

func startDLM(t testing.TB, store string, args ...string) *process {
	t.Helper()
	return prepare(t, store, args...).start()
}

// says waits for a line with the text on its standard error.
func (p *process) says(text string) string {
	p.t.Helper()
	for {
		line, err := p.lines.ReadString('\n')
		p.stderr.WriteString(line)
		if strings.Contains(line, text) {
			return line
		}
		if err != nil {
			p.t.Fatalf("standard error ended without %q: %s", text, &p.stderr)
		}
	}
}

// wait returns its exit code, and -n for a death by signal n.
func (p *process) wait() int {
	p.t.Helper()
	io.Copy(&p.stderr, p.lines)
	<-p.ended
	if exit, ok := errors.AsType[*exec.ExitError](p.err); p.err != nil && !ok {
		p.t.Fatal(p.err)
	} else if ok {
		if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
			return -int(status.Signal())
		}
	}
	return p.ProcessState.ExitCode()
}

func (p *process) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// expect waits for the exit code.
func (p *process) expect(code int) {
	p.t.Helper()
	if got := p.wait(); got != code {
		p.t.Errorf("exit code %d, want %d; standard error:\n%s", got, code, &p.stderr)
	}
}

// runDLM runs dlm to its end.
func runDLM(t testing.TB, store string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	p := startDLM(t, store, args...)
	code = p.wait()
	return code, p.stdout.String(), p.stderr.String()
}

// call runs dlm in this process. It is for all but `dlm run`.
func call(ctx context.Context, env map[string]string, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	m := &Main{Out: &out, Err: &err, LookupEnv: func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	}}
	code = m.Run(ctx, args)
	return code, out.String(), err.String()
}

// get returns what the store knows of a key.
func get(t testing.TB, store, key string) lockJSON {
	t.Helper()
	code, out, msg := call(t.Context(), map[string]string{"DLM_BACKEND": store}, "get", "--json", key)
	var info lockJSON
	if err := json.Unmarshal([]byte(out), &info); code != 0 || err != nil {
		t.Fatalf("dlm get: exit code %d, %v: %s%s", code, err, out, msg)
	}
	return info
}

// isMessage says whether all of stderr is messages of dlm, and has the text.
func isMessage(stderr, text string) bool {
	for line := range strings.Lines(stderr) {
		if !strings.HasPrefix(line, "dlm: ") || !strings.HasSuffix(line, "\n") {
			return false
		}
	}
	return strings.Contains(stderr, text)
}

// holder is a dlm that holds a key until it is told to end.
type holder struct {
	*process
	tree *proctest.Tree
}

// hold starts a holder, and returns when its command runs.
func hold(t testing.TB, store, key string, flags ...string) *holder {
	t.Helper()
	return holdTree(t, store, key, flags, []string{"command"}, "ready", "usr1", "exit 0")
}

// holdTree starts a dlm whose command has these behaviours, and returns when the
// processes with these names are ready.
func holdTree(t testing.TB, store, key string, flags, names []string, behaviours ...string) *holder {
	t.Helper()
	h := queueTree(t, store, key, flags, behaviours...)
	h.tree.Await(names...)
	return h
}

// queue starts a dlm that is to wait for a key, and returns when it does.
func queue(t testing.TB, store, key string, flags ...string) *holder {
	t.Helper()
	h := queueTree(t, store, key, flags, "ready", "usr1", "exit 0")
	h.says("waiting for")
	return h
}

func queueTree(t testing.TB, store, key string, flags []string, behaviours ...string) *holder {
	t.Helper()
	args := append(append([]string{"run"}, flags...), key, "--")
	return startTree(t, store, args, behaviours...)
}

// startTree starts a dlm whose command, which is appended to the arguments, has
// these behaviours.
func startTree(t testing.TB, store string, args []string, behaviours ...string) *holder {
	t.Helper()
	tree := proctest.New(t)
	h := &holder{startDLM(t, store, append(args, tree.Args(behaviours...)...)...), tree}
	go func() {
		<-h.ended
		tree.NoMore()
	}()
	return h
}

// let lets the command of a holder end, and waits until dlm has.
func (h *holder) let() {
	h.t.Helper()
	h.signal(syscall.SIGUSR1)
	h.expect(0)
}

// eventually waits for a condition of which no event tells.
func eventually(t testing.TB, condition func() bool) {
	t.Helper()
	for began := time.Now(); !condition(); time.Sleep(time.Millisecond) {
		if time.Since(began) > time.Minute {
			t.Fatal("waited for a minute")
		}
	}
}

// within fails the test if the time since began is over.
func within(t testing.TB, began time.Time, most time.Duration) {
	t.Helper()
	if took := time.Since(began); took > most {
		t.Errorf("took %v, more than %v", took, most)
	}
}
