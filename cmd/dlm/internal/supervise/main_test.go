//go:build unix

package supervise_test

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/cmd/dlm/internal/proctest"
	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"
)

// The test binary plays all parts: caller, shim and command.
func TestMain(m *testing.M) {
	supervise.Init()
	proctest.Init()
	if len(os.Args) > 2 && os.Args[1] == "caller" {
		caller(os.Args[2])
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// order is what the helper "caller" is told to run.
type order struct {
	Path             string
	Args             []string
	Term, Kill, Hard time.Duration // from now; 0 means never
	Leftover         time.Duration
}

func (o order) schedule() supervise.Schedule {
	now := supervise.Now()
	at := func(d time.Duration) supervise.Instant {
		if d == 0 {
			d = time.Hour
		}
		return now.Add(d)
	}
	return supervise.Schedule{Term: at(o.Term), Kill: at(o.Kill), Hard: at(o.Hard)}
}

// news is what the helper "caller" prints, one JSON object a line.
type news struct {
	Kind   string
	Code   int // exit code, -1 after a signal
	Signal int
	Error  string
	Shim   int
	At     supervise.Instant
}

// caller runs a command and prints what happens. Lines on its standard input
// are commands: "signal N", or an order in JSON for a new schedule.
func caller(arg string) {
	var o order
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		panic(err)
	}
	out := json.NewEncoder(os.Stdout)
	p, err := supervise.Start(supervise.Spec{
		Path: o.Path, Args: o.Args, Env: os.Environ(), Schedule: o.schedule(), Leftover: o.Leftover,
	})
	if err != nil {
		out.Encode(news{Kind: "failed", Error: err.Error()})
		return
	}
	out.Encode(news{Kind: "started"})
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			if n, ok := strings.CutPrefix(in.Text(), "signal "); ok {
				sig, _ := strconv.Atoi(n)
				p.Signal(syscall.Signal(sig))
				continue
			}
			var o order
			if err := json.Unmarshal(in.Bytes(), &o); err != nil {
				panic(err)
			}
			p.Reschedule(o.schedule())
		}
	}()
	kinds := map[supervise.EventKind]string{
		supervise.Stopped: "stopped", supervise.Ending: "ending", supervise.Exited: "exited", supervise.Stuck: "stuck",
		supervise.Leftovers: "leftovers", supervise.ShimDied: "shim died", supervise.Done: "done",
	}
	for e := range p.Events() {
		n := news{Kind: kinds[e.Kind], Signal: int(e.Signal), At: supervise.Now()}
		if e.Kind == supervise.Exited {
			n.Code = e.Status.ExitStatus()
			if e.Status.Signaled() {
				n.Signal = int(e.Status.Signal())
			}
		}
		out.Encode(n)
	}
}

// run is a running helper "caller" and its command.
type run struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	*proctest.Tree
}

// runTree starts a command under the helper "caller", and waits until the
// processes with these names are ready.
func runTree(t *testing.T, o order, names []string, behaviours ...string) *run {
	t.Helper()
	tree := proctest.New(t)
	o.Args = tree.Args(behaviours...)
	o.Path = o.Args[0]
	r := start(t, o)
	r.Tree = tree
	r.expect("started")
	tree.Await(names...)
	return r
}

// start starts the helper "caller".
func start(t *testing.T, o order, options ...func(*exec.Cmd)) *run {
	t.Helper()
	arg, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	r := &run{t: t, cmd: exec.Command(os.Args[0], "caller", string(arg))}
	r.cmd.Stderr = os.Stderr
	// Processes with the race detector would take a second to end.
	r.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	for _, option := range options {
		option(r.cmd)
	}
	if r.in, err = r.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.out = bufio.NewScanner(out)
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.cmd.Process.Kill()
		r.cmd.Wait()
	})
	return r
}

// next returns the next line of the caller.
func (r *run) next() news {
	r.t.Helper()
	if !r.out.Scan() {
		r.t.Fatalf("the caller has ended: %v", r.out.Err())
	}
	var n news
	if err := json.Unmarshal(r.out.Bytes(), &n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

// expect checks the kinds of the next lines, and returns the last one.
func (r *run) expect(kinds ...string) (n news) {
	r.t.Helper()
	for _, kind := range kinds {
		if n = r.next(); n.Kind != kind {
			r.t.Fatalf("got %+v, want %q", n, kind)
		}
	}
	return n
}

// tell sends a line to the caller.
func (r *run) tell(line string) {
	r.t.Helper()
	if _, err := io.WriteString(r.in, line+"\n"); err != nil {
		r.t.Fatal(err)
	}
}

// reachesShim waits until the shim has received all that was told before. The
// command's next behaviours must be "usr1" and "ready".
func (r *run) reachesShim() {
	r.t.Helper()
	r.tell("signal 10")
	r.Await("command")
}

func (r *run) kill(pid int, sig syscall.Signal) {
	r.t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		r.t.Fatal(err)
	}
}
