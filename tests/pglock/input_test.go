package pglock_test

import (
	"database/sql"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver pgx

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// overDB returns a manager over database/sql.
func (r *rig) overDB(cfg *dlm.LockConfig) *dlm.Manager {
	r.Helper()
	db, err := sql.Open("pgx", r.s.URL("postgres"))
	if err != nil {
		r.Fatal(err)
	}
	db.SetMaxOpenConns(8)
	db.SetMaxIdleConns(8)
	r.Cleanup(func() { db.Close() })
	b, err := pglock.NewDB(db, &pglock.Options{PollInterval: 20 * time.Millisecond})
	if err != nil {
		r.Fatal(err)
	}
	m, err := dlm.NewManager(b, cfg)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		if err := m.Close(r.Context()); err != nil && r.Context().Err() == nil {
			r.Error(err)
		}
	})
	return m
}

// findings returns what a check finds.
func findings(t *testing.T, b driver.Checker) []driver.Finding {
	t.Helper()
	list, err := b.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		if f.Check == "" || f.Detail == "" || f.Severity == driver.SeverityCritical && f.Fix == "" {
			t.Errorf("incomplete: %+v", f)
		}
	}
	return list
}

func expectFinding(t *testing.T, list []driver.Finding, check string, severity driver.Severity, text string) {
	t.Helper()
	if !slices.ContainsFunc(list, func(f driver.Finding) bool {
		return f.Check == check && f.Severity == severity && strings.Contains(f.Detail, text)
	}) {
		t.Errorf("no %v finding on %s with %q: %+v", severity, check, text, list)
	}
}

// What is wrong with a server or its set-up is said by the first call, by its type
// and in words, and by a check.
func TestWrongSetup(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, &servers.PostgresConfig{HBA: []string{
		"host all secret 127.0.0.1/32 scram-sha-256", "host all limited,nobody_else 127.0.0.1/32 trust",
	}})
	for _, name := range []string{"empty", "old", "new", "bare"} {
		s.MustDo("postgres", "create database "+name)
	}
	s.MustDo("postgres", "create role secret login password 'right'; create role limited login")
	for _, name := range []string{"postgres", "old", "new", "bare"} {
		if err := pglock.CreateSchema(t.Context(), newPool(t, s.URL(name), nil), nil); err != nil {
			t.Fatal(err)
		}
	}
	s.MustDo("old", "update dlm.meta set version = 0")
	s.MustDo("new", "update dlm.meta set version = 99")
	s.MustDo("bare", "delete from dlm.meta")
	s.MustDo("postgres", "grant usage on schema dlm to secret; grant select on all tables in schema dlm to secret")
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	silent := listener(t, func(net.Conn) {})
	talker := listener(t, func(c net.Conn) { _, _ = c.Write([]byte("-ERR unknown command\r\n+OK\r\n")) })
	for _, c := range []struct {
		name, url string
		problem   pglock.Problem
		check     string
		text      string
	}{
		{"missing schema", s.URL("empty"), pglock.ProblemNoSchema, "schema", `"dlm"."meta"`},
		{"older schema", s.URL("old"), pglock.ProblemSchemaVersion, "schema", "version 0, must have 3"},
		{"newer schema", s.URL("new"), pglock.ProblemSchemaVersion, "schema", "version 99"},
		{"schema without a version", s.URL("bare"), pglock.ProblemSchemaVersion, "schema", "no row"},
		{"missing rights", s.URLFor("secret", "right", "postgres"), pglock.ProblemPermission, "rights", `INSERT on "dlm"."keys"`},
		{"no right to the schema", s.URLFor("limited", "", "postgres"), pglock.ProblemPermission, "rights", "needs"},
		{"wrong password", s.URLFor("secret", "wrong", "postgres"), pglock.ProblemAuth, "authentication", "secret"},
		{"no such user", s.URLFor("nobody_else", "", "postgres"), pglock.ProblemAuth, "authentication", "nobody_else"},
		{"no such database", s.URL("nowhere"), pglock.ProblemDatabase, "database", "nowhere"},
		{"no TLS", strings.Replace(s.URL("postgres"), "disable", "require", 1), pglock.ProblemTLS, "TLS", "TLS"},
		{"a web server", "postgres://postgres@" + web.Listener.Addr().String() + "/x?sslmode=disable&connect_timeout=1", "", "connection", ""},
		{"another server", "postgres://postgres@" + talker + "/x?sslmode=disable", pglock.ProblemNotPostgres, "product", ""},
		{"a silent server", "postgres://postgres@" + silent + "/x?sslmode=disable&connect_timeout=1", "", "connection", ""},
		{"nothing", "postgres://postgres@127.0.0.1:1/x?sslmode=disable", "", "connection", "refused"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, err := pglock.New(newPool(t, c.url, nil), nil)
			if err != nil {
				t.Fatal(err)
			}
			_, err = b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Second, Limit: 1})
			if c.problem == "" {
				if !errors.Is(err, driver.ErrNotApplied) {
					t.Errorf("%v", err)
				}
			} else if e, ok := errors.AsType[*pglock.ServerError](err); !ok || e.Problem != c.problem || !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %s with %q", err, c.problem, c.text)
			}
			if err != nil && strings.Contains(err.Error(), "wrong") {
				t.Errorf("the error tells the password: %v", err)
			}
			expectFinding(t, findings(t, b), c.check, driver.SeverityCritical, "")
		})
	}
}

// listener accepts connections, says something, and keeps them.
func listener(t *testing.T, say func(net.Conn)) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
		for _, c := range open {
			c.Close()
		}
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			say(c)
		}
	})
	return l.Addr().String()
}

// A schema can be made again, by many at once, under any name, and only by who may.
func TestCreateSchema(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	s.MustDo("postgres", "create role limited login")
	pool := newPool(t, s.URL("postgres"), nil)
	for _, opts := range []pglock.Options{
		{},
		{Schema: `we"ird 'name; é`, Prefix: `p"x_`},
		{Schema: "public", Prefix: "dlm_"},
		{Schema: strings.Repeat("x", 63), Prefix: strings.Repeat("y", 32)},
	} {
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				if err := pglock.CreateSchema(t.Context(), pool, &opts); err != nil {
					t.Errorf("%+v: %v", opts, err)
				}
			})
		}
		wg.Wait()
		text, err := pglock.SchemaSQL(&opts)
		if err != nil {
			t.Fatal(err)
		}
		s.MustDo("postgres", text) // again, as a migration
		b, err := pglock.New(pool, &opts)
		if err != nil {
			t.Fatal(err)
		}
		lease, err := b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
		if err != nil {
			t.Fatalf("%+v: %v", opts, err)
		}
		_, err = b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "b", TTL: time.Minute, Limit: 1, Enqueue: true})
		if !errors.Is(err, driver.ErrHeld) {
			t.Errorf("%+v: %v", opts, err)
		}
		if err := b.Release(t.Context(), lease); err != nil {
			t.Errorf("%+v: %v", opts, err)
		}
		for _, f := range findings(t, b) {
			if f.Severity > driver.SeverityOK && f.Check != "durability" {
				t.Errorf("%+v", f)
			}
		}
		handOn(t, pool, &opts)
	}
	limited := newPool(t, s.URLFor("limited", "", "postgres"), nil)
	err := pglock.CreateSchema(t.Context(), limited, &pglock.Options{Schema: "other"})
	if e, ok := errors.AsType[*pglock.ServerError](err); !ok || e.Problem != pglock.ProblemPermission {
		t.Error(err)
	}
}

// handOn goes once round all functions that locks need, in both modes.
func handOn(t *testing.T, pool *pgxpool.Pool, opts *pglock.Options) {
	t.Helper()
	table, err := pglock.New(pool, opts)
	if err != nil {
		t.Fatal(err)
	}
	advisory, err := pglock.NewAdvisory(pool, &pglock.AdvisoryOptions{Schema: opts.Schema, Prefix: opts.Prefix})
	if err != nil {
		t.Fatal(err)
	}
	defer advisory.Close()
	for name, b := range map[string]driver.Backend{"tables": table, "advisory": advisory} {
		ask := func(owner string) (driver.Lease, error) {
			return b.Acquire(t.Context(), driver.Request{
				Key: "handed", Owner: owner, TTL: time.Minute, Limit: 1, Enqueue: true, Manager: "m",
			})
		}
		lease, err := ask("a")
		if err != nil {
			t.Fatalf("%+v, %s: %v", opts, name, err)
		}
		for _, owner := range []string{"b", "c", "b"} {
			if _, err := ask(owner); !errors.Is(err, driver.ErrHeld) {
				t.Errorf("%+v, %s: waiting: %v", opts, name, err)
			}
		}
		batch := []driver.Renewal{{Lease: lease}}
		if b.Extend(t.Context(), batch); batch[0].Err != nil {
			t.Errorf("%+v, %s: %v", opts, name, batch[0].Err)
		}
		if err := b.Release(t.Context(), driver.Lease{Key: "handed", Owner: "c"}); err != nil {
			t.Errorf("%+v, %s: withdrawing: %v", opts, name, err)
		}
		if err := b.Release(t.Context(), lease); err != nil {
			t.Errorf("%+v, %s: %v", opts, name, err)
		}
		next, err := ask("b")
		if err != nil || next.Token <= lease.Token {
			t.Errorf("%+v, %s: %+v after %+v, %v", opts, name, next, lease, err)
		}
		info, err := b.(driver.Inspector).Inspect(t.Context(), "handed")
		if err != nil || len(info.Holders) != 1 {
			t.Errorf("%+v, %s: %+v, %v", opts, name, info, err)
		}
		if _, err := b.(driver.Forcer).ForceRelease(t.Context(), "handed", 0); err != nil {
			t.Errorf("%+v, %s: forced: %v", opts, name, err)
		}
	}
}

// Options that are wrong are named.
func TestOptions(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	pool := newPool(t, s.URL("postgres"), nil)
	for _, c := range []struct {
		opts pglock.Options
		want string
	}{
		{pglock.Options{Schema: strings.Repeat("x", 64)}, "Options.Schema"},
		{pglock.Options{Schema: "a\x00b"}, "Options.Schema"},
		{pglock.Options{Prefix: strings.Repeat("x", 33)}, "Options.Prefix"},
		{pglock.Options{Prefix: "\xff"}, "Options.Prefix"},
		{pglock.Options{LivenessWindow: time.Millisecond}, "Options.LivenessWindow"},
		{pglock.Options{KeepTokens: time.Second}, "Options.KeepTokens"},
		{pglock.Options{PollInterval: time.Hour}, "Options.PollInterval"},
	} {
		_, err := pglock.New(pool, &c.opts)
		if !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c.opts, err)
		}
	}
	if _, err := pglock.New(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Error(err)
	}
	if _, err := pglock.NewDB(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Error(err)
	}
}

// Two transactions that lock the same key follow each other.
func TestLockTx(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	pool := newPool(t, s.URL("postgres"), nil)
	s.MustDo("postgres", "create table counter as select 0 as n")
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			var n int
			err = errors.Join(
				pglock.LockTx(t.Context(), tx, "k"),
				tx.QueryRow(t.Context(), "select n from counter").Scan(&n),
			)
			if err == nil {
				_, err = tx.Exec(t.Context(), "update counter set n = $1", n+1)
			}
			if err := errors.Join(err, tx.Commit(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := s.MustDo("postgres", "select n from counter")[0][0]; n != "10" {
		t.Errorf("%s of 10 transactions counted", n)
	}
	if err := pglock.LockTx(t.Context(), nil, "k"); !errors.Is(err, driver.ErrInvalid) {
		t.Error(err)
	}
}
