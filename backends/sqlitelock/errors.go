package sqlitelock

import (
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"fmt"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/go-dlm/dlm/driver"
)

// busy says that another connection is in the way and that the same statement
// will succeed once it has gone.
func busy(err error) bool {
	switch code(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL:
		return true
	}
	return false
}

// code is SQLite's primary result code within an error, or 0.
func code(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code() & 0xff
	}
	return 0
}

// broken says that a failure leaves the connection in doubt.
func broken(err error) bool {
	return code(err) != 0 || errors.Is(err, sql.ErrConnDone) || errors.Is(err, sqldriver.ErrBadConn)
}

// hopeless says that repeating the call cannot help: somebody has to do
// something about the file first.
func hopeless(err error) bool {
	switch code(err) {
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY,
		sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_ERROR:
		return true
	}
	return false
}

// notApplied marks the failure of a call that certainly had no effect.
func notApplied(err error) error {
	switch {
	case errors.Is(err, driver.ErrInvalid), errors.Is(err, driver.ErrClosed):
		return err
	case hopeless(err):
		return fmt.Errorf("%w: %w: sqlitelock: %w", driver.ErrNotApplied, driver.ErrInvalid, err)
	default:
		return fmt.Errorf("%w: sqlitelock: %w", driver.ErrNotApplied, err)
	}
}

// committing classifies a failed COMMIT. If the file was busy or full, nothing
// was committed; after any other failure that cannot be said.
func committing(err error) error {
	switch code(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL:
		return notApplied(err)
	}
	return fmt.Errorf("sqlitelock: %w", err)
}

// unusable is an error about the file itself. Repeating the call cannot help.
func unusable(format string, args ...any) error {
	return fmt.Errorf("%w: sqlitelock: "+format, append([]any{driver.ErrInvalid}, args...)...)
}
