package pglock_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// schemas numbers the schemas, by which tests share servers.
var schemas atomic.Int64

func newSchema() string { return fmt.Sprintf("t%d", schemas.Add(1)) }

// cut stands between the clients of one test and their server.
type cut struct {
	proxy *servers.Proxy
}

// withoutCleanup keeps a proxy open for longer than what it was opened by.
type withoutCleanup struct{ testing.TB }

func (withoutCleanup) Cleanup(func()) {}

func newCut(tb testing.TB, addr string) *cut {
	c := &cut{servers.StartProxy(withoutCleanup{tb}, addr)}
	tb.Cleanup(c.proxy.Close)
	return c
}

func (c *cut) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, c.proxy.Addr())
}

func (c *cut) freeze(testing.TB) (thaw func()) {
	c.proxy.Blackhole()
	return c.proxy.Resume
}

// tally counts the connections that are made, and those not closed yet.
type tally struct {
	to         pgconnDial
	made, open atomic.Int64
}

func (c *tally) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := c.to(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c.made.Add(1)
	c.open.Add(1)
	return &counted{Conn: conn, by: c}, nil
}

type counted struct {
	net.Conn
	by   *tally
	once sync.Once
}

func (n *counted) Close() error {
	defer n.once.Do(func() { n.by.open.Add(-1) })
	return n.Conn.Close()
}

// unit and window are the shortest times that a busy machine keeps up with.
const (
	unit   = 600 * time.Millisecond
	window = 2 * time.Second
)

// newPool returns a pool for a URL. A nil dial is the usual one.
func newPool(tb testing.TB, url string, dial pgconnDial) *pgxpool.Pool {
	tb.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		tb.Fatal(err)
	}
	if dial != nil {
		config.ConnConfig.DialFunc = dial
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

type pgconnDial = func(ctx context.Context, network, addr string) (net.Conn, error)

// shelf is what the harnesses of one suite take their stores from. A schema, and
// each session that compiles its functions, costs the server a good part of a
// second, so that a store is used by one case after another.
type shelf struct {
	suite   testing.TB
	addr    string // of the server or the pooler
	pooled  bool
	unit    time.Duration
	connect opener
	plain   *pgxpool.Pool // past any pooler

	mu   sync.Mutex
	free []*store
}

// store is a schema, and the network of its clients.
type store struct {
	cut    *cut
	frozen atomic.Bool
	conns  *tally
	opts   *pglock.Options
	backends
}

// backends opens backends on a store.
type backends struct {
	open func(testing.TB, *pglock.Options) (driver.Backend, error)
	kill func(testing.TB, driver.Backend) // as [drivertest.Harness.Kill]
	// resting is the number of connections that stay open for the next case, or -1
	// as long as one of them is in use, or being made or ended.
	resting func() int
	close   func() // once no case uses it any more
}

// opener prepares backends on a store, for longer than one case. The name is that
// of the store's schema, and of its sessions.
type opener func(suite testing.TB, dial pgconnDial, name string) backends

// named gives the sessions of a URL a name.
func named(url, name string) string { return url + "&application_name=" + name }

func newShelf(suite testing.TB, s *servers.Postgres, addr string, unit time.Duration, connect opener) *shelf {
	return &shelf{
		suite: suite, addr: addr, pooled: addr != s.Addr(), unit: unit, connect: connect,
		plain: newPool(suite, s.URL("postgres")+"&pool_max_conns=2", nil),
	}
}

func (sh *shelf) take(tb testing.TB) *store {
	tb.Helper()
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if n := len(sh.free); n > 0 {
		st := sh.free[n-1]
		sh.free = sh.free[:n-1]
		return st
	}
	c := newCut(sh.suite, sh.addr)
	st := &store{cut: c, conns: &tally{to: c.dial}, opts: &pglock.Options{Schema: newSchema(), LivenessWindow: window}}
	if err := pglock.CreateSchema(tb.Context(), sh.plain, st.opts); err != nil {
		tb.Fatal(err)
	}
	st.backends = sh.connect(sh.suite, st.conns.dial, st.opts.Schema)
	return st
}

// leave gives a store back, empty, unless something that was sent to it may still be
// on its way.
func (sh *shelf) leave(tb testing.TB, st *store) {
	if st.frozen.Load() || !sh.quiet(tb, st) {
		st.cut.proxy.Close()
		st.close()
		return
	}
	var text strings.Builder
	for _, table := range []string{"keys", "holds", "tickets", "adv_holds", "adv_tickets"} {
		fmt.Fprintf(&text, "delete from %s.%s; ", st.opts.Schema, table)
	}
	fmt.Fprintf(&text, "update %s.meta set floor = 0", st.opts.Schema)
	if _, err := sh.plain.Exec(context.Background(), text.String(), pgx.QueryExecModeSimpleProtocol); err != nil {
		tb.Errorf("emptying a store: %v", err)
		return
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.free = append(sh.free, st)
}

// quiet waits until the clients have ended all but their resting connections, and
// the server the sessions of the others, and with them whatever they did. A pooler
// has sessions of its own, of which that is not known: there, no connection must
// have been ended.
func (sh *shelf) quiet(tb testing.TB, st *store) bool {
	servers.Until(tb, "the clients' connections rest", func() bool { return int64(st.resting()) == st.conns.open.Load() })
	if sh.pooled {
		return st.conns.open.Load() == st.conns.made.Load()
	}
	servers.Until(tb, "the other sessions end", func() bool {
		var sessions int64
		err := sh.plain.QueryRow(context.Background(),
			"select count(*) from pg_stat_activity where application_name = $1", st.opts.Schema).Scan(&sessions)
		if err != nil {
			tb.Fatal(err)
		}
		return sessions == st.conns.open.Load()
	})
	return true
}

// harness is the harness of one case.
func (sh *shelf) harness(t *testing.T) *drivertest.Harness {
	st := sh.take(t)
	t.Cleanup(func() { sh.leave(t, st) })
	return &drivertest.Harness{
		Unit: sh.unit,
		Open: func(t testing.TB) driver.Backend {
			b, err := st.open(t, st.opts)
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Kill: st.kill,
		Freeze: func(t testing.TB) (thaw func()) {
			st.frozen.Store(true)
			return st.cut.freeze(t)
		},
		Forget: func(t testing.TB, key string) {
			_, err := sh.plain.Exec(context.Background(), "delete from "+st.opts.Schema+".keys where key = $1", []byte(key))
			if err != nil {
				t.Fatal(err)
			}
		},
	}
}

// overPool opens backends over a pool of pgx, which they share: a new connection
// costs the server a process, and a busy machine a part of a short TTL.
func overPool(url string) opener {
	return func(suite testing.TB, dial pgconnDial, name string) backends {
		pool := newPool(suite, named(url, name)+"&pool_max_conns=8", dial)
		warm(suite, func() (func(string) error, func(), error) {
			conn, err := pool.Acquire(context.Background())
			if err != nil {
				return nil, nil, err
			}
			run := func(text string) error {
				_, err := conn.Exec(context.Background(), text, pgx.QueryExecModeExec)
				return err
			}
			return run, conn.Release, nil
		}, name)
		return backends{
			open: func(_ testing.TB, opts *pglock.Options) (driver.Backend, error) { return pglock.New(pool, opts) },
			resting: func() int {
				stat := pool.Stat()
				if stat.AcquiredConns()+stat.ConstructingConns() > 0 {
					return -1
				}
				return int(stat.TotalConns())
			},
			close: pool.Close,
		}
	}
}

// overDB opens backends over database/sql.
func overDB(url string) opener {
	return func(suite testing.TB, dial pgconnDial, name string) backends {
		config, err := pgx.ParseConfig(named(url, name))
		if err != nil {
			suite.Fatal(err)
		}
		config.DialFunc = dial
		db := stdlib.OpenDB(*config)
		db.SetMaxOpenConns(8)
		db.SetMaxIdleConns(8)
		suite.Cleanup(func() { db.Close() })
		warm(suite, func() (func(string) error, func(), error) {
			conn, err := db.Conn(context.Background())
			if err != nil {
				return nil, nil, err
			}
			run := func(text string) error {
				_, err := conn.ExecContext(context.Background(), text)
				return err
			}
			return run, func() { conn.Close() }, nil
		}, name)
		return backends{
			open: func(_ testing.TB, opts *pglock.Options) (driver.Backend, error) {
				o := *opts
				o.PollInterval = 50 * time.Millisecond
				return pglock.NewDB(db, &o)
			},
			resting: func() int {
				stats := db.Stats()
				if stats.InUse > 0 {
					return -1
				}
				return stats.OpenConnections
			},
			close: func() { db.Close() },
		}
	}
}

// warm opens some connections and has the server's functions compiled on each,
// which on a busy machine takes a good part of a short TTL.
func warm(tb testing.TB, connect func() (run func(string) error, release func(), err error), schema string) {
	tb.Helper()
	for i := range 6 {
		run, release, err := connect()
		if err != nil {
			tb.Fatal(err)
		}
		defer release()
		for _, text := range []string{
			"acquire_v1('warm%d', 'a', 60000000, '', 0, 1, 60000000, 60000000)",
			"extend_v1(array['%02d'], array['61'], array['1'], array['1'], 60000000)", "release_v1('warm%d', 'a', 0, 60000000)",
		} {
			if err := run("select " + schema + "." + fmt.Sprintf(text, i)); err != nil {
				tb.Fatal(err)
			}
		}
	}
}

func TestConformancePg(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	drivertest.Run(t, newShelf(t, s, s.Addr(), unit, overPool(s.URL("postgres"))).harness)
}

func TestConformancePgBouncer(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	p := servers.StartPgBouncer(t, s, "transaction", 24)
	connect := func(suite testing.TB, dial pgconnDial, name string) backends {
		b := overPool(p.URL("postgres"))(suite, dial, name)
		open := b.open
		b.open = func(tb testing.TB, opts *pglock.Options) (driver.Backend, error) {
			o := *opts
			o.PollInterval = 50 * time.Millisecond
			b, err := open(tb, &o)
			if err != nil {
				return nil, err
			}
			return &polling{b, b.(driver.Inspector), b.(driver.Forcer), b.(driver.Checker)}, nil
		}
		return b
	}
	drivertest.Run(t, newShelf(t, s, p.Addr(), 2*unit, connect).harness)
}

// polling is a backend without its Notifier, which has nothing to tell behind a
// pooler in transaction mode.
type polling struct {
	driver.Backend
	driver.Inspector
	driver.Forcer
	driver.Checker
}

func TestConformancePgSQL(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	drivertest.Run(t, newShelf(t, s, s.Addr(), 2*unit, overDB(s.URL("postgres"))).harness)
}

func TestOperationsPg(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	sh := newShelf(t, s, s.Addr(), unit, overPool(s.URL("postgres")))
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, sh.harness)
		})
	}
}
