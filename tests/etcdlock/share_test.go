package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// versions runs a test against the newest and the oldest version.
func versions(t *testing.T, test func(t *testing.T, start func(testing.TB) []*servers.Etcd)) {
	t.Parallel()
	t.Run("new", func(t *testing.T) {
		t.Parallel()
		test(t, single)
	})
	t.Run("old", func(t *testing.T) {
		t.Parallel()
		test(t, old)
	})
}

func (r *rig) backend(cut *cuts, change ...func(*clientv3.Config)) *etcdlock.Backend {
	r.Helper()
	b, err := etcdlock.New(connect(r, r.members, cut, change...), &etcdlock.Options{Prefix: r.prefix})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { b.Close() })
	return b
}

func exclusive(key string, ttl time.Duration) driver.Request {
	return driver.Request{Key: key, Owner: "o", TTL: ttl, Limit: 1}
}

// Calls about different locks that meet share entries of the log.
func TestCallsShareEntries(t *testing.T) {
	versions(t, func(t *testing.T, start func(testing.TB) []*servers.Etcd) {
		r := newRig(t, start(t))
		b := r.backend(nil)
		const callers, rounds = 64, 10
		pair := func(key string) {
			lease, err := b.Acquire(r.within(), exclusive(key, 20*time.Second))
			if err == nil {
				err = b.Release(r.within(), lease)
			}
			if err != nil {
				t.Errorf("%s: %v", key, err)
			}
		}
		pair("warm")
		applied := func() float64 { return r.members[0].Metric("etcd_server_proposals_applied_total") }
		before := applied()
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				for range rounds {
					pair(fmt.Sprint("k", i))
				}
			})
		}
		wg.Wait()
		const calls = 2 * callers * rounds
		entries := applied() - before
		t.Logf("%d calls took %.0f entries", calls, entries)
		if entries == 0 || entries > calls/2 {
			t.Errorf("%d calls took %.0f entries", calls, entries)
		}
	})
}

// A lease that has ended fails those who asked for it, and these take another.
func TestSharedWithEndedLease(t *testing.T) {
	versions(t, func(t *testing.T, start func(testing.TB) []*servers.Etcd) {
		r := newRig(t, start(t))
		b := r.backend(nil)
		ttls := []time.Duration{20 * time.Second, 30 * time.Second}
		for round := range 5 {
			first := exclusive(fmt.Sprint("first", round), ttls[0])
			if _, err := b.Acquire(r.within(), first); err != nil {
				t.Fatal(err)
			}
			if _, err := r.admin.Revoke(r.within(), r.lease(r.keys(first.Key)[0])); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for i := range 40 {
				wg.Go(func() {
					lease, err := b.Acquire(r.within(), exclusive(fmt.Sprint("k", i), ttls[i%2]))
					if err == nil {
						err = b.Release(r.within(), lease)
					}
					if err != nil {
						t.Errorf("k%d: %v", i, err)
					}
				})
			}
			wg.Wait()
		}
	})
}

// A lock that the user has no right to does not spoil the others.
func TestSharedWithoutRights(t *testing.T) {
	versions(t, func(t *testing.T, start func(testing.TB) []*servers.Etcd) {
		r := newRig(t, start(t))
		must := func(_ any, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		ctx, admin := r.within(), r.admin
		must(admin.RoleAdd(ctx, "root"))
		must(admin.RoleAdd(ctx, "some"))
		for _, from := range []string{r.prefix + "\x00", r.prefix + "a"} {
			must(admin.RoleGrantPermission(ctx, "some", from, clientv3.GetPrefixRangeEnd(from), clientv3.PermissionType(clientv3.PermReadWrite)))
		}
		must(admin.UserAdd(ctx, "root", "secret"))
		must(admin.UserGrantRole(ctx, "root", "root"))
		must(admin.UserAdd(ctx, "app", "secret"))
		must(admin.UserGrantRole(ctx, "app", "some"))
		must(admin.AuthEnable(ctx))
		b := r.backend(nil, func(cfg *clientv3.Config) { cfg.Username, cfg.Password = "app", "secret" })
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				for range 3 {
					lease, err := b.Acquire(r.within(), exclusive(fmt.Sprint("a", i), 20*time.Second))
					if err == nil {
						err = b.Release(r.within(), lease)
					}
					if err != nil {
						t.Errorf("a%d: %v", i, err)
					}
					_, err = b.Acquire(r.within(), exclusive(fmt.Sprint("b", i), 20*time.Second))
					wantProblem(t, err, driver.ErrInvalid, etcdlock.ProblemPermission)
				}
			})
		}
		wg.Wait()
	})
}

// Calls that share a request come back when their own contexts end, and can be
// withdrawn while it is still on its way.
func TestSharedIsGivenUp(t *testing.T) {
	versions(t, func(t *testing.T, start func(testing.TB) []*servers.Etcd) {
		r := newRig(t, start(t))
		cut := newCuts(t)
		var sent atomic.Int64
		b := r.backend(cut, underWay(func(int64) { sent.Add(1) }))
		warm, err := b.Acquire(r.within(), exclusive("warm", 20*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		p, err := cut.to(r.members[0].Addr())
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			p.Hold(servers.Up)
			const callers = 20
			var wg sync.WaitGroup
			for i := range callers {
				wg.Go(func() {
					patience := time.Duration(100+10*i) * time.Millisecond
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					start := time.Now()
					if _, err := b.Acquire(ctx, exclusive(fmt.Sprint("k", i), 20*time.Second)); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("k%d: %v", i, err)
					}
					if late := time.Since(start) - patience; late > 2*time.Second {
						t.Errorf("k%d came back after %v more", i, late)
					}
				})
			}
			wg.Wait()
			sent.Store(0)
			for i := range callers {
				wg.Go(func() {
					if err := b.Release(r.within(), driver.Lease{Key: fmt.Sprint("k", i), Owner: "o"}); err != nil {
						t.Errorf("withdrawing k%d: %v", i, err)
					}
				})
			}
			r.until("the withdrawals are on their way", func() bool { return sent.Load() >= callers })
			p.Resume()
			wg.Wait()
		}
		for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			resp, err := r.admin.Get(r.within(), r.prefix+"k", clientv3.WithPrefix(), clientv3.WithKeysOnly())
			if err != nil {
				t.Fatal(err)
			}
			if len(resp.Kvs) > 0 {
				t.Fatalf("came late: %v", resp.Kvs)
			}
		}
		if err := b.Release(r.within(), warm); err != nil {
			t.Error(err)
		}
	})
}
