package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/lib/pq" // the driver "postgres" of the peers

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/tests/servers"
)

const (
	// postgresDatabase is what is measured. Statements of others, in the database
	// postgres, are not counted.
	postgresDatabase = "bench"
	// postgresPool is how many connections a pool has, unless a row says
	// otherwise. Waiters of some rows have one each.
	postgresPool = 16
	postgresMost = 1200
)

func init() {
	stores["postgres"] = &store{
		name:    "postgres",
		rows:    postgresRows,
		unit:    "statements",
		floors:  map[workload]string{w1: "row-floor", w2: "row-floor", w3: "allisson-pglock", w4: "allisson-pglock", w5: "cirello-pglock"},
		targets: postgresTargets,
		start:   startPostgres,
		flush:   flushPostgres,
		version: postgresVersion,
		count:   countPostgres,
	}
}

// postgresRows are in the order in which they are shown.
var postgresRows = []row{
	{
		name: "select1", workloads: []workload{w1, w2},
		settings: "floor: SELECT 1 through pgx, pool of 16; one round trip, no release",
		open:     openSelect1,
	},
	{
		name: "row-floor", workloads: []workload{w1, w2, w3, w4},
		settings: "floor of a lock in a table: INSERT, or UPDATE of a row that has run out, and DELETE; pgx, pool of 16; " +
			"polls every 10ms while it waits",
		open: openRowFloor,
	},
	{
		name: "advisory-floor", workloads: []workload{w1, w2, w3, w4},
		settings: "floor without a lease: pg_advisory_lock; pgx, a connection for each goroutine",
		open:     openAdvisoryFloor,
	},
	{
		name: "cirello-pglock", workloads: []workload{w1, w2, w3, w5},
		settings: "lib/pq, pool of 16; a heartbeat every 3/10 of the lease, which is its retry delay, too",
		open:     openCirello(0),
	},
	{
		name: "cirello-tuned", workloads: []workload{w3, w4},
		settings: "the same with a lease of 200ms",
		open:     openCirello(200 * time.Millisecond),
	},
	{
		name: "allisson-pglock", workloads: []workload{w1, w2, w3, w4},
		settings: "advisory locks; lib/pq, a connection for each lock and so a pool of one for each goroutine, opened beforehand",
		open:     openAllisson,
	},
	{
		name: "dlm-postgres", workloads: []workload{w1, w2, w3, w4, w5},
		settings: "one manager for the whole process, pgx, pool of 16",
		open:     openDLM(1, newPostgresManager),
	},
	{
		name: "dlm-postgres-x16", workloads: []workload{w3, w4},
		settings: "16 managers with a pool each, as in 16 processes: goroutine i uses manager i%16",
		open:     openDLM(16, newPostgresManager),
	},
	{
		name: "dlm-advisory", workloads: []workload{w1, w2, w3, w4},
		settings: "advisory locks, one manager for the whole process, one connection",
		open:     openDLM(1, newAdvisoryManager),
	},
}

var postgresTargets = slices.Concat(
	[]target{
		{w1, "dlm-postgres", "pairP50", "row-floor", atMost(1.2)},
		{w2, "dlm-postgres", "rate", "row-floor", atLeast(1)},
	},
	postgresHandOverTargets("dlm-postgres"),
	postgresHandOverTargets("dlm-postgres-x16"),
	[]target{
		{w1, "dlm-advisory", "pairP50", "advisory-floor", atMost(1.1)},
		{w2, "dlm-advisory", "rate", "allisson-pglock", atLeast(1)},
		{w4, "dlm-advisory", "unserved", "", atMost(0)},
		{w4, "dlm-advisory", "violations", "", atMost(0)},
		{w4, "dlm-postgres", "unserved", "", atMost(0)},
		{w4, "dlm-postgres", "violations", "", atMost(0)},
		{w4, "dlm-postgres", "inversionsApart", "", atMost(0)},
		{w4, "dlm-postgres", "drain", "", atMost(3000)},
		{w5, "dlm-postgres", "lost", "", atMost(0)},
		{w5, "dlm-postgres", "round", "", atMost(200)},
		{w5, "dlm-postgres", "goroutines", "", bound{}},
		{w5, "dlm-postgres", "grown", "", bound{}},
	},
)

// postgresHandOverTargets are those of W3.
func postgresHandOverTargets(row string) []target {
	return []target{
		{w3, row, "gapP50", "allisson-pglock", atMost(2.5)},
		{w3, row, "jain", "", atLeast(0.99)},
		{w3, row, "violations", "", atMost(0)},
	}
}

// startPostgres starts a server as it is by default, which waits for the disk,
// but with connections for all.
func startPostgres(tb servers.TB) map[string][]server {
	p := servers.StartPostgres(tb, &servers.PostgresConfig{Settings: []string{
		"fsync=on", "full_page_writes=on", "autovacuum=on", "shared_buffers=128MB", "min_wal_size=80MB", "max_wal_size=1GB",
		fmt.Sprint("max_connections=", postgresMost),
		"shared_preload_libraries=pg_stat_statements",
	}})
	p.MustDo("postgres", "create extension pg_stat_statements")
	p.MustDo("postgres", "create database "+postgresDatabase)
	return map[string][]server{"": {{addr: p.Addr(), pid: p.Pid()}}}
}

func postgresURL(addr, database string) string {
	return fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable", addr, database)
}

// newPostgresPool returns a pool with as many open connections as can be used at
// the same time.
func newPostgresPool(ctx context.Context, cfg openConfig) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(postgresURL(cfg.addrs[0], postgresDatabase))
	if err != nil {
		return nil, err
	}
	config.MaxConns = postgresPool
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	conns := make([]*pgxpool.Conn, min(cfg.workers, postgresPool))
	err = each(len(conns), len(conns), func(i int) (err error) {
		conns[i], err = pool.Acquire(ctx)
		return err
	})
	for _, c := range conns {
		if c != nil {
			c.Release()
		}
	}
	return pool, err
}

// newPostgresDB returns a pool as the peers want it, with all its connections
// open.
func newPostgresDB(ctx context.Context, addr string, size int) (*sql.DB, error) {
	db, err := sql.Open("postgres", postgresURL(addr, postgresDatabase))
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	conns := make([]*sql.Conn, size)
	err = each(size, 16, func(i int) (err error) {
		conns[i], err = db.Conn(ctx)
		return err
	})
	for _, c := range conns {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	return db, err
}

func newPostgresManager(ctx context.Context, cfg openConfig) (*dlm.Manager, error) {
	pool, err := newPostgresPool(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := pglock.CreateSchema(ctx, pool, nil); err != nil {
		return nil, err
	}
	return pglock.NewLockManager(pool, nil, nil)
}

func newAdvisoryManager(ctx context.Context, cfg openConfig) (*dlm.Manager, error) {
	cfg.workers = 1 // of the pool; the backend has its own connection
	pool, err := newPostgresPool(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := pglock.CreateSchema(ctx, pool, nil); err != nil {
		return nil, err
	}
	return pglock.NewAdvisoryLockManager(pool, nil, nil)
}

// onPostgres does something on a connection of its own.
func onPostgres(ctx context.Context, list []server, database string, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, postgresURL(list[0].addr, database))
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(ctx))
}

// flushPostgres also ends the sessions that the last client has left behind, and
// writes to disk what would otherwise be written during the next measurement.
func flushPostgres(ctx context.Context, list []server) error {
	return onPostgres(ctx, list, postgresDatabase, func(conn *pgx.Conn) error {
		for {
			// Whoever has been told to end is told again until it has.
			tag, err := conn.Exec(ctx, `select pg_terminate_backend(pid) from pg_stat_activity
				where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()`)
			if err != nil {
				return err
			}
			if tag.RowsAffected() == 0 {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		_, err := conn.Exec(ctx, `do $$ declare name text; begin
			for name in select nspname from pg_namespace where nspname !~ '^(pg_|information_schema$)' loop
				execute format('drop schema %I cascade', name);
			end loop;
			create schema public;
		end $$`)
		if err != nil {
			return err
		}
		_, err = conn.Exec(ctx, "checkpoint")
		return err
	})
}

func postgresVersion(ctx context.Context, list []server) (version string, err error) {
	err = onPostgres(ctx, list, "postgres", func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, "show server_version").Scan(&version)
	})
	return "PostgreSQL " + version, err
}

// countPostgres counts the statements that clients have sent, and not those
// within functions.
func countPostgres(ctx context.Context, list []server) (counter, error) {
	conn, err := pgx.Connect(ctx, postgresURL(list[0].addr, "postgres"))
	if err != nil {
		return nil, err
	}
	const query = `select s.query, sum(s.calls)::int8 from pg_stat_statements s
		join pg_database d on d.oid = s.dbid where d.datname = $1 group by s.query`
	return func(ctx context.Context) (map[string]int64, error) {
		rows, err := conn.Query(ctx, query, postgresDatabase)
		if err != nil {
			return nil, err
		}
		calls := map[string]int64{}
		var statement string
		var n int64
		_, err = pgx.ForEachRow(rows, []any{&statement, &n}, func() error {
			calls[statement] += n
			return nil
		})
		return calls, err
	}, nil
}
