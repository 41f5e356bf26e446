package pglock_test

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
)

// crowd is a backend with one connection, which is held up until those who ask
// meanwhile have met.
type crowd struct {
	*rig
	driver.Backend
}

// crowds are backends of all kinds that make statements in their own way.
var crowds = []struct {
	name string
	open func(r *rig) (driver.Backend, error)
}{
	{"pool", func(r *rig) (driver.Backend, error) { return pglock.New(r.pool("&pool_max_conns=1"), nil) }},
	{"serializable", func(r *rig) (driver.Backend, error) {
		return pglock.New(r.pool("&pool_max_conns=1&default_transaction_isolation=serializable"), nil)
	}},
	{"no prepared statements", func(r *rig) (driver.Backend, error) {
		return pglock.New(r.pool("&pool_max_conns=1&default_query_exec_mode=exec"), nil)
	}},
	{"database/sql", func(r *rig) (driver.Backend, error) {
		db, err := sql.Open("pgx", r.s.URL("postgres"))
		if err != nil {
			return nil, err
		}
		db.SetMaxOpenConns(1)
		r.Cleanup(func() { db.Close() })
		return pglock.NewDB(db, nil)
	}},
}

// eachCrowd runs a test with a crowd of each kind, one after another.
func eachCrowd(t *testing.T, run func(c *crowd)) {
	t.Helper()
	t.Parallel()
	r := newRig(t, nil)
	for _, kind := range crowds {
		t.Run(kind.name, func(t *testing.T) {
			r := &rig{T: t, s: r.s}
			r.s.MustDo("postgres", "truncate dlm.keys, dlm.holds, dlm.tickets; update dlm.meta set floor = 0")
			b, err := kind.open(r)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { b.Close() })
			c := &crowd{rig: r, Backend: b}
			c.take("gate", "first")
			run(c)
		})
	}
}

func alone(key, owner string) driver.Request {
	return driver.Request{Key: key, Owner: owner, TTL: time.Minute, Limit: 1}
}

// take acquires a key that is free.
func (c *crowd) take(key, owner string) driver.Lease {
	c.Helper()
	lease, err := c.Acquire(c.Context(), alone(key, owner))
	if err != nil {
		c.Error(err)
	}
	return lease
}

// queue has an owner wait for a key that is held.
func (c *crowd) queue(key, owner string) {
	c.Helper()
	wait := alone(key, owner)
	wait.Enqueue = true
	if _, err := c.Acquire(c.Context(), wait); !errors.Is(err, driver.ErrHeld) {
		c.Fatal(err)
	}
}

func (c *crowd) holders(key string) []driver.HolderInfo {
	c.Helper()
	info, err := c.Backend.(driver.Inspector).Inspect(c.Context(), key)
	if err != nil {
		c.Error(err)
	}
	return info.Holders
}

// expire makes the grant of a key look as if its time were over.
func (c *crowd) expire(key string) {
	c.Helper()
	c.s.MustDo("postgres", "update dlm.keys set expires = 0 where key = '"+key+"'")
}

// locked locks rows of keys until it is called off.
func (c *crowd) locked(where string) (unlock func()) {
	c.Helper()
	conn, err := pgx.Connect(c.Context(), c.s.URL("postgres"))
	if err != nil {
		c.Fatal(err)
	}
	if _, err := conn.Exec(c.Context(), "begin; select from dlm.keys where key in ("+where+") for update"); err != nil {
		c.Fatal(err)
	}
	return sync.OnceFunc(func() { _ = conn.Close(context.Background()) })
}

// meet has calls made while the connection is held up, so that all but the first
// few of them wait for each other.
func (c *crowd) meet(calls ...func()) {
	c.Helper()
	unlock := c.locked("'gate'")
	defer unlock()
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := c.Acquire(c.Context(), alone("gate", "first")); err != nil {
			c.Error(err)
		}
	})
	c.until("the connection is held up", func() bool { return c.blocked() > 0 })
	var begun sync.WaitGroup
	for _, call := range calls {
		begun.Add(1)
		wg.Go(func() {
			begun.Done()
			call()
		})
	}
	begun.Wait()
	unlock()
	wg.Wait()
}

// blocked is how many sessions wait for others.
func (c *crowd) blocked() int {
	c.Helper()
	n, err := strconv.Atoi(c.s.MustDo("postgres", "select count(*) from pg_stat_activity where wait_event_type = 'Lock'")[0][0])
	if err != nil {
		c.Fatal(err)
	}
	return n
}

// writers is how many transactions have written the rows of keys last.
func (c *crowd) writers(prefix string) int {
	c.Helper()
	rows := c.s.MustDo("postgres", "select count(distinct xmin::text) from dlm.keys where key like '"+prefix+"%'::bytea")
	n, err := strconv.Atoi(rows[0][0])
	if err != nil {
		c.Fatal(err)
	}
	return n
}

// Calls that meet share statements, whether their keys are new or known, and each
// gets what it would get alone.
func TestSharedStatements(t *testing.T) {
	eachCrowd(t, func(c *crowd) {
		const n = 20
		round := 0
		c.until("new keys, known ones and releases share statements", func() bool {
			round++
			prefix := fmt.Sprint("round", round, "-")
			leases := make([]driver.Lease, n)
			acquire := func(owner string) (writers int) {
				var calls []func()
				for i := range n {
					calls = append(calls, func() {
						lease, err := c.Acquire(c.Context(), alone(fmt.Sprint(prefix, i), owner))
						if err != nil {
							c.Error(err)
						}
						if lease.Token <= leases[i].Token {
							c.Errorf("token %d follows %d", lease.Token, leases[i].Token)
						}
						leases[i] = lease
					})
				}
				c.meet(calls...)
				return c.writers(prefix)
			}
			release := func() (writers int) {
				var calls []func()
				for i := range n {
					calls = append(calls, func() {
						if err := c.Release(c.Context(), leases[i]); err != nil {
							c.Error(err)
						}
					})
				}
				c.meet(calls...)
				return c.writers(prefix)
			}
			fresh, freed := acquire("a"), release()
			known := acquire("b")
			for i, l := range leases { // each has its own
				if holders := c.holders(l.Key); len(holders) != 1 || holders[0].Owner != "b" || holders[0].Token != l.Token {
					c.Errorf("key %d: %+v, want token %d", i, holders, l.Token)
				}
			}
			release()
			if c.Failed() {
				c.FailNow()
			}
			return fresh <= n/2 && freed <= n/2 && known <= n/2
		})
	})
}

// What is not simply granted or given up is answered as if it had been asked alone.
func TestSharedStatementsMixed(t *testing.T) {
	eachCrowd(t, func(c *crowd) {
		const n = 4
		const ahead = int64(1) << 52
		token := func(lease driver.Lease, err error) {
			if err != nil || lease.Token == 0 {
				c.Errorf("%+v, %v, want a grant", lease, err)
			}
		}
		kinds := []struct {
			name    string
			prepare func(key string)
			check   func(lease driver.Lease, err error)
		}{
			{"free", func(key string) {
				if err := c.Release(c.Context(), c.take(key, "x")); err != nil {
					c.Fatal(err)
				}
			}, token},
			{"new", func(string) {}, token},
			{"own", func(key string) { c.take(key, "a") }, token},
			{"held", func(key string) { c.take(key, "x") }, func(_ driver.Lease, err error) {
				if held, ok := errors.AsType[*driver.HeldError](err); !ok || held.Holder != "x" || held.Position != 1 {
					c.Errorf("%v, want the first place behind x", err)
				}
			}},
			{"waited", func(key string) {
				c.take(key, "x")
				c.queue(key, "y")
			}, func(_ driver.Lease, err error) {
				if held, ok := errors.AsType[*driver.HeldError](err); !ok || held.Holder != "x" || held.Position != 2 {
					c.Errorf("%v, want the second place behind x", err)
				}
			}},
			{"left to the queue", func(key string) {
				c.take(key, "x")
				c.queue(key, "y")
				c.expire(key)
			}, func(_ driver.Lease, err error) {
				if held, ok := errors.AsType[*driver.HeldError](err); !ok || held.Holder != "y" {
					c.Errorf("%v, want it to be held by y", err)
				}
			}},
			{"permits", func(key string) {
				several := alone(key, "x")
				several.Limit = 3
				if _, err := c.Acquire(c.Context(), several); err != nil {
					c.Fatal(err)
				}
			}, func(_ driver.Lease, err error) {
				if limit, ok := errors.AsType[*driver.LimitError](err); !ok || limit.Have != 3 {
					c.Errorf("%v, want a limit of 3", err)
				}
			}},
		}
		var calls []func()
		for i := range n {
			for _, kind := range kinds {
				key := fmt.Sprint(kind.name, i)
				kind.prepare(key)
				calls = append(calls, func() {
					req := alone(key, "a")
					req.Enqueue = true
					lease, err := c.Acquire(c.Context(), req)
					kind.check(lease, err)
				})
			}
		}
		c.meet(calls...)

		calls = nil
		for i := range n {
			for _, kind := range kinds {
				key, want := fmt.Sprint(kind.name, i), driver.ErrLost
				if kind.name == "free" || kind.name == "new" || kind.name == "own" {
					want = nil
				}
				calls = append(calls, func() {
					lease := driver.Lease{Key: key, Owner: "a", Token: ahead}
					if want == nil {
						lease = c.take(key, "a")
					}
					if err := c.Release(c.Context(), lease); !errors.Is(err, want) {
						c.Errorf("%s: %v, want %v", key, err, want)
					}
				})
			}
		}
		for i := range n {
			lease := c.take(fmt.Sprint("over", i), "a")
			c.expire(lease.Key)
			calls = append(calls, func() {
				if err := c.Release(c.Context(), lease); !errors.Is(err, driver.ErrLost) {
					c.Errorf("%s: %v, want a loss", lease.Key, err)
				}
			})
			next := c.take(fmt.Sprint("next", i), "a")
			c.queue(next.Key, "y")
			calls = append(calls, func() {
				if err := c.Release(c.Context(), next); err != nil {
					c.Error(err)
				}
				if holders := c.holders(next.Key); len(holders) != 1 || holders[0].Owner != "y" {
					c.Errorf("%s: %+v, want it to be held by y", next.Key, holders)
				}
			})
		}
		c.meet(calls...)

		// Rows that were swept had larger numbers.
		c.s.MustDo("postgres", fmt.Sprint("update dlm.meta set floor = ", ahead))
		calls = nil
		for i := range 5 * n {
			calls = append(calls, func() {
				if lease := c.take(fmt.Sprint("later", i), "a"); lease.Token <= ahead {
					c.Errorf("token %d follows %d, which was swept", lease.Token, ahead)
				}
			})
		}
		c.meet(calls...)
	})
}

// A shared statement does not wait for keys that others work on, and a key that is
// in it twice is granted once.
func TestSharedStatementsWaitForNobody(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend()
	c := &crowd{rig: r, Backend: b}
	for _, key := range []string{"a", "b", "c"} {
		lease := c.take(key, "x")
		if key == "b" {
			continue
		}
		if err := b.Release(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
	}
	unlock := c.locked("'a', 'b'")
	defer unlock()
	answers := func(call string) string {
		return fmt.Sprint(r.s.MustDo("postgres", "set statement_timeout = 20000; "+call))
	}
	// The keys are a, c twice, and d, which is new, twice.
	acquire := `select string_agg(place::text, ' ' order by place) from dlm.acquire_many_v1(
		'61,63,63,64,64', '61,61,62,61,62', '60000000,60000000,60000000,60000000,60000000', ',,,,', 60000000)`
	if got := answers(acquire); got != "[[2 4]]" && got != "[[3 4]]" && got != "[[2 5]]" && got != "[[3 5]]" {
		t.Errorf("granted %s, want one of 2 and 3 and one of 4 and 5", got)
	}
	if got := answers(acquire); got != "[[]]" {
		t.Errorf("granted %s the second time", got)
	}
	// One whose manager has no name.
	if got := answers("select place from dlm.acquire_many_v1('65', '61', '60000000', '', 60000000)"); got != "[[1]]" {
		t.Errorf("granted %s, want 1", got)
	}
	token := r.s.MustDo("postgres", "select string_agg(token::text, ',' order by key) from dlm.keys where key in ('b', 'c')")[0][0]
	owner := r.s.MustDo("postgres", "select encode(owner, 'hex') from dlm.keys where key = 'c'")[0][0]
	release := fmt.Sprintf("select string_agg(n::text, ' ') from dlm.release_many_v1('62,63', '78,%s', '%s', 60000000) n", owner, token)
	if got := answers(release); got != "[[2]]" {
		t.Errorf("released %s, want 2", got)
	}
}

// Shared statements that make and take the same keys in whatever order do not wait
// for each other in a circle.
func TestSharedStatementsNoCircle(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const sessions, rounds, names, most = 8, 150, 40, 12
	var made atomic.Int64
	var wg sync.WaitGroup
	for range sessions {
		conn, err := pgx.Connect(t.Context(), r.s.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		if _, err := conn.Exec(t.Context(), "set deadlock_timeout = '5ms'"); err != nil { // long before a wait is given up
			t.Fatal(err)
		}
		wg.Go(func() {
			for range rounds {
				generation := made.Add(1) / sessions
				keys := make([]string, most)
				for i, n := range rand.Perm(names)[:most] {
					keys[i] = hex.EncodeToString(fmt.Append(nil, generation/4, "-", n))
				}
				lists := func(item string) string { return strings.Join(slices.Repeat([]string{item}, most), ",") }
				_, err := conn.Exec(t.Context(), "select dlm.acquire_many_v1($1, $2, $3, $4, 60000000)",
					strings.Join(keys, ","), lists("61"), lists("1000"), lists(""))
				if e, ok := errors.AsType[*pgconn.PgError](err); err != nil && (!ok || e.Code != "55P03") {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// Calls that have met do not wait for a connection that is not made, while others
// are idle.
func TestSharedStatementsHangingDial(t *testing.T) {
	t.Parallel()
	const idle = 4
	r := newRig(t, nil)
	var hang atomic.Bool
	pool := newPool(t, r.s.URL("postgres")+"&pool_max_conns=8", func(ctx context.Context, network, addr string) (net.Conn, error) {
		if hang.Load() {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	})
	b, err := pglock.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	c := &crowd{rig: r, Backend: b}
	c.take("first", "a")
	var conns []*pgxpool.Conn
	for range idle {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	hang.Store(true)
	burst := func(ctx context.Context, name string, n int) (failed int64) {
		var wg sync.WaitGroup
		var errs atomic.Int64
		for i := range n {
			wg.Go(func() {
				if _, err := b.Acquire(ctx, alone(fmt.Sprint(name, i), "a")); err != nil {
					errs.Add(1)
				}
			})
		}
		wg.Wait()
		return errs.Load()
	}
	short, cancel := context.WithCancel(t.Context())
	waiting := make(chan int64)
	go func() { waiting <- burst(short, "during", 10) }()
	r.until("connections are being made", func() bool { return pool.Stat().ConstructingConns() > 0 })
	for _, conn := range conns {
		conn.Release()
	}
	if n := burst(t.Context(), "after", idle); n > 0 {
		t.Errorf("%d of %d calls failed", n, idle)
	}
	cancel()
	<-waiting
}

// Who gives up before the statement is sent has left nothing; who gives up later
// has his call withdrawn after it.
func TestSharedStatementsGivenUp(t *testing.T) {
	eachCrowd(t, func(c *crowd) {
		giveUp, cancel := context.WithCancel(c.Context())
		var mu sync.Mutex
		unsent := 0
		var calls []func()
		for i := range 20 {
			calls = append(calls, func() {
				_, err := c.Acquire(giveUp, alone(fmt.Sprint("given up", i), "a"))
				mu.Lock()
				defer mu.Unlock()
				switch {
				case errors.Is(err, driver.ErrNotApplied) && errors.Is(err, context.Canceled):
					unsent++
				case err != nil && !errors.Is(err, context.Canceled):
					c.Error(err)
				}
			})
		}
		calls = append(calls, cancel)
		c.meet(calls...)
		if unsent == 0 {
			c.Error("none was taken back")
		}

		// Another makes the key, and does not end.
		maker, err := pgx.Connect(c.Context(), c.s.URL("postgres"))
		if err != nil {
			c.Fatal(err)
		}
		defer maker.Close(context.Background())
		if _, err := maker.Exec(c.Context(), `begin; insert into dlm.keys
			select 'z', last, head, stays, waiting, many, mode, permits, null, token, ttl, since, expires, manager from dlm.keys limit 1`); err != nil {
			c.Fatal(err)
		}
		held, cancel := context.WithCancel(c.Context())
		defer cancel()
		calls = []func(){func() {
			c.until("the key is waited for", func() bool {
				rows := c.s.MustDo("postgres", fmt.Sprintf("select count(*) from pg_stat_activity where %d = any (pg_blocking_pids(pid))", maker.PgConn().PID()))
				return rows[0][0] != "0"
			})
			cancel()
		}}
		given := make(chan struct{})
		calls = append(calls, func() {
			defer close(given)
			if _, err := c.Acquire(held, alone("z", "a")); !errors.Is(err, context.Canceled) || errors.Is(err, driver.ErrNotApplied) {
				c.Errorf("%v, want an unknown outcome", err)
			}
		}, func() {
			<-given
			_ = maker.Close(context.Background())
			if err := c.Release(c.Context(), driver.Lease{Key: "z", Owner: "a"}); err != nil {
				c.Error(err)
			}
		})
		for i := range 10 {
			calls = append(calls, func() { c.take(fmt.Sprint("y", i), "a") })
		}
		c.meet(calls...)
		if rows := c.s.MustDo("postgres", "select count(*) from dlm.keys where key = 'z' and owner is not null"); rows[0][0] != "0" {
			c.Error("the withdrawn grant is left")
		}
	})
}
