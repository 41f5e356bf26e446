package redislock_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/tests/servers"
)

// patience is for waits that only a fault makes long.
const patience = 30 * time.Second

// eventually waits until a condition holds.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	servers.Until(t, what, cond)
}

// manage returns a manager over a client of its own, which renews often.
func manage(t testing.TB, client redis.UniversalClient, opts redislock.Options) *dlm.Manager {
	t.Helper()
	m, err := redislock.NewLockManager(client, &dlm.LockConfig{
		RenewInterval: 300 * time.Millisecond, MaxRetries: -1, CallTimeout: 2 * time.Second,
	}, &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := m.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
		client.Close()
	})
	return m
}

const (
	// longTTL outlasts every failover.
	longTTL = 20 * time.Second
	// lossyTTL is for locks that are released during a failover: the release
	// may be lost with the old primary, and then their time has to run out.
	lossyTTL = 5 * time.Second
)

// take acquires a lock, and waits for it.
func take(t testing.TB, m *dlm.Manager, key string) *dlm.Lock {
	t.Helper()
	return takeFor(t, m, key, longTTL)
}

func takeFor(t testing.TB, m *dlm.Manager, key string, ttl time.Duration) *dlm.Lock {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, err := m.AcquireLock(ctx, key, ttl)
	if err != nil {
		t.Fatalf("acquiring %q: %v", key, err)
	}
	return l
}

// waiter is an acquisition that waits for a lock.
type waiter struct {
	key string
	got chan *dlm.Lock
}

// wait begins to wait for a lock that is held, and returns when it is in the
// queue.
func wait(t testing.TB, m *dlm.Manager, key string) waiter {
	t.Helper()
	before := waiting(t, m, key)
	w := waiter{key, make(chan *dlm.Lock, 1)}
	var wg sync.WaitGroup
	wg.Go(func() {
		l, err := m.AcquireLock(t.Context(), key, longTTL)
		if err != nil {
			t.Errorf("waiting for %q: %v", key, err)
		}
		w.got <- l
	})
	t.Cleanup(wg.Wait)
	eventually(t, fmt.Sprintf("somebody waits for %q", key), func() bool { return waiting(t, m, key) > before })
	return w
}

func waiting(t testing.TB, m *dlm.Manager, key string) int {
	t.Helper()
	info, err := m.GetLock(t.Context(), key)
	if err != nil {
		t.Fatalf("inspecting %q: %v", key, err)
	}
	return len(info.Waiters)
}

// granted waits for the grant.
func (w waiter) granted(t testing.TB) *dlm.Lock {
	t.Helper()
	select {
	case l := <-w.got:
		if l == nil {
			t.FailNow()
		}
		return l
	case <-time.After(patience):
		t.Fatalf("%q was not granted to its waiter", w.key)
		return nil
	}
}

// drop releases a lock. A server that is being replaced may not answer, and
// then the manager goes on trying.
func drop(t testing.TB, l *dlm.Lock) {
	t.Helper()
	err := l.Release(context.Background())
	if err != nil && !errors.Is(err, dlm.ErrIndeterminate) && !errors.Is(err, dlm.ErrNotApplied) {
		t.Errorf("releasing %q: %v", l.Key, err)
	}
}

// goOn waits until locks are renewed once more, and the store shows it.
func goOn(t testing.TB, m *dlm.Manager, locks ...*dlm.Lock) {
	t.Helper()
	before := make([]time.Time, len(locks))
	for i, l := range locks {
		before[i] = l.Deadline()
	}
	for i, l := range locks {
		eventually(t, fmt.Sprintf("%q is renewed", l.Key), func() bool { return l.Err() != nil || l.Deadline().After(before[i]) })
		if err := l.Err(); err != nil {
			t.Fatalf("%q was lost: %v", l.Key, err)
		}
	}
	for _, l := range locks {
		var info *dlm.LockInfo
		eventually(t, fmt.Sprintf("%q can be inspected", l.Key), func() (ok bool) {
			var err error
			info, err = m.GetLock(t.Context(), l.Key)
			return err == nil
		})
		if len(info.Holders) != 1 || info.Holders[0].Owner != l.Value || info.Holders[0].Token != l.Token {
			t.Fatalf("%v is held by %+v", l, info.Holders)
		}
	}
}

// passesOn checks that releases wake the next at once: waiters that only look
// again by themselves do so about once a second.
func passesOn(t testing.TB, a, b *dlm.Manager, key string) {
	t.Helper()
	const want, quick = 8, 300 * time.Millisecond
	l := take(t, a, key)
	start := time.Now()
	for inRow, n := 0, 0; inRow < want; n++ {
		if time.Since(start) > patience {
			t.Fatalf("%d releases of %q did not wake the next at once", n, key)
		}
		a, b = b, a
		w := wait(t, a, key)
		released := time.Now()
		drop(t, l)
		l = w.granted(t)
		if inRow++; time.Since(released) > quick {
			inRow = 0
		}
	}
	drop(t, l)
}

// inStep waits until replicas have all that their primary has.
func inStep(t testing.TB, primary *servers.Redis, replicas int) {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: primary.Addr(), ReadTimeout: patience})
	defer client.Close()
	// To find out counts for one connection.
	conn := client.Conn()
	defer conn.Close()
	if err := conn.Publish(t.Context(), "in step", "").Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Wait(t.Context(), replicas, patience/2).Result(); err != nil || n < int64(replicas) {
		t.Fatalf("%d replicas are in step: %v", n, err)
	}
}

// ledger notes who held what, and when.
type ledger struct {
	mu      sync.Mutex
	tenures []tenure
	grants  atomic.Int64
	lost    atomic.Int64
}

// tenure is how long somebody thought that a lock was his.
type tenure struct {
	key      string
	token    int64
	from, to time.Time
	end      string
}

func (t tenure) String() string {
	return fmt.Sprintf("%q token %d from %s to %s (%s)", t.key, t.token, t.from.Format(clock), t.to.Format(clock), t.end)
}

const clock = "05.000000"

// hold holds a lock for a while and notes it.
func (b *ledger) hold(t testing.TB, l *dlm.Lock, d time.Duration) {
	b.grants.Add(1)
	n := tenure{key: l.Key, token: l.Token, from: time.Now(), end: "released"}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-l.Done():
	case <-timer.C:
	}
	n.to = time.Now()
	err := l.Err()
	if err == nil {
		err = l.Release(context.Background())
	}
	switch {
	case errors.Is(err, dlm.ErrLost):
		b.lost.Add(1)
		n.end = err.Error()
	case err != nil && !errors.Is(err, dlm.ErrIndeterminate) && !errors.Is(err, dlm.ErrNotApplied):
		t.Errorf("releasing %q: %v", l.Key, err)
	}
	// It is not thought to be ours after its deadline, even if we are late.
	if deadline := l.Deadline(); n.to.After(deadline) {
		n.to = deadline
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tenures = append(b.tenures, n)
}

// work has workers of each manager take, hold and release locks until the end
// of the test or the call of stop.
func (b *ledger) work(t testing.TB, keys int, managers ...*dlm.Manager) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i, m := range managers {
		for key := range keys {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(uint64(i), uint64(key)))
				for ctx.Err() == nil {
					l, err := m.AcquireLock(ctx, fmt.Sprintf("work%d", key), 1500*time.Millisecond)
					if err != nil {
						if ctx.Err() == nil {
							t.Errorf("acquiring: %v", err)
						}
						continue
					}
					// Some go beyond their time to live.
					d := time.Duration(random.IntN(20)) * time.Millisecond
					if random.IntN(20) == 0 {
						d = 2 * time.Second
					}
					b.hold(t, l, d)
				}
			})
		}
	}
	stop = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// progress waits until locks are granted again, and returns how long it took.
func (b *ledger) progress(t testing.TB, since time.Time) time.Duration {
	t.Helper()
	before := b.grants.Load()
	eventually(t, "locks are granted", func() bool { return b.grants.Load() >= before+3 })
	return time.Since(since)
}

// overlaps returns the pairs that held a key at the same time, and fails the
// test if tokens do not rise from one to the next.
func (b *ledger) overlaps(t testing.TB) (list []string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	slices.SortFunc(b.tenures, func(x, y tenure) int {
		return cmp.Or(cmp.Compare(x.key, y.key), x.from.Compare(y.from))
	})
	for i, x := range b.tenures {
		for _, y := range b.tenures[i+1:] {
			if y.key != x.key {
				break
			}
			switch {
			case y.from.Before(x.to):
				list = append(list, fmt.Sprintf("%v\nand %v", x, y))
			case y.token <= x.token:
				t.Errorf("tokens do not rise:\n%v\n%v", x, y)
			}
		}
	}
	return list
}
