package sqlitelock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"modernc.org/sqlite"

	"github.com/go-dlm/dlm/driver"
)

const (
	minLivenessWindow     = 100 * time.Millisecond
	maxLivenessWindow     = time.Hour
	defaultLivenessWindow = 10 * time.Second

	// openPatience is how long New waits for a file that others keep locked.
	openPatience = 10 * time.Second
)

// Options configures a backend. Nil means the defaults.
type Options struct {
	// LivenessWindow bounds how long a waiter that has died can hold up those
	// behind it. It must be between 100ms and 1h. Defaults to 10s.
	LivenessWindow time.Duration
}

// Backend keeps locks in a file. It is safe for concurrent use.
type Backend struct {
	path   string
	file   os.FileInfo // of the file that was opened
	window time.Duration
	clock  clock
	db     *sql.DB // opens connections; each is used through a lane

	writer, reader *lane
	listening      sync.WaitGroup // the Listen calls, until they have closed their lanes

	closing   sync.Once
	closed    chan struct{} // closed by Close
	closeErr  error
	mu        sync.Mutex
	listeners map[string]*listener // by manager
}

var (
	_ driver.Backend   = (*Backend)(nil)
	_ driver.Notifier  = (*Backend)(nil)
	_ driver.Inspector = (*Backend)(nil)
	_ driver.Forcer    = (*Backend)(nil)
)

// New opens the file, which it creates if need be, with those of its folders
// that are missing. It returns an error that matches [driver.ErrInvalid] if the
// path does not name a file that can be used, or names one that belongs to
// another program or to a later version, and one that matches
// [errors.ErrUnsupported] on a system or a file system that cannot carry locks.
func New(path string, opts *Options) (*Backend, error) {
	clock, err := systemClock()
	if err != nil {
		return nil, fmt.Errorf("sqlitelock: %w", err)
	}
	return open(path, opts, clock)
}

func open(path string, opts *Options, clock clock) (*Backend, error) {
	window := defaultLivenessWindow
	if opts != nil && opts.LivenessWindow != 0 {
		window = opts.LivenessWindow
	}
	if window < minLivenessWindow || window > maxLivenessWindow {
		return nil, fmt.Errorf("%w: Options.LivenessWindow is %v, must be between %v and %v",
			driver.ErrInvalid, window, minLivenessWindow, maxLivenessWindow)
	}
	path, file, err := prepare(path)
	if err != nil {
		return nil, err
	}
	connector, err := sqlite.NewConnector(dsn(path, "mode=rw&_busy_timeout=0"))
	if err != nil {
		return nil, fmt.Errorf("sqlitelock: %w", err)
	}
	b := &Backend{
		path:      path,
		file:      file,
		window:    window,
		clock:     clock,
		db:        sql.OpenDB(connector),
		writer:    newLane(),
		reader:    newLane(),
		closed:    make(chan struct{}),
		listeners: make(map[string]*listener),
	}
	// A connection that is given up is closed, never kept for later.
	b.db.SetMaxIdleConns(-1)

	ctx, cancel := context.WithTimeout(background, openPatience)
	defer cancel()
	_, err = call(ctx, b, b.writer, func(s *session) (struct{}, error) { return struct{}{}, b.setup(ctx, s) })
	if err == nil {
		// The first look through the transaction machinery finds what is left
		// to find, such as a file replaced while it was being opened.
		_, err = read(ctx, b, func(*tx) (struct{}, error) { return struct{}{}, nil })
	}
	if err != nil {
		if hopeless(err) && !errors.Is(err, driver.ErrInvalid) {
			err = unusable("cannot use %s: %w", path, err)
		}
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// connect opens a connection.
func (b *Backend) connect(ctx context.Context) (*session, error) {
	s, err := newSession(b.db)
	if err != nil {
		return nil, err
	}
	for _, pragma := range []string{
		// Transactions survive the death of a process; those that must survive
		// a power failure are marked, see session.durably.
		"PRAGMA synchronous = NORMAL",
		"PRAGMA fullfsync = 1",
		// The log is written back after 4MB, and kept at no more than that.
		"PRAGMA wal_autocheckpoint = 1000",
		"PRAGMA journal_size_limit = 4194304",
		"PRAGMA temp_store = MEMORY",
		// The file is not trusted to be sound.
		"PRAGMA cell_size_check = 1",
		"PRAGMA trusted_schema = 0",
	} {
		err := b.patiently(ctx, func() error {
			_, err := s.conn.ExecContext(background, pragma)
			return err
		})
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
}

// Properties implements [driver.Backend].
func (b *Backend) Properties() driver.Properties {
	return driver.Properties{
		Name:           "sqlite",
		Tokens:         driver.TokensStrict,
		LivenessWindow: b.window,
		FairQueue:      true,
		SharedMode:     true,
		Permits:        true,
	}
}

// ticketLife is how long a ticket, or a grant that was handed over, lasts
// unless its waiter is heard of again.
func (b *Backend) ticketLife() time.Duration { return b.window / 4 * 3 }

// Acquire implements [driver.Backend].
func (b *Backend) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	if req.Key == "" || req.Owner == "" || req.TTL <= 0 || req.Limit < 1 {
		return driver.Lease{}, fmt.Errorf("%w: no key, no owner, no time to live, or no permits", driver.ErrInvalid)
	}
	type answer struct {
		lease   driver.Lease
		refusal *driver.HeldError
	}
	a, err := write(ctx, b, func(t *tx) (a answer, err error) {
		a.lease, a.refusal, err = t.acquire(req, b.ticketLife())
		return a, err
	})
	switch {
	case err != nil:
		return driver.Lease{}, err
	case a.refusal == nil:
		b.left(req.Manager, req.Key, req.Owner)
		return a.lease, nil
	}
	if a.refusal.Ticket != 0 {
		b.waits(req.Manager, req.Key, req.Owner)
	}
	return driver.Lease{}, a.refusal
}

// Extend implements [driver.Backend]. The whole batch is one transaction.
func (b *Backend) Extend(ctx context.Context, batch []driver.Renewal) {
	if len(batch) == 0 {
		return
	}
	// A call that is given up may still be running: it works on a copy.
	leases := make([]driver.Lease, len(batch))
	for i := range batch {
		leases[i] = batch[i].Lease
	}
	losses, err := write(ctx, b, func(t *tx) ([]*driver.LostError, error) {
		if err := t.sweep(); err != nil {
			return nil, err
		}
		losses := make([]*driver.LostError, len(leases))
		for i, lease := range leases {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			found, err := t.extend(lease)
			if err == nil && !found {
				losses[i], err = t.lost(lease)
			}
			if err != nil {
				return nil, err
			}
		}
		return losses, nil
	})
	for i := range batch {
		batch[i].Lease.Age = 0
		switch {
		case err != nil:
			batch[i].Err = err
		case losses[i] != nil:
			batch[i].Err = losses[i]
		default:
			batch[i].Err = nil
		}
	}
}

// Release implements [driver.Backend].
func (b *Backend) Release(ctx context.Context, lease driver.Lease) error {
	loss, err := write(ctx, b, func(t *tx) (*driver.LostError, error) { return t.release(lease) })
	if err != nil {
		return err
	}
	b.forget(lease.Key, lease.Owner)
	if loss != nil {
		return loss
	}
	return nil
}

// ForceRelease implements [driver.Forcer].
func (b *Backend) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	return write(ctx, b, func(t *tx) ([]driver.HolderInfo, error) { return t.force(key, token) })
}

// Close implements [driver.Backend]. It ends the Listen calls and waits for
// them, and for the call that is under way.
func (b *Backend) Close() error {
	b.closing.Do(func() {
		b.mu.Lock()
		close(b.closed)
		b.mu.Unlock()
		b.listening.Wait()
		b.closeErr = errors.Join(b.writer.close(), b.reader.close(), b.db.Close())
	})
	return b.closeErr
}
