package pglock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/puddle/v2"

	"github.com/go-dlm/dlm/driver"
)

// statement is one of the few that the backend makes. Its parameters are
// strings, []byte and int64, and what it returns is read as text, so that it is
// the same for all drivers. One without a name is not prepared.
type statement struct{ name, sql string }

// row is a row of a result, as text; a NULL is nil.
type row [][]byte

// database is what the backend needs of a pool of connections.
type database interface {
	// connect takes a connection out of the pool. It obeys the context.
	connect(ctx context.Context) (session, error)
	// careful makes later statements transactions whose isolation level is set,
	// as the default of the server, of the database or of the user is another.
	careful()
	// direct says that nothing stands between the pool and the server, so that
	// statements may be prepared.
	direct()
}

// session is a connection that was taken out of the pool. It is for one
// goroutine.
type session interface {
	query(ctx context.Context, st *statement, args []any) ([]row, error)
	// run runs several statements without parameters, all or none.
	run(ctx context.Context, text string) error
	// pid is what the other side calls the session, or 0 if that is not known.
	pid() uint32
	release()
}

// pgxDatabase talks to the server below pgx's own queries. These would prepare
// statements or not as the user has set it, and set-ups that share connections
// among clients carry only those without a name.
type pgxDatabase struct {
	pool      *pgxpool.Pool
	isCareful atomic.Bool
	// prepares says that statements may be prepared on the connections. It
	// saves the server a third of its work.
	prepares atomic.Bool
}

func newPgxDatabase(pool *pgxpool.Pool) *pgxDatabase { return &pgxDatabase{pool: pool} }

func (d *pgxDatabase) careful() { d.isCareful.Store(true) }

// direct prepares statements from now on, unless the user has switched that off.
func (d *pgxDatabase) direct() {
	d.prepares.Store(d.pool.Config().ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement)
}

func (d *pgxDatabase) connect(ctx context.Context) (session, error) {
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		if errors.Is(err, puddle.ErrClosedPool) {
			return nil, fmt.Errorf("%w: pglock: %w", driver.ErrClosed, err)
		}
		return nil, unsentError{err}
	}
	return &pgxSession{d: d, conn: conn}, nil
}

type pgxSession struct {
	d    *pgxDatabase
	conn *pgxpool.Conn
}

func (s *pgxSession) release()    { s.conn.Release() }
func (s *pgxSession) pid() uint32 { return s.conn.Conn().PgConn().PID() }

const (
	textFormat, binaryFormat    = 0, 1
	byteaOID, int8OID, textOID  = 17, 20, 25
	beginSQL, commitSQL, endSQL = "begin isolation level read committed", "commit", "rollback"
)

// params are parameters as the protocol has them.
type params struct {
	values  [][]byte
	oids    []uint32
	formats []int16
}

func newParams(args []any) *params {
	p := &params{make([][]byte, len(args)), make([]uint32, len(args)), make([]int16, len(args))}
	for i, arg := range args {
		switch a := arg.(type) {
		case []byte:
			p.values[i], p.oids[i], p.formats[i] = a, byteaOID, binaryFormat
		case string:
			p.values[i], p.oids[i] = []byte(a), textOID
		case int64:
			p.values[i], p.oids[i] = strconv.AppendInt(nil, a, 10), int8OID
		default:
			panic(fmt.Sprintf("pglock: parameter of type %T", arg))
		}
	}
	return p
}

func (s *pgxSession) query(ctx context.Context, st *statement, args []any) ([]row, error) {
	conn := s.conn.Conn().PgConn()
	p := newParams(args)
	var prepared *pgconn.StatementDescription
	if st.name != "" && s.d.prepares.Load() {
		sd, err := s.conn.Conn().Prepare(ctx, st.name, st.sql) // a round trip for the first time only
		if err != nil {
			return nil, unsentError{err}
		}
		prepared = sd
	}
	if s.d.isCareful.Load() {
		return s.transact(ctx, prepared, st, p)
	}
	var reader *pgconn.ResultReader
	if prepared != nil {
		reader = conn.ExecStatement(ctx, prepared, p.values, p.formats, nil)
	} else {
		reader = conn.ExecParams(ctx, st.sql, p.values, p.oids, p.formats, nil)
	}
	result := reader.Read()
	return rows(result), s.failed(ctx, st, result.Err)
}

// failed forgets a prepared statement that is not there any more, because
// somebody has discarded the session's state.
func (s *pgxSession) failed(ctx context.Context, st *statement, err error) error {
	if code := state(err); code == stateNoPrepared || code == statePrepared {
		s.d.prepares.Store(false)
		_ = s.conn.Conn().Deallocate(ctx, st.name) // it is gone anyway
	}
	return err
}

// transact makes the statement a transaction of the right isolation level, in
// one round trip.
func (s *pgxSession) transact(ctx context.Context, prepared *pgconn.StatementDescription, st *statement, p *params) ([]row, error) {
	conn := s.conn.Conn().PgConn()
	batch := &pgconn.Batch{}
	batch.ExecParams(beginSQL, nil, nil, nil, nil)
	if prepared != nil {
		batch.ExecStatement(prepared, p.values, p.formats, nil)
	} else {
		batch.ExecParams(st.sql, p.values, p.oids, p.formats, nil)
	}
	batch.ExecParams(commitSQL, nil, nil, nil, nil)
	results, err := conn.ExecBatch(ctx, batch).ReadAll()
	if err != nil {
		err = s.failed(ctx, st, err)
		if !conn.IsClosed() && conn.TxStatus() != 'I' {
			// If that fails, the pool closes the connection.
			_, _ = conn.Exec(ctx, endSQL).ReadAll()
		}
		return nil, err
	}
	if len(results) != 3 {
		return nil, fmt.Errorf("pglock: %d results of 3 statements", len(results))
	}
	return rows(results[1]), nil
}

func rows(r *pgconn.Result) []row {
	list := make([]row, len(r.Rows))
	for i, cells := range r.Rows {
		list[i] = cells
	}
	return list
}

func (s *pgxSession) run(ctx context.Context, text string) error {
	_, err := s.conn.Conn().PgConn().Exec(ctx, text).ReadAll()
	return err
}

// sqlDatabase talks to the server through any driver for database/sql.
type sqlDatabase struct {
	db        *sql.DB
	isCareful atomic.Bool
}

func (d *sqlDatabase) careful() { d.isCareful.Store(true) }
func (d *sqlDatabase) direct()  {}

func (d *sqlDatabase) connect(ctx context.Context) (session, error) {
	conn, err := d.db.Conn(ctx)
	if err != nil {
		if err.Error() == "sql: database is closed" {
			return nil, fmt.Errorf("%w: pglock: %w", driver.ErrClosed, err)
		}
		return nil, unsentError{err}
	}
	return &sqlSession{d: d, conn: conn}, nil
}

type sqlSession struct {
	d    *sqlDatabase
	conn *sql.Conn
}

func (s *sqlSession) pid() uint32 { return 0 }

// release gives the connection back; that it is broken has been said before.
func (s *sqlSession) release() { _ = s.conn.Close() }

func (s *sqlSession) query(ctx context.Context, st *statement, args []any) ([]row, error) {
	if !s.d.isCareful.Load() {
		return readRows(s.conn.QueryContext(ctx, st.sql, args...))
	}
	tx, err := s.conn.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return nil, unsentError{err}
	}
	list, err := readRows(tx.QueryContext(ctx, st.sql, args...))
	if err != nil {
		return nil, errors.Join(err, ignoreDone(tx.Rollback()))
	}
	if err := tx.Commit(); state(err) != "" {
		return nil, err
	} else if err != nil {
		// Some drivers say that a connection was broken before as if nothing had
		// been sent, which is not known of a commit.
		return nil, fmt.Errorf("committing: %v", err)
	}
	return list, nil
}

// ignoreDone leaves out the answer to a rollback that nothing is left to do.
func ignoreDone(err error) error {
	if errors.Is(err, sql.ErrTxDone) {
		return nil
	}
	return err
}

func readRows(r *sql.Rows, err error) ([]row, error) {
	if err != nil {
		return nil, err
	}
	defer r.Close()
	columns, err := r.Columns()
	if err != nil {
		return nil, err
	}
	var list []row
	for r.Next() {
		cells := make(row, len(columns))
		into := make([]any, len(columns))
		for i := range cells {
			into[i] = &cells[i]
		}
		if err := r.Scan(into...); err != nil {
			return nil, err
		}
		list = append(list, cells)
	}
	return list, errors.Join(r.Err(), r.Close())
}

// run relies on drivers that send a text without parameters as it is.
func (s *sqlSession) run(ctx context.Context, text string) error {
	_, err := s.conn.ExecContext(ctx, text)
	return err
}
