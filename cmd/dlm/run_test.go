//go:build linux

package main

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestRunPassesExitCodeOn(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	for script, want := range map[string]int{
		"exit 0":        0,
		"exit 1":        1,
		"exit 42":       42,
		"exit 255":      255,
		"kill -9 $$":    137,
		"kill -TERM $$": 143,
		"kill -INT $$":  130,
	} {
		code, out, msg := runDLM(t, store, "run", "k", "--", "sh", "-c", script)
		if code != want || out != "" || msg != "" {
			t.Errorf("%s: exit code %d, want %d; output %q, messages %q", script, code, want, out, msg)
		}
	}
}

func TestRunCannotStart(t *testing.T) {
	t.Parallel()
	store, dir := newStore(t), t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for command, want := range map[string]struct {
		code int
		text string
	}{
		"no-such-command-at-all":        {127, "command not found"},
		dir + "/missing":                {127, "command not found"},
		file("x", "", 0o755) + "/below": {127, "command not found"},
		"":                              {127, "command not found"},
		dir:                             {126, "permission denied"},
		file("plain", "echo", 0o644):    {126, "permission denied"},
		file("data", "\x00\x01", 0o755): {126, "#!"},
		file("script", "#!/no/such/program\n", 0o755): {126, "interpreter"},
	} {
		code, out, msg := runDLM(t, store, "run", "k", "--", command)
		if code != want.code || out != "" || !isMessage(msg, want.text) {
			t.Errorf("%q: exit code %d, want %d; output %q, messages %q", command, code, want.code, out, msg)
		}
	}
	// The lock did not stay behind.
	if info := get(t, store, "k"); len(info.Holders) > 0 {
		t.Errorf("still held: %+v", info)
	}
}

func TestRunNotAcquired(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := hold(t, store, "k")
	for _, flags := range [][]string{{"--no-wait"}, {"--wait", "2s"}} {
		mark := filepath.Join(t.TempDir(), "started")
		began := time.Now()
		args := append(append([]string{"run", "--quiet"}, flags...), "k", "--", "touch", mark)
		code, _, msg := runDLM(t, store, args...)
		if code != 75 || !isMessage(msg, "held by") || strings.Count(msg, "\n") != 1 {
			t.Errorf("%v: exit code %d, want 75: %s", flags, code, msg)
		}
		if flags[0] == "--wait" && time.Since(began) < 2*time.Second {
			t.Errorf("did not wait")
		}
		if _, err := os.Stat(mark); err == nil {
			t.Errorf("%v: the command was started", flags)
		}
		if info := get(t, store, "k"); len(info.Waiters) > 0 {
			t.Errorf("%v: ticket left behind: %+v", flags, info.Waiters)
		}
	}
	h.let()
}

func TestRunStoreUnusable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	garbage := filepath.Join(dir, "garbage.db")
	if err := os.WriteFile(garbage, bytes.Repeat([]byte("garbage "), 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	mark := filepath.Join(dir, "started")
	for _, path := range []string{garbage, garbage + "/below.db", dir, open + "/locks.db"} {
		code, out, msg := runDLM(t, "sqlite://"+path, "run", "k", "--", "touch", mark)
		if code != 69 || out != "" || !isMessage(msg, "the store cannot be used") || strings.Count(msg, "\n") != 1 {
			t.Errorf("%s: exit code %d, want 69: %s", path, code, msg)
		}
	}
	if _, err := os.Stat(mark); err == nil {
		t.Errorf("the command was started")
	}
}

func TestRunOutputIsUntouched(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	in := make([]byte, 300_000)
	rand.Read(in)
	p := prepare(t, store, "run", "k", "--", "sh", "-c", "cat; printf 'no newline' >&2")
	p.Stdin = bytes.NewReader(in)
	p.start().expect(0)
	if !bytes.Equal(p.stdout.Bytes(), in) {
		t.Errorf("%d bytes went in, and %d others came out", len(in), p.stdout.Len())
	}
	if got := p.stderr.String(); got != "no newline" {
		t.Errorf("standard error %q", got)
	}
}

// The command has the very files that dlm was given, and nothing of dlm's own:
// no store, no socket.
func TestRunFilesOfCommand(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	extra, err := os.Create(filepath.Join(dir, "extra"))
	if err != nil {
		t.Fatal(err)
	}
	defer extra.Close()
	// list returns what the command sees; 3 is the extra file.
	list := func(p *process) map[string]string {
		p.Stdout, p.ExtraFiles = out, []*os.File{extra}
		if err := errors.Join(out.Truncate(0), seekStart(out)); err != nil {
			t.Fatal(err)
		}
		p.start().expect(0)
		data, err := os.ReadFile(out.Name())
		if err != nil {
			t.Fatal(err)
		}
		files := map[string]string{}
		for line := range strings.Lines(string(data)) {
			left, target, ok := strings.Cut(strings.TrimSpace(line), " -> ")
			if !ok {
				continue
			}
			kind, _, _ := strings.Cut(target, ":") // pipes have numbers
			if strings.HasPrefix(target, "/proc/") {
				kind = "the folder that ls reads"
			}
			files[left[strings.LastIndexByte(left, ' ')+1:]] = kind
		}
		return files
	}
	store := newStore(t)
	direct := prepare(t, store)
	direct.Path, direct.Args = "/bin/ls", []string{"ls", "-l", "/proc/self/fd"}
	want := list(direct)
	got := list(prepare(t, store, "run", "k", "--", "ls", "-l", "/proc/self/fd"))
	if !maps.Equal(got, want) || got["3"] != extra.Name() {
		t.Errorf("descriptors of the command: %v, want %v", got, want)
	}
}

func seekStart(f *os.File) error {
	_, err := f.Seek(0, io.SeekStart)
	return err
}

func TestRunEnvironment(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	p := prepare(t, store, "run", "--ttl", "20s", "a key", "--", "sh", "-c",
		`printf '%s\n' "$DLM_KEY" "$DLM_TOKEN" "$DLM_DEADLINE" "$OTHER"; env | grep -c '^DLM_TOKEN='`)
	p.Env = append(p.Env, "DLM_TOKEN=stale", "OTHER=kept")
	began := time.Now()
	p.start().expect(0)
	lines := strings.Split(p.stdout.String(), "\n")
	if len(lines) != 6 || lines[0] != "a key" || lines[3] != "kept" || lines[4] != "1" {
		t.Fatalf("got %q", lines)
	}
	if token, err := strconv.ParseInt(lines[1], 10, 64); err != nil || token < 1 {
		t.Errorf("token %q", lines[1])
	}
	deadline, err := time.Parse(time.RFC3339Nano, lines[2])
	if err != nil || deadline.Before(began.Add(15*time.Second)) || deadline.After(time.Now().Add(20*time.Second)) {
		t.Errorf("deadline %q, %v", lines[2], err)
	}
}

// Those who wait are served in order, one at a time, with rising tokens.
func TestRunTakesTurns(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	journal := filepath.Join(t.TempDir(), "journal")
	script := fmt.Sprintf(`echo "begin $0 $DLM_TOKEN" >>%s; sleep 0.05; echo "end $0" >>%s`, journal, journal)
	first := hold(t, store, "k")
	var waiters []*process
	for i := range 4 {
		p := startDLM(t, store, "run", "k", "--", "sh", "-c", script, strconv.Itoa(i))
		p.says("waiting for the lock on k")
		waiters = append(waiters, p)
	}
	first.let()
	for _, p := range waiters {
		p.expect(0)
	}
	data, err := os.ReadFile(journal)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	if len(lines) != 8 {
		t.Fatalf("journal %q", lines)
	}
	last := int64(0)
	for i := range 4 {
		var who int
		var token int64
		if _, err := fmt.Sscanf(lines[2*i], "begin %d %d", &who, &token); err != nil || who != i || token <= last {
			t.Errorf("line %q, want the turn of %d with a token above %d", lines[2*i], i, last)
		}
		last = token
		if want := fmt.Sprintf("end %d", i); lines[2*i+1] != want {
			t.Errorf("line %q, want %q", lines[2*i+1], want)
		}
	}
}

func TestRunSlots(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	a, b := hold(t, store, "k", "--slots", "2"), hold(t, store, "k", "--slots", "2")
	c := queue(t, store, "k", "--slots", "2")
	if info := get(t, store, "k"); info.Limit != 2 || len(info.Holders) != 2 || len(info.Waiters) != 1 {
		t.Errorf("got %+v", info)
	}
	// Another number is a mistake of the user.
	if code, _, msg := runDLM(t, store, "run", "--slots", "3", "k", "--", "true"); code != 64 || !isMessage(msg, "--slots 2") {
		t.Errorf("other limit: exit code %d: %s", code, msg)
	}
	a.let()
	c.tree.Await("command")
	b.let()
	c.let()
}

func TestRunShared(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	a, b := hold(t, store, "k", "--shared"), hold(t, store, "k", "--shared")
	c := queue(t, store, "k")
	for i, h := range get(t, store, "k").Holders {
		if h.Mode != "shared" {
			t.Errorf("holder %d: %+v", i, h)
		}
	}
	a.let()
	b.let()
	c.tree.Await("command")
	if code, _, msg := runDLM(t, store, "run", "--shared", "--no-wait", "k", "--", "true"); code != 75 {
		t.Errorf("shared beside exclusive: exit code %d: %s", code, msg)
	}
	c.let()
}

// A command may run for longer than the TTL.
func TestRunRenews(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := hold(t, store, "k", "--ttl", "4s")
	w := startDLM(t, store, "run", "--wait", "5s", "k", "--", "true")
	w.says("waiting")
	w.expect(75)
	h.let()
}

func TestRunForwardsSignals(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	for _, sig := range []syscall.Signal{
		syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
		syscall.SIGWINCH,
	} {
		h := holdTree(t, store, "k", nil, []string{"command"}, "signal")
		h.signal(sig)
		h.expect(100 + int(sig))
	}
}

func TestRunStopAndContinue(t *testing.T) {
	t.Parallel()
	h := hold(t, newStore(t), "k")
	// Without a terminal, the command is stopped and dlm goes on.
	h.signal(syscall.SIGTSTP)
	awaitState(t, h.tree.Pids["command"], 'T')
	h.signal(syscall.SIGCONT)
	h.let()
}

// awaitState waits until a process is in a state, see proc(5).
func awaitState(t testing.TB, pid int, want byte) {
	t.Helper()
	eventually(t, func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		return stat[bytes.LastIndexByte(stat, ')')+2] == want
	})
}

func TestRunSignalWhileWaiting(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := hold(t, store, "k")
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		mark := filepath.Join(t.TempDir(), "started")
		p := startDLM(t, store, "run", "k", "--", "touch", mark)
		p.says("waiting for")
		began := time.Now()
		p.signal(sig)
		p.expect(128 + int(sig))
		within(t, began, time.Second)
		if !isMessage(p.stderr.String(), "the command was not started") {
			t.Errorf("%v: messages %q", sig, &p.stderr)
		}
		if info := get(t, store, "k"); len(info.Waiters) > 0 {
			t.Errorf("%v: ticket left behind: %+v", sig, info.Waiters)
		}
		if _, err := os.Stat(mark); err == nil {
			t.Errorf("%v: the command was started", sig)
		}
	}
	// Others do not end the wait.
	p := queue(t, store, "k")
	p.signal(syscall.SIGUSR1)
	h.let()
	p.tree.Await("command")
	p.let()
}

// The wait ends as fast when the store does not answer.
func TestRunSignalWhileStoreHangs(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "locks.db")
	store := "sqlite://" + path
	if code, _, msg := runDLM(t, store, "run", "k", "--", "true"); code != 0 {
		t.Fatal(msg)
	}
	release := lockStore(t, path)
	p := startDLM(t, store, "run", "k", "--", "true")
	awaitOpen(t, p.Process.Pid, path)
	began := time.Now()
	p.signal(syscall.SIGTERM)
	p.expect(128 + int(syscall.SIGTERM))
	within(t, began, time.Second)
	release()
	if info := get(t, store, "k"); len(info.Waiters)+len(info.Holders) > 0 {
		t.Errorf("left behind: %+v", info)
	}
}

// awaitOpen waits until a process has opened a file.
func awaitOpen(t testing.TB, pid int, path string) {
	t.Helper()
	eventually(t, func() bool {
		links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(links, func(link string) bool {
			target, err := os.Readlink(link)
			return err == nil && target == path
		})
	})
}

// What the command leaves behind is gone before the lock is free.
func TestRunLeftovers(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	p := holdTree(t, store, "k", []string{"--ttl", "6s"}, []string{"child", "daemon", "command"},
		"ignore", "child", "daemon", "ready", "usr1", "exit 3")
	next := queue(t, store, "k")
	delete(p.tree.Pids, "command")
	p.signal(syscall.SIGUSR1)
	next.tree.Await("command")
	if left := p.tree.Living(); len(left) > 0 {
		t.Errorf("the next holder runs beside %v", left)
	}
	p.expect(3)
	if !isMessage(p.stderr.String(), "left processes behind") {
		t.Errorf("messages %q", &p.stderr)
	}
	p.tree.Gone()
	next.let()
}

// The end of a pipe may outlive the command by a moment.
func TestRunWaitsForTail(t *testing.T) {
	t.Parallel()
	p := startDLM(t, newStore(t), "run", "k", "--", "sh", "-c", "(sleep 0.3; echo tail) & echo head; exit 4")
	p.expect(4)
	if got := p.stdout.String(); got != "head\ntail\n" {
		t.Errorf("output %q", got)
	}
	if got := p.stderr.String(); got != "" {
		t.Errorf("messages %q", got)
	}
}

func TestRunNested(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	if code, _, msg := runDLM(t, store, "run", "a", "--", binary, "run", "b", "--", "sh", "-c", "exit 5"); code != 5 {
		t.Errorf("exit code %d, want 5: %s", code, msg)
	}
	// The same key is held by the outer one.
	code, _, msg := runDLM(t, store, "run", "a", "--", binary, "run", "--no-wait", "a", "--", "true")
	if code != 75 {
		t.Errorf("exit code %d, want 75: %s", code, msg)
	}
}

func TestRunNestedKilled(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	p := startTree(t, store, []string{"run", "a", "--", binary, "run", "b", "--"}, "ignore", "daemon", "ready", "stay")
	p.tree.Await("command", "daemon")
	p.signal(syscall.SIGKILL)
	p.tree.Gone()
	p.expect(-int(syscall.SIGKILL))
}
