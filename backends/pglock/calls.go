package pglock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// adriftPatience is how much longer a statement may take whose caller has gone.
// Then its connection is closed.
const adriftPatience = 5 * time.Second

// errNoReply says that a statement was given up after it had been sent.
var errNoReply = errors.New("no reply yet")

// calls makes statements. They end with their contexts, but the connection does
// not: a driver that is told to stop closes the connection, while the server may
// still be about to carry the statement out, so that an acquisition would come
// behind its withdrawal and be granted to nobody. So a statement is left to end
// by itself, out of sight of its caller, and a withdrawal waits for those of the
// same owner. What breaks by itself or takes longer than adriftPatience may still
// come late; it then ends with its TTL, or with its ticket.
type calls struct {
	db     database
	opts   *Options
	ctx    context.Context // ends when the backend is closed
	cancel context.CancelFunc

	mu sync.Mutex
	// adrift are the calls that were given up after they had been sent, by owner.
	adrift map[string][]*call
	closed bool
}

// call is a statement under way.
type call struct {
	owner  string
	cancel context.CancelFunc
	timer  *time.Timer   // cancels it once its caller has gone; guarded by calls.mu
	done   chan struct{} // closed when rows and err are set
	rows   []row
	err    error

	// Of one that shares a statement, or waits to:
	asks []string
	with atomic.Pointer[company] // set when it is sent
}

func newCalls(db database, opts *Options) *calls {
	c := &calls{db: db, opts: opts, adrift: make(map[string][]*call)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// do makes a statement. The owner is set for acquisitions: nothing waits for the
// others, as they do no harm when they come late.
func (c *calls) do(ctx context.Context, owner string, st *statement, args ...any) ([]row, error) {
	s, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	return c.on(ctx, s, owner, st, args...)
}

// on makes a statement on a session, and gives it back.
func (c *calls) on(ctx context.Context, s session, owner string, st *statement, args ...any) ([]row, error) {
	k := &call{owner: owner, done: make(chan struct{})}
	var detached context.Context
	detached, k.cancel = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer c.landed(k)
		k.rows, k.err = c.query(detached, s, st, args)
	}()
	select {
	case <-k.done:
		return k.rows, k.err
	case <-ctx.Done():
	}
	if !c.giveUp(k) {
		return k.rows, k.err
	}
	return nil, fmt.Errorf("pglock: %w: %w", errNoReply, ctx.Err())
}

// ask makes a statement without parameters.
func (c *calls) ask(ctx context.Context, text string) ([]row, error) {
	return c.do(ctx, "", &statement{"", text})
}

// connect takes a connection out of the pool. A panic of what the user has hooked
// into that is an error.
func (c *calls) connect(ctx context.Context) (s session, err error) {
	defer func() {
		if p := recover(); p != nil {
			s, err = nil, fmt.Errorf("%w: pglock: the driver panicked: %v", driver.ErrNotApplied, p)
		}
	}()
	s, err = c.db.connect(ctx)
	if err != nil {
		if over := ended(ctx, err); over != nil {
			return nil, fmt.Errorf("%w: pglock: waiting for a connection: %w", driver.ErrNotApplied, over)
		}
		return nil, c.opts.classify(err)
	}
	if err := ctx.Err(); err != nil {
		s.release()
		return nil, fmt.Errorf("%w: pglock: %w", driver.ErrNotApplied, err)
	}
	return s, nil
}

// query is the part of a call that its caller may not live to see.
func (c *calls) query(ctx context.Context, s session, st *statement, args []any) (rows []row, err error) {
	defer s.release()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("pglock: the driver panicked: %v", p)
		}
	}()
	rows, err = s.query(ctx, st, args)
	if state(err) == stateIsolation {
		c.db.careful()
		rows, err = s.query(ctx, st, args)
	}
	return rows, c.opts.classify(err)
}

// landed is the end of a call.
func (c *calls) landed(k *call) {
	k.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	close(k.done)
	if k.timer == nil {
		return // its caller is there
	}
	k.timer.Stop()
	left := slices.DeleteFunc(c.adrift[k.owner], func(other *call) bool { return other == k })
	if len(left) == 0 {
		delete(c.adrift, k.owner)
	} else {
		c.adrift[k.owner] = left
	}
}

// giveUp lets a call go on without its caller. It returns false if the answer
// has come all the same.
func (c *calls) giveUp(k *call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-k.done:
		return false
	default:
	}
	if c.closed {
		k.cancel()
		return true
	}
	k.timer = time.AfterFunc(adriftPatience, k.cancel)
	c.adrift[k.owner] = append(c.adrift[k.owner], k)
	return true
}

// await waits until no acquisition of this owner is on its way any more.
func (c *calls) await(ctx context.Context, owner string) error {
	for {
		c.mu.Lock()
		var ahead *call
		if owner != "" && len(c.adrift[owner]) > 0 {
			ahead = c.adrift[owner][0]
		}
		c.mu.Unlock()
		if ahead == nil {
			return nil
		}
		select {
		case <-ahead.done:
		case <-ctx.Done():
			return fmt.Errorf("%w: pglock: an earlier request is not answered: %w", driver.ErrNotApplied, ctx.Err())
		}
	}
}

// close ends what is adrift.
func (c *calls) close() {
	c.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, list := range c.adrift {
		for _, k := range list {
			k.cancel()
		}
	}
}
