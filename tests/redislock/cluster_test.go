package redislock_test

import (
	"context"
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

func cluster(c *servers.Cluster) func(dialer) redis.UniversalClient {
	return func(dial dialer) redis.UniversalClient {
		return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), Dialer: dial})
	}
}

func TestConformanceCluster(t *testing.T) {
	t.Parallel()
	c := servers.StartCluster(t, 3, 3)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return slower(harness(t, cluster(c), redislock.Options{}))
	})
}

func TestConformanceClusterAcknowledged(t *testing.T) {
	t.Parallel()
	c := servers.StartCluster(t, 3, 3)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return slower(harness(t, cluster(c), redislock.Options{Replicas: 1}))
	})
}

// clusterTest is a cluster with two managers on it.
type clusterTest struct {
	*servers.Cluster
	prefix string
	opts   redislock.Options
	a, b   *dlm.Manager
}

// TestCluster changes a cluster while locks are held, waited for and queued,
// without acknowledgements and with.
func TestCluster(t *testing.T) {
	t.Parallel()
	for replicas := range 2 {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			t.Parallel()
			c := &clusterTest{Cluster: servers.StartCluster(t, 3, 3), prefix: newPrefix()}
			c.opts = redislock.Options{Prefix: c.prefix, Replicas: replicas}
			c.a, c.b = c.open(t), c.open(t)
			t.Run("keys", func(t *testing.T) { testKeys(t, c) })
			t.Run("migration", func(t *testing.T) { testMigration(t, c) })
			t.Run("promotion", func(t *testing.T) {
				testChange(t, c, func(primary *servers.Redis) func() {
					c.Failover(c.ReplicaOf(primary))
					return func() {}
				})
			})
			t.Run("kill", func(t *testing.T) {
				testChange(t, c, func(primary *servers.Redis) func() {
					primary.Kill()
					return primary.Restart
				})
			})
			t.Run("subscription", func(t *testing.T) { testSubscription(t, c) })
			t.Run("hang", func(t *testing.T) { testHang(t, c) })
			t.Run("stop", func(t *testing.T) {
				testChange(t, c, func(primary *servers.Redis) func() {
					primary.Pause()
					return primary.Resume
				})
			})
		})
	}
}

func (c *clusterTest) open(t *testing.T) *dlm.Manager {
	return manage(t, cluster(c.Cluster)(nil), c.opts)
}

// slotOf returns the slot of a lock whose key needs no escaping.
func (c *clusterTest) slotOf(key string) int { return c.Slot(record(c.prefix, key)) }

// keysOn returns keys of locks that are kept by a node, with this beginning.
func (c *clusterTest) keysOn(primary *servers.Redis, begin string, n int) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if key := fmt.Sprint(begin, i); c.PrimaryOf(c.slotOf(key)) == primary {
			keys = append(keys, key)
		}
	}
	return keys
}

func testMigration(t *testing.T, c *clusterTest) {
	slot := c.slotOf("moving")
	from := c.PrimaryOf(slot)
	to := c.Nodes[0]
	if from == to {
		to = c.Nodes[1]
	}
	held := take(t, c.a, "moving")
	first, second := wait(t, c.b, "moving"), wait(t, c.a, "moving")

	// Halfway, the slot is with neither of them. A lock that is held goes on.
	finish := c.BeginMigration(slot, to)
	before := held.Deadline()
	eventually(t, "the lock is renewed halfway", func() bool { return held.Err() != nil || held.Deadline().After(before) })
	if err := held.Err(); err != nil {
		t.Fatal(err)
	}
	finish()
	goOn(t, c.a, held)
	released := time.Now()
	drop(t, held)
	drop(t, first.granted(t))
	held = second.granted(t)
	t.Logf("two waiters within %v", time.Since(released))
	passesOn(t, c.a, c.b, "moved")

	// And back at one go, with a lock that was queued for.
	third := wait(t, c.b, "moving")
	c.MigrateSlot(slot, from)
	goOn(t, c.a, held)
	drop(t, held)
	drop(t, third.granted(t))
	c.WaitReady()
}

// testChange replaces a primary, and checks that locks go on, on this node and
// on the others.
func testChange(t *testing.T, c *clusterTest, fail func(primary *servers.Redis) (mend func())) {
	primary := c.PrimaryOf(0)
	keys := c.keysOn(primary, "held", 7)
	slot := c.slotOf(keys[0])
	var held, others []*dlm.Lock
	for _, key := range keys[1:] {
		held = append(held, take(t, c.a, key))
	}
	lossy := takeFor(t, c.a, keys[0], lossyTTL)
	// Those on other nodes have no time to lose.
	for _, key := range c.keysOn(c.PrimaryOf(16383), "other", 6) {
		others = append(others, takeFor(t, c.a, key, 2*time.Second))
	}
	goOn(t, c.a, held...)
	after, during := wait(t, c.b, held[0].Key), wait(t, c.b, lossy.Key)
	var book ledger
	stop := book.work(t, 6, c.open(t), c.open(t))
	book.progress(t, time.Now())
	inStep(t, primary, 1)

	start := time.Now()
	mend := fail(primary)
	var wg sync.WaitGroup
	wg.Go(func() { drop(t, lossy) })
	c.WaitPrimary(slot, primary)
	replaced := time.Since(start)
	if c.opts.Replicas > 0 {
		// While there is no replica, nothing is acknowledged.
		mend()
	}
	goOn(t, c.a, held[1:]...)
	renewed := time.Since(start)
	l := during.granted(t)
	served := l.AcquiredAt.Sub(start)
	drop(t, l)
	wg.Wait()
	released := time.Now()
	drop(t, held[0])
	drop(t, after.granted(t))
	t.Logf("replaced after %v, renewed after %v, a waiter whose holder released meanwhile was served after %v, another within %v of a release",
		replaced, renewed, served, time.Since(released))
	book.progress(t, start)
	passesOn(t, c.a, c.b, keys[0])
	mend()
	c.WaitReady()
	passesOn(t, c.a, c.b, keys[0])
	goOn(t, c.a, append(held[1:], others...)...)
	for _, l := range append(held[1:], others...) {
		drop(t, l)
	}
	stop()
	overlaps := book.overlaps(t)
	t.Logf("%d grants, %d lost, %d overlaps %v", book.grants.Load(), book.lost.Load(), len(overlaps), overlaps)
	if c.opts.Replicas > 0 && len(overlaps) > 0 {
		t.Error("granted twice")
	}
}

// A subscription finds another node when its own has died, though nothing else
// is asked of that one.
func testSubscription(t *testing.T, c *clusterTest) {
	client := cluster(c.Cluster)(nil)
	t.Cleanup(func() { client.Close() })
	b := backend(t, client, c.opts)
	primary := c.PrimaryOf(0)
	manager := ""
	for i := 0; manager == "" || c.PrimaryOf(c.Slot(c.prefix+"!"+manager)) != primary; i++ {
		manager = fmt.Sprint("m", i)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	up := make(chan struct{}, 100)
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			_ = b.Listen(ctx, manager, func(driver.Event) { up <- struct{}{} }) // it ends with its node
		}
	})
	defer wg.Wait()
	defer cancel()
	await := func() {
		t.Helper()
		select {
		case <-up:
		case <-ctx.Done():
			t.Fatal("the subscription does not stand")
		}
	}
	await()
	primary.Kill()
	await()
	cancel()
	wg.Wait()
	primary.Restart()
	c.WaitReady()
}

// A node that hangs does not hold up calls to others, and makes the clients look
// for one that has taken its place.
func testHang(t *testing.T, c *clusterTest) {
	primary, other := c.PrimaryOf(0), c.PrimaryOf(16383)
	hung, well := c.keysOn(primary, "hung", 10), c.keysOn(other, "well", 10)
	// One of them may ask the very node that hangs who has taken its place.
	var clients []*redislock.Backend
	for range 4 {
		client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), ReadTimeout: 2 * patience})
		t.Cleanup(func() { client.Close() })
		b := backend(t, client, c.opts)
		grant(t, b, hung[0])
		grant(t, b, well[0])
		clients = append(clients, b)
	}
	looks := func() (n int64) {
		for _, r := range c.Nodes {
			if r != primary {
				n += r.Commands()["cluster|slots"]
			}
		}
		return n
	}
	before := looks()
	primary.Pause()
	ctx, cancel := context.WithCancel(t.Context())
	var rest, answered sync.WaitGroup
	defer rest.Wait()
	defer cancel()
	for i, b := range clients {
		for k := range hung {
			ask := func(ctx context.Context, key string) error {
				_, err := b.Acquire(ctx, driver.Request{Key: key, Owner: fmt.Sprint(i), TTL: time.Minute, Limit: 1 + len(clients)})
				return err
			}
			rest.Go(func() { _ = ask(ctx, hung[k]) })
			answered.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, patience)
				defer cancel()
				if err := ask(ctx, well[k]); err != nil {
					t.Errorf("a node that is well: %v", err)
				}
			})
		}
	}
	answered.Wait()
	eventually(t, "a client looks for another node", func() bool { return looks() > before })
	cancel()
	primary.Resume()
	rest.Wait()
	c.WaitReady()
}

// All of a lock's records must be in one slot, whatever is in its key. Clients
// that are told to read from replicas must not do so for locks.
func testKeys(t *testing.T, c *clusterTest) {
	var replicas []*servers.Redis
	for _, r := range c.Nodes {
		if r.Role() == "slave" {
			replicas = append(replicas, r)
			r.MustDo("CONFIG", "RESETSTAT")
		}
	}
	for _, o := range []redis.ClusterOptions{{}, {ReadOnly: true, RouteRandomly: true}, {ReadOnly: true, RouteByLatency: true}} {
		o.Addrs = c.Addrs()
		m := manage(t, redis.NewClusterClient(&o), c.opts)
		var locks []*dlm.Lock
		for _, key := range []string{"a{b}c", "{", "}", "{}", "{}x", "%7D", "%", "x}y{z", "{{a}}", "é", "\x00", " "} {
			shared, err := m.Acquire(t.Context(), key, longTTL, &dlm.AcquireOptions{Shared: true})
			if err != nil {
				t.Fatal(err)
			}
			w := wait(t, m, key)
			drop(t, shared)
			locks = append(locks, w.granted(t))
		}
		goOn(t, m, locks...)
		for _, l := range locks {
			drop(t, l)
		}
	}
	for _, r := range replicas {
		if n := r.Commands(); n["eval"]+n["evalsha"] > 0 {
			t.Errorf("a replica was asked: %v", n)
		}
	}
	// A client of one server does not find the others.
	b := backend(t, client(t, c.Nodes[0]), c.opts)
	refused := 0
	for i := range 20 {
		if _, err := try(t, b, fmt.Sprint("k", i), "o"); err != nil {
			refused++
			wantProblem(t, err, redislock.ProblemCluster)
		}
	}
	if refused == 0 {
		t.Error("no key is elsewhere")
	}
}

// A client of one server serves a cluster that has no other.
func TestClusterOfOne(t *testing.T) {
	t.Parallel()
	c := servers.StartCluster(t, 1, 0)
	b := backend(t, client(t, c.Nodes[0]), redislock.Options{})
	batch := make([]driver.Renewal, 100)
	for i := range batch {
		lease, err := try(t, b, fmt.Sprint("k", i), "o")
		if err != nil {
			t.Fatal(err)
		}
		lease.TTL = time.Hour
		batch[i].Lease = lease
	}
	batch[50].Lease.Token++
	for range 2 {
		b.Extend(t.Context(), batch)
		for i := range batch {
			if err := batch[i].Err; (err == nil) != (i != 50) || i == 50 && !errors.Is(err, driver.ErrLost) {
				t.Errorf("renewal %d: %v", i, err)
			}
		}
	}
	infos, err := b.List(t.Context(), "k", "", 0)
	if err != nil || len(infos) != len(batch) {
		t.Errorf("%d keys are listed: %v", len(infos), err)
	}
	for _, info := range infos {
		if len(info.Holders) != 1 || info.Key != "k50" && info.Holders[0].Remaining < 50*time.Minute {
			t.Errorf("%q is held by %+v", info.Key, info.Holders)
		}
	}
}
