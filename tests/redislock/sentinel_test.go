package redislock_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

func failover(s *servers.Sentinels) func(dialer) redis.UniversalClient {
	return func(dial dialer) redis.UniversalClient {
		return redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: s.MasterName, SentinelAddrs: s.Addrs(), Dialer: dial,
		})
	}
}

func TestConformanceSentinel(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, nil)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return slower(harness(t, failover(s), redislock.Options{})) })
}

func TestConformanceSentinelAcknowledged(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, nil)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return slower(harness(t, failover(s), redislock.Options{Replicas: 1}))
	})
}

// slower is for stores where a call takes longer.
func slower(h *drivertest.Harness) *drivertest.Harness {
	h.Unit = 2 * unit
	return h
}

// failures are the ways in which a primary goes.
var failures = []struct {
	name string
	// fail makes a primary go, and returns how it comes back.
	fail func(s *servers.Sentinels, primary *servers.Redis) (mend func())
}{
	{"command", func(s *servers.Sentinels, _ *servers.Redis) func() {
		s.Failover()
		return func() {}
	}},
	{"kill", func(_ *servers.Sentinels, primary *servers.Redis) func() {
		primary.Kill()
		return primary.Restart
	}},
	{"stop", func(_ *servers.Sentinels, primary *servers.Redis) func() {
		primary.Pause()
		return primary.Resume
	}},
}

func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, nil)
	for _, f := range failures {
		t.Run(f.name, func(t *testing.T) {
			opts := redislock.Options{Prefix: newPrefix()}
			open := func() *dlm.Manager { return manage(t, failover(s)(nil), opts) }
			a, b, c, d := open(), open(), open(), open()
			var held []*dlm.Lock
			for i := range 10 {
				held = append(held, take(t, a, fmt.Sprint("held", i)))
			}
			goOn(t, a, held...)
			lossy := takeFor(t, a, "lossy", lossyTTL)
			after, during := wait(t, b, held[0].Key), wait(t, b, "lossy")
			second := wait(t, c, held[0].Key)
			var book ledger
			stop := book.work(t, 3, c, d)
			book.progress(t, time.Now())
			primary := s.Primary()
			inStep(t, primary, 1)

			start := time.Now()
			mend := f.fail(s, primary)
			var wg sync.WaitGroup
			wg.Go(func() { drop(t, lossy) })
			s.WaitPrimary(primary)
			replaced := time.Since(start)
			goOn(t, a, held[1:]...)
			extended := time.Since(start)
			l := during.granted(t)
			served := l.AcquiredAt.Sub(start)
			drop(t, l)
			wg.Wait()
			released := time.Now()
			drop(t, held[0])
			drop(t, after.granted(t))
			drop(t, second.granted(t))
			t.Logf("replaced after %v, renewed after %v, a waiter whose holder released meanwhile was served after %v, "+
				"two waiters within %v of a release", replaced, extended, served, time.Since(released))
			book.progress(t, start)
			passesOn(t, b, d, "pass")
			mend()
			s.WaitReady()
			book.progress(t, start)
			passesOn(t, b, d, "pass")
			goOn(t, a, held[1:]...)
			for _, l := range held[1:] {
				drop(t, l)
			}
			stop()
			overlaps := book.overlaps(t)
			t.Logf("%d grants, %d lost, %d overlaps %v", book.grants.Load(), book.lost.Load(), len(overlaps), overlaps)
		})
	}
}

// A client that is told to use replicas must not take their word for it.
func TestSentinelReplicaOnly(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, nil)
	client := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: s.MasterName, SentinelAddrs: s.Addrs(), ReplicaOnly: true,
	})
	defer client.Close()
	m, err := redislock.NewLockManager(client, &dlm.LockConfig{MaxRetries: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(t.Context())
	_, err = m.AcquireLock(t.Context(), "k", time.Minute)
	wantProblem(t, err, redislock.ProblemReplica)
}

func wantProblem(t testing.TB, err error, want redislock.Problem) {
	t.Helper()
	if e, ok := errors.AsType[*redislock.ServerError](err); !ok || e.Problem != want {
		t.Errorf("error is %v, want the problem %q", err, want)
	}
}

// A replica refuses to say anything, even what it could say without writing: it
// may know less than its primary.
func TestDemoted(t *testing.T) {
	t.Parallel()
	p := startPair(t)
	c := client(t, p.primary)
	b := backend(t, c, redislock.Options{})
	lease, err := try(t, b, "held", "o")
	if err != nil {
		t.Fatal(err)
	}
	inStep(t, p.primary, 1)
	p.replica.MustDo("REPLICAOF", "NO", "ONE")
	p.primary.MustDo("REPLICAOF", "127.0.0.1", fmt.Sprint(p.replica.Port()))

	_, free := try(t, b, "k", "o")
	_, held := try(t, b, "held", "p")
	batch := []driver.Renewal{{Lease: lease}, {Lease: driver.Lease{Key: "k", Owner: "o", Token: 1, TTL: time.Minute}}}
	for i := range batch {
		b.Extend(t.Context(), batch[i:i+1])
		// The next call gets a new connection, perhaps to somebody else.
		if n := c.PoolStats().TotalConns; n != 0 {
			t.Errorf("%d connections are kept", n)
		}
	}
	_, forced := b.ForceRelease(t.Context(), "k", 0)
	for what, err := range map[string]error{
		"a free key": free, "a held key": held,
		"renewal":                      batch[0].Err,
		"renewal of nothing":           batch[1].Err,
		"release":                      b.Release(t.Context(), lease),
		"release of nothing":           b.Release(t.Context(), driver.Lease{Key: "k", Owner: "o", Token: 1}),
		"release of another's":         b.Release(t.Context(), driver.Lease{Key: "held", Owner: "p", Token: 1}),
		"withdrawal of nothing":        b.Release(t.Context(), driver.Lease{Key: "k", Owner: "o"}),
		"withdrawal beside a holder":   b.Release(t.Context(), driver.Lease{Key: "held", Owner: "p"}),
		"forced release of a free key": forced,
	} {
		if e, ok := errors.AsType[*redislock.ServerError](err); !ok || e.Problem != redislock.ProblemReplica || !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%s: %v", what, err)
		}
	}
	p.primary.MustDo("REPLICAOF", "NO", "ONE")
	if err := b.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}
	grant(t, b, "k")
}
