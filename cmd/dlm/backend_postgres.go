//go:build !no_postgres

package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
)

func init() {
	storeFaults = append(storeFaults, func(err error) bool { return errors.As(err, new(*pglock.ServerError)) })
	schemes["postgres"] = scheme{usage: `  postgres://[USER[:PASSWORD]@]HOST[:PORT][,HOST...]/DATABASE?schema=dlm
      a PostgreSQL server, 12 or later, also through PgBouncer. The password may
      also be in the environment, as PGPASSWORD, or in ~/.pgpass; others on this
      machine can then not read it in the list of processes. The tables must be
      there; with create_schema=true they are made if they are not, which takes
      the right to create them.
      Other parameters: prefix=, liveness_window=20s, keep_tokens=24h,
      poll_interval=500ms, and those of PostgreSQL's own clients: sslmode,
      sslrootcert, sslcert, sslkey, target_session_attrs, connect_timeout,
      application_name.
      With mode=advisory locks are advisory locks of one session, which the server
      frees at once when this process dies, and which a failover forgets; not
      through PgBouncer in transaction mode. Of the other parameters then
      session_timeout=30s takes the place of liveness_window, keep_tokens and
      poll_interval. The two kinds of lock do not exclude each other. If dlm run
      is killed, or its connection breaks, the lock is free at once, a moment
      before its command is stopped.`, parse: parsePostgres}
	schemes["postgresql"] = scheme{parse: parsePostgres}
}

const (
	// postgresPatience bounds connecting, and making the tables.
	postgresPatience = 3 * time.Second
	// postgresPool bounds the connections.
	postgresPool = 8
)

// postgresParams are the parameters that the client library takes.
var postgresParams = []string{
	"sslmode", "sslrootcert", "sslcert", "sslkey", "sslnegotiation", "target_session_attrs", "connect_timeout", "application_name",
	"channel_binding", "krbsrvname",
}

// sslModes are the values of sslmode.
const sslModes = "disable, allow, prefer, require, verify-ca or verify-full"

func parsePostgres(u *storeURL, _ func(string) (string, bool)) (opener, error) {
	switch {
	case u.Opaque != "":
		return nil, fmt.Errorf("write %s:// with two slashes", u.Scheme)
	case strings.Contains(u.EscapedPath()+u.RawQuery+u.EscapedFragment(), "@"):
		// Most likely what stands before it is a part of a password.
		return nil, errors.New("a @ stands behind the host; write %2F for /, %3F for ?, %23 for # " +
			"within user and password, and %40 for a @ that is meant")
	case u.Fragment != "" || strings.HasSuffix(u.String(), "#"):
		return nil, errors.New("a # stands in the URL; write %23 for it")
	}
	for _, host := range u.hosts {
		if !strings.HasPrefix(host, "[") && strings.Count(host, ":") > 1 {
			return nil, errors.New("a host has several colons; write [ and ] around an IPv6 address")
		}
		if strings.HasPrefix(host, ":") || host == "" {
			return nil, fmt.Errorf("a host is missing, as in %s://localhost/database", u.Scheme)
		}
	}
	database := strings.TrimPrefix(u.EscapedPath(), "/")
	if database == "" {
		return nil, fmt.Errorf("the name of the database is missing, as in %s://localhost/database", u.Scheme)
	}
	if strings.Contains(database, "/") {
		return nil, errors.New("the path has more parts than the name of a database")
	}
	p := parseParams(u)
	opts := &pglock.Options{}
	opts.Schema, _ = p.take("schema")
	opts.Prefix, _ = p.take("prefix")
	mode, given := p.take("mode")
	advisory := mode == "advisory"
	if given && !advisory && mode != "table" {
		p.fail("parameter mode is %q, must be table or advisory", mode)
	}
	// The bounds are those of pglock.Options.
	for _, f := range []struct {
		name, value string
		most        int
	}{{"schema", opts.Schema, 63}, {"prefix", opts.Prefix, 32}} {
		if len(f.value) > f.most || !utf8.ValidString(f.value) || strings.ContainsRune(f.value, 0) {
			p.fail("parameter %s is %q, must be up to %d bytes of UTF-8", f.name, f.value, f.most)
		}
	}
	var session time.Duration
	if advisory {
		session = p.duration("session_timeout", 2*time.Second, time.Hour)
		for _, name := range []string{"liveness_window", "keep_tokens", "poll_interval"} {
			if _, ok := p.take(name); ok {
				p.fail("parameter %s does not go with mode=advisory", name)
			}
		}
	} else {
		opts.LivenessWindow = p.duration("liveness_window", 100*time.Millisecond, time.Hour)
		opts.KeepTokens = p.duration("keep_tokens", time.Minute, 366*24*time.Hour)
		opts.PollInterval = p.duration("poll_interval", 10*time.Millisecond, time.Minute)
		if _, ok := p.take("session_timeout"); ok {
			p.fail("parameter session_timeout goes with mode=advisory only")
		}
	}
	text, given := p.take("create_schema")
	create := text == "true"
	if given && !create {
		p.fail("parameter create_schema is %q, must be true, or left out", text)
	}
	theirs := url.Values{}
	for _, name := range postgresParams {
		if value, ok := p.take(name); ok {
			theirs.Set(name, value)
		}
	}
	if mode := theirs.Get("sslmode"); theirs.Has("sslmode") && (mode == "" || !strings.Contains(sslModes, mode)) {
		p.fail("parameter sslmode is %q, must be %s", mode, sslModes)
	}
	if err := p.finish(); err != nil {
		return nil, err
	}
	plain := *u.URL
	plain.Host, plain.RawQuery = strings.Join(u.hosts, ","), theirs.Encode()
	store := func(pool *pgxpool.Pool) (driver.Backend, error) { return pglock.New(pool, opts) }
	if advisory {
		store = func(pool *pgxpool.Pool) (driver.Backend, error) {
			return pglock.NewAdvisory(pool, &pglock.AdvisoryOptions{Schema: opts.Schema, Prefix: opts.Prefix, SessionTimeout: session})
		}
	}
	return func(cfg *dlm.LockConfig) (*dlm.Manager, error) {
		return openPostgres(plain.String(), opts, create, store, cfg)
	}, nil
}

func openPostgres(
	text string, opts *pglock.Options, create bool, store func(*pgxpool.Pool) (driver.Backend, error), cfg *dlm.LockConfig,
) (*dlm.Manager, error) {
	config, err := pgxpool.ParseConfig(text)
	if err != nil {
		return nil, err // without the password
	}
	config.MaxConns = postgresPool
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = postgresPatience
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = "dlm"
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		return nil, err
	}
	if create {
		ctx, cancel := context.WithTimeout(context.Background(), 2*postgresPatience)
		defer cancel()
		if err := pglock.CreateSchema(ctx, pool, opts); err != nil {
			pool.Close()
			return nil, err
		}
	}
	b, err := store(pool)
	if err != nil {
		pool.Close()
		return nil, err
	}
	return dlm.NewManager(&overPool{b, pool}, cfg) // which closes it if it fails
}

// overPool is a backend whose pool is closed with it.
type overPool struct {
	driver.Backend
	pool *pgxpool.Pool
}

// Unwrap lets the manager find what else the backend can do.
func (o *overPool) Unwrap() driver.Backend { return o.Backend }

func (o *overPool) Close() error {
	err := o.Backend.Close()
	o.pool.Close()
	return err
}
