package pglock

import (
	"context"
	"database/sql"
	_ "embed" // of schema.sql
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm/driver"
)

// SchemaVersion is the version of tables and functions that this version of the
// package works with.
const SchemaVersion = 3

// oldest is the oldest version of PostgreSQL that the functions are made for, as
// server_version_num.
const oldest = 120000

// schemaText makes the tables with the default options.
//
//go:embed schema.sql
var schemaText string

// schemaNames finds in it what depends on the options.
var schemaNames = regexp.MustCompile(`'dlm\.[a-z_0-9]+'|\bdlm\.([a-z_0-9]+)|'dlm'|SCHEMA dlm\b|INDEX IF NOT EXISTS ([a-z_]+)`)

// SchemaSQL returns the statements that make the tables and functions, for tools
// that carry out migrations. They are several statements, may be carried out
// again, and are to be one transaction. Nil options mean the defaults; of the
// options, Schema and Prefix matter.
func SchemaSQL(opts *Options) (string, error) {
	o, err := opts.withDefaults()
	if err != nil {
		return "", err
	}
	return o.schema(), nil
}

func (o *Options) schema() string {
	return schemaNames.ReplaceAllStringFunc(schemaText, func(s string) string {
		switch {
		case s == "'dlm'":
			return literal(quote(o.Schema))
		case strings.HasPrefix(s, "'"):
			return literal(o.name(strings.Trim(strings.TrimPrefix(s, "'dlm."), "'")))
		case strings.HasPrefix(s, "SCHEMA"):
			return "SCHEMA " + quote(o.Schema)
		case strings.HasPrefix(s, "INDEX"):
			return "INDEX IF NOT EXISTS " + quote(o.Prefix+s[strings.LastIndexByte(s, ' ')+1:])
		}
		return o.name(strings.TrimPrefix(s, "dlm."))
	})
}

// literal makes a text one of SQL.
func literal(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// CreateSchema makes the tables and functions in a database, unless they are
// there, and brings those of an earlier version up to date; clients that know only
// that one then refuse to work. The user needs the right to create the schema, or to
// create in it if it is there. Tables of a newer version are an error that matches
// [driver.ErrInvalid]: a [*ServerError] with [ProblemSchemaVersion].
func CreateSchema(ctx context.Context, pool *pgxpool.Pool, opts *Options) error {
	if pool == nil {
		return invalidf("pool is nil")
	}
	return createSchema(ctx, newPgxDatabase(pool), opts)
}

// CreateSchemaDB is [CreateSchema] for database/sql.
func CreateSchemaDB(ctx context.Context, db *sql.DB, opts *Options) error {
	if db == nil {
		return invalidf("db is nil")
	}
	return createSchema(ctx, &sqlDatabase{db: db}, opts)
}

func createSchema(ctx context.Context, db database, opts *Options) error {
	o, err := opts.withDefaults()
	if err != nil {
		return err
	}
	c := newCalls(db, &o)
	version, err := o.found(ctx, c.ask)
	switch {
	case is(err, ProblemNoSchema):
	case err != nil:
		return err
	case version < 1 || version >= SchemaVersion:
		return o.fits(version)
	}
	s, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer s.release()
	// Others may be about to do the same.
	err = s.run(ctx, "begin; select pg_advisory_xact_lock("+strconv.FormatInt(lockNumber("dlm schema"), 10)+");"+o.schema()+"; commit")
	if err != nil {
		_ = s.run(context.WithoutCancel(ctx), endSQL) // or the connection is closed
		return fmt.Errorf("creating the tables: %w", o.classify(err))
	}
	return nil
}

// asker makes one statement without parameters.
type asker func(ctx context.Context, text string) ([]row, error)

// version checks the version of the tables.
func (o *Options) version(ctx context.Context, ask asker) error {
	version, err := o.found(ctx, ask)
	if err != nil {
		return err
	}
	return o.fits(version)
}

// found reads the version of the tables.
func (o *Options) found(ctx context.Context, ask asker) (int64, error) {
	// That the user may not look into a schema is not the same as that there is
	// none, see classify.
	rows, err := ask(ctx, "SELECT version FROM "+o.name("meta")+" WHERE id = 1")
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 {
		return 0, problem(ProblemSchemaVersion, nil, "the table %s has no row, and so no version", o.name("meta"))
	}
	f := &scanner{row: rows[0]}
	return f.int(), f.err
}

// fits says whether this package works with a version of the tables.
func (o *Options) fits(version int64) error {
	switch {
	case version < SchemaVersion:
		return problem(ProblemSchemaVersion, nil, "the tables in %s have version %d, must have %d; call pglock.CreateSchema, or carry out "+
			"the text of pglock.SchemaSQL of this version of the package", quote(o.Schema), version, SchemaVersion)
	case version > SchemaVersion:
		return problem(ProblemSchemaVersion, nil, "the tables in %s have version %d, this version of the package knows %d; "+
			"use a newer one", quote(o.Schema), version, SchemaVersion)
	}
	return nil
}

// tag tells the statements of backends with other options apart, which may use
// the same connections.
func (o *Options) tag() string { return o.channel(" ")[4:16] }

// setup is what a backend finds out before the first call.
type setup struct {
	done atomic.Bool
	turn chan struct{} // has room for the one who looks
}

const lookSQL = `SELECT current_setting('server_version_num'), current_setting('default_transaction_isolation'),
	pg_backend_pid()::text, pg_is_in_recovery()::text, current_setting('default_transaction_read_only')`

// ready looks at the server unless that was done. It fails if the server or the
// tables do not do for locks; the next call then looks again.
func (b *backend) ready(ctx context.Context) error {
	s := &b.setup
	if s.done.Load() {
		return nil
	}
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%w: pglock: looking at the server: %w", driver.ErrNotApplied, ctx.Err())
	}
	defer func() { <-s.turn }()
	if s.done.Load() {
		return nil
	}
	if err := b.look(ctx); err != nil {
		// Nothing was done for the call itself yet.
		if errors.Is(err, driver.ErrInvalid) || errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrClosed) {
			return err
		}
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	s.done.Store(true)
	return nil
}

func (b *backend) look(ctx context.Context) error {
	s, err := b.calls.connect(ctx)
	if err != nil {
		return err
	}
	pid := s.pid()
	rows, err := b.calls.on(ctx, s, "", &statement{"", lookSQL})
	if err != nil {
		return err
	}
	if len(rows) != 1 || len(rows[0]) != 5 {
		return errStrange
	}
	f := &scanner{row: rows[0]}
	if v := f.int(); v < oldest {
		return problem(ProblemTooOld, nil, "PostgreSQL %d.%d, must be %d or later", v/10000, v/100%100, oldest/10000)
	}
	if f.text() != "read committed" {
		b.calls.db.careful()
	}
	// A pooler makes up the number that it gives out.
	if f.int() == int64(pid) {
		b.calls.db.direct()
	}
	if err := b.opts.version(ctx, b.calls.ask); err != nil {
		return err
	}
	return b.opts.rights(ctx, b.calls.ask, needed)
}

// need is a right that locks need.
type need struct{ table, rights string }

// needed are those that locks in tables need.
var needed = []need{
	{"meta", "SELECT UPDATE"},
	{"keys", "SELECT INSERT UPDATE DELETE"},
	{"holds", "SELECT INSERT UPDATE DELETE"},
	{"tickets", "SELECT INSERT UPDATE DELETE"},
}

// rights checks that the user has the rights that he needs.
func (o *Options) rights(ctx context.Context, ask asker, needed []need) error {
	var values []string
	for _, n := range needed {
		for right := range strings.FieldsSeq(n.rights) {
			values = append(values, fmt.Sprintf("(%s, '%s')", literal(o.name(n.table)), right))
		}
	}
	rows, err := ask(ctx, `SELECT r.what || ' on ' || r.name FROM (VALUES `+strings.Join(values, ", ")+`) AS r(name, what)
		WHERE NOT CASE r.what WHEN 'USAGE' THEN has_sequence_privilege(r.name, r.what) ELSE has_table_privilege(r.name, r.what) END`)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return nil
	}
	var missing []string
	for _, r := range rows {
		missing = append(missing, string(r[0]))
	}
	return problem(ProblemPermission, nil, "the user lacks %s; see Required server settings in the package's documentation",
		strings.Join(missing, ", "))
}
