//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"
)

// everybody is the largest tree, of which nobody listens to SIGTERM.
var (
	everybody = []string{"command", "child", "orphan", "daemon"}
	family    = []string{"ignore", "child", "orphan", "daemon", "ready", "stay"}
)

func forceRelease(t testing.TB, store, key string) {
	t.Helper()
	code, _, msg := call(t.Context(), map[string]string{"DLM_BACKEND": store}, "release", "--force", key)
	if code != 0 {
		t.Fatalf("dlm release: exit code %d: %s", code, msg)
	}
}

// A lock that is taken away takes the whole tree with it.
func TestLostByForce(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := holdTree(t, store, "k", []string{"--ttl", "6s"}, everybody, family...)
	forceRelease(t, store, "k")
	h.says("lost the lock on k")
	noticed := time.Now()
	h.tree.Gone()
	within(t, noticed, 2*time.Second)
	h.expect(79)
	if msg := h.stderr.String(); !isMessage(msg, "somebody has removed it") {
		t.Errorf("messages %q", msg)
	}
}

// A command has a moment to clean up.
func TestLostIsTold(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	mark := filepath.Join(t.TempDir(), "cleaned")
	p := startDLM(t, store, "run", "--ttl", "6s", "k", "--", "sh", "-c",
		fmt.Sprintf(`trap 'touch %s; exit 0' TERM; echo ready >&2; sleep 1000 & wait`, mark))
	p.says("ready")
	forceRelease(t, store, "k")
	p.expect(79)
	if _, err := os.Stat(mark); err != nil {
		t.Error(err)
	}
}

// The next holder does not start beside a command that lost its lock to a store
// that could not be reached: everybody is dead before.
func TestLostForWantOfRenewal(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "locks.db")
	store := "sqlite://" + path
	h := holdTree(t, store, "k", []string{"--ttl", "6s"}, everybody, family...)
	next := queue(t, store, "k")
	release := lockStore(t, path)
	h.says("was not renewed in time")
	h.tree.Gone()
	// dlm is done with its work before the deadline, so that the lock is
	// still there and can be given back.
	release()
	next.tree.Await("command")
	if left := h.tree.Living(); len(left) > 0 {
		t.Errorf("the next holder runs beside %v", left)
	}
	h.expect(79)
	next.let()
}

// A command has its grace to clean up.
func TestGrace(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "locks.db")
	mark := filepath.Join(t.TempDir(), "cleaned")
	p := startDLM(t, "sqlite://"+path, "run", "--ttl", "4s", "--grace", "2s", "k", "--", "sh", "-c",
		fmt.Sprintf(`trap 'sleep 0.5; touch %s; exit 0' TERM; echo ready >&2; sleep 1000 & wait`, mark))
	p.says("ready")
	release := lockStore(t, path)
	p.says("was not renewed in time")
	p.expect(79)
	release()
	if _, err := os.Stat(mark); err != nil {
		t.Error(err)
	}
}

// A store that is gone for good ends the command as well.
func TestLostStore(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "locks.db")
	h := holdTree(t, "sqlite://"+path, "k", []string{"--ttl", "6s"}, everybody, family...)
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(path + suffix); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	h.tree.Gone()
	h.expect(79)
}

// If dlm is killed, so are all that it has started, also those with a session
// of their own, and the key is free after the TTL.
func TestKilled(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := holdTree(t, store, "k", []string{"--ttl", "6s"}, everybody, family...)
	next := queue(t, store, "k")
	h.signal(syscall.SIGKILL)
	killed := time.Now()
	h.tree.Gone()
	within(t, killed, 2*time.Second)
	next.tree.Await("command")
	if left := h.tree.Living(); len(left) > 0 {
		t.Errorf("the next holder runs beside %v", left)
	}
	next.let()
	h.expect(-int(syscall.SIGKILL))
}

func TestSupervisorKilled(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := holdTree(t, store, "k", nil, everybody, family...)
	if err := syscall.Kill(h.tree.Parent, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.tree.Gone()
	h.expect(70)
	if msg := h.stderr.String(); !isMessage(msg, "supervisor") {
		t.Errorf("messages %q", msg)
	}
	if info := get(t, store, "k"); len(info.Holders) > 0 {
		t.Errorf("the lock is still held: %+v", info)
	}
}

// A dlm that is stopped for longer than the TTL cannot renew the lock, nor stop
// its command. That is stopped all the same, before the next holder starts.
func TestStopped(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := holdTree(t, store, "k", []string{"--ttl", "6s"}, everybody, family...)
	next := queue(t, store, "k")
	h.signal(syscall.SIGSTOP)
	next.tree.Await("command")
	if left := h.tree.Living(); len(left) > 0 {
		t.Errorf("the next holder runs beside %v", left)
	}
	h.tree.Gone()
	h.signal(syscall.SIGCONT)
	h.expect(79)
	// The late riser has not taken the next holder's lock away.
	if info := get(t, store, "k"); len(info.Holders) != 1 {
		t.Errorf("got %+v, want the next holder", info)
	}
	next.let()
}

// A supervisor that is stopped is replaced.
func TestSupervisorStopped(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "locks.db")
	store := "sqlite://" + path
	h := holdTree(t, store, "k", []string{"--ttl", "6s"}, everybody, family...)
	next := queue(t, store, "k")
	if err := syscall.Kill(h.tree.Parent, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	release := lockStore(t, path)
	h.says("supervisor")
	h.tree.Gone()
	release()
	next.tree.Await("command")
	if left := h.tree.Living(); len(left) > 0 {
		t.Errorf("the next holder runs beside %v", left)
	}
	h.expect(79)
	next.let()
}

// A lock that was handed over to a waiter has little time left at first. That
// must not stop the command.
func TestHandedOver(t *testing.T) {
	t.Parallel()
	store := newStore(t) + "?liveness_window=1s"
	first := hold(t, store, "k")
	second := queue(t, store, "k")
	third := queue(t, store, "k", "--ttl", "1m")
	first.let()
	second.tree.Await("command")
	second.let()
	third.tree.Await("command")
	third.let()
}

func TestLimits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ttl, grace, wantGrace, wantLead time.Duration
	}{
		{30 * time.Second, 0, 10 * time.Second, 2 * time.Second},
		{time.Hour, 0, 10 * time.Second, 2 * time.Second},
		{3 * time.Second, 0, time.Second, 250 * time.Millisecond},
		{30 * time.Second, 15 * time.Second, 15 * time.Second, 2 * time.Second},
	} {
		l := newLimits(c.ttl, c.grace)
		if l.grace != c.wantGrace || l.lead != c.wantLead {
			t.Errorf("newLimits(%v, %v) = %+v, want %v and %v", c.ttl, c.grace, l, c.wantGrace, c.wantLead)
		}
	}
	// After a loss that is certain there is a short notice, after the deadline
	// none.
	l := newLimits(30*time.Second, 0)
	if s := l.lost("taken"); s.Kill.Sub(s.Term) != shortNotice {
		t.Errorf("taken: %v between the signals", s.Kill.Sub(s.Term))
	}
	if s := l.lost("expired"); s.Kill != s.Term || s.Kill.Sub(supervise.Now()) > 0 {
		t.Errorf("expired: %v between the signals", s.Kill.Sub(s.Term))
	}
}
