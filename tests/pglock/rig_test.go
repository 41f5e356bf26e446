package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// rig is a server of one test's own with tables, and what is needed to look at it
// past the backend.
type rig struct {
	*testing.T
	s *servers.Postgres
}

func newRig(t *testing.T, cfg *servers.PostgresConfig) *rig {
	t.Helper()
	r := &rig{T: t, s: servers.StartPostgres(t, cfg)}
	if err := pglock.CreateSchema(t.Context(), r.pool(""), nil); err != nil {
		t.Fatal(err)
	}
	return r
}

// rigPatience is for waits that only a fault makes long.
const rigPatience = 40 * time.Second

func (r *rig) until(what string, cond func() bool) {
	r.Helper()
	servers.Until(r, what, cond)
}

// pool returns a pool of connections to the server, with further parameters.
func (r *rig) pool(params string) *pgxpool.Pool {
	r.Helper()
	return newPool(r.T, r.s.URL("postgres")+params, nil)
}

// journal notes what a manager reports.
type journal struct {
	mu     sync.Mutex
	events []dlm.Event
}

func (j *journal) Observe(e dlm.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.events = append(j.events, e)
}

// count counts the events of a kind and of an operation.
func (j *journal) count(kind dlm.EventKind, op string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, e := range j.events {
		if e.Kind == kind && e.Op == op {
			n++
		}
	}
	return n
}

// manager returns a manager, which the test need not close.
func (r *rig) manager(pool *pgxpool.Pool, cfg *dlm.LockConfig, opts *pglock.Options) *dlm.Manager {
	r.Helper()
	m, err := pglock.NewLockManager(pool, cfg, opts)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_ = m.Close(ctx) // the server may be gone
	})
	return m
}

// plain returns a manager with a pool of its own and the defaults.
func (r *rig) plain() *dlm.Manager {
	r.Helper()
	return r.manager(r.pool(""), nil, nil)
}

func (r *rig) backend() *pglock.Backend {
	r.Helper()
	b, err := pglock.New(r.pool(""), nil)
	if err != nil {
		r.Fatal(err)
	}
	return b
}

func (r *rig) take(m *dlm.Manager, key string, ttl time.Duration) *dlm.Lock {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), rigPatience)
	defer cancel()
	l, err := m.AcquireLock(ctx, key, ttl)
	if err != nil {
		r.Fatal(err)
	}
	return l
}

func (r *rig) release(l *dlm.Lock) {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
	defer cancel()
	if err := l.Release(ctx); err != nil {
		r.Error(err)
	}
}

// survived renews a lock after its connections have broken, which the pool may not
// know yet: such a call says that it had no effect.
func (r *rig) survived(l *dlm.Lock) {
	r.Helper()
	r.until("the lock is renewed", func() bool {
		err := l.Extend(r.Context(), time.Minute)
		if err != nil && !errors.Is(err, driver.ErrNotApplied) {
			r.Fatalf("the lock did not survive: %v", err)
		}
		return err == nil
	})
}

// later acquires a lock in the background.
func (r *rig) later(m *dlm.Manager, key string, ttl time.Duration) <-chan *dlm.Lock {
	got := make(chan *dlm.Lock, 1)
	var wg sync.WaitGroup
	r.Cleanup(wg.Wait)
	wg.Go(func() {
		ctx, cancel := context.WithTimeout(r.Context(), rigPatience)
		defer cancel()
		l, err := m.AcquireLock(ctx, key, ttl)
		if err != nil {
			r.Errorf("waiting for %q: %v", key, err)
			return
		}
		got <- l
	})
	return got
}

func (r *rig) got(locks <-chan *dlm.Lock) *dlm.Lock {
	r.Helper()
	select {
	case l := <-locks:
		return l
	case <-time.After(rigPatience):
		r.Fatal("the lock of a waiter never came")
		return nil
	}
}

// queued waits until n wait for a key.
func (r *rig) queued(b driver.Inspector, key string, n int) {
	r.Helper()
	r.until(fmt.Sprintf("%d wait for %q", n, key), func() bool {
		info, err := b.Inspect(r.Context(), key)
		if err != nil {
			r.Fatal(err)
		}
		return len(info.Waiters) == n
	})
}

// clean waits until nothing but the memory of tokens is left.
func (r *rig) clean() {
	r.Helper()
	r.until("nothing is left", func() bool {
		rows := r.s.MustDo("postgres", `select (select count(*) from dlm.tickets) + (select count(*) from dlm.holds) +
			(select count(*) from dlm.keys where owner is not null)`)
		return rows[0][0] == "0"
	})
}

// load is a crowd that takes and releases locks without pause, and checks that
// nobody else has them and that tokens rise.
type load struct {
	r      *rig
	cancel context.CancelFunc
	wg     sync.WaitGroup
	rounds []atomic.Int64
	last   []atomic.Int64 // tokens by key
	inside []atomic.Int32 // holders by key

	mu   sync.Mutex
	errs []error
}

const loadKeys = 3

// loadTTL outlasts every fault.
const loadTTL = 30 * time.Second

func (r *rig) load(workers int, managers ...*dlm.Manager) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{
		r: r, cancel: cancel, rounds: make([]atomic.Int64, workers*len(managers)),
		last: make([]atomic.Int64, loadKeys), inside: make([]atomic.Int32, loadKeys),
	}
	for i := range l.rounds {
		l.wg.Go(func() { l.work(ctx, managers[i/workers], i) })
	}
	r.Cleanup(l.stop)
	return l
}

func (l *load) work(ctx context.Context, m *dlm.Manager, i int) {
	for n := i; ctx.Err() == nil; n++ {
		key := n % loadKeys
		lock, err := m.AcquireLock(ctx, fmt.Sprintf("load%d", key), loadTTL)
		if err != nil {
			if ctx.Err() == nil {
				l.fail(err)
			}
			return
		}
		if l.inside[key].Add(1) != 1 {
			l.fail(fmt.Errorf("two hold %q", lock.Key))
		}
		if last := l.last[key].Swap(lock.Token); last >= lock.Token {
			l.fail(fmt.Errorf("token %d of %q follows %d", lock.Token, lock.Key, last))
		}
		l.inside[key].Add(-1)
		if err := lock.Release(context.Background()); err != nil {
			l.fail(err)
		}
		l.rounds[i].Add(1)
	}
}

func (l *load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errs = append(l.errs, err)
}

// goesOn waits until everybody has had a lock n times more.
func (l *load) goesOn(n int64) {
	l.r.Helper()
	before := make([]int64, len(l.rounds))
	for i := range before {
		before[i] = l.rounds[i].Load()
	}
	l.r.until("everybody gets a lock again", func() bool {
		l.mu.Lock()
		err := errors.Join(l.errs...)
		l.mu.Unlock()
		if err != nil {
			l.r.Fatal(err)
		}
		for i := range before {
			if l.rounds[i].Load() < before[i]+n {
				return false
			}
		}
		return true
	})
}

// stop ends the load and reports what went wrong.
func (l *load) stop() {
	l.cancel()
	l.wg.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, err := range l.errs {
		l.r.Error(err)
	}
	l.errs = nil
}

// counter counts the waiters that are in the queue for the first time.
type counter struct{ waiting atomic.Int64 }

func (c *counter) Observe(e dlm.Event) {
	if e.Kind == dlm.EventWaiting {
		c.waiting.Add(1)
	}
}
