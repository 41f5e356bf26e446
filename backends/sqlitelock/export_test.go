package sqlitelock

import (
	"context"
	"fmt"
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
