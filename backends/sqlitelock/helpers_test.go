package sqlitelock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
)

// file names a lock file in a folder of the test's own.
func file(t testing.TB) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "locks.db")
}

// open opens a backend for as long as the test runs.
func open(t testing.TB, path string, opts *sqlitelock.Options) *sqlitelock.Backend {
	t.Helper()
	b, err := sqlitelock.New(path, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBackend(t, b) })
	return b
}

func closeBackend(t testing.TB, b *sqlitelock.Backend) {
	t.Helper()
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

// fakeClock stands still unless the test moves it.
type fakeClock struct {
	boot string
	ns   atomic.Int64
}

func newFakeClock(boot string) *fakeClock {
	c := &fakeClock{boot: boot}
	c.ns.Store(int64(time.Hour))
	return c
}

func (c *fakeClock) advance(d time.Duration) { c.ns.Add(int64(d)) }

func (c *fakeClock) clock() sqlitelock.Clock {
	return sqlitelock.NewClock(c.boot, func() (int64, error) { return c.ns.Load(), nil })
}

// openAt opens a backend that goes by a fake clock.
func openAt(t testing.TB, path string, c *fakeClock) *sqlitelock.Backend {
	t.Helper()
	b, err := sqlitelock.Open(path, nil, c.clock())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBackend(t, b) })
	return b
}

// ask is a request for an exclusive lock that waits in the queue.
func ask(key, owner string) driver.Request {
	return driver.Request{
		Key: key, Owner: owner, TTL: time.Minute, Mode: driver.Exclusive, Limit: 1, Enqueue: true, Manager: "m",
	}
}

// try is ask without a ticket.
func try(key, owner string) driver.Request {
	req := ask(key, owner)
	req.Enqueue = false
	return req
}

func acquire(t testing.TB, b driver.Backend, req driver.Request) driver.Lease {
	t.Helper()
	lease, err := b.Acquire(t.Context(), req)
	if err != nil {
		t.Fatalf("Acquire(%q, %q): %v", req.Key, req.Owner, err)
	}
	if lease.Key != req.Key || lease.Owner != req.Owner || lease.Token < 1 || lease.TTL < req.TTL || lease.Mode != req.Mode {
		t.Fatalf("Acquire(%+v) = %+v", req, lease)
	}
	return lease
}

func refused(t testing.TB, b driver.Backend, req driver.Request) *driver.HeldError {
	t.Helper()
	lease, err := b.Acquire(t.Context(), req)
	held, ok := errors.AsType[*driver.HeldError](err)
	if !ok {
		t.Fatalf("Acquire(%q, %q) = %+v, %v; want a refusal", req.Key, req.Owner, lease, err)
	}
	return held
}

func release(t testing.TB, b driver.Backend, lease driver.Lease) {
	t.Helper()
	if err := b.Release(t.Context(), lease); err != nil {
		t.Fatalf("Release(%+v): %v", lease, err)
	}
}

func lost(t testing.TB, err error, want driver.LostReason) {
	t.Helper()
	loss, ok := errors.AsType[*driver.LostError](err)
	if !ok || loss.Reason != want {
		t.Fatalf("got %v, want a loss with reason %q", err, want)
	}
}

func extend(ctx context.Context, b driver.Backend, lease driver.Lease) error {
	batch := []driver.Renewal{{Lease: lease}}
	b.Extend(ctx, batch)
	return batch[0].Err
}

func inspect(t testing.TB, b driver.Inspector, key string) driver.KeyInfo {
	t.Helper()
	info, err := b.Inspect(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// owners lists who holds and who waits, as "a b / c d".
func owners(info driver.KeyInfo) string {
	var s strings.Builder
	for _, h := range info.Holders {
		s.WriteString(h.Owner + " ")
	}
	s.WriteString("/")
	for _, w := range info.Waiters {
		s.WriteString(" " + w.Owner)
	}
	return s.String()
}

// raw opens the file past the package.
func raw(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+path+"?mode=rw&_busy_timeout=5000")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func mustExec(t testing.TB, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// waiter does what package dlm does for those who wait: it listens, and asks
// again four times in a liveness window.
type waiter struct {
	b       *sqlitelock.Backend
	manager string
	stop    context.CancelFunc
	done    chan error

	mu     sync.Mutex
	grants map[string]chan driver.Event
}

func newWaiter(ctx context.Context, b *sqlitelock.Backend, manager string) *waiter {
	ctx, stop := context.WithCancel(ctx)
	w := &waiter{b: b, manager: manager, stop: stop, done: make(chan error, 1), grants: make(map[string]chan driver.Event)}
	up := make(chan struct{})
	go func() {
		w.done <- b.Listen(ctx, manager, func(e driver.Event) {
			switch e.Kind {
			case driver.EventUp:
				close(up)
			case driver.EventGrant:
				w.mu.Lock()
				if c := w.grants[e.Lease.Owner]; c != nil {
					c <- e
				}
				w.mu.Unlock()
			}
		})
	}()
	select {
	case <-up:
	case err := <-w.done:
		w.done <- err
	}
	return w
}

func (w *waiter) close() error {
	w.stop()
	err := <-w.done
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// lock waits for the key. queued, if not nil, is called once there is a ticket.
func (w *waiter) lock(ctx context.Context, req driver.Request, queued func()) (driver.Lease, error) {
	req.Manager = w.manager
	grants := make(chan driver.Event, 16)
	w.mu.Lock()
	w.grants[req.Owner] = grants
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.grants, req.Owner)
		w.mu.Unlock()
	}()
	for {
		lease, err := w.b.Acquire(ctx, req)
		held, ok := errors.AsType[*driver.HeldError](err)
		if !ok {
			return lease, err
		}
		if queued != nil {
			queued()
			queued = nil
		}
		pause := w.b.Properties().LivenessWindow / 4
		if held.Remaining > 0 {
			pause = min(pause, held.Remaining)
		}
		timer := time.NewTimer(pause)
		select {
		case e := <-grants:
			timer.Stop()
			if e.Ticket != held.Ticket {
				return lease, fmt.Errorf("granted ticket %d, have %d", e.Ticket, held.Ticket)
			}
			// The grant is ours; asking again confirms it.
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return lease, ctx.Err()
		}
	}
}

func contains(err error, part string) bool {
	return err != nil && strings.Contains(err.Error(), part)
}
