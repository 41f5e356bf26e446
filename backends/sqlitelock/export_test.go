package sqlitelock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"modernc.org/sqlite"
)

// Clock is a clock that a test controls.
type Clock = clock

// NewClock makes one.
func NewClock(boot string, now func() (int64, error)) Clock { return clock{boot: boot, now: now} }

// SystemClock is the clock of this machine.
var SystemClock = systemClock

// Open is New with a clock.
var Open = open

const (
	ApplicationID = applicationID
	SchemaVersion = schemaVersion
	BlockSize     = blockSize
)

// Exec runs a statement on the backend's own connection for writing.
func (b *Backend) Exec(ctx context.Context, query string, args ...any) error {
	_, err := call(ctx, b, b.writer, func(s *session) (int64, error) { return s.exec(query, args...) })
	return err
}

// Number reads one number on the backend's own connection for writing.
func (b *Backend) Number(ctx context.Context, query string, args ...any) (n int64, err error) {
	return call(ctx, b, b.writer, func(s *session) (n int64, err error) {
		found, err := s.row(query, args, &n)
		if err == nil && !found {
			err = fmt.Errorf("no rows: %s", query)
		}
		return n, err
	})
}

// Waiting is how many tickets of this process the backend watches for.
func (b *Backend) Waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, l := range b.listeners {
		n += len(l.waiting)
	}
	return n
}

// EarlySession is a connection that was opened before the file had tables.
type EarlySession struct{ s *session }

// OpenEarly opens a file that is empty.
func OpenEarly(path string) (*EarlySession, func() error, error) {
	connector, err := sqlite.NewConnector(dsn(path, "mode=rw&_busy_timeout=0"))
	if err != nil {
		return nil, nil, err
	}
	b := &Backend{db: sql.OpenDB(connector)}
	s, err := b.connect(context.Background())
	if err != nil {
		return nil, nil, errors.Join(err, b.db.Close())
	}
	return &EarlySession{s}, func() error { return errors.Join(s.close(), b.db.Close()) }, nil
}

// Refresh reads which tables there are.
func (e *EarlySession) Refresh() error { return e.s.refresh() }

// Boot reads from a table.
func (e *EarlySession) Boot() (boot string, err error) {
	_, err = e.s.row("SELECT boot FROM meta", nil, &boot)
	return boot, err
}

// Busy says whether the file was locked.
var Busy = busy
