package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/tests/servers"
)

// connections counts the connections of clients with a name.
func (r *rig) connections(name string) int {
	r.Helper()
	list, err := r.admin.ClientList(r.Context()).Result()
	if err != nil {
		r.Fatal(err)
	}
	return strings.Count(list, " name="+name+" ")
}

// scripts counts the calls of scripts that the server has had.
func (r *rig) scripts() int64 {
	r.Helper()
	c := r.s.Commands()
	return c["evalsha"] + c["eval"]
}

// RED8: waiters take no connections. (go-redis itself opens more than its pool
// has room for while many connections are being made.)
func TestSingleManyWaiters(t *testing.T) {
	t.Parallel()
	const keys, each, most = 50, 10, 20
	r := newRig(t, nil)
	m := r.manager(r.client(redis.Options{PoolSize: 5, ClientName: "crowd"}), dlm.LockConfig{}, redislock.Options{})
	kept := r.take(m, "kept", 3*time.Second)
	other := r.plain()
	var locks []*dlm.Lock
	for i := range keys {
		locks = append(locks, r.take(other, fmt.Sprint(i), time.Minute))
	}
	var wg sync.WaitGroup
	for i := range keys * each {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
			defer cancel()
			l, err := m.AcquireLock(ctx, fmt.Sprint(i%keys), time.Minute)
			if err == nil {
				err = l.Release(ctx)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	b := r.backend(redislock.Options{})
	for i := range keys {
		r.queued(b, fmt.Sprint(i), each)
	}
	if n := r.connections("crowd"); n > most {
		t.Errorf("%d connections of %d waiters, want at most %d", n, keys*each, most)
	}
	for _, l := range locks {
		r.release(l)
	}
	wg.Wait()
	if n := r.connections("crowd"); n > most {
		t.Errorf("%d connections of %d waiters, want at most %d", n, keys*each, most)
	}
	r.held(kept)
	r.release(kept)
	r.clean()
}

// RED9, WAIT2: waiters do not spin, neither while all is well nor while the
// server refuses them.
func TestSingleWaitersAreCalm(t *testing.T) {
	t.Parallel()
	const n = 50
	const while = 1500 * time.Millisecond
	for _, tt := range []struct {
		name        string
		break_      func(r *rig, p *servers.Proxy)
		heal        func(r *rig, p *servers.Proxy)
		seen        string
		mostBetween int
	}{
		{"refused", func(_ *rig, p *servers.Proxy) { p.Refuse() }, func(_ *rig, p *servers.Proxy) { p.Resume() }, "", 20 * n},
		{
			"read only",
			func(r *rig, _ *servers.Proxy) { r.s.MustDo("REPLICAOF", "127.0.0.1", "1") },
			func(r *rig, _ *servers.Proxy) { r.s.MustDo("REPLICAOF", "NO", "ONE") }, "READONLY", 20 * n,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			proxy := servers.StartProxy(t, r.s.Addr())
			var journal journal
			m := r.manager(r.client(redis.Options{Addr: proxy.Addr()}), dlm.LockConfig{MaxRetries: -1, Observer: &journal},
				redislock.Options{LivenessWindow: 2 * time.Second})
			other := r.plain()
			var locks []*dlm.Lock
			var waits []<-chan *dlm.Lock
			b := r.backend(redislock.Options{})
			for i := range n {
				// One queue of many, and many of one.
				key := fmt.Sprint(max(0, i-n/2))
				if i == 0 || i > n/2 {
					locks = append(locks, r.take(other, key, time.Minute))
				}
				waits = append(waits, r.later(m, key, time.Minute))
			}
			r.queued(b, "0", n/2+1)

			before := r.scripts()
			time.Sleep(while) // the time that is measured
			if calls := r.scripts() - before; calls > 10*n {
				t.Errorf("%d calls of %d waiters in %v", calls, n, while)
			}
			tt.break_(r, proxy)
			failed := journal.count(dlm.EventStoreError, tt.seen)
			time.Sleep(while) // the time that is measured
			if calls := journal.count(dlm.EventStoreError, tt.seen) - failed; calls > tt.mostBetween {
				t.Errorf("%d failures of %d waiters in %v", calls, n, while)
			}
			tt.heal(r, proxy)
			for _, l := range locks {
				r.release(l)
			}
			var wg sync.WaitGroup
			for _, w := range waits {
				wg.Go(func() {
					if l := <-w; l != nil {
						r.release(l)
					}
				})
			}
			done := make(chan struct{})
			go func() { wg.Wait(); close(done) }()
			closed(r, "all waiters are served", done)
			r.clean()
		})
	}
}

// WAIT6: a holder that is cut off holds nobody up for longer than its TTL.
func TestSingleHolderCutOff(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	proxy := servers.StartProxy(t, r.s.Addr())
	dead := r.manager(r.client(redis.Options{Addr: proxy.Addr()}), dlm.LockConfig{}, redislock.Options{})
	l := r.take(dead, "a", time.Second)
	m := r.plain()
	var waits []<-chan *dlm.Lock
	for i := range 5 {
		waits = append(waits, r.later(m, "a", time.Minute))
		r.queued(r.backend(redislock.Options{}), "a", i+1)
	}
	proxy.Blackhole()
	last := l.Token
	for _, w := range waits {
		next := closed(r, "a waiter is served", w)
		if l.Err() == nil {
			t.Error("the holder that was cut off does not know that its lock is gone")
		}
		if next.Token <= last {
			t.Errorf("token %d follows %d", next.Token, last)
		}
		last = next.Token
		r.release(next)
	}
	proxy.Resume()
	r.clean()
}

// WAIT10, RES1: a manager has one subscription, whoever waits, and closing it
// ends that.
func TestSingleOneSubscription(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	client := r.client(redis.Options{ClientName: "shared"})
	other := r.plain()
	for range 5 {
		m, err := redislock.NewLockManager(client, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		var locks []*dlm.Lock
		var waits []<-chan *dlm.Lock
		for i := range 20 {
			locks = append(locks, r.take(other, fmt.Sprint(i), time.Minute))
		}
		for i := range 20 {
			waits = append(waits, r.later(m, fmt.Sprint(i), time.Minute))
		}
		r.until("the subscription stands", func() bool { return len(r.channels()) > 0 })
		for i, l := range locks {
			r.release(l)
			r.release(closed(r, "a waiter is served", waits[i]))
		}
		channels := r.channels()
		if len(channels) != 1 || r.admin.PubSubNumSub(t.Context(), channels...).Val()[channels[0]] != 1 {
			t.Errorf("the subscriptions of one manager: %q", channels)
		}
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
		r.until("the subscription has ended", func() bool { return len(r.channels()) == 0 })
	}
	if n := r.connections("shared"); n > client.Options().PoolSize {
		t.Errorf("%d connections are left", n)
	}
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Errorf("the client after its managers: %v", err)
	}
	r.clean()
}

// WAIT12: hundreds of names, several permits each.
func TestSingleManyNames(t *testing.T) {
	t.Parallel()
	const names, each = 200, 3
	r := newRig(t, nil)
	m := []*dlm.Manager{r.plain(), r.plain()}
	var wg sync.WaitGroup
	for i := range names * each {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
			defer cancel()
			for range 2 {
				l, err := m[i%2].Acquire(ctx, fmt.Sprint(i%names), time.Minute, &dlm.AcquireOptions{Limit: 2})
				if err == nil {
					err = l.Release(ctx)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	r.clean()
}

// X6: a client that is closed ends everything, and says so.
func TestSingleClientClosed(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	client := r.client(redis.Options{})
	m := r.manager(client, dlm.LockConfig{}, redislock.Options{LivenessWindow: time.Second})
	held := r.take(m, "held", 1500*time.Millisecond)
	r.take(r.plain(), "a", time.Minute)
	ended := make(chan error, 1)
	go func() {
		_, err := m.AcquireLock(t.Context(), "a", time.Minute)
		ended <- err
	}()
	r.queued(r.backend(redislock.Options{}), "a", 1)
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if err := closed(r, "the wait ends", ended); !errors.Is(err, dlm.ErrClosed) {
		t.Errorf("a wait on a client that was closed: %v", err)
	}
	if _, err := m.AcquireLock(t.Context(), "b", time.Minute); !errors.Is(err, dlm.ErrClosed) {
		t.Errorf("an acquisition on a client that was closed: %v", err)
	}
	r.lossOf(held)
}
