package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
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

// nodes is a quorum of servers, each with a proxy before it.
type nodes struct {
	t       *testing.T
	servers []*servers.Redis
	proxies []*servers.Proxy
	prefix  string
}

func startNodes(t *testing.T, n int, cfg *servers.RedisConfig) *nodes {
	t.Helper()
	q := &nodes{t: t, servers: servers.StartMasters(t, n, cfg), prefix: newPrefix()}
	for _, s := range q.servers {
		q.proxies = append(q.proxies, servers.StartProxy(t, s.Addr()))
	}
	return q
}

// clients returns a client for each node.
func (q *nodes) clients() []redis.UniversalClient {
	var list []redis.UniversalClient
	for _, p := range q.proxies {
		c := redis.NewClient(&redis.Options{Addr: p.Addr(), DialerRetries: 1, MaxRetries: -1})
		q.t.Cleanup(func() { c.Close() })
		list = append(list, c)
	}
	return list
}

func (q *nodes) options() *redislock.QuorumOptions {
	return &redislock.QuorumOptions{Prefix: q.prefix, LivenessWindow: window, MaxTTL: 5 * time.Second, NodeTimeout: 2 * time.Second}
}

func (q *nodes) backend(change ...func(*redislock.QuorumOptions)) *redislock.Quorum {
	q.t.Helper()
	opts := q.options()
	for _, f := range change {
		f(opts)
	}
	b, err := redislock.NewQuorum(q.clients(), opts)
	if err != nil {
		q.t.Fatal(err)
	}
	q.t.Cleanup(func() { b.Close() })
	return b
}

func (q *nodes) manager(cfg *dlm.LockConfig) *dlm.Manager {
	q.t.Helper()
	return q.managerWith(cfg, q.options())
}

func (q *nodes) managerWith(cfg *dlm.LockConfig, opts *redislock.QuorumOptions) *dlm.Manager {
	q.t.Helper()
	m, err := redislock.NewQuorumLockManager(q.clients(), cfg, opts)
	if err != nil {
		q.t.Fatal(err)
	}
	q.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = m.Close(ctx)
	})
	return m
}

// holds says whether a node has a grant on the key.
func (q *nodes) holds(node int, key string) bool {
	q.t.Helper()
	reply := q.servers[node].MustDo("HGET", record(q.prefix, key), "h")
	h, ok := reply.(string)
	// A record that is free has a last token and a zero.
	return ok && len(h) > 12
}

// grants is the number of nodes that have a grant on the key.
func (q *nodes) grants(key string) int {
	q.t.Helper()
	n := 0
	for node := range q.servers {
		if q.holds(node, key) {
			n++
		}
	}
	return n
}

// isFree checks that no node has a grant on the key.
func (q *nodes) isFree(key string) {
	q.t.Helper()
	if n := q.grants(key); n > 0 {
		q.t.Errorf("%d nodes still have the grant", n)
	}
}

func TestQuorumRefusesSetups(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	c := q.clients()
	other := redis.NewClient(&redis.Options{Addr: q.servers[0].Addr()})
	t.Cleanup(func() { other.Close() })
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{q.servers[0].Addr()}})
	t.Cleanup(func() { cluster.Close() })
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": q.servers[0].Addr()}})
	t.Cleanup(func() { ring.Close() })
	for _, tc := range []struct {
		name    string
		clients []redis.UniversalClient
		opts    *redislock.QuorumOptions
		want    error
	}{
		{"none", nil, nil, driver.ErrInvalid},
		{"one", c[:1], nil, driver.ErrInvalid},
		{"two", c[:2], nil, driver.ErrInvalid},
		{"four", append(c[:3:3], other), nil, driver.ErrInvalid},
		{"a nil one", []redis.UniversalClient{c[0], nil, c[1]}, nil, driver.ErrInvalid},
		{"one client twice", []redis.UniversalClient{c[0], c[1], c[0]}, nil, driver.ErrInvalid},
		{"a cluster", []redis.UniversalClient{c[0], c[1], cluster}, nil, errors.ErrUnsupported},
		{"a ring", []redis.UniversalClient{c[0], c[1], ring}, nil, errors.ErrUnsupported},
		{"braces", c, &redislock.QuorumOptions{Prefix: "{a}"}, driver.ErrInvalid},
		{"node time-out", c, &redislock.QuorumOptions{NodeTimeout: time.Hour}, driver.ErrInvalid},
		{"longest TTL", c, &redislock.QuorumOptions{MaxTTL: time.Millisecond}, driver.ErrInvalid},
	} {
		if _, err := redislock.NewQuorum(tc.clients, tc.opts); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}

	// Two names of one server are found out at the first call.
	b, err := redislock.NewQuorum([]redis.UniversalClient{c[0], c[1], other}, q.options())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for range 2 {
		_, err = b.Acquire(t.Context(), request("k", "a", time.Second))
		if e, ok := errors.AsType[*redislock.ServerError](err); !ok || e.Problem != redislock.ProblemSameServer || !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("one server twice: %v", err)
		}
	}

	// What a quorum cannot do is refused.
	full := q.backend()
	req := request("k", "a", time.Second)
	req.Mode = driver.Shared
	if _, err := full.Acquire(t.Context(), req); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("shared: %v", err)
	}
	req = request("k", "a", time.Second)
	req.Limit = 2
	if _, err := full.Acquire(t.Context(), req); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("permits: %v", err)
	}
	if _, err := full.Acquire(t.Context(), request("k", "a", time.Minute)); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("TTL above MaxTTL: %v", err)
	}
}

func request(key, owner string, ttl time.Duration) driver.Request {
	return driver.Request{Key: key, Owner: owner, TTL: ttl, Limit: 1}
}

// A minority that hangs, is dead or is cut off does not keep anybody waiting,
// and takes part again when it is back.
func TestQuorumMinorityAway(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		away func(q *nodes, n int)
		back func(q *nodes, n int)
	}{
		{"stopped", func(q *nodes, n int) { q.servers[n].Pause() }, func(q *nodes, n int) { q.servers[n].Resume() }},
		{"dead", func(q *nodes, n int) { q.servers[n].Kill() }, func(q *nodes, n int) { q.servers[n].Restart() }},
		{"cut off", func(q *nodes, n int) { q.proxies[n].Blackhole() }, func(q *nodes, n int) { q.proxies[n].Resume() }},
		{"reset", func(q *nodes, n int) { q.proxies[n].Refuse() }, func(q *nodes, n int) { q.proxies[n].Resume() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			q := startNodes(t, 5, &servers.RedisConfig{Persist: true})
			m := q.manager(nil)
			held, err := m.AcquireLock(t.Context(), "held", 3*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			tc.away(q, 1)
			tc.away(q, 3)
			last := int64(0)
			for range 20 {
				l, err := m.AcquireLock(t.Context(), "k", 3*time.Second)
				if err != nil {
					t.Fatal(err)
				}
				if l.Token <= last {
					t.Errorf("token %d after %d", l.Token, last)
				}
				last = l.Token
				if err := l.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			before := held.Deadline()
			eventually(t, "the lock is renewed", func() bool { return held.Deadline().After(before) })
			tc.back(q, 1)
			tc.back(q, 3)
			eventually(t, "the nodes have the lock again", func() bool { return q.holds(1, "held") && q.holds(3, "held") })
			if err := held.Err(); err != nil {
				t.Fatal(err)
			}
			if err := held.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// QUO2: nodes that are restarted without their data, one after another, are
// given the lock again, and nobody else gets it meanwhile.
func TestQuorumRollingRestart(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	m, rival := q.manager(nil), q.manager(nil)
	l, err := m.AcquireLock(t.Context(), "k", 3*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	for n := range q.servers {
		q.servers[n].Kill()
		q.servers[n].Restart()
		if _, err := rival.TryLock(t.Context(), "k", time.Second); !errors.Is(err, dlm.ErrHeld) {
			t.Fatalf("a rival: %v", err)
		}
		eventually(t, "the node has the lock again", func() bool { return q.holds(n, "k") })
	}
	if err := l.Err(); err != nil {
		t.Fatal(err)
	}
	// Two at once are a majority: the lock is lost, and says so.
	q.servers[0].Kill()
	q.servers[1].Kill()
	q.servers[0].Restart()
	q.servers[1].Restart()
	select {
	case <-l.Done():
	case <-time.After(patience):
		t.Fatal("the loss was not told")
	}
	if err := l.Err(); !errors.Is(err, dlm.ErrLost) {
		t.Errorf("%v, want a loss", err)
	}
	token := l.Token
	next, err := rival.AcquireLock(t.Context(), "k", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if next.Token <= token {
		t.Errorf("token %d after %d", next.Token, token)
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A node that has lost its data does not help a rival to a majority before all
// that it may have granted has run out.
func TestQuorumForgetfulNode(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	a, b := q.backend(), q.backend()
	for _, backend := range []*redislock.Quorum{a, b} {
		var lease driver.Lease
		eventually(t, "the nodes are known", func() (ok bool) {
			var err error
			lease, err = backend.Acquire(t.Context(), request("first", "x", time.Second))
			return err == nil
		})
		if err := backend.Release(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
	}
	q.servers[2].Pause()
	lease, err := a.Acquire(t.Context(), request("k", "a", 4*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	granted := time.Now()
	q.servers[1].Kill()
	q.servers[1].Restart()
	q.servers[2].Resume()
	for {
		rival, err := b.Acquire(t.Context(), request("k", "b", time.Second))
		if err == nil {
			if time.Since(granted) < lease.TTL {
				t.Fatalf("granted to a rival after %v", time.Since(granted))
			}
			if rival.Token <= lease.Token {
				t.Errorf("token %d after %d", rival.Token, lease.Token)
			}
			break
		}
		if !errors.Is(err, driver.ErrHeld) && !errors.Is(err, driver.ErrNotApplied) {
			t.Logf("meanwhile: %v", err)
		}
		if time.Since(granted) > patience {
			t.Fatal("the node never votes again")
		}
		time.Sleep(20 * time.Millisecond) // between two questions of a rival
	}
}

// QUO5: a majority that answers so late that the TTL is over is no success.
func TestQuorumTooSlow(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	m := q.manager(&dlm.LockConfig{MaxRetries: 1, RetryInterval: time.Millisecond})
	l, err := m.AcquireLock(t.Context(), "k", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range q.proxies {
		p.Delay(servers.Down, 600*time.Millisecond)
	}
	if l, err := m.AcquireLock(t.Context(), "k", 500*time.Millisecond); err == nil {
		t.Errorf("granted until %v", time.Until(l.Deadline()))
	}
	for _, p := range q.proxies {
		p.Delay(servers.Down, 0)
	}
	eventually(t, "nothing is left", func() bool {
		l, err := m.TryLock(t.Context(), "k", time.Second)
		if err != nil {
			return false
		}
		return l.Release(t.Context()) == nil
	})
}

// QUO9: a lock that lies on a majority only is released without complaint.
func TestQuorumReleasePart(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 5, nil)
	b := q.backend()
	if _, err := b.Inspect(t.Context(), "k"); err != nil { // all nodes are known
		t.Fatal(err)
	}
	q.servers[0].Kill()
	q.servers[1].Kill()
	lease, err := b.Acquire(t.Context(), request("k", "a", 5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	q.servers[0].Restart()
	q.servers[1].Restart()
	if err := b.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}
	b.Close() // waits for what is under way
	q.isFree("k")
}

// QUO8: a node that cannot be used does not hinder the others, and takes part as
// soon as it can.
func TestQuorumOneBadNode(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	q.servers[2].MustDo("CONFIG", "SET", "requirepass", "secret")
	m := q.manager(nil)
	l, err := m.AcquireLock(t.Context(), "k", 3*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	c := redis.NewClient(&redis.Options{Addr: q.servers[2].Addr(), Password: "secret"})
	defer c.Close()
	if err := c.ConfigSet(t.Context(), "requirepass", "").Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node has the lock", func() bool { return q.holds(2, "k") })
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Many who wait are all served, also when they come from several managers.
func TestQuorumCrowd(t *testing.T) {
	t.Parallel()
	const waiters = 200
	q := startNodes(t, 5, nil)
	opts := q.options()
	opts.LivenessWindow = 10 * window // not to be about busy machines
	var managers []*dlm.Manager
	for range 4 {
		managers = append(managers, q.managerWith(nil, opts))
	}
	var inside, served atomic.Int32
	var wg sync.WaitGroup
	for i := range waiters {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			l, err := managers[i%len(managers)].AcquireLock(ctx, "k", 5*time.Second)
			if err != nil {
				t.Error(err)
				return
			}
			if inside.Add(1) != 1 {
				t.Error("two are inside")
			}
			inside.Add(-1)
			served.Add(1)
			if err := l.Release(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if served.Load() != waiters {
		t.Errorf("%d of %d were served", served.Load(), waiters)
	}
}

// chaosTime is for how long the nodes are broken.
func chaosTime(t *testing.T) time.Duration {
	text := os.Getenv("DLM_TEST_CHAOS")
	if text == "" {
		return 5 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("DLM_TEST_CHAOS: %v", err)
	}
	return d
}

// Up to two of five nodes are killed, stopped or cut off all the time, while
// clients take locks. Nobody holds a key together with somebody else, tokens
// rise, and most acquisitions succeed.
func TestQuorumChaos(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 5, &servers.RedisConfig{Persist: true})
	const clients, keys = 8, 2
	managers := make([]*dlm.Manager, 4)
	for i := range managers {
		managers[i] = q.manager(nil)
		l, err := managers[i].AcquireLock(t.Context(), "first", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	type holding struct {
		sync.Mutex
		lock  *dlm.Lock
		token int64
	}
	var held [keys]holding
	var tried, got, lost atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			m := managers[i%len(managers)]
			for ctx.Err() == nil {
				n := rand.N(keys)
				h, key := &held[n], fmt.Sprint("k", n)
				tried.Add(1)
				actx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				l, err := m.AcquireLock(actx, key, 2*time.Second)
				cancel()
				if err != nil {
					t.Logf("acquire: %v", err)
					continue
				}
				got.Add(1)
				h.Lock()
				if h.lock != nil && time.Now().Before(h.lock.Deadline()) {
					t.Errorf("token %d is granted while %d is held until %v", l.Token, h.token, h.lock.Deadline())
				}
				if l.Token <= h.token {
					t.Errorf("token %d after %d", l.Token, h.token)
				}
				h.lock, h.token = l, l.Token
				h.Unlock()
				select {
				case <-time.After(rand.N(5 * time.Millisecond)): // what the lock is for
				case <-l.Done():
					lost.Add(1)
				}
				h.Lock()
				if h.lock == l {
					h.lock = nil
				}
				h.Unlock()
				rctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				_ = l.Release(rctx)
				cancel()
			}
		})
	}
	end := time.Now().Add(chaosTime(t))
	for round := 0; time.Now().Before(end); round++ {
		a := rand.N(5)
		b := (a + 1 + rand.N(4)) % 5
		var heal []func()
		for _, n := range []int{a, b} {
			switch rand.N(4) {
			case 0:
				q.servers[n].Kill()
				heal = append(heal, func() { q.servers[n].Restart() })
			case 1:
				q.servers[n].Pause()
				heal = append(heal, func() { q.servers[n].Resume() })
			case 2:
				q.proxies[n].Blackhole()
				heal = append(heal, func() { q.proxies[n].Resume() })
			case 3:
				q.proxies[n].Refuse()
				heal = append(heal, func() { q.proxies[n].Resume() })
			}
		}
		time.Sleep(200*time.Millisecond + rand.N(time.Second)) // the length of the fault
		for _, f := range heal {
			f()
		}
		time.Sleep(rand.N(300 * time.Millisecond))
	}
	stop()
	wg.Wait()
	t.Logf("%d acquisitions, %d within 5s: %.3f %%, %d lost", tried.Load(), got.Load(), 100*float64(got.Load())/float64(max(tried.Load(), 1)), lost.Load())
	if got.Load() == 0 {
		t.Error("nothing was granted")
	}
}

// A node that was not told the token of the majority learns it by the next
// renewal, so that the release of that token frees it, too.
func TestQuorumTokenCatchesUp(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	b := q.backend()
	lease, err := b.Acquire(t.Context(), request("k", "a", 5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "all nodes have the grant", func() bool { return q.grants("k") == 3 })
	const older = `
local h = {cmsgpack.unpack(redis.call('HGET', KEYS[1], 'h'))}
h[3] = h[3] - 1
redis.call('HSET', KEYS[1], 'h', cmsgpack.pack(unpack(h)))
return 1`
	q.servers[2].MustDo("EVAL", older, "1", record(q.prefix, "k"))
	batch := []driver.Renewal{{Lease: lease}}
	if b.Extend(t.Context(), batch); batch[0].Err != nil {
		t.Fatal(batch[0].Err)
	}
	if err := b.Release(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all nodes are free", func() bool { return q.grants("k") == 0 })
}

// A repetition that finds its grant on fewer nodes than a majority, because one
// does not answer, is no refusal: it must not give back what it holds.
func TestQuorumRepetitionKeepsGrant(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	b := q.backend(func(o *redislock.QuorumOptions) { o.NodeTimeout = time.Second })
	lease, err := b.Acquire(t.Context(), request("k", "a", 5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "all nodes have the grant", func() bool { return q.grants("k") == 3 })
	const taken = `
local h = {cmsgpack.unpack(redis.call('HGET', KEYS[1], 'h'))}
h[7] = 'b'
redis.call('HSET', KEYS[1], 'h', cmsgpack.pack(unpack(h)))
return 1`
	q.servers[2].MustDo("EVAL", taken, "1", record(q.prefix, "k"))
	q.proxies[1].Blackhole()
	_, err = b.Acquire(t.Context(), request("k", "a", 5*time.Second))
	if err == nil || errors.Is(err, driver.ErrHeld) || errors.Is(err, driver.ErrNotApplied) {
		t.Errorf("the repetition: %v, want an unknown outcome", err)
	}
	q.proxies[1].Resume()
	if !q.holds(0, "k") {
		t.Error("the grant was given back")
	}
	// The repetition may be undone on the node that was cut off at the same time.
	if err := b.Release(t.Context(), lease); errors.Is(err, driver.ErrLost) {
		t.Error(err)
	}
	eventually(t, "two nodes are free", func() bool { return !q.holds(0, "k") && !q.holds(1, "k") })
}

// A node that is behind the majority when the lock is released is left with
// nothing, whether the grant reaches it late or only its answer comes late, and
// also if its token was not that of the majority.
func TestQuorumStraggler(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		held   servers.Direction
		ahead  bool // the straggler gives a larger token than the others
		before bool // it answers before the release, or else after it was called
	}{
		{"request", servers.Up, false, false},
		{"request, other token", servers.Up, true, false},
		{"reply", servers.Down, false, false},
		{"reply, other token", servers.Down, true, false},
		{"before the release", servers.Down, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			const last = 2
			q := startNodes(t, last+1, nil)
			opts := q.options()
			opts.MaxTTL = time.Minute // longer than the test waits
			b, err := redislock.NewQuorum(q.clients(), opts)
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			first, err := b.Acquire(t.Context(), request("k", "a", time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			if err := b.Release(t.Context(), first); err != nil {
				t.Fatal(err)
			}
			eventually(t, "all nodes are free", func() bool { return q.grants("k") == 0 })
			if tc.ahead {
				const ahead = `
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'h', cmsgpack.pack(now[1] * 1000000 + now[2] + 60000000, 0))
return 1`
				q.servers[last].MustDo("EVAL", ahead, "1", record(q.prefix, "k"))
			}

			q.proxies[last].Hold(tc.held)
			lease, err := b.Acquire(t.Context(), request("k", "b", time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			if tc.before {
				q.proxies[last].Resume()
			}
			if err := b.Release(t.Context(), lease); err != nil {
				t.Error(err)
			}
			q.proxies[last].Resume()
			b.Close() // waits for what is under way
			q.isFree("k")
		})
	}
}

// An acquisition and its release ask each node once when nothing is wrong.
func TestQuorumCallsPerPair(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 5, nil)
	b := q.backend()
	const pairs = 100
	slow := 0
	for i := range pairs {
		// A key of its own: a release may still be on its way to a slow node.
		began := time.Now()
		lease, err := b.Acquire(t.Context(), request("k"+strconv.Itoa(i), "a", 5*time.Second))
		if err == nil {
			err = b.Release(t.Context(), lease)
		}
		if err == nil {
			continue
		}
		// On a busy machine a call may take so long that it is made again, which
		// seldom leaves its outcome open. An answer is no such thing.
		slow++
		answered := errors.Is(err, driver.ErrHeld) || errors.Is(err, driver.ErrLost) || errors.Is(err, driver.ErrInvalid)
		if answered || slow > pairs/20 || time.Since(began) < 200*time.Millisecond {
			t.Fatal(err)
		}
	}
	b.Close() // waits for what is under way
	calls := int64(0)
	for _, s := range q.servers {
		calls += s.Commands()["evalsha"]
	}
	// The looks at the nodes before the first call are more.
	if most := int64((pairs+slow)*5*2 + 20); calls > most {
		t.Errorf("%d calls of scripts for %d pairs, want %d at most", calls, pairs, most)
	}
}

// The queue of a node can vanish within a script, see TestSinglePartsExpireWithinScript.
func TestQuorumQueueExpiresWithinScript(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	if _, err := q.backend().Acquire(t.Context(), request("k", "a", 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all nodes have the grant", func() bool { return q.grants("k") == 3 })
	admin := redis.NewClient(&redis.Options{Addr: q.servers[0].Addr()})
	defer admin.Close()
	name := record(q.prefix, "k")
	second := time.Second.Microseconds()
	reply, err := admin.Eval(t.Context(), source(t, admin, "quorum_head", "quorum_acquire"), []string{name, name + ":q", q.prefix + "!node"},
		"b", second, "", 0, second, 0, 1, 0).Result()
	if err != nil {
		t.Fatal(err)
	}
	if list, ok := reply.([]any); !ok || len(list) != 7 || list[0] != int64(0) || list[2] != "a" || list[6] == int64(0) {
		t.Errorf("got %v, want a refusal with a place", reply)
	}
}

// Who does not wait is not refused because of a lock that was released, though
// one node does not know it yet and another does not answer.
func TestQuorumTryAfterRelease(t *testing.T) {
	t.Parallel()
	const slow, dead = 1, 2
	q := startNodes(t, 3, nil)
	holder := q.backend()
	lease, err := holder.Acquire(t.Context(), request("k", "a", 5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "all nodes have the grant", func() bool { return q.grants("k") == 3 })

	other := &nodes{t: t, servers: q.servers, prefix: q.prefix}
	for _, s := range q.servers {
		other.proxies = append(other.proxies, servers.StartProxy(t, s.Addr()))
	}
	b := other.backend()
	if _, err := b.Inspect(t.Context(), "k"); err != nil { // all nodes are known
		t.Fatal(err)
	}
	other.proxies[dead].Refuse()
	q.proxies[slow].Delay(servers.Up, 200*time.Millisecond)
	if err := holder.Release(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Acquire(t.Context(), request("k", "b", 5*time.Second)); err != nil {
		t.Error(err)
	}
}

// A waiter is woken by the one node that has its place and is listened to, though
// that one did not have the grant which is released.
func TestQuorumWakesWithoutGrant(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	b := q.backend()
	lease, err := b.Acquire(t.Context(), request("k", "a", 5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan driver.Event, 10)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = b.Listen(ctx, "m", func(e driver.Event) { events <- e }) })
	if e := <-events; e.Kind != driver.EventUp {
		t.Fatalf("%+v, want EventUp", e)
	}
	waiter := request("k", "b", 5*time.Second)
	waiter.Manager, waiter.Enqueue = "m", true
	if _, err := b.Acquire(t.Context(), waiter); !errors.Is(err, driver.ErrHeld) {
		t.Fatal(err)
	}
	places := func(node int) bool {
		return q.servers[node].MustDo("ZCARD", record(q.prefix, "k")+":q") == any(int64(1))
	}
	eventually(t, "all nodes have the place", func() bool { return places(0) && places(1) && places(2) })
	const (
		withoutGrant = `
local last = cmsgpack.unpack(redis.call('HGET', KEYS[1], 'h'))
redis.call('HSET', KEYS[1], 'h', cmsgpack.pack(last, 0))
return 1`
		withoutPlace = `
redis.call('HDEL', KEYS[1], 'q', 'sb')
return redis.call('DEL', KEYS[2])`
	)
	q.servers[0].MustDo("EVAL", withoutGrant, "1", record(q.prefix, "k"))
	for _, s := range q.servers[1:] {
		s.MustDo("EVAL", withoutPlace, "2", record(q.prefix, "k"), record(q.prefix, "k")+":q")
	}
	if err := b.Release(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-events:
		if e.Kind != driver.EventWake || e.Lease.Owner != "b" {
			t.Errorf("%+v, want EventWake for b", e)
		}
	case <-time.After(patience):
		t.Error("the waiter is not woken")
	}
}

// Who comes later stands behind, though what the manager takes the nodes' clocks
// to show is far behind, since it has only heard of them late.
func TestQuorumQueueOrder(t *testing.T) {
	t.Parallel()
	const ttl = time.Minute
	q := startNodes(t, 3, nil)
	long := func(o *redislock.QuorumOptions) { o.MaxTTL, o.LivenessWindow = ttl, ttl } // nobody asks again
	b := q.backend(long)
	lease, err := b.Acquire(t.Context(), request("k", "a", ttl))
	if err != nil {
		t.Fatal(err)
	}
	other := &nodes{t: t, servers: q.servers, prefix: q.prefix}
	for _, s := range q.servers {
		p := servers.StartProxy(t, s.Addr())
		p.Delay(servers.Down, 200*time.Millisecond)
		other.proxies = append(other.proxies, p)
	}
	late := other.backend(long)
	if _, err := late.Acquire(t.Context(), request("k", "x", ttl)); !errors.Is(err, driver.ErrHeld) {
		t.Fatal(err)
	}
	want := []string{"b", "c", "d", "e"}
	for i, owner := range want {
		waiter := request("k", owner, ttl)
		waiter.Enqueue = true
		if _, err := []*redislock.Quorum{b, late}[i%2].Acquire(t.Context(), waiter); !errors.Is(err, driver.ErrHeld) {
			t.Fatal(err)
		}
	}
	info, err := b.Inspect(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	var queue []string
	for _, w := range info.Waiters {
		queue = append(queue, w.Owner)
	}
	if !slices.Equal(queue, want) {
		t.Errorf("the queue is %q, want %q", queue, want)
	}
	if err := b.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}
}
