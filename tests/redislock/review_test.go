package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// An Extend or a repeated Acquire with a shorter TTL does not shorten a grant on
// the nodes, not even once somebody else has looked at the key.
func TestQuorumShorterRenewal(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	long := func(o *redislock.QuorumOptions) { o.MaxTTL = time.Minute }
	a, b := q.backend(long), q.backend(long)
	for _, tc := range []struct {
		key   string
		renew func(l driver.Lease) error
	}{
		{"extend", func(l driver.Lease) error {
			l.TTL = 1200 * time.Millisecond
			batch := []driver.Renewal{{Lease: l}}
			a.Extend(t.Context(), batch)
			return batch[0].Err
		}},
		{"acquire", func(l driver.Lease) error {
			_, err := a.Acquire(t.Context(), request(l.Key, l.Owner, 1200*time.Millisecond))
			return err
		}},
	} {
		lease, err := a.Acquire(t.Context(), request(tc.key, "a", time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		if err := tc.renew(lease); err != nil {
			t.Fatal(err)
		}
		for start := time.Now(); time.Since(start) < 2*time.Second; {
			if _, err := b.Acquire(t.Context(), request(tc.key, "b", time.Second)); err == nil {
				t.Errorf("%s: granted to a rival %v after the renewal of a grant for a minute", tc.key, time.Since(start))
				break
			}
			time.Sleep(20 * time.Millisecond) // between two questions of the rival
		}
	}
}

// A waiter with a short TTL does not make the record of a long lock expire.
func TestQuorumWaiterKeepsRecord(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	opts := q.options()
	opts.KeepTokens, opts.MaxTTL = time.Minute, 24*time.Hour
	b, err := redislock.NewQuorum(q.clients(), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if _, err := b.Acquire(t.Context(), request("k", "a", 24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all nodes have the grant", func() bool { return q.grants("k") == 3 })
	check := func(when string) {
		t.Helper()
		for n, s := range q.servers {
			if left, ok := s.MustDo("PTTL", record(q.prefix, "k")).(int64); !ok || left < (24*time.Hour-time.Minute).Milliseconds() {
				t.Errorf("%s: node %d keeps the record for %d ms only", when, n, left)
			}
		}
	}
	check("at first")
	wait := request("k", "b", time.Second)
	wait.Enqueue = true
	if _, err := b.Acquire(t.Context(), wait); !errors.Is(err, driver.ErrHeld) {
		t.Fatal(err)
	}
	eventually(t, "all nodes have the ticket", func() bool { return q.waiting("k") == 3 })
	check("with a waiter")
	if _, err := b.Acquire(t.Context(), request("k", "a", time.Second)); err != nil {
		t.Fatal(err)
	}
	b.Close() // waits for what is under way
	check("after a repetition")
}

// A node that comes back with an old snapshot has forgotten the last grants, and
// does not vote.
func TestQuorumOldSnapshot(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	a, b := q.backend(), q.backend()
	for _, backend := range []*redislock.Quorum{a, b} {
		lease, err := backend.Acquire(t.Context(), request("first", "x", time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if err := backend.Release(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
	}
	q.servers[1].MustDo("SAVE")
	q.proxies[2].Refuse()
	lease, err := a.Acquire(t.Context(), request("k", "a", 4*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	granted := time.Now()
	q.servers[1].Kill()
	q.servers[1].Restart()
	if mark := q.servers[1].MustDo("EXISTS", q.prefix+"!node"); mark != int64(1) {
		t.Fatal("the snapshot is not there")
	}
	q.proxies[2].Resume()
	for time.Since(granted) < lease.TTL/2 {
		if _, err := b.Acquire(t.Context(), request("k", "b", time.Second)); err == nil {
			t.Fatalf("granted to a rival after %v", time.Since(granted))
		}
		time.Sleep(20 * time.Millisecond) // between two questions of a rival
	}
}

// A client whose clock stood still, as in a machine that was suspended, does not
// get old tokens from nodes that have forgotten the key.
func TestQuorumOldProposal(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	source := luaSource(t, "quorum_head", "quorum_acquire")
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer c.Close()
	if err := c.Set(t.Context(), "p:!node", "0 "+s.RunID(), 0).Err(); err != nil {
		t.Fatal(err)
	}
	now := time.Now().UnixMicro()
	reply, err := c.Eval(t.Context(), source, []string{"p:{k}", "p:{k}:q", "p:!node"},
		"a", 1000000, "", 60000, 0, now-(2*time.Hour).Microseconds(), 1, 1020000, "").Slice()
	if err != nil {
		t.Fatal(err)
	}
	if token, ok := reply[2].(int64); !ok || token < now-(2*time.Second).Microseconds() {
		t.Errorf("the token is %v before the clock", time.Duration(now-token)*time.Microsecond)
	}
}

// A call that was made directly, timed out, and was made again, may have been
// carried out, whatever became of the second one.
func TestSecondCallFails(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	p := servers.StartProxy(t, s.Addr())
	var refuse atomic.Bool
	c := redis.NewClient(&redis.Options{
		DialerRetries: 1,
		Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
			if refuse.Load() {
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("refused by the test")}
			}
			var d net.Dialer
			return d.DialContext(ctx, "tcp", p.Addr())
		},
	})
	defer c.Close()
	prefix := newPrefix()
	b, err := redislock.New(c, &redislock.Options{Prefix: prefix})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	lease, err := b.Acquire(t.Context(), request("first", "x", time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Release(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	refuse.Store(true)
	p.Hold(servers.Down)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = b.Acquire(ctx, request("k", "a", time.Minute))
	if err == nil {
		t.Fatal("granted")
	}
	if s.MustDo("EXISTS", record(prefix, "k")) != int64(1) {
		t.Fatal("the call did not reach the server")
	}
	if errors.Is(err, driver.ErrNotApplied) {
		t.Errorf("it was carried out, and is said not to have been: %v", err)
	}
}

// waiting counts the tickets that nodes have for a key.
func (q *nodes) waiting(key string) int {
	q.t.Helper()
	n := 0
	for _, s := range q.servers {
		fields, _ := s.MustDo("HKEYS", record(q.prefix, key)).([]any)
		for _, f := range fields {
			if strings.HasPrefix(fmt.Sprint(f), "s") {
				n++
			}
		}
	}
	return n
}

// Waiters that give up leave no tickets behind, at whatever moment they do.
func TestQuorumCancelledWaiters(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	m := q.manager(nil)
	held, err := m.AcquireLock(t.Context(), "k", 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 60 {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(3*time.Millisecond))
				if _, err := m.AcquireLock(ctx, "k", time.Second); err == nil {
					t.Error("granted")
				}
				cancel()
			}
		})
	}
	wg.Wait()
	eventually(t, "no ticket is left", func() bool { return q.waiting("k") == 0 })
	if err := held.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// voteAtOnce checks that no node waits for a time before it votes.
func (q *nodes) voteAtOnce() {
	q.t.Helper()
	for n, s := range q.servers {
		var mark any
		eventually(q.t, "the node is marked", func() bool { // which a majority does not wait for
			mark = s.MustDo("GET", q.prefix+"!node")
			return mark != nil
		})
		if !strings.HasPrefix(fmt.Sprint(mark), "0") {
			q.t.Errorf("node %d votes only after %v", n, mark)
		}
	}
}

// A new quorum begins at once, however many ask at the same time.
func TestQuorumBeginsInCrowd(t *testing.T) {
	t.Parallel()
	for round := range 3 {
		q := startNodes(t, 3, nil)
		backends := []*redislock.Quorum{q.backend(), q.backend()}
		var wg sync.WaitGroup
		var failed atomic.Int64
		for i := range 32 {
			wg.Go(func() {
				time.Sleep(rand.N(10 * time.Millisecond))
				if _, err := backends[i%2].Acquire(t.Context(), request(fmt.Sprint("k", i), "a", 4*time.Second)); err != nil {
					failed.Add(1)
				}
			})
		}
		wg.Wait()
		q.voteAtOnce()
		if n := failed.Load(); n > 0 {
			t.Logf("round %d: %d calls failed", round, n)
		}
	}
}

// Close does not mind calls that are under way.
func TestQuorumCloseUnderWay(t *testing.T) {
	t.Parallel()
	q := startNodes(t, 3, nil)
	clients := q.clients()
	for range 40 {
		b, err := redislock.NewQuorum(clients, q.options())
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for {
					lease, err := b.Acquire(t.Context(), request("k", fmt.Sprint(i), time.Second))
					if errors.Is(err, driver.ErrClosed) {
						return
					}
					if err == nil {
						_ = b.Release(t.Context(), lease)
					}
				}
			})
		}
		time.Sleep(5*time.Millisecond + rand.N(5*time.Millisecond)) // calls are under way
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
}

// The queue outlasts its tickets, however short the memory for tokens is.
func TestQueueOutlastsTickets(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer c.Close()
	prefix := newPrefix()
	b, err := redislock.New(c, &redislock.Options{Prefix: prefix, KeepTokens: time.Minute, LivenessWindow: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if _, err := b.Acquire(t.Context(), request("k", "a", time.Second)); err != nil {
		t.Fatal(err)
	}
	wait := request("k", "b", time.Second)
	wait.Enqueue = true
	if _, err := b.Acquire(t.Context(), wait); !errors.Is(err, driver.ErrHeld) {
		t.Fatal(err)
	}
	for _, key := range []string{record(prefix, "k"), record(prefix, "k") + ":q"} {
		if left := s.MustDo("PTTL", key).(int64); left < (90 * time.Minute).Milliseconds() {
			t.Errorf("%s is kept for %d ms, its ticket for 90 minutes", key, left)
		}
	}
}

// A new quorum begins at once, also if the first to ask gives up meanwhile.
func TestQuorumBeginsThoughGivenUp(t *testing.T) {
	t.Parallel()
	for round := range 5 {
		q := startNodes(t, 3, nil)
		b := q.backend()
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(round)*1500*time.Microsecond)
		_, _ = b.Acquire(ctx, request("first", "a", time.Second))
		cancel()
		if _, err := b.Acquire(t.Context(), request("k", "a", 4*time.Second)); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		q.voteAtOnce()
	}
}

// luaSource puts together a script of the quorum.
func luaSource(t *testing.T, names ...string) string {
	t.Helper()
	var source strings.Builder
	for _, name := range names {
		text, err := os.ReadFile("../../backends/redislock/lua/" + name + ".lua")
		if err != nil {
			t.Fatal(err)
		}
		source.WriteString(string(text))
	}
	return source.String()
}

// The token of an attempt that has failed, arriving late, does not replace that
// of a later attempt of the same owner.
func TestQuorumLateToken(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer c.Close()
	if err := c.Set(t.Context(), "p:!node", "0 "+s.RunID(), 0).Err(); err != nil {
		t.Fatal(err)
	}
	keys := []string{"p:{k}", "p:{k}:q", "p:!node"}
	acquire := func(attempt int) int64 {
		t.Helper()
		reply, err := c.Eval(t.Context(), luaSource(t, "quorum_head", "quorum_acquire"), keys,
			"a", 10000000, "", 60000, 0, 0, attempt, 1020000).Slice()
		if err != nil {
			t.Fatal(err)
		}
		return reply[2].(int64)
	}
	first := acquire(1)
	if err := c.Eval(t.Context(), luaSource(t, "quorum_head", "quorum_settle"), keys[:2], "a", 1, 0, 0, "", 60000).Err(); err != nil {
		t.Fatal(err)
	}
	second := acquire(2)
	if second <= first {
		t.Fatalf("token %d after %d", second, first)
	}
	set, err := c.Eval(t.Context(), luaSource(t, "quorum_head", "quorum_token"), keys[:2], "a", first, 1).Int()
	if err != nil || set != 0 {
		t.Errorf("set: %d, %v", set, err)
	}
	if token := acquire(2); token != second {
		t.Errorf("token %d became %d", second, token)
	}
}
