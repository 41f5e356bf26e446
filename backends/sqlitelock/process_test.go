package sqlitelock_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
)

// Eight processes take turns on one key.
func TestProcessesExclude(t *testing.T) {
	t.Parallel()
	const processes, each = 8, 50
	path := file(t)
	var wg sync.WaitGroup
	for i := range processes {
		wg.Go(func() {
			out, err := childCommand(t.Context(), "cycles", path, fmt.Sprint("p", i), strconv.Itoa(each)).CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	wg.Wait()
	log, err := os.ReadFile(path + ".log")
	if err != nil {
		t.Fatal(err)
	}
	tokens := strings.Fields(string(log))
	if len(tokens) != processes*each {
		t.Fatalf("%d grants, want %d", len(tokens), processes*each)
	}
	last := int64(0)
	for _, s := range tokens {
		token, err := strconv.ParseInt(s, 10, 64)
		if err != nil || token <= last {
			t.Fatalf("token %s follows %d (%v)", s, last, err)
		}
		last = token
	}
}

// A holder that is killed keeps the key for the rest of its TTL, not longer
// and not shorter, and its death leaves no lock on the file.
func TestHolderIsKilled(t *testing.T) {
	t.Parallel()
	const ttl = time.Second
	path := file(t)
	b := open(t, path, childOptions)
	w := newWaiter(t.Context(), b, "m")
	defer w.close()
	before := time.Now()
	holder := start(t, "hold", path, "k", ttl.String())
	token, err := strconv.ParseInt(holder.line(t), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	after := time.Now() // the lease began between before and after
	holder.kill()
	held := refused(t, b, try("k", "early"))
	if held.Holder != "holder" || held.Token != token {
		t.Fatalf("%+v", held)
	}
	lease, err := w.lock(t.Context(), ask("k", "next"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if now := time.Now(); now.Before(before.Add(ttl)) || now.After(after.Add(ttl+time.Second)) {
		t.Fatalf("granted %v after the holder's grant", now.Sub(after))
	}
	if lease.Token <= token {
		t.Fatalf("token %d follows %d", lease.Token, token)
	}
}

// Waiters that are killed delay those behind them by one liveness window in
// all, not by one each.
func TestWaitersAreKilled(t *testing.T) {
	t.Parallel()
	path := file(t)
	b := open(t, path, childOptions)
	w := newWaiter(t.Context(), b, "m")
	defer w.close()
	lease := acquire(t, b, ask("k", "first"))
	var dead []*child
	for i := range 3 {
		c := start(t, "queue", path, fmt.Sprint("dead", i))
		if got := c.line(t); got != "queued" {
			t.Fatal(got)
		}
		dead = append(dead, c)
	}
	queued := make(chan struct{})
	granted := make(chan error, 1)
	go func() {
		_, err := w.lock(t.Context(), ask("k", "live"), func() { close(queued) })
		granted <- err
	}()
	<-queued
	if got := owners(inspect(t, b, "k")); got != "first / dead0 dead1 dead2 live" {
		t.Fatal(got)
	}
	for _, c := range dead {
		c.kill()
	}
	started := time.Now()
	release(t, b, lease)
	if err := <-granted; err != nil {
		t.Fatal(err)
	}
	if took := time.Since(started); took > childWindow+time.Second/2 {
		t.Fatalf("the dead cost %v, the window is %v", took, childWindow)
	}
}

// Fifty waiters, on five backends, are served in the order in which they came.
func TestFiftyWaitersInOrder(t *testing.T) {
	t.Parallel()
	const backends, waiters = 5, 50
	path := file(t)
	// No ticket lapses, however slow the machine is.
	patient := &sqlitelock.Options{LivenessWindow: time.Hour}
	b := open(t, path, patient)
	lease := acquire(t, b, ask("k", "first"))
	var ws []*waiter
	for i := range backends {
		w := newWaiter(t.Context(), open(t, path, patient), fmt.Sprint("m", i))
		t.Cleanup(func() {
			if err := w.close(); err != nil {
				t.Error(err)
			}
		})
		ws = append(ws, w)
	}
	served := make(chan int, waiters)
	var wg sync.WaitGroup
	for i := range waiters {
		w := ws[i%backends]
		queued := make(chan struct{})
		wg.Go(func() {
			lease, err := w.lock(t.Context(), ask("k", fmt.Sprint(i)), func() { close(queued) })
			if err != nil {
				t.Error(err)
				return
			}
			served <- i
			if err := w.b.Release(t.Context(), lease); err != nil {
				t.Error(err)
			}
		})
		<-queued
	}
	release(t, b, lease)
	wg.Wait()
	for want := range waiters {
		if got := <-served; got != want {
			t.Fatalf("waiter %d was served when it was the turn of %d", got, want)
		}
	}
}

// Processes that are killed in the middle of whatever they do leave a sound
// file, no lock on it, and nothing that lasts.
func TestKilledAtAnyMoment(t *testing.T) {
	t.Parallel()
	path := file(t)
	rounds := 25
	if testing.Short() || raceEnabled {
		rounds = 5
	}
	for i := range rounds {
		a, b := start(t, "churn", path), start(t, "churn", path)
		a.line(t)
		b.line(t)
		be := open(t, path, childOptions)
		last := int64(0)
		for n := range 5 + i {
			lease := acquire(t, be, ask("own", fmt.Sprint(n)))
			if lease.Token <= last {
				t.Fatalf("token %d follows %d", lease.Token, last)
			}
			last = lease.Token
			release(t, be, lease)
		}
		a.kill()
		release(t, be, acquire(t, be, ask("own", "between")))
		b.kill()
		if next := acquire(t, be, ask("own", "after")); next.Token <= last {
			t.Fatalf("token %d follows %d", next.Token, last)
		} else {
			release(t, be, next)
		}
		closeBackend(t, be)
	}
	var verdict string
	if err := raw(t, path).QueryRowContext(t.Context(), "PRAGMA integrity_check").Scan(&verdict); err != nil || verdict != "ok" {
		t.Fatal(verdict, err)
	}
	// Whatever the dead held or waited for lapses by itself.
	b := open(t, path, childOptions)
	for i := range 5 {
		w := newWaiter(t.Context(), b, fmt.Sprint("m", i))
		lease, err := w.lock(timeout(t, childWindow+time.Second), ask(fmt.Sprint("churn", i), "o"), nil)
		if err != nil {
			t.Fatal(err)
		}
		release(t, b, lease)
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Many processes that make the same file at the same time make one.
func TestProcessesCreateTogether(t *testing.T) {
	t.Parallel()
	for range 3 {
		path := filepath.Join(t.TempDir(), "a", "b", "locks.db")
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				out, err := childCommand(t.Context(), "cycles", path, fmt.Sprint("p", i), "2").CombinedOutput()
				if err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
		wg.Wait()
	}
}

// A connection that was opened before another process made the tables, and
// finds the file busy when it asks for them, waits; it does not say that they
// are missing.
func TestTablesMadeMeanwhile(t *testing.T) {
	t.Parallel()
	path := file(t)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	early, done, err := sqlitelock.OpenEarly(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := done(); err != nil {
			t.Error(err)
		}
	}()
	closeBackend(t, open(t, path, nil))
	other := raw(t, path)
	mustExec(t, other, "PRAGMA locking_mode = EXCLUSIVE")
	mustExec(t, other, "BEGIN EXCLUSIVE")
	if err := early.Refresh(); !sqlitelock.Busy(err) {
		t.Errorf("while the file is locked: %v", err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if err := early.Refresh(); err != nil {
		t.Error(err)
	}
	if boot, err := early.Boot(); err != nil || boot == "" {
		t.Errorf("%q, %v", boot, err)
	}
}

// Many who open a new file at once all find it in order.
func TestNewFileTogether(t *testing.T) {
	t.Parallel()
	for range 30 {
		path := file(t)
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				b, err := sqlitelock.New(path, nil)
				if err == nil {
					err = b.Close()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}
