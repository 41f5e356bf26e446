package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// TestFailovers replaces the primary again and again under load, 3 times or as
// often as DLM_TEST_FAILOVERS says. No lock that a replica has acknowledged may
// be granted twice.
func TestFailovers(t *testing.T) {
	t.Parallel()
	times := 3
	if n, err := strconv.Atoi(os.Getenv("DLM_TEST_FAILOVERS")); err == nil {
		times = n
	}
	s := servers.StartSentinel(t, nil)
	opts := redislock.Options{Prefix: newPrefix(), Replicas: 1}
	open := func() *dlm.Manager { return manage(t, failover(s)(nil), opts) }
	var book ledger
	stop := book.work(t, 3, open(), open())
	book.progress(t, time.Now())
	holder := open()
	held := takeFor(t, holder, "held", time.Minute) // Sentinels may need several elections
	var total, worst time.Duration
	for i := range times {
		f := failures[i%len(failures)]
		goOn(t, holder, held)
		primary := s.Primary()
		start := time.Now()
		mend := f.fail(s, primary)
		s.WaitPrimary(primary)
		replaced := time.Since(start)
		mend()
		// While there is no replica, there are no locks.
		s.WaitReady()
		ready := time.Now()
		served := book.progress(t, ready)
		total, worst = total+served, max(worst, served)
		t.Logf("%s: replaced after %v, with a replica again after %v, served %v later", f.name, replaced, ready.Sub(start), served)
	}
	goOn(t, holder, held)
	drop(t, held)
	stop()
	overlaps := book.overlaps(t)
	t.Logf("%d failovers, %d grants, %d lost, %d overlaps; served %v after the replica was back, at most %v",
		times, book.grants.Load(), book.lost.Load(), len(overlaps), total/time.Duration(times), worst)
	if len(overlaps) > 0 {
		t.Errorf("granted twice: %v", overlaps)
	}
}

// pair is a primary and its replica, without anybody who watches them.
type pair struct{ primary, replica *servers.Redis }

func startPair(t *testing.T) pair {
	primary := servers.StartRedis(t, nil)
	return pair{primary, servers.StartRedis(t, &servers.RedisConfig{ReplicaOf: primary})}
}

// part ends the replication for good. The replica keeps what it has.
func (p pair) part() {
	p.replica.Pause()
	p.primary.MustDo("CLIENT", "KILL", "TYPE", "replica")
}

// promote puts the replica in the place of its primary.
func (p pair) promote(t *testing.T) {
	p.primary.Kill()
	p.replica.Resume()
	p.replica.MustDo("REPLICAOF", "NO", "ONE")
	if role := p.replica.Role(); role != "master" {
		t.Fatalf("the replica is a %s", role)
	}
}

// ackTimeout is no longer than it must be, as it is waited for, and is enough for
// a replica on a busy machine.
const ackTimeout = 400 * time.Millisecond

// A grant that had not reached the replica is lost with the primary, unless an
// acknowledgement was asked for: then it is not given.
func TestLostGrants(t *testing.T) {
	t.Parallel()
	for replicas, want := range []int{10, 0} {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			t.Parallel()
			p := startPair(t)
			opts := redislock.Options{Replicas: replicas, ReplicaTimeout: ackTimeout}
			before, err := redislock.NewLockManager(client(t, p.primary), &dlm.LockConfig{MaxRetries: 1, RetryInterval: time.Millisecond}, &opts)
			if err != nil {
				t.Fatal(err)
			}
			defer before.Close(context.Background())
			inStep(t, p.primary, 1)
			kept := take(t, before, "kept")
			inStep(t, p.primary, 1)
			p.part()
			var held []*dlm.Lock
			for i := range 10 {
				l, err := before.TryLock(t.Context(), fmt.Sprint("k", i), time.Minute)
				switch {
				case err == nil:
					held = append(held, l)
				case replicas > 0:
					wantProblem(t, err, redislock.ProblemAcknowledgement)
				default:
					t.Fatal(err)
				}
			}
			p.promote(t)

			after := manage(t, client(t, p.replica), redislock.Options{})
			if _, err := after.TryLock(t.Context(), kept.Key, time.Minute); !errors.Is(err, dlm.ErrHeld) {
				t.Errorf("a lock that the replica knew of: %v", err)
			}
			twice := 0
			for _, l := range held {
				again := take(t, after, l.Key)
				if l.Err() == nil && time.Now().Before(l.Deadline()) {
					twice++
				}
				if again.Token <= l.Token {
					t.Errorf("token %d after %d", again.Token, l.Token)
				}
			}
			t.Logf("%d of 10 grants made without replication, %d granted twice", len(held), twice)
			if twice != want {
				t.Errorf("%d grants were lost, want %d", twice, want)
			}
		})
	}
}

func client(t *testing.T, r *servers.Redis) redis.UniversalClient {
	c := redis.NewClient(&redis.Options{Addr: r.Addr()})
	t.Cleanup(func() { c.Close() })
	return c
}

// Tokens rise over the loss of the last grants, without help by acknowledgements.
func TestTokensRiseOverLoss(t *testing.T) {
	t.Parallel()
	p := startPair(t)
	before := backend(t, client(t, p.primary), redislock.Options{})
	token := grant(t, before, "k").Token
	inStep(t, p.primary, 1)
	p.part()
	for range 100 {
		lease := grant(t, before, "k")
		if lease.Token <= token {
			t.Fatalf("token %d after %d", lease.Token, token)
		}
		token = lease.Token
	}
	p.promote(t)
	after := backend(t, client(t, p.replica), redislock.Options{})
	if lease := grant(t, after, "k"); lease.Token <= token {
		t.Errorf("token %d of the new primary after %d of the old one", lease.Token, token)
	}
}

func backend(t *testing.T, c redis.UniversalClient, opts redislock.Options) *redislock.Backend {
	t.Helper()
	b, err := redislock.New(c, &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// try asks for a grant that lasts a minute.
func try(t *testing.T, b *redislock.Backend, key, owner string) (driver.Lease, error) {
	t.Helper()
	return b.Acquire(t.Context(), driver.Request{Key: key, Owner: owner, TTL: time.Minute, Limit: 1})
}

// grant takes and releases a key.
func grant(t *testing.T, b *redislock.Backend, key string) driver.Lease {
	t.Helper()
	lease, err := try(t, b, key, "o")
	if err == nil {
		err = b.Release(t.Context(), lease)
	}
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

func TestAcknowledgement(t *testing.T) {
	t.Parallel()
	primary := servers.StartRedis(t, nil)
	with := backend(t, client(t, primary), redislock.Options{Replicas: 1, ReplicaTimeout: ackTimeout})
	without := backend(t, client(t, primary), redislock.Options{})

	// refused checks that there is no lock, and that nothing is left of it.
	refused := func(when string) {
		t.Helper()
		_, err := try(t, with, "k", "a")
		wantProblem(t, err, redislock.ProblemAcknowledgement)
		if !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%s: the error does not match ErrNotApplied: %v", when, err)
		}
		if info, err := without.Inspect(t.Context(), "k"); err != nil || len(info.Holders)+len(info.Waiters) > 0 {
			t.Errorf("%s: left behind: %+v, %v", when, info, err)
		}
		grant(t, without, "k")
	}
	refused("without a replica")

	a := servers.StartRedis(t, &servers.RedisConfig{ReplicaOf: primary})
	inStep(t, primary, 1)
	lease, err := try(t, with, "k", "a")
	if err != nil {
		t.Fatalf("with a replica: %v", err)
	}
	if _, err := try(t, without, "k", "b"); !errors.Is(err, driver.ErrHeld) {
		t.Errorf("held, and taken by a client that wants no acknowledgement: %v", err)
	}
	// A renewal counts only if it is acknowledged. The grant lasts as long as
	// it did.
	a.Pause()
	batch := []driver.Renewal{{Lease: lease}}
	with.Extend(t.Context(), batch)
	wantProblem(t, batch[0].Err, redislock.ProblemAcknowledgement)
	a.Resume()
	inStep(t, primary, 1)
	batch = []driver.Renewal{{Lease: lease}}
	with.Extend(t.Context(), batch)
	if batch[0].Err != nil {
		t.Errorf("renewal with a replica: %v", batch[0].Err)
	}
	if err := with.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}

	a.Kill()
	refused("after its replica has died")
	b := servers.StartMasters(t, 2, &servers.RedisConfig{ReplicaOf: primary})
	inStep(t, primary, 2)
	grant(t, with, "k")
	both := backend(t, client(t, primary), redislock.Options{Replicas: 2, ReplicaTimeout: ackTimeout})
	grant(t, both, "k")
	b[0].Kill()
	grant(t, with, "k")
	_, err = try(t, both, "k", "a")
	wantProblem(t, err, redislock.ProblemAcknowledgement)
	b[1].Kill()
	refused("after all replicas have died")
	b[0].Restart()
	inStep(t, primary, 1)
	grant(t, with, "k")
}

// Somebody who waits for a lock goes on waiting while there is no replica.
func TestAcknowledgementReturns(t *testing.T) {
	t.Parallel()
	primary := servers.StartRedis(t, nil)
	m := manage(t, redis.NewClient(&redis.Options{Addr: primary.Addr()}), redislock.Options{Replicas: 1, ReplicaTimeout: 50 * time.Millisecond})
	got := make(chan error, 2)
	for range cap(got) {
		go func() {
			l, err := m.AcquireLock(t.Context(), "k", time.Minute)
			if err == nil {
				err = l.Release(t.Context())
			}
			got <- err
		}()
	}
	eventually(t, "the replicas are asked", func() bool { return primary.Commands()["wait"] > 3 })
	servers.StartRedis(t, &servers.RedisConfig{ReplicaOf: primary})
	for range cap(got) {
		if err := <-got; err != nil {
			t.Error(err)
		}
	}
}

// A server that refuses each renewal for itself does not get the client out of
// step with its replies.
func TestRefusedRenewals(t *testing.T) {
	t.Parallel()
	server := servers.StartRedis(t, nil)
	c := client(t, server)
	b := backend(t, c, redislock.Options{})
	batch := make([]driver.Renewal, 3)
	for i := range batch {
		lease, err := try(t, b, fmt.Sprint("k", i), "o")
		if err != nil {
			t.Fatal(err)
		}
		batch[i].Lease = lease
	}
	server.MustDo("CONFIG", "SET", "min-replicas-to-write", "1")
	before := c.PoolStats()
	b.Extend(t.Context(), batch)
	for _, r := range batch {
		if !errors.Is(r.Err, driver.ErrNotApplied) || !strings.Contains(r.Err.Error(), "NOREPLICAS") {
			t.Errorf("error is %v", r.Err)
		}
	}
	if after := c.PoolStats(); after.TotalConns != before.TotalConns {
		t.Errorf("%d connections of %d are kept", after.TotalConns, before.TotalConns)
	}
	server.MustDo("CONFIG", "SET", "min-replicas-to-write", "0")
	b.Extend(t.Context(), batch)
	for _, r := range batch {
		if r.Err != nil {
			t.Error(r.Err)
		}
	}
}

// unreachable lets no lone command through once it is closed: pipelines pass.
type unreachable struct{ closed atomic.Bool }

func (u *unreachable) DialHook(next redis.DialHook) redis.DialHook { return next }

func (u *unreachable) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (u *unreachable) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !u.closed.Load() {
			return next(ctx, cmd)
		}
		err := &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("refused by the test")}
		cmd.SetErr(err)
		return err
	}
}

// A grant that was not acknowledged and could not be taken back either may be there:
// that taking it back had no effect does not mean that the request had none.
func TestUnacknowledgedGrantIsLeft(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	client := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer client.Close()
	hook := &unreachable{}
	client.AddHook(hook)
	b, err := redislock.New(client, &redislock.Options{Prefix: newPrefix(), Replicas: 1, ReplicaTimeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	_, err = b.Acquire(t.Context(), request("k", "a", time.Minute))
	if !problem(err, redislock.ProblemAcknowledgement, driver.ErrNotApplied) {
		t.Fatalf("got %v, want a grant that was taken back", err)
	}
	hook.closed.Store(true)
	_, err = b.Acquire(t.Context(), request("k", "b", time.Minute))
	if !problem(err, redislock.ProblemAcknowledgement, err) || errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) {
		t.Errorf("got %v, want an unknown outcome", err)
	}
	hook.closed.Store(false)
	if info, err := b.Inspect(t.Context(), "k"); err != nil || len(info.Holders) != 1 {
		t.Errorf("%+v, %v: this test should have left a grant", info, err)
	}
	if err := b.Release(t.Context(), driver.Lease{Key: "k", Owner: "b"}); err != nil {
		t.Error(err)
	}
}
