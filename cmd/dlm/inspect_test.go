package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/sqlitelock"
)

// manager opens a store in this process.
func manager(t testing.TB, store string) *dlm.Manager {
	t.Helper()
	m, err := sqlitelock.NewLockManager(strings.TrimPrefix(store, "sqlite://"), &dlm.LockConfig{Label: "tester"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close(context.Background()) })
	return m
}

func acquire(t testing.TB, m *dlm.Manager, key string, opts *dlm.AcquireOptions) *dlm.Lock {
	t.Helper()
	l, err := m.Acquire(t.Context(), key, time.Minute, opts)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// ok runs dlm in this process and returns its standard output.
func ok(t testing.TB, store string, args ...string) string {
	t.Helper()
	code, out, msg := call(t.Context(), map[string]string{"DLM_BACKEND": store}, args...)
	if code != 0 {
		t.Fatalf("dlm %v: exit code %d: %s", args, code, msg)
	}
	return out
}

// fields cuts a table into its cells.
func fields(table string) (rows [][]string) {
	for line := range strings.Lines(table) {
		rows = append(rows, strings.Fields(line))
	}
	return rows
}

func TestLs(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	m := manager(t, store)
	if out := ok(t, store, "ls"); out != "KEY  HOLDER  TOKEN  MODE  HELD  REMAINING  WAITING\n" {
		t.Errorf("empty store: %q", out)
	}
	if out := ok(t, store, "ls", "--json"); out != "[]\n" {
		t.Errorf("empty store: %q", out)
	}
	a := acquire(t, m, "job:a", nil)
	b := acquire(t, m, "job:b\x1b[31m", &dlm.AcquireOptions{Limit: 2})
	c := acquire(t, m, "job:b\x1b[31m", &dlm.AcquireOptions{Limit: 2})
	acquire(t, m, "other", &dlm.AcquireOptions{Shared: true})

	out := ok(t, store, "ls", "job:")
	rows := fields(out)
	if strings.Contains(out, "\x1b") || len(rows) != 4 {
		t.Fatalf("got %q", out)
	}
	for i, want := range []struct {
		key string
		l   *dlm.Lock
	}{{"job:a", a}, {`"job:b\x1b[31m"`, b}, {`"job:b\x1b[31m"`, c}} {
		row := rows[i+1]
		if len(row) != 7 || row[0] != want.key || row[1] != want.l.Value || row[2] != strconv.FormatInt(want.l.Token, 10) ||
			row[3] != "exclusive" || row[6] != "0" {
			t.Errorf("row %q, want %v", row, want.l)
		}
		if left, err := time.ParseDuration(row[5]); err != nil || left < 30*time.Second || left > time.Minute {
			t.Errorf("remaining %q", row[5])
		}
	}
	// The columns are aligned.
	lines := strings.Split(out, "\n")
	for _, line := range lines[1:4] {
		if strings.Index(line, "tester/") != strings.Index(lines[0], "HOLDER") {
			t.Errorf("not aligned:\n%s", out)
		}
	}

	var list []lockJSON
	if err := json.Unmarshal([]byte(ok(t, store, "ls", "--json")), &list); err != nil || len(list) != 3 {
		t.Fatalf("got %+v, %v", list, err)
	}
	if l := list[1]; l.Key != b.Key || l.Limit != 2 || len(l.Holders) != 2 || l.Holders[1].Token != strconv.FormatInt(c.Token, 10) ||
		l.Holders[0].TTL != 60_000 || l.Waiters == nil {
		t.Errorf("got %+v", l)
	}
	if l := list[2]; l.Key != "other" || l.Holders[0].Mode != "shared" {
		t.Errorf("got %+v", l)
	}
}

func TestLsReadsAllPages(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	m := manager(t, store)
	const n = pageSize + 3
	for i := range n {
		acquire(t, m, fmt.Sprintf("key %04d", i), nil)
	}
	rows := fields(ok(t, store, "ls", "key"))
	if len(rows) != n+1 || strings.Join(rows[n][:2], " ") != fmt.Sprintf(`"key %04d"`, n-1) {
		t.Errorf("%d rows, the last is %q", len(rows), rows[len(rows)-1])
	}
}

func TestGet(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	m := manager(t, store)
	rows := fields(ok(t, store, "get", "k"))
	if len(rows) != 2 || !slices.Equal(rows[1], []string{"k", "-", "-", "-", "-", "-", "0"}) {
		t.Errorf("free key: %q", rows)
	}
	if out := ok(t, store, "get", "--json", "k"); out != `{"key":"k","limit":0,"holders":[],"waiters":[]}`+"\n" {
		t.Errorf("free key: %q", out)
	}
	l := acquire(t, m, "k", nil)
	w := queue(t, store, "k")
	rows = fields(ok(t, store, "get", "k"))
	if len(rows) != 5 || rows[1][1] != l.Value || rows[1][6] != "1" || rows[3][0] != "WAITER" || rows[4][1] != "exclusive" {
		t.Errorf("got %q", rows)
	}
	info := get(t, store, "k")
	if len(info.Waiters) != 1 || !strings.HasSuffix(strings.Split(info.Waiters[0].Owner, "/")[0], ":"+strconv.Itoa(w.Process.Pid)) {
		t.Errorf("got %+v, want the process %d as waiter", info, w.Process.Pid)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.tree.Await("command")
	w.let()
}

func TestRelease(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	m := manager(t, store)
	env := map[string]string{"DLM_BACKEND": store}
	l := acquire(t, m, "k", nil)

	code, out, msg := call(t.Context(), env, "release", "k")
	if code != 64 || out != "" || !isMessage(msg, "--force") {
		t.Errorf("without --force: exit code %d: %s%s", code, out, msg)
	}
	code, out, msg = call(t.Context(), env, "release", "--force", "k", "--token", strconv.FormatInt(l.Token+1, 10))
	if code != 1 || out != "" || !isMessage(msg, "no lock on k has the token") {
		t.Errorf("another token: exit code %d: %s%s", code, out, msg)
	}
	for _, token := range []string{"0", "-1", "x"} {
		if code, _, msg := call(t.Context(), env, "release", "--force", "k", "--token="+token); code != 64 || !isMessage(msg, "token") {
			t.Errorf("token %s: exit code %d: %s", token, code, msg)
		}
	}
	if l.Err() != nil || len(get(t, store, "k").Holders) != 1 {
		t.Fatalf("the lock was removed")
	}
	code, out, msg = call(t.Context(), env, "release", "--force", "k", "--token", strconv.FormatInt(l.Token, 10))
	if code != 0 || out != "" || !isMessage(msg, fmt.Sprintf("removed the lock on k by force: token %d, owner %s", l.Token, l.Value)) {
		t.Errorf("exit code %d: %s%s", code, out, msg)
	}
	code, out, msg = call(t.Context(), env, "release", "--force", "--json", "k")
	if code != 1 || out != `{"key":"k","removed":[]}`+"\n" || !isMessage(msg, "nobody holds k") {
		t.Errorf("nothing left: exit code %d: %s%s", code, out, msg)
	}

	for range 2 {
		acquire(t, m, "s", &dlm.AcquireOptions{Limit: 2})
	}
	code, out, msg = call(t.Context(), env, "release", "--force", "--json", "s")
	var removed removedJSON
	if err := json.Unmarshal([]byte(out), &removed); err != nil || code != 0 || len(removed.Removed) != 2 || strings.Count(msg, "\n") != 2 {
		t.Errorf("exit code %d: %s%s", code, out, msg)
	}
}

// lines gives a writer's lines to a channel.
func lines(t testing.TB) (io.Writer, func() string) {
	ch := make(chan string, 100)
	var buf bytes.Buffer
	return writerFunc(func(b []byte) (int, error) {
			buf.Write(b)
			for {
				line, err := buf.ReadString('\n')
				if err != nil {
					buf.WriteString(line)
					return len(b), nil
				}
				ch <- line
			}
		}), func() string {
			t.Helper()
			select {
			case line := <-ch:
				return line
			case <-time.After(time.Minute):
				t.Fatal("no line for a minute")
				return ""
			}
		}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestWatch(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	m := manager(t, store)
	for _, asJSON := range []bool{false, true} {
		out, next := lines(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan int)
		go func() {
			var msg bytes.Buffer
			m := &Main{Out: out, Err: &msg, LookupEnv: func(string) (string, bool) { return "", false }}
			ended <- m.Run(ctx, []string{"watch", "k", "--backend", store, "--interval", "10ms", fmt.Sprintf("--json=%v", asJSON)})
		}()
		see := func(text string, check func(lockJSON) bool) {
			t.Helper()
			line := next()
			var l lockJSON
			if !asJSON && !strings.Contains(line, text) {
				t.Errorf("line %q, want %q", line, text)
			} else if asJSON && (json.Unmarshal([]byte(line), &l) != nil || !check(l) || l.Time == "") {
				t.Errorf("line %q", line)
			}
		}
		see("k free; 0 waiting", func(l lockJSON) bool { return len(l.Holders) == 0 })
		l := acquire(t, m, "k", nil)
		see(fmt.Sprintf("k held by %s (token %d, exclusive); 0 waiting", l.Value, l.Token), func(got lockJSON) bool {
			return len(got.Holders) == 1 && got.Holders[0].Token == strconv.FormatInt(l.Token, 10)
		})
		// A renewal is no change.
		if err := l.Extend(t.Context(), time.Hour); err != nil {
			t.Fatal(err)
		}
		w := queue(t, store, "k")
		see("; 1 waiting", func(l lockJSON) bool { return len(l.Waiters) == 1 })
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		see("; 0 waiting", func(got lockJSON) bool { return len(got.Holders) == 1 && got.Holders[0].Owner != l.Value })
		w.tree.Await("command")
		w.let()
		see("k free", func(l lockJSON) bool { return len(l.Holders) == 0 })
		cancel()
		if code := <-ended; code != 0 {
			t.Errorf("exit code %d", code)
		}
	}
}

func TestWatchEndsOnSignal(t *testing.T) {
	t.Parallel()
	p := prepare(t, newStore(t), "watch", "k")
	r, w := io.Pipe()
	p.Stdout = w
	p.start()
	line := make([]byte, 200)
	if n, err := r.Read(line); err != nil || !strings.Contains(string(line[:n]), "k free") {
		t.Fatalf("got %q, %v", line[:n], err)
	}
	p.signal(syscall.SIGTERM)
	p.expect(143)
}

func TestInspectStoreUnusable(t *testing.T) {
	t.Parallel()
	store := "sqlite://" + t.TempDir()
	for _, args := range [][]string{{"ls"}, {"get", "k"}, {"release", "--force", "k"}, {"watch", "k"}} {
		code, out, msg := call(t.Context(), map[string]string{"DLM_BACKEND": store}, args...)
		if code != 69 || out != "" || !isMessage(msg, "the store cannot be used") {
			t.Errorf("%v: exit code %d: %s%s", args, code, out, msg)
		}
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	if out := ok(t, "", "version"); !strings.HasPrefix(out, "dlm ") || !strings.Contains(out, "; stores: consul, consuls, etcd, etcds, postgres, ") || !strings.HasSuffix(out, ", sqlite, zk, zks\n") {
		t.Errorf("got %q", out)
	}
	var v versionJSON
	if err := json.Unmarshal([]byte(ok(t, "", "version", "--json")), &v); err != nil || v.Go == "" || !slices.Contains(v.Backends, "sqlite") {
		t.Errorf("got %+v, %v", v, err)
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out := ok(t, "", "completion", shell); !strings.Contains(out, "dlm") {
			t.Errorf("%s: got %q", shell, out)
		}
	}
}

func TestQuote(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":              `""`,
		"-":             `"-"`,
		"plain:key/1":   "plain:key/1",
		"größe":         "größe",
		"with space":    `"with space"`,
		"tab\t":         `"tab\t"`,
		"\x1b[2J":       `"\x1b[2J"`,
		"back\\slash":   `"back\\slash"`,
		`"quoted"`:      `"\"quoted\""`,
		"rtl\u202eevil": `"rtl\u202eevil"`,
	} {
		if got := quote(in); got != want {
			t.Errorf("quote(%q) = %s, want %s", in, got, want)
		}
	}
	for in, want := range map[string]string{"k": "k", "a b": "'a b'", "it's": `'it'\''s'`, "$x": "'$x'", "-x": "'-x'", "": "''", "\n": `"\n"`} {
		if got := shellQuote(in); got != want {
			t.Errorf("shellQuote(%q) = %s, want %s", in, got, want)
		}
	}
}

// What is wrong with the command line is said before anything is opened.
func TestUsage(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "locks.db")
	store := "sqlite://" + path
	long := strings.Repeat("k", dlm.MaxKeyLen+1)
	run := func(flags ...string) []string {
		return append(append([]string{"run"}, flags...), "k", "--", "touch", path)
	}
	for _, c := range []struct {
		args []string
		env  string // NAME=value
		want string
	}{
		{nil, "", "say what to do"},
		{[]string{"bogus"}, "", "bogus"},
		{[]string{"--bogus"}, "", "--bogus"},
		{[]string{"ls", "a", "b"}, "", "at most 1"},
		{[]string{"get"}, "", "1 arg"},
		{[]string{"get", ""}, "", "KEY is empty"},
		{[]string{"get", long}, "", "at most 512"},
		{[]string{"get", "\xff"}, "", "UTF-8"},
		{[]string{"watch", "k", "--interval", "0"}, "", "--interval"},
		{[]string{"run"}, "", "put --"},
		{[]string{"run", "k", "touch", path}, "", "put --"},
		{[]string{"run", "k", "--"}, "", "no COMMAND"},
		{[]string{"run", "--", "touch", path}, "", "one KEY"},
		{[]string{"run", "k", "l", "--", "touch", path}, "", "one KEY"},
		{[]string{"run", "", "--", "touch", path}, "", "KEY is empty"},
		{run("--ttl", "0"), "", "--ttl is 0s"},
		{run("--ttl", "-1ns"), "", "--ttl is -1ns"},
		{run("--ttl", "999us"), "", "between 1ms"},
		{run("--ttl", "30"), "", "--ttl"},
		{run("--ttl", "9000h"), "", "between 1ms"},
		{run(), "DLM_TTL=0s", "DLM_TTL is 0s"},
		{run(), "DLM_TTL=-30s", "DLM_TTL is -30s"},
		{run(), "DLM_TTL=1us", "between 1ms"},
		{run(), "DLM_TTL=soon", "DLM_TTL is \"soon\""},
		{run("--wait", "0"), "", "--no-wait"},
		{run("--wait", "-1s"), "", "--wait is -1s"},
		{run("--wait", "1s", "--no-wait"), "", "exclude each other"},
		{run(), "DLM_WAIT=0s", "DLM_WAIT is 0s"},
		{run("--slots", "0"), "", "--slots is 0"},
		{run("--slots", "-1"), "", "--slots is -1"},
		{run("--slots", "2", "--shared"), "", "exclude each other"},
		{run("--grace", "0"), "", "--grace is 0s"},
		{run("--grace", "16s"), "", "at most 15s"},
		{run("--grace", "2s"), "", "above 2s"},
		{run(), "DLM_GRACE=1m", "at most 15s"},
		{run("--backend", "bogus://x"), "", `--backend: unknown kind of store "bogus", must be one of: consul, consuls, etcd, etcds, postgres, `},
		{run("--backend", "redis://h/x"), "", `--backend: the path is "x" where the number`},
		{run("--backend", "sqlite://a,b"), "", "three slashes"},
		{run("--backend", "/path"), "", "unknown kind of store"},
		{run("--backend", "sqlite://relative/path"), "", "three slashes"},
		{run("--backend", "sqlite:relative"), "", "three slashes"},
		{run("--backend", store+"?bogus=1"), "", `unknown parameter "bogus"`},
		{run("--backend", store+"?liveness_window=1s&liveness_window=2s"), "", "liveness_window is given 2 times"},
		{run("--backend", store+"?liveness_window=1"), "", `liveness_window is "1"`},
		{run("--backend", store+"?liveness_window="), "", `liveness_window is ""`},
		{run("--backend", store+"?liveness_window=-5s"), "", "between 100ms and 1h0m0s"},
		{run("--backend", store+"?a=%zz"), "", "malformed parameters"},
		{run("--backend", store+"#x"), "", "path and parameters only"},
		{run("--backend", "sqlite://%zz"), "", "not a URL"},
		{run(), "DLM_BACKEND=bogus://", "DLM_BACKEND: unknown kind of store"},
	} {
		env := map[string]string{"DLM_BACKEND": store}
		if name, value, ok := strings.Cut(c.env, "="); ok {
			env[name] = value
		}
		code, out, msg := call(t.Context(), env, c.args...)
		if code != 64 || out != "" || !isMessage(msg, c.want) || strings.Count(msg, "\n") != 1 {
			t.Errorf("%q %s: exit code %d, output %q, message %q, want %q", c.args, c.env, code, out, msg, c.want)
		}
	}
	if found, err := filepath.Glob(path + "*"); err != nil || len(found) > 0 {
		t.Errorf("something was opened or run: %v, %v", found, err)
	}
}

func TestDefaultStore(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"XDG_STATE_HOME": "/state", "HOME": "/home/x"}, "/state/dlm/locks.db"},
		{map[string]string{"XDG_STATE_HOME": "relative", "HOME": "/home/x"}, "/home/x/.local/state/dlm/locks.db"},
		{map[string]string{"HOME": "/home/x"}, "/home/x/.local/state/dlm/locks.db"},
	} {
		got, err := defaultFile(func(name string) (string, bool) { v, ok := c.env[name]; return v, ok })
		if got != c.want || err != nil {
			t.Errorf("%v: got %q, %v, want %q", c.env, got, err, c.want)
		}
	}
	code, _, msg := call(t.Context(), nil, "ls")
	if code != 64 || !isMessage(msg, "HOME") {
		t.Errorf("without HOME: exit code %d: %s", code, msg)
	}
	home := t.TempDir()
	if code, out, msg := call(t.Context(), map[string]string{"HOME": home}, "ls"); code != 0 {
		t.Errorf("exit code %d: %s%s", code, out, msg)
	}
	if found, err := filepath.Glob(home + "/.local/state/dlm/locks.db"); err != nil || len(found) != 1 {
		t.Errorf("found %v, %v", found, err)
	}
}

// Flags come before the environment.
func TestEnvironmentStandsForFlags(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := hold(t, store, "k")
	for _, c := range []struct {
		env  string
		args []string
		want string
	}{
		{"DLM_WAIT=2s", nil, "the wait of 2s is over"},
		{"DLM_WAIT=1h", []string{"--wait", "2s"}, "the wait of 2s is over"},
		{"DLM_WAIT=1h", []string{"--no-wait"}, "held by"},
		{"DLM_WAIT=bogus", []string{"--no-wait"}, "held by"},
	} {
		p := prepare(t, store, append(append([]string{"run"}, c.args...), "k", "--", "true")...)
		p.Env = append(p.Env, c.env)
		p.start().expect(75)
		if !strings.Contains(p.stderr.String(), c.want) {
			t.Errorf("%s %v: messages %q", c.env, c.args, &p.stderr)
		}
	}
	h.let()
}

func FuzzParseBackend(f *testing.F) {
	for _, s := range []string{
		"sqlite://", "sqlite:///a/b?liveness_window=1s", "sqlite://h", "x:", "sqlite:///%00", "sqlite:///a?b=%zz",
		"redis://u:p@h:1/2?prefix=x", "redis+quorum://a,b:1,[::1]:2?max_ttl=1m", "rediss+sentinel://a,b/m/1?insecure=true",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		open, err := parseBackend(text, func(string) (string, bool) { return "/home/x", true })
		if (open == nil) == (err == nil) {
			t.Errorf("got %v, %v", open != nil, err)
		}
		if scheme, _, _ := strings.Cut(strings.ToLower(text), ":"); err == nil && schemes[scheme].parse == nil {
			t.Errorf("%q was accepted", text)
		}
	})
}
