package sqlitelock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
)

// background is the context of every statement. Statements never wait: a busy
// database is answered at once (busy_timeout is 0), and all waiting is done in
// Go, between statements. Interrupting one half-way would only make it hard to
// say what state its transaction is in.
var background = context.Background()

// session is one connection with its prepared statements. One goroutine uses
// it at a time.
type session struct {
	conn  *sql.Conn
	stmts map[string]*sql.Stmt
	// log are the two files beside the database, as they were when this
	// connection opened them. They stay for as long as it is open.
	log []os.FileInfo
	// bad says that a statement failed in a way that leaves the connection in
	// doubt. Its lane then replaces it.
	bad bool
}

func newSession(db *sql.DB) (*session, error) {
	conn, err := db.Conn(background)
	if err != nil {
		return nil, err
	}
	return &session{conn: conn, stmts: make(map[string]*sql.Stmt)}, nil
}

// close gives up the connection, and with it whatever transaction is open.
func (s *session) close() error {
	var errs []error
	for _, st := range s.stmts {
		errs = append(errs, st.Close())
	}
	return errors.Join(append(errs, s.conn.Close())...)
}

// stmt returns the prepared statement for a query, which is a constant.
func (s *session) stmt(query string) (*sql.Stmt, error) {
	if st := s.stmts[query]; st != nil {
		return st, nil
	}
	st, err := s.conn.PrepareContext(background, query)
	if err != nil {
		return nil, err
	}
	s.stmts[query] = st
	return st, nil
}

// exec runs a statement and returns how many rows it changed.
func (s *session) exec(query string, args ...any) (int64, error) {
	st, err := s.stmt(query)
	if err != nil {
		return 0, err
	}
	res, err := st.ExecContext(background, args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// row reads the first row of a query's answer and says whether there is one.
func (s *session) row(query string, args []any, dest ...any) (bool, error) {
	st, err := s.stmt(query)
	if err != nil {
		return false, err
	}
	err = st.QueryRowContext(background, args...).Scan(dest...)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

// rows calls each for every row of a query's answer.
func (s *session) rows(query string, args []any, each func(scan func(dest ...any) error) error) (err error) {
	st, err := s.stmt(query)
	if err != nil {
		return err
	}
	rows, err := st.QueryContext(background, args...)
	if err != nil {
		return err
	}
	defer func() {
		if e := rows.Close(); err == nil {
			err = e
		}
	}()
	for rows.Next() {
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// dsn names the file to the driver. Every byte that could mean something in a
// URI is escaped.
func dsn(path, params string) string {
	var b strings.Builder
	b.WriteString("file:")
	for _, c := range []byte(path) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.IndexByte("/-_.", c) >= 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	b.WriteString("?_dqs=0&_defensive=1&_error_rc=1&")
	b.WriteString(params)
	return b.String()
}

// atomically runs fn in a transaction of its own.
func (s *session) atomically(fn func() error) error {
	if _, err := s.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	err := fn()
	if err == nil {
		_, err = s.exec("COMMIT")
	}
	if err != nil {
		s.rollback()
	}
	return err
}

// durably runs fn in a transaction that is on the disk when it returns. Other
// transactions survive the death of any process, but not a power failure.
func (s *session) durably(fn func() error) error {
	if _, err := s.exec("PRAGMA synchronous = EXTRA"); err != nil {
		return err
	}
	err := s.atomically(fn)
	if _, e := s.exec("PRAGMA synchronous = NORMAL"); e != nil {
		s.bad = true
		err = errors.Join(err, e)
	}
	return err
}

// rollback ends a transaction that failed.
func (s *session) rollback() {
	if _, err := s.exec("ROLLBACK"); err != nil {
		s.bad = true
	}
}
