package pglock

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// What a check looks at, see [driver.Finding].
const (
	checkConnection    = "connection"
	checkAuth          = "authentication"
	checkTLS           = "TLS"
	checkProduct       = "product"
	checkDatabase      = "database"
	checkVersion       = "version"
	checkRole          = "role"
	checkSchema        = "schema"
	checkRights        = "rights"
	checkDurability    = "durability"
	checkReplicas      = "replicas"
	checkPooling       = "pooling"
	checkNotifications = "notifications"
	checkIsolation     = "isolation"
	checkTimeouts      = "timeouts"
	checkClock         = "clock"
	checkCapacity      = "capacity"
)

const (
	// askPatience bounds each answer of the server to a check.
	askPatience = 3 * time.Second
	// leastTimeout is the shortest bound of a statement that leaves room for a
	// busy server.
	leastTimeout = time.Second
	// queueTight is the used share of the server's queue of notifications that
	// is too much: when it is full, nothing can be handed over.
	queueTight = 0.5
)

// check is the check of one server.
type check struct {
	opts *Options
	// query makes a statement, and says how the session is called by the other side.
	query func(ctx context.Context, text string) (rows []row, pid uint32, err error)
	// advisory is the backend that is asked, if it is one of this kind.
	advisory *Advisory
	server   string
	findings []driver.Finding
}

// settingsSQL asks for what anybody may know. The role comes first, as a standby
// cannot be asked for everything.
const settingsSQL = `SELECT coalesce(host(inet_server_addr()) || ':' || inet_server_port(), ''),
	current_setting('server_version_num'), current_setting('server_version'), pg_is_in_recovery()::text,
	current_setting('default_transaction_read_only'), current_setting('fsync'), current_setting('full_page_writes'),
	current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
	(SELECT count(*) FROM pg_stat_replication), current_setting('default_transaction_isolation'),
	(SELECT setting FROM pg_settings WHERE name = 'statement_timeout'),
	(SELECT setting FROM pg_settings WHERE name = 'lock_timeout'),
	pg_backend_pid(), (SELECT count(*) FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl)`

// Check implements [driver.Checker]. It needs no rights beyond those that locks
// need.
func (b *backend) Check(ctx context.Context) ([]driver.Finding, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if b.ended.Load() {
		return nil, driver.ErrClosed
	}
	c := &check{opts: &b.opts, query: func(ctx context.Context, text string) ([]row, uint32, error) {
		s, err := b.calls.connect(ctx)
		if err != nil {
			return nil, 0, err
		}
		pid := s.pid()
		rows, err := b.calls.on(ctx, s, "", &statement{"", text})
		return rows, pid, err
	}}
	return c.findAll(ctx)
}

// findAll looks at everything.
func (c *check) findAll(ctx context.Context) ([]driver.Finding, error) {
	c.run(ctx)
	// A deadline that has passed is a server that was too slow.
	if err := ctx.Err(); errors.Is(err, context.Canceled) {
		return nil, err
	}
	return c.findings, nil
}

func (c *check) add(name string, severity driver.Severity, detail, fix string) {
	c.findings = append(c.findings, driver.Finding{Check: name, Severity: severity, Server: c.server, Detail: detail, Fix: fix})
}

func (c *check) ok(name, format string, args ...any) {
	c.add(name, driver.SeverityOK, fmt.Sprintf(format, args...), "")
}

// ask makes a statement, for which it does not wait for ever.
func (c *check) ask(ctx context.Context, text string) (rows []row, pid uint32, err error) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	return c.query(ctx, text)
}

// run looks at one thing after the other, as far as it is of use.
func (c *check) run(ctx context.Context) {
	began := time.Now()
	rows, pid, err := c.ask(ctx, settingsSQL)
	if err != nil {
		c.failed(err)
		return
	}
	took := time.Since(began)
	if len(rows) != 1 || len(rows[0]) != 15 {
		c.failed(errStrange)
		return
	}
	f := &scanner{row: rows[0]}
	c.server = f.text()
	number, version := f.int(), f.text()
	standby, readOnly := f.text() == "true", f.text() == "on"
	fsync, pages, commit, names, replicas := f.text(), f.text(), f.text(), f.text(), f.int()
	isolation, statement, lock := f.text(), f.int(), f.int()
	serverPid, ssl := f.int(), f.int()

	how := "without TLS"
	if ssl > 0 {
		how = "over TLS"
	}
	c.ok(checkConnection, "answers within %v, %s", took.Round(100*time.Microsecond), how)
	if number < oldest {
		c.add(checkVersion, driver.SeverityCritical, fmt.Sprintf("PostgreSQL %s, must be %d or later", version, oldest/10000),
			"update the server")
		return
	}
	c.ok(checkVersion, "PostgreSQL %s", version)
	switch {
	case standby:
		c.add(checkRole, driver.SeverityCritical, "a standby: locks cannot be taken here",
			"use the address of the primary; in a URL name all servers and add target_session_attrs=read-write")
		return
	case readOnly:
		c.add(checkRole, driver.SeverityCritical, "default_transaction_read_only is on: locks cannot be taken",
			"ALTER ROLE … SET default_transaction_read_only = off, and see whether the server or the database has it on for a reason")
		return
	}
	c.ok(checkRole, "a primary")
	if c.advisory == nil {
		c.durability(fsync, pages, commit)
		c.replicas(commit, names, replicas)
		if isolation == "read committed" {
			c.ok(checkIsolation, "default_transaction_isolation is read committed")
		} else {
			c.ok(checkIsolation, "default_transaction_isolation is %s: each call is a transaction that sets read committed, "+
				"which costs the server a little more", isolation)
		}
		c.timeouts(statement, lock)
	} else {
		c.failover(replicas)
		c.capacity(ctx)
	}
	c.clock(ctx)
	if !c.schema(ctx) {
		return
	}
	if c.advisory != nil {
		c.session(ctx)
		c.notifications(ctx)
		return
	}
	pooled := pid != 0 && int64(pid) != serverPid
	switch {
	case pooled:
		c.ok(checkPooling, "a pooler stands before the server: statements are not prepared")
	case pid != 0:
		c.ok(checkPooling, "no pooler stands before the server")
	default:
		c.add(checkPooling, driver.SeverityUnknown, "whether a pooler stands before the server cannot be found out through database/sql", "")
	}
	c.notifications(ctx)
}

// failed adds the finding for a server that does not serve us.
func (c *check) failed(err error) {
	var problem Problem
	if e, ok := errors.AsType[*ServerError](err); ok {
		problem = e.Problem
	}
	cause := reason(err)
	switch {
	case problem == ProblemAuth:
		c.add(checkAuth, driver.SeverityCritical, "the server does not let the user in: "+cause,
			"check user and password, and the lines of pg_hba.conf for this user, database and address")
	case problem == ProblemTLS:
		c.add(checkTLS, driver.SeverityCritical, "client and server do not agree on TLS: "+cause,
			"set sslmode as the server has it, and sslrootcert to whoever has signed its certificate")
	case problem == ProblemNotPostgres:
		c.add(checkProduct, driver.SeverityCritical, "what answers is no PostgreSQL server: "+cause, "check host and port")
	case problem == ProblemDatabase:
		c.add(checkDatabase, driver.SeverityCritical, "there is no such database: "+cause, "create it, or name another one")
	case errors.Is(err, context.DeadlineExceeded):
		c.add(checkConnection, driver.SeverityCritical, "no answer in time: "+cause,
			"check that the server runs and is not stopped, that no firewall is between, and that the pool has connections left")
	default:
		c.add(checkConnection, driver.SeverityCritical, "the server cannot be reached or used: "+cause,
			"check that the server runs, that host and port are right, and what its log says")
	}
}

// reason is the text of an error without what every one begins with.
func reason(err error) string {
	if e, ok := errors.AsType[*ServerError](err); ok && e.Err != nil {
		err = e.Err
	}
	s := err.Error()
	for _, prefix := range []string{driver.ErrNotApplied.Error() + ": ", driver.ErrInvalid.Error() + ": ", "pglock: "} {
		s = strings.TrimPrefix(s, prefix)
	}
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }), " ")
}

func (c *check) durability(fsync, pages, commit string) {
	switch {
	case fsync == "off" || pages == "off":
		c.add(checkDurability, driver.SeverityWarning,
			fmt.Sprintf("fsync is %s and full_page_writes is %s: a crash of the machine can destroy the database, locks and tokens with it", fsync, pages),
			"fsync = on and full_page_writes = on in postgresql.conf")
	case commit == "off":
		c.add(checkDurability, driver.SeverityWarning,
			"synchronous_commit is off: a crash of the server forgets the last locks, and grants them again while their holders still work",
			"ALTER ROLE … SET synchronous_commit = on for the user that takes locks")
	default:
		c.ok(checkDurability, "commits are on the server's disk before they are answered")
	}
}

func (c *check) replicas(commit, names string, count int64) {
	switch {
	case names != "" && commit != "off" && commit != "local":
		c.ok(checkReplicas, "commits wait for replicas: synchronous_standby_names is %q", names)
	case count > 0:
		c.add(checkReplicas, driver.SeverityWarning,
			fmt.Sprintf("%d replicas are connected, and commits do not wait for them: a failover forgets the last locks, "+
				"and grants them again while their holders still work", count),
			"set synchronous_standby_names, and see to it that only a replica named there is promoted")
	default:
		c.ok(checkReplicas, "none are seen")
	}
}

// failover says what becomes of advisory locks, which no replica knows.
func (c *check) failover(replicas int64) {
	if replicas == 0 {
		c.ok(checkReplicas, "none are seen")
		return
	}
	c.add(checkReplicas, driver.SeverityWarning,
		fmt.Sprintf("%d replicas are connected, and know nothing of advisory locks: a failover forgets all of them, "+
			"and grants them again before their holders have noticed, if they are cut off", replicas),
		"use locks in tables if there are failovers, or let the resource check the token")
}

// capacity says how many locks there can be.
func (c *check) capacity(ctx context.Context) {
	rows, _, err := c.ask(ctx, `SELECT current_setting('max_locks_per_transaction')::bigint *
		(current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint)`)
	if err != nil || len(rows) != 1 {
		c.add(checkCapacity, driver.SeverityUnknown, "how many locks the server has room for could not be read", "")
		return
	}
	c.ok(checkCapacity, "the server has room for about %d locks of all kinds and users at a time (max_locks_per_transaction times max_connections)",
		(&scanner{row: rows[0]}).int())
}

func (c *check) timeouts(statement, lock int64) {
	for _, t := range []struct {
		name  string
		value time.Duration
	}{
		{"statement_timeout", time.Duration(statement) * time.Millisecond},
		{"lock_timeout", time.Duration(lock) * time.Millisecond},
	} {
		if t.value > 0 && t.value < leastTimeout {
			c.add(checkTimeouts, driver.SeverityWarning, fmt.Sprintf("%s is %v: while the server is busy, renewals fail and locks can be lost", t.name, t.value),
				fmt.Sprintf("ALTER ROLE … SET %s = '%v' or more for the user that takes locks", t.name, leastTimeout))
			return
		}
	}
	c.ok(checkTimeouts, "statement_timeout and lock_timeout leave room")
}

// clock compares the clocks, on which locks do not depend.
func (c *check) clock(ctx context.Context) {
	began := time.Now()
	rows, _, err := c.ask(ctx, "SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint")
	half := time.Since(began) / 2
	if err != nil || len(rows) != 1 {
		c.add(checkClock, driver.SeverityUnknown, "the server's clock could not be read", "")
		return
	}
	n := (&scanner{row: rows[0]}).int()
	offset := time.UnixMicro(n).Sub(began.Add(half)).Round(time.Millisecond)
	c.ok(checkClock, "%v ahead of this machine's, give or take %v, which locks do not depend on", offset, half.Round(100*time.Microsecond))
}

// schema returns false if there are no tables that can be used.
func (c *check) schema(ctx context.Context) bool {
	ask := func(ctx context.Context, text string) ([]row, error) {
		rows, _, err := c.ask(ctx, text)
		return rows, err
	}
	rights := needed
	if c.advisory != nil {
		rights = neededForAdvisory
	}
	err := c.opts.version(ctx, ask)
	if err == nil {
		c.ok(checkSchema, "the tables in %s have version %d", quote(c.opts.Schema), SchemaVersion)
		if err = c.opts.rights(ctx, ask, rights); err == nil {
			c.ok(checkRights, "the user has all rights that locks need")
			return true
		}
	}
	detail := reason(err)
	if e, ok := errors.AsType[*ServerError](err); ok && e.Detail != "" {
		detail = e.Detail
	}
	switch {
	case is(err, ProblemNoSchema), is(err, ProblemSchemaVersion):
		c.add(checkSchema, driver.SeverityCritical, detail,
			"call pglock.CreateSchema, or carry out the text of pglock.SchemaSQL; with the command, add create_schema=true to the URL once")
	case is(err, ProblemPermission):
		c.add(checkRights, driver.SeverityCritical, detail, fmt.Sprintf(
			"GRANT USAGE ON SCHEMA %s TO the user, GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %[1]s, "+
				"and for advisory mode GRANT USAGE ON ALL SEQUENCES IN SCHEMA %[1]s",
			quote(c.opts.Schema)))
	default:
		c.failed(err)
	}
	return false
}

// notifications looks whether the server can still send them.
func (c *check) notifications(ctx context.Context) {
	rows, _, err := c.ask(ctx, "SELECT (pg_notification_queue_usage() * 1000)::bigint")
	if err != nil || len(rows) != 1 {
		c.add(checkNotifications, driver.SeverityUnknown, "the queue of notifications could not be looked at", "")
		return
	}
	share := float64((&scanner{row: rows[0]}).int()) / 1000
	detail := "the queue of notifications is " + strconv.Itoa(int(share*100)) + " % full"
	if share < queueTight {
		c.ok(checkNotifications, "%s", detail)
		return
	}
	c.add(checkNotifications, driver.SeverityCritical, detail+": when it is full, no lock can be handed over",
		"find the session that listens and stays in a transaction (pg_stat_activity), and end it")
}
