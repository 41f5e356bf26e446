package pglock_test

import (
	"context"
	"fmt"
	"net"
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

// unit and window are the shortest times that a busy machine keeps up with.
const (
	unit   = time.Second
	window = 3 * time.Second
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

// harness is the harness of a server or a pooler at an address.
func harness(tb testing.TB, s *servers.Postgres, addr string, unit time.Duration, connect opener) *drivertest.Harness {
	c := newCut(tb, addr)
	opts := &pglock.Options{Schema: newSchema(), LivenessWindow: window}
	plain := newPool(tb, s.URL("postgres")+"&pool_max_conns=1", nil)
	if err := pglock.CreateSchema(tb.Context(), plain, opts); err != nil {
		tb.Fatal(err)
	}
	open := connect(tb, c, opts.Schema)
	return &drivertest.Harness{
		Unit: unit,
		Open: func(t testing.TB) driver.Backend {
			b, err := open(opts)
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Freeze: c.freeze,
		Forget: func(t testing.TB, key string) {
			_, err := plain.Exec(context.Background(), "delete from "+opts.Schema+".keys where key = $1", []byte(key))
			if err != nil {
				t.Fatal(err)
			}
		},
	}
}

// overPool opens backends over a pool of pgx, which they share: a new connection
// costs the server a process, and a busy machine a part of a short TTL.
func overPool(url string) opener {
	return func(tb testing.TB, c *cut, schema string) func(*pglock.Options) (driver.Backend, error) {
		pool := newPool(tb, url+"&pool_max_conns=8", c.dial)
		warm(tb, func() (func(string) error, func(), error) {
			conn, err := pool.Acquire(tb.Context())
			if err != nil {
				return nil, nil, err
			}
			run := func(text string) error {
				_, err := conn.Exec(tb.Context(), text, pgx.QueryExecModeExec)
				return err
			}
			return run, conn.Release, nil
		}, schema)
		return func(opts *pglock.Options) (driver.Backend, error) { return pglock.New(pool, opts) }
	}
}

// overDB opens backends over database/sql.
func overDB(url string) opener {
	return func(tb testing.TB, c *cut, schema string) func(*pglock.Options) (driver.Backend, error) {
		config, err := pgx.ParseConfig(url)
		if err != nil {
			tb.Fatal(err)
		}
		config.DialFunc = c.dial
		db := stdlib.OpenDB(*config)
		db.SetMaxOpenConns(8)
		db.SetMaxIdleConns(8)
		tb.Cleanup(func() { db.Close() })
		warm(tb, func() (func(string) error, func(), error) {
			conn, err := db.Conn(tb.Context())
			if err != nil {
				return nil, nil, err
			}
			run := func(text string) error {
				_, err := conn.ExecContext(tb.Context(), text)
				return err
			}
			return run, func() { conn.Close() }, nil
		}, schema)
		return func(opts *pglock.Options) (driver.Backend, error) {
			o := *opts
			o.PollInterval = 50 * time.Millisecond
			return pglock.NewDB(db, &o)
		}
	}
}

// opener opens a client's connections, and then backends over them.
type opener func(testing.TB, *cut, string) func(*pglock.Options) (driver.Backend, error)

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
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return harness(t, s, s.Addr(), unit, overPool(s.URL("postgres")))
	})
}

func TestConformancePgBouncer(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	p := servers.StartPgBouncer(t, s, "transaction", 24)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return harness(t, s, p.Addr(), 2*unit, func(tb testing.TB, c *cut, schema string) func(*pglock.Options) (driver.Backend, error) {
			open := overPool(p.URL("postgres"))(tb, c, schema)
			return func(opts *pglock.Options) (driver.Backend, error) {
				o := *opts
				o.PollInterval = 50 * time.Millisecond
				b, err := open(&o)
				if err != nil {
					return nil, err
				}
				return &polling{b, b.(driver.Inspector), b.(driver.Forcer), b.(driver.Checker)}, nil
			}
		})
	})
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
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return harness(t, s, s.Addr(), 2*unit, overDB(s.URL("postgres")))
	})
}

func TestOperationsPg(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness {
				return harness(t, s, s.Addr(), unit, overPool(s.URL("postgres")))
			})
		})
	}
}
