package fence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Dialect is a kind of SQL.
type Dialect int

// The dialects.
const (
	// PostgreSQL is PostgreSQL 9.5 or newer.
	PostgreSQL Dialect = iota + 1
	// SQLite is SQLite 3.24 or newer.
	SQLite
	// MySQL is MariaDB or MySQL, with InnoDB, and one node that is written to: in
	// a cluster with several, two transactions that meet can both be accepted. It
	// is tested on MariaDB.
	MySQL
)

// String returns the name of the dialect.
func (d Dialect) String() string {
	switch d {
	case PostgreSQL:
		return "PostgreSQL"
	case SQLite:
		return "SQLite"
	case MySQL:
		return "MySQL"
	}
	return fmt.Sprintf("Dialect(%d)", int(d))
}

// SQLOptions are options of [NewSQL].
type SQLOptions struct {
	// Table is the table of the records: a name, or a schema (with MySQL, a
	// database) and a name with a dot between them. A name has small letters,
	// digits and underscores, does not begin with a digit, and has at most 63
	// bytes. It is quoted, so that any word will do. Defaults to "dlm_fence".
	Table string
}

// SQL is a guard for what is written by transactions of a database. Its table
// must be in the same database as the data. See [SQL.Schema]. It is safe for
// concurrent use.
//
// Rows of which each has a fence column of its own need neither this guard nor
// its table, but one more condition, see [Affected].
type SQL struct {
	dialect               Dialect
	schema, admit, lookUp string
}

// Tx is a transaction, such as [*sql.Tx]. A guard neither commits nor rolls it
// back. The methods for that are here to keep out [*sql.DB], on which the check
// would be a transaction of its own, and so worth nothing.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	Commit() error
	Rollback() error
}

var _ Tx = (*sql.Tx)(nil)

var tableName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}(\.[a-z_][a-z0-9_]{0,62})?$`)

// NewSQL returns a guard. Nil options mean the defaults. It returns an error that
// matches [dlm.ErrInvalid] if there is no such dialect, or the name of the table
// is not as it must be. The database is not asked.
func NewSQL(dialect Dialect, opts *SQLOptions) (*SQL, error) {
	table := "dlm_fence"
	if opts != nil && opts.Table != "" {
		table = opts.Table
	}
	if !tableName.MatchString(table) {
		return nil, invalidf("Table is %q, must be a name in small letters, with or without a schema", table)
	}
	quote := `"`
	if dialect == MySQL {
		quote = "`"
	}
	table = quote + strings.ReplaceAll(table, ".", quote+"."+quote) + quote
	g := &SQL{dialect: dialect}
	// A row that is there is locked until the transaction ends, also if its token
	// stays as it is; so a higher token waits until the write is done.
	switch dialect {
	case PostgreSQL:
		g.schema = "CREATE TABLE IF NOT EXISTS " + table + " (resource bytea PRIMARY KEY, token bigint NOT NULL)"
		g.admit = "INSERT INTO " + table + " AS f (resource, token) VALUES ($1, $2) " +
			"ON CONFLICT (resource) DO UPDATE SET token = excluded.token WHERE f.token <= excluded.token"
		g.lookUp = "SELECT token FROM " + table + " WHERE resource = $1"
	case SQLite:
		g.schema = "CREATE TABLE IF NOT EXISTS " + table + " (resource BLOB PRIMARY KEY, token INTEGER NOT NULL) WITHOUT ROWID"
		g.admit = "INSERT INTO " + table + " AS f (resource, token) VALUES (?, ?) " +
			"ON CONFLICT (resource) DO UPDATE SET token = excluded.token WHERE f.token <= excluded.token"
		g.lookUp = "SELECT token FROM " + table + " WHERE resource = ?"
	case MySQL:
		g.schema = "CREATE TABLE IF NOT EXISTS " + table +
			" (resource VARBINARY(512) NOT NULL PRIMARY KEY, token BIGINT NOT NULL) ENGINE=InnoDB"
		g.admit = "INSERT INTO " + table + " (resource, token) VALUES (?, ?) " +
			"ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))"
		// The newest version, which a plain SELECT need not see.
		g.lookUp = "SELECT token FROM " + table + " WHERE resource = ? FOR UPDATE"
	default:
		return nil, invalidf("there is no %v", dialect)
	}
	return g, nil
}

// Schema returns the statement that creates the table unless it is there. To
// make it part of your migrations is better than to run it at every start:
// PostgreSQL lets one of two sessions that do so at the same time fail. The name of a
// resource is kept as bytes. A row must not be removed as long as anybody could
// write to its resource with an old token.
func (g *SQL) Schema() string { return g.schema }

// Check checks a token within the transaction that writes. If it returns nil,
// then nobody else passes Check for the resource until the transaction has
// ended; and the token is recorded if it is committed. Make it the transaction's
// first statement, and roll back if it fails.
//
// What is not guaranteed: that the write is accepted, before the transaction is
// committed. And a process that is stopped within its transaction keeps the later
// holder waiting until it goes on, or the database ends its session
// (idle_in_transaction_session_timeout of PostgreSQL). So keep the
// transaction short, and nothing in it that waits for others.
//
// The error matches [ErrStale] if a higher token was accepted before, and
// [dlm.ErrInvalid] if an argument is wrong. All other errors are those of the
// database: with REPEATABLE READ or SERIALIZABLE, two transactions that meet can
// fail to be serialized; with SQLite the database can be busy; with MySQL there
// can be a deadlock. Whoever repeats the transaction then is refused or accepted
// as any other.
//
// It is right at READ COMMITTED and all higher levels. (At READ UNCOMMITTED,
// which only MySQL has, it is, too, though what the transaction reads may not be.)
func (g *SQL) Check(ctx context.Context, tx Tx, resource string, token int64) error {
	if err := Validate(resource, token); err != nil {
		return err
	}
	switch {
	case ctx == nil:
		return invalidf("context is nil")
	case tx == nil:
		return invalidf("transaction is nil")
	}
	result, err := tx.ExecContext(ctx, g.admit, []byte(resource), token)
	if err != nil {
		return err
	}
	if g.dialect != MySQL {
		n, err := result.RowsAffected()
		if err != nil {
			return err
		}
		err = Affected(resource, token, n)
		var stale *StaleError
		if errors.As(err, &stale) {
			// It is refused also if nobody can say why.
			_ = tx.QueryRowContext(ctx, g.lookUp, []byte(resource)).Scan(&stale.Highest)
		}
		return err
	}
	// MySQL counts rows in two ways, by an option of the client. In neither of
	// them is it certain what no row, or one, means. But the row is ours by now.
	var highest int64
	if err := tx.QueryRowContext(ctx, g.lookUp, []byte(resource)).Scan(&highest); err != nil {
		return err
	}
	if highest > token {
		return &StaleError{Resource: resource, Token: token, Highest: highest}
	}
	return nil
}

// Statement returns what [SQL.Check] executes, for transactions that are not of
// package database/sql, such as those of pgx. [Affected] gets the verdict out of
// the number of rows:
//
//	query, args, err := guard.Statement(resource, token)
//	if err != nil {
//		return err
//	}
//	tag, err := tx.Exec(ctx, query, args...) // pgx.Tx
//	if err != nil {
//		return err
//	}
//	if err := fence.Affected(resource, token, tag.RowsAffected()); err != nil {
//		return err // tx must be rolled back
//	}
//
// Nothing keeps the caller from executing it outside the transaction that
// writes, where it is worth nothing.
//
// The error matches [dlm.ErrInvalid] if an argument is wrong. With MySQL, whose
// number of rows does not tell, it matches [errors.ErrUnsupported].
func (g *SQL) Statement(resource string, token int64) (query string, args []any, err error) {
	if err := Validate(resource, token); err != nil {
		return "", nil, err
	}
	if g.dialect == MySQL {
		return "", nil, fmt.Errorf("dlm: a fence of %v takes two statements, see SQL.Check: %w", g.dialect, errors.ErrUnsupported)
	}
	return g.admit, []any{[]byte(resource), token}, nil
}

// Affected turns the number of rows that a conditional write has changed into a
// verdict: nil if it is 1 or more, and a [*StaleError] if it is 0. It is for
// [SQL.Statement], and for rows with a fence column of their own:
//
//	UPDATE item SET stock = $1, fence = $2 WHERE id = $3 AND fence <= $2
//
// where fence is a bigint that is not null, 0 at first, and the row is there: one
// that is missing looks the same as a stale token. As check and write are one
// statement, no transaction is needed for a single row. Whoever reads the row
// before, to compute what to write, must have shown the token by then, or do
// both in one transaction after [SQL.Check]; else what it writes can rest on what
// an earlier holder was about to overwrite.
//
// MySQL counts only rows that have really changed, unless the client asks for
// those that were found (clientFoundRows of go-sql-driver), which it must do here.
//
// A negative number is an error, but no stale token: a driver that cannot count
// cannot be used.
func Affected(resource string, token, rows int64) error {
	switch {
	case rows < 0:
		return fmt.Errorf("dlm: the driver does not say how many rows were written: %w", errors.ErrUnsupported)
	case rows == 0:
		return &StaleError{Resource: resource, Token: token}
	}
	return nil
}
