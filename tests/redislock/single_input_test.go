package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
)

// Clients that are set up differently share keys all the same.
func TestSingleDifferentOptions(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	long := redislock.Options{LivenessWindow: time.Hour, KeepTokens: 48 * time.Hour}
	short := redislock.Options{LivenessWindow: 300 * time.Millisecond, KeepTokens: time.Minute}
	m1 := r.manager(r.client(redis.Options{}), dlm.LockConfig{}, long)
	m2 := r.manager(r.client(redis.Options{}), dlm.LockConfig{}, short)

	// The waiter's times do not become the holder's.
	l := r.take(m1, "a", 2*time.Hour)
	next := r.later(m2, "a", time.Minute)
	r.queued(r.backend(long), "a", 1)
	before := r.scripts()
	r.until("the waiter has refreshed its ticket", func() bool { return r.scripts() > before+6 })
	if ttl := r.admin.PTTL(t.Context(), r.prefix+"{a}").Val(); ttl < 2*time.Hour {
		t.Errorf("the record goes in %v, before the lock", ttl)
	}
	r.held(l)
	r.release(l)
	got := closed(r, "the waiter is served", next)
	if got.Token <= l.Token {
		t.Errorf("token %d follows %d", got.Token, l.Token)
	}
	r.release(got)

	load := r.load(m1, m2)
	for range 3 {
		load.goesOn()
	}
	load.stop()
	r.clean()
}

// counting returns a manager that counts the locks which it was handed.
func (r *rig) counting(opts redislock.Options, grants *atomic.Int64) *dlm.Manager {
	r.Helper()
	inner := r.backend(opts)
	m, err := dlm.NewManager(drivertest.Intercept(inner, drivertest.Hooks{
		Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
			return inner.Listen(ctx, manager, func(e driver.Event) {
				if e.Kind == driver.EventGrant {
					grants.Add(1)
				}
				handle(e)
			})
		},
	}), nil)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { r.end(m) })
	return m
}

// Keys that mean something to Redis are handed over like all others.
func TestSingleAwkwardKeys(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	var grants atomic.Int64
	m := r.counting(redislock.Options{LivenessWindow: time.Hour}, &grants)
	other := r.plain()
	keys := []string{
		"{", "}", "{}", "{a}", "a}b{c", "%", "%7D", "\x00", "a\x00b", "a\nb\r\n", " ", "a b 3 c", "*", "ключ", "!", ":q", "dlm:{a}:h",
		strings.Repeat("}", 512), strings.Repeat("k", 512),
	}
	b := r.backend(redislock.Options{})
	for i, key := range keys {
		l := r.take(other, key, time.Minute)
		next := r.later(m, key, time.Minute)
		r.queued(b, key, 1)
		r.until("the subscription stands", func() bool { return len(r.channels()) > 0 })
		if i == 0 {
			grants.Store(0)
		}
		if info, err := m.GetLock(t.Context(), key); err != nil || len(info.Holders) != 1 || info.Holders[0].Owner != l.Value {
			t.Errorf("%q: %+v, %v", key, info, err)
		}
		r.release(l)
		got := closed(r, fmt.Sprintf("%q is handed over", key), next)
		if got.Key != key || got.Token <= l.Token {
			t.Errorf("%q: %v follows %v", key, got, l)
		}
		if err := got.Extend(t.Context(), time.Hour); err != nil {
			t.Errorf("%q: %v", key, err)
		}
		r.release(got)
	}
	r.until("every hand-over is told", func() bool { return grants.Load() == int64(len(keys)) })
}

// Managers share a client, and each gets what is its own.
func TestSingleSharedClient(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	client := r.client(redis.Options{PoolSize: 2})
	first := r.manager(client, dlm.LockConfig{}, redislock.Options{})
	l := r.take(first, "a", time.Minute)
	var waits []<-chan *dlm.Lock
	for i := range 5 {
		m := r.manager(client, dlm.LockConfig{}, redislock.Options{})
		waits = append(waits, r.later(m, "a", time.Minute))
		r.queued(r.backend(redislock.Options{}), "a", i+1)
		if err := m.ReleaseLock(t.Context(), l); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("releasing another manager's lock: %v", err)
		}
	}
	r.release(l)
	for _, w := range waits {
		next := closed(r, "a waiter is served", w)
		if next.Token <= l.Token {
			t.Errorf("%v follows %v", next, l)
		}
		l = next
		r.release(next)
	}
	// One that closes leaves the client to the others.
	if err := first.Close(t.Context()); err != nil {
		t.Error(err)
	}
	r.release(r.take(r.manager(client, dlm.LockConfig{}, redislock.Options{}), "a", time.Minute))
	r.clean()
}

// Databases and prefixes are worlds of their own, channels included.
func TestSingleWorldsApart(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	worlds := []*dlm.Manager{}
	for _, w := range []struct {
		db     int
		prefix string
	}{{0, "dlm:"}, {3, "dlm:"}, {0, "dlm:dlm:"}, {0, "d"}, {0, "*"}, {0, "\x00\n "}, {15, "d?m:"}} {
		worlds = append(worlds, r.manager(r.client(redis.Options{DB: w.db}), dlm.LockConfig{}, redislock.Options{Prefix: w.prefix}))
	}
	var locks []*dlm.Lock
	for _, m := range worlds {
		l, err := m.TryLock(t.Context(), "a", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		locks = append(locks, l)
	}
	for i, m := range worlds {
		list, err := m.ListLocks(t.Context(), "", "", 0)
		if err != nil || len(list) != 1 || list[0].Key != "a" || list[0].Holders[0].Owner != locks[i].Value {
			t.Errorf("world %d has %+v, %v", i, list, err)
		}
		if _, err := m.TryLock(t.Context(), "a", time.Minute); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("world %d: %v", i, err)
		}
		next := r.later(m, "a", time.Minute)
		r.until("somebody waits", func() bool {
			info, err := m.GetLock(t.Context(), "a")
			return err == nil && len(info.Waiters) == 1
		})
		r.release(locks[i])
		r.release(closed(r, "the waiter is served", next))
	}
}

// X4: the longest times that are allowed do not overflow, the shortest work.
func TestSingleExtremeTimes(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for i, opts := range []redislock.Options{
		{LivenessWindow: time.Hour, KeepTokens: 366 * 24 * time.Hour}, {LivenessWindow: 100 * time.Millisecond, KeepTokens: time.Minute},
	} {
		m := r.manager(r.client(redis.Options{}), dlm.LockConfig{}, opts)
		for _, o := range []dlm.AcquireOptions{{}, {Limit: 1 << 30}, {Shared: true}} {
			key := fmt.Sprint(i, o.Limit, o.Shared)
			l, err := m.Acquire(t.Context(), key, dlm.MaxTTL, &o)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Extend(t.Context(), dlm.MaxTTL); err != nil {
				t.Error(err)
			}
			if err := l.Extend(t.Context(), time.Millisecond); err != nil {
				t.Error(err)
			}
			info, err := m.GetLock(t.Context(), key)
			if err != nil || len(info.Holders) != 1 || info.Holders[0].Remaining < dlm.MaxTTL-time.Minute {
				t.Errorf("%+v, %v", info, err)
			}
			if left := time.Until(l.Deadline()); left < dlm.MaxTTL/100*98 {
				t.Errorf("the deadline is in %v", left)
			}
			// A touch of the record by somebody else does not cut it.
			if _, err := m.TryLock(t.Context(), key, time.Millisecond); !o.Shared && o.Limit == 0 && !errors.Is(err, dlm.ErrHeld) {
				t.Error(err)
			}
			if info, err := m.GetLock(t.Context(), key); err != nil || info.Holders[0].Remaining < dlm.MaxTTL-time.Minute {
				t.Errorf("after a touch: %+v, %v", info, err)
			}
			r.release(l)
		}
	}
}
