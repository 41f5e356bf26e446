package sqlitelock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// grace is how long a call whose context has ended waits for the answer
	// of a statement that is running. Statements take far less, unless the
	// disk hangs.
	grace = 100 * time.Millisecond

	minBusyPause = 100 * time.Microsecond
	maxBusyPause = 5 * time.Millisecond
)

// lane is a session and the goroutine that uses it, for one call at a time.
// The goroutine is kept because SQLite needs a deep stack.
type lane struct {
	jobs chan func(*lane)
	quit chan struct{} // closed by close
	end  chan struct{} // closed when the goroutine has gone
	s    *session      // nil before the first call, and after a failure
	err  error         // of the close; read after end
}

func newLane() *lane {
	l := &lane{jobs: make(chan func(*lane)), quit: make(chan struct{}), end: make(chan struct{})}
	go l.run()
	return l
}

func (l *lane) run() {
	defer close(l.end)
	for {
		select {
		case job := <-l.jobs:
			job(l)
			if l.s != nil && l.s.bad {
				_ = l.s.close()
				l.s = nil
			}
		case <-l.quit:
			if l.s != nil {
				l.err = l.s.close()
			}
			return
		}
	}
}

// close ends the lane once the call that is under way has ended.
func (l *lane) close() error {
	close(l.quit)
	<-l.end
	return l.err
}

// call runs fn on the lane's session and obeys the context even if the disk
// hangs: then fn goes on by itself, and what comes of it is not known.
func call[T any](ctx context.Context, b *Backend, l *lane, fn func(*session) (T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	var zero T
	if err := b.ready(ctx); err != nil {
		return zero, err
	}
	done := make(chan answer, 1)
	job := func(l *lane) {
		var a answer
		if a.err = l.open(ctx, b); a.err == nil {
			a.v, a.err = fn(l.s)
		}
		done <- a
	}
	select {
	case l.jobs <- job:
	case <-ctx.Done():
		return zero, notApplied(fmt.Errorf("waiting for other calls: %w", ctx.Err()))
	case <-b.closed:
		return zero, driver.ErrClosed
	}
	select {
	case a := <-done:
		return a.v, a.err
	case <-ctx.Done():
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case a := <-done:
		return a.v, a.err
	case <-timer.C:
		return zero, fmt.Errorf("sqlitelock: the file does not answer: %w", ctx.Err())
	}
}

// open makes sure that there is a session.
func (l *lane) open(ctx context.Context, b *Backend) (err error) {
	if l.s != nil {
		return nil
	}
	if l.s, err = b.connect(ctx); err != nil {
		return notApplied(err)
	}
	return nil
}

// ready refuses a call before anything is done for it.
func (b *Backend) ready(ctx context.Context) error {
	select {
	case <-b.closed:
		return driver.ErrClosed
	default:
	}
	if err := ctx.Err(); err != nil {
		return notApplied(err)
	}
	return nil
}

// patiently repeats fn while the file is busy. SQLite's own busy handler would
// sleep for up to 100ms at a time. The pauses grow with the time waited, slowly
// enough for a fair chance beside a process that hardly ever lets go.
func (b *Backend) patiently(ctx context.Context, fn func() error) error {
	for start := time.Now(); ; {
		err := fn()
		if !busy(err) {
			return err
		}
		pause := min(max(time.Since(start)/64, minBusyPause), maxBusyPause)
		timer := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w: another connection keeps the file locked: %w", ctx.Err(), err)
		case <-b.closed:
			timer.Stop()
			return driver.ErrClosed
		}
	}
}

// errNoTokens ends a transaction that needs more tokens than are reserved.
var errNoTokens = errors.New("no tokens left in this block")

// tx is one transaction.
type tx struct {
	s   *session
	now int64 // read once the transaction had begun
	// last is the token or ticket given last, and ceiling the last one that
	// may be given.
	last, ceiling int64
	counted       bool // last has moved
	stale         bool // something on some key has expired
	// granted are the managers whose waiters were granted something.
	granted []string
}

// write runs fn in a transaction that excludes all others.
func write[T any](ctx context.Context, b *Backend, fn func(*tx) (T, error)) (T, error) {
	return call(ctx, b, b.writer, func(s *session) (T, error) { return transact(ctx, b, s, "BEGIN IMMEDIATE", fn) })
}

// read runs fn on a snapshot.
func read[T any](ctx context.Context, b *Backend, fn func(*tx) (T, error)) (T, error) {
	return call(ctx, b, b.reader, func(s *session) (T, error) { return transact(ctx, b, s, "BEGIN", fn) })
}

func transact[T any](ctx context.Context, b *Backend, s *session, begin string, fn func(*tx) (T, error)) (T, error) {
	var zero T
	for {
		t, err := b.begin(ctx, s, begin)
		if err != nil {
			return zero, notApplied(err)
		}
		v, err := fn(t)
		if err == nil {
			err = t.finish(ctx)
		}
		switch {
		case err == nil:
		case errors.Is(err, errNoTokens):
			s.rollback()
			if err := b.reserve(ctx, s); err != nil {
				return zero, notApplied(err)
			}
			continue
		default:
			s.rollback()
			s.bad = s.bad || broken(err)
			return zero, notApplied(err)
		}
		if _, err := s.exec("COMMIT"); err != nil {
			s.rollback()
			s.bad = true
			return zero, committing(err)
		}
		b.nudge(t.granted)
		return v, nil
	}
}

// begin starts a transaction and reads what every one needs.
func (b *Backend) begin(ctx context.Context, s *session, begin string) (*tx, error) {
	t := &tx{s: s}
	err := b.patiently(ctx, func() error {
		if _, err := s.exec(begin); err != nil {
			return err
		}
		err := b.load(t)
		if err != nil {
			s.rollback()
		}
		return err
	})
	s.bad = s.bad || broken(err) && !busy(err)
	return t, err
}

// load reads the clock and the counter, and makes sure that the file is the
// one that was opened and that its instants are readings of our clock.
func (b *Backend) load(t *tx) (err error) {
	if t.now, err = b.clock.now(); err != nil {
		return err
	}
	var boot string
	found, err := t.s.row(`SELECT boot, counter, ceiling,
			EXISTS (SELECT 1 FROM holds WHERE expires <= ?1) OR EXISTS (SELECT 1 FROM tickets WHERE dies <= ?1)
		FROM meta WHERE id = 1`, []any{t.now}, &boot, &t.last, &t.ceiling, &t.stale)
	switch {
	case err != nil:
		return err
	case !found, t.last < 1, t.last > t.ceiling:
		return unusable("%s is damaged: there is no sound counter", b.path)
	case t.ceiling >= endOfTokens-blockSize:
		return unusable("%s has no tokens left", b.path)
	case boot != b.clock.boot:
		return unusable("%s has been taken over by another machine, or by another boot of this one", b.path)
	}
	return b.checkFiles(t.s)
}

// checkFiles makes sure that the file and its log are still those that the
// session has open. Whoever opens the file anew after one of them has been
// deleted does not see what we write, nor we him.
func (b *Backend) checkFiles(s *session) error {
	known := append([]os.FileInfo{b.file}, s.log...)
	for i, suffix := range []string{"", "-wal", "-shm"} {
		now, err := os.Stat(b.path + suffix)
		switch {
		case err != nil:
			return unusable("%s has been removed while it was in use: %w", b.path+suffix, err)
		case i >= len(known):
			known = append(known, now)
		case !os.SameFile(now, known[i]):
			return unusable("%s has been replaced while it was in use", b.path+suffix)
		}
	}
	s.log = known[1:]
	return nil
}

// next returns a number above all that were given before.
func (t *tx) next() (int64, error) {
	if t.last >= t.ceiling {
		return 0, errNoTokens
	}
	t.last++
	t.counted = true
	return t.last, nil
}

// finish does what is left to do before the commit.
func (t *tx) finish(ctx context.Context) error {
	if t.counted {
		if _, err := t.s.exec("UPDATE meta SET counter = ? WHERE id = 1", t.last); err != nil {
			return err
		}
	}
	return ctx.Err()
}
