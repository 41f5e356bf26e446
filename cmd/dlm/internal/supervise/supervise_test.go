//go:build unix

package supervise_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/cmd/dlm/internal/proctest"
	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"

	"github.com/go-dlm/dlm/driver/drivertest"
)

// everybody is the largest tree.
var everybody = []string{"command", "child", "orphan", "daemon"}

// family starts everybody. None of them listens to SIGTERM.
var family = []string{"ignore", "child", "orphan", "daemon", "ready", "stay"}

func linuxOnly(t *testing.T) {
	t.Helper()
	if runtime.GOOS != "linux" {
		drivertest.Skip(t, "needs child subreapers")
	}
}

func TestExitStatus(t *testing.T) {
	t.Parallel()
	r := start(t, order{Path: "/bin/sh", Args: []string{"sh", "-c", "exit 42"}})
	if n := r.expect("started", "exited"); n.Code != 42 {
		t.Errorf("exit code %d, want 42", n.Code)
	}
	r.expect("done")
}

func TestExitBySignal(t *testing.T) {
	t.Parallel()
	r := start(t, order{Path: "/bin/sh", Args: []string{"sh", "-c", "kill -9 $$"}})
	if n := r.expect("started", "exited"); n.Signal != 9 {
		t.Errorf("signal %d, want 9", n.Signal)
	}
	r.expect("done")
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, content := range map[string]string{"data": "data", "interpreter": "#!/no/such/interpreter\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		"/no/such/file":                   "no such file",
		dir:                               "permission denied",
		filepath.Join(dir, "data"):        "exec format error",
		filepath.Join(dir, "interpreter"): "no such file",
	} {
		r := start(t, order{Path: path, Args: []string{"x"}})
		if n := r.expect("failed"); !strings.Contains(n.Error, want) {
			t.Errorf("%s: error %q, want %q", path, n.Error, want)
		}
	}
}

func TestNoTimeLeft(t *testing.T) {
	t.Parallel()
	r := start(t, order{Path: "/bin/true", Args: []string{"true"}, Term: -time.Second})
	if n := r.expect("failed"); n.Error != supervise.ErrTooLate.Error() {
		t.Errorf("error %q", n.Error)
	}
}

func TestSignalReachesGroup(t *testing.T) {
	t.Parallel()
	r := runTree(t, order{}, []string{"command", "child"}, "child", "ready", "usr1", "exit 5")
	r.tell("signal 10")
	if n := r.expect("exited"); n.Code != 5 {
		t.Errorf("got %+v, want exit code 5", n)
	}
	// The child saw the signal as well, and lives on without handling it.
	r.expect("leftovers", "done")
	r.Gone()
}

func TestStopIsReported(t *testing.T) {
	t.Parallel()
	r := runTree(t, order{}, []string{"command"}, "ready", "usr1", "exit 0")
	r.kill(r.Pids["command"], syscall.SIGSTOP)
	if n := r.expect("stopped"); n.Signal != int(syscall.SIGSTOP) {
		t.Errorf("got %+v", n)
	}
	r.tell("signal 10")
	r.tell("signal 18")
	r.expect("exited", "done")
}

// At Term the command is told to end, at Kill it is made to, with all that it
// has started.
func TestSchedule(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{}, everybody, family...)
	now := supervise.Now()
	r.tell(`{"Term":100000000,"Kill":400000000}`)
	r.expect("ending")
	r.Gone()
	if passed := supervise.Now().Sub(now); passed < 400*time.Millisecond {
		t.Errorf("killed after %v, too early", passed)
	}
	if n := r.expect("exited", "done"); n.At.Sub(now) < 400*time.Millisecond {
		t.Errorf("over after %v, too early", n.At.Sub(now))
	}
}

// A command that ends on SIGTERM is not kept waiting.
func TestTermIsEnough(t *testing.T) {
	t.Parallel()
	r := runTree(t, order{}, []string{"command", "child"}, "child", "ready", "stay")
	r.tell(`{"Term":1000000}`)
	if n := r.expect("ending", "exited"); n.Signal != int(syscall.SIGTERM) {
		t.Errorf("got %+v, want death by SIGTERM", n)
	}
	r.expect("done")
	r.Gone()
}

// A schedule that moves on keeps the command alive; once the end has begun it
// is only brought forward.
func TestReschedule(t *testing.T) {
	t.Parallel()
	r := runTree(t, order{}, []string{"command"}, "ignore", "ready", "usr1", "ready", "stay")
	began := supervise.Now()
	r.tell(`{"Term":1000000000,"Kill":1000000000}`)
	r.reachesShim()
	r.tell(`{}`)
	// The old schedule passes.
	time.Sleep(began.Add(1100 * time.Millisecond).Sub(supervise.Now()))
	r.tell(`{"Term":1000000}`)
	r.expect("ending")
	r.tell(`{}`)
	r.tell(`{"Kill":1000000}`)
	if n := r.expect("exited", "done"); n.At.Sub(began) < 1100*time.Millisecond {
		t.Errorf("ended by a schedule that had been replaced")
	}
}

func TestLeftovers(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{Leftover: 100 * time.Millisecond}, []string{"child", "orphan", "daemon"},
		"ignore", "child", "orphan", "daemon", "exit 3")
	if n := r.expect("exited"); n.Code != 3 {
		t.Errorf("exit code %d, want 3", n.Code)
	}
	r.expect("leftovers", "done")
	r.Gone()
}

// A wish to end is not made to wait for what the command left behind, and a
// schedule applies to that, too.
func TestLeftoversHurry(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{Leftover: time.Hour}, []string{"daemon"}, "ignore", "daemon", "exit 0")
	r.expect("exited")
	r.tell("signal 15")
	r.expect("leftovers")
	r.tell(`{"Kill":1000000}`)
	r.expect("done")
	r.Gone()
}

func TestCallerKilled(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{}, everybody, family...)
	r.cmd.Process.Kill()
	r.Gone()
}

func TestShimKilled(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{}, everybody, family...)
	r.kill(r.Parent, syscall.SIGKILL)
	if n := r.expect("shim died", "exited"); n.Signal != int(syscall.SIGKILL) {
		t.Errorf("got %+v, want death by SIGKILL", n)
	}
	r.expect("done")
	r.Gone()
}

// If both die in the same moment, the command itself dies all the same.
func TestBothKilled(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{}, []string{"command"}, "ignore", "ready", "stay")
	// A stopped shim cannot act before it is killed.
	r.kill(r.Parent, syscall.SIGSTOP)
	r.cmd.Process.Kill()
	r.kill(r.Parent, syscall.SIGKILL)
	r.Gone()
}

// A shim that does not do its work is replaced by the caller.
func TestShimStopped(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{}, everybody, family...)
	r.kill(r.Parent, syscall.SIGSTOP)
	r.tell(`{"Term":1000000,"Kill":2000000,"Hard":100000000}`)
	r.expect("shim died", "exited", "done")
	r.Gone()
}

// A shim that was stopped for a while does not act on a schedule that was
// replaced meanwhile.
func TestShimStoppedAndContinued(t *testing.T) {
	t.Parallel()
	r := runTree(t, order{}, []string{"command"}, "ready", "usr1", "ready", "usr1", "exit 9")
	began := supervise.Now()
	r.tell(`{"Term":1000000000,"Kill":1000000000}`)
	r.reachesShim()
	r.kill(r.Parent, syscall.SIGSTOP)
	r.tell(`{}`)
	time.Sleep(began.Add(1100 * time.Millisecond).Sub(supervise.Now()))
	r.kill(r.Parent, syscall.SIGCONT)
	r.tell("signal 10")
	if n := r.expect("exited"); n.Code != 9 {
		t.Errorf("got %+v, want exit code 9", n)
	}
	r.expect("done")
}

// A caller that is stopped does not keep its command past the schedule.
func TestCallerStopped(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	r := runTree(t, order{}, everybody, "ignore", "child", "orphan", "daemon", "ready", "usr1", "ready", "stay")
	r.tell(`{"Term":1000000000,"Kill":1100000000}`)
	r.reachesShim()
	r.kill(r.cmd.Process.Pid, syscall.SIGSTOP)
	r.Gone()
	r.kill(r.cmd.Process.Pid, syscall.SIGCONT)
	r.expect("ending", "exited", "done")
}

// Signals that would end the shim do not.
func TestShimIsDeaf(t *testing.T) {
	t.Parallel()
	r := runTree(t, order{}, []string{"command"}, "ready", "usr1", "exit 4")
	for _, sig := range []syscall.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
		syscall.SIGALRM, syscall.SIGPIPE, syscall.SIGTSTP,
	} {
		r.kill(r.Parent, sig)
	}
	r.tell("signal 10")
	if n := r.expect("exited"); n.Code != 4 {
		t.Errorf("got %+v, want exit code 4", n)
	}
	r.expect("done")
}

// A process that may not be killed keeps the run from being over.
func TestStuck(t *testing.T) {
	t.Parallel()
	linuxOnly(t)
	if os.Getuid() != 0 {
		drivertest.Skip(t, "needs to be root, to run as somebody else")
	}
	dir := t.TempDir()
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	plain, rooted := filepath.Join(dir, "plain"), filepath.Join(dir, "rooted")
	// The other one must be able to get there.
	err = errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o755), os.WriteFile(plain, program, 0o755), os.WriteFile(rooted, program, 0o755),
		os.Chmod(rooted, 0o755|os.ModeSetuid))
	if err != nil {
		t.Fatal(err)
	}
	tree := proctest.New(t)
	r := start(t, order{Path: rooted, Args: tree.Args("root", "ready", "usr1", "exit 3")}, func(cmd *exec.Cmd) {
		cmd.Path = plain
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	})
	r.expect("started")
	tree.Await("command")
	r.tell(`{"Term":1000000,"Kill":1000000}`)
	r.expect("ending", "stuck")
	r.kill(tree.Pids["command"], syscall.SIGUSR1)
	if n := r.expect("exited"); n.Code != 3 {
		t.Errorf("got %+v, want exit code 3", n)
	}
	r.expect("done")
}

func TestLookPath(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(a, "tool"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", a+":"+b)
	if _, err := supervise.LookPath("tool"); !os.IsPermission(err) {
		t.Errorf("not executable: %v", err)
	}
	if _, err := supervise.LookPath("other"); !os.IsNotExist(err) {
		t.Errorf("not there: %v", err)
	}
	if _, err := supervise.LookPath(""); !os.IsNotExist(err) {
		t.Errorf("empty name: %v", err)
	}
	if _, err := supervise.LookPath(filepath.Join(a, "tool", "x")); !os.IsNotExist(err) {
		t.Errorf("below a file: %v", err)
	}
	if _, err := supervise.LookPath(a); !os.IsPermission(err) {
		t.Errorf("directory: %v", err)
	}
	want := filepath.Join(b, "tool")
	if err := os.WriteFile(want, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := supervise.LookPath("tool"); got != want || err != nil {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	t.Chdir(b)
	t.Setenv("PATH", "")
	if _, err := supervise.LookPath("tool"); !os.IsNotExist(err) {
		t.Errorf("without PATH: %v", err)
	}
	t.Setenv("PATH", "/nowhere:")
	if got, err := supervise.LookPath("tool"); got != "./tool" || err != nil {
		t.Errorf("got %q, %v, want the working directory's", got, err)
	}
}
