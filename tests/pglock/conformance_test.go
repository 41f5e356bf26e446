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
	unit   = 500 * time.Millisecond
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

// harness is the harness of a server or a pooler at an address.
func harness(tb testing.TB, s *servers.Postgres, addr string, connect opener) *drivertest.Harness {
	c := newCut(tb, addr)
	open := connect(tb, c)
	opts := &pglock.Options{Schema: newSchema(), LivenessWindow: window}
	plain := newPool(tb, s.URL("postgres")+"&pool_max_conns=1", nil)
	if err := pglock.CreateSchema(tb.Context(), plain, opts); err != nil {
		tb.Fatal(err)
	}
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
	return func(tb testing.TB, c *cut) func(*pglock.Options) (driver.Backend, error) {
		pool := newPool(tb, url+"&pool_max_conns=8", c.dial)
		return func(opts *pglock.Options) (driver.Backend, error) { return pglock.New(pool, opts) }
	}
}

// overDB opens backends over database/sql.
func overDB(url string) opener {
	return func(tb testing.TB, c *cut) func(*pglock.Options) (driver.Backend, error) {
		config, err := pgx.ParseConfig(url)
		if err != nil {
			tb.Fatal(err)
		}
		config.DialFunc = c.dial
		db := stdlib.OpenDB(*config)
		db.SetMaxOpenConns(8)
		tb.Cleanup(func() { db.Close() })
		return func(opts *pglock.Options) (driver.Backend, error) {
			o := *opts
			o.PollInterval = 50 * time.Millisecond
			return pglock.NewDB(db, &o)
		}
	}
}

// opener opens a client's connections, and then backends over them.
type opener func(testing.TB, *cut) func(*pglock.Options) (driver.Backend, error)

func TestConformancePg(t *testing.T) {
	s := servers.StartPostgres(t, nil)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return harness(t, s, s.Addr(), overPool(s.URL("postgres")))
	})
}

func TestConformancePgBouncer(t *testing.T) {
	s := servers.StartPostgres(t, nil)
	p := servers.StartPgBouncer(t, s, "transaction", 4)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return harness(t, s, p.Addr(), overPool(p.URL("postgres")))
	})
}

func TestConformancePgSQL(t *testing.T) {
	s := servers.StartPostgres(t, nil)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
		return harness(t, s, s.Addr(), overDB(s.URL("postgres")))
	})
}

func TestOperationsPg(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness {
				return harness(t, s, s.Addr(), overPool(s.URL("postgres")))
			})
		})
	}
}
