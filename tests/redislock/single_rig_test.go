package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// rig is a server of one test's own, and what is needed to look at it past the
// backend.
type rig struct {
	*testing.T
	s      *servers.Redis
	prefix string
	admin  *redis.Client
}

func newRig(t *testing.T, cfg *servers.RedisConfig) *rig {
	t.Helper()
	s := servers.StartRedis(t, cfg)
	r := &rig{T: t, s: s, prefix: "dlm:", admin: redis.NewClient(&redis.Options{Addr: s.Addr()})}
	t.Cleanup(func() { r.admin.Close() })
	return r
}

// rigPatience is for waits that only a fault makes long.
const rigPatience = 40 * time.Second

func (r *rig) until(what string, cond func() bool) {
	r.Helper()
	servers.Until(r, what, cond)
}

// closed waits for a channel to be closed, or to give something.
func closed[T any](r *rig, what string, c <-chan T) T {
	r.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(rigPatience):
		r.Fatalf("never happened: %s", what)
		panic("not reached")
	}
}

// client returns a client, of a server at an address if opts does not name one.
func (r *rig) client(opts redis.Options) *redis.Client {
	r.Helper()
	if opts.Addr == "" {
		opts.Addr = r.s.Addr()
	}
	c := redis.NewClient(&opts)
	r.Cleanup(func() { c.Close() })
	return c
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

// count counts the events of a kind whose error contains a text.
func (j *journal) count(kind dlm.EventKind, text string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, e := range j.events {
		if e.Kind == kind && (text == "" || e.Err != nil && strings.Contains(e.Err.Error(), text)) {
			n++
		}
	}
	return n
}

// manager returns a manager, which the test need not close.
func (r *rig) manager(client redis.UniversalClient, cfg dlm.LockConfig, opts redislock.Options) *dlm.Manager {
	r.Helper()
	m, err := redislock.NewLockManager(client, &cfg, &opts)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { r.end(m) })
	return m
}

// end closes a manager, however the server is.
func (r *rig) end(m *dlm.Manager) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = m.Close(ctx) // the server may be gone
}

// plain returns a manager with a client of its own and the defaults.
func (r *rig) plain() *dlm.Manager {
	r.Helper()
	return r.manager(r.client(redis.Options{}), dlm.LockConfig{}, redislock.Options{})
}

// backend returns a backend without a manager.
func (r *rig) backend(opts redislock.Options) *redislock.Backend {
	r.Helper()
	b, err := redislock.New(r.client(redis.Options{}), &opts)
	if err != nil {
		r.Fatal(err)
	}
	return b
}

// take acquires a lock within the patience of the test.
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
	ctx, cancel := context.WithTimeout(r.Context(), rigPatience)
	defer cancel()
	if err := l.Release(ctx); err != nil {
		r.Error(err)
	}
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

// names returns all keys under the prefix.
func (r *rig) names() []string {
	r.Helper()
	names, err := r.admin.Keys(r.Context(), r.prefix+"*").Result()
	if err != nil {
		r.Fatal(err)
	}
	return names
}

// bare says what is left under the prefix that is more than the memory of a
// token.
func (r *rig) residue() []string {
	r.Helper()
	var left []string
	b := r.backend(redislock.Options{})
	for _, name := range r.names() {
		key, ok := strings.CutPrefix(name, r.prefix+"{")
		key, closes := strings.CutSuffix(key, "}")
		fields, err := r.admin.HKeys(r.Context(), name).Result()
		if !ok || !closes || err != nil || len(fields) != 1 || fields[0] != "h" {
			left = append(left, fmt.Sprintf("%q %q %v", name, fields, err))
			continue
		}
		info, err := b.Inspect(r.Context(), key)
		if err != nil || len(info.Holders)+len(info.Waiters) > 0 {
			left = append(left, fmt.Sprintf("%q: %+v %v", key, info, err))
		}
	}
	return left
}

// clean waits until nothing but the memory of tokens is left.
func (r *rig) clean() {
	r.Helper()
	var left []string
	defer func() {
		if len(left) > 0 {
			r.Logf("this is left: %s", left)
		}
	}()
	r.until("nothing is left", func() bool {
		left = r.residue()
		return len(left) == 0
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

func (r *rig) load(managers ...*dlm.Manager) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{
		r: r, cancel: cancel, rounds: make([]atomic.Int64, 3*len(managers)),
		last: make([]atomic.Int64, loadKeys), inside: make([]atomic.Int32, loadKeys),
	}
	for i := range l.rounds {
		l.wg.Go(func() { l.work(ctx, managers[i/3], i) })
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

// goesOn waits until everybody has had a lock again.
func (l *load) goesOn() {
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
			if l.rounds[i].Load() < before[i]+2 {
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

// lossOf waits for the loss of a lock, and checks that it is not later than it
// may be: a busy machine gets a moment.
func (r *rig) lossOf(l *dlm.Lock) *dlm.LostError {
	r.Helper()
	closed(r, "the loss of a lock", l.Done())
	if late := time.Since(l.Deadline()); late > 2*time.Second {
		r.Errorf("the loss was told %v after the deadline", late)
	}
	lost, ok := errors.AsType[*dlm.LostError](l.Err())
	if !ok {
		r.Fatalf("%v ended with %v", l, l.Err())
	}
	return lost
}

func (r *rig) held(locks ...*dlm.Lock) {
	r.Helper()
	for _, l := range locks {
		if err := l.Err(); err != nil {
			r.Error(err)
		}
	}
}
