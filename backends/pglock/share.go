package pglock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/flow"
)

const (
	// maxShared bounds the calls that share a statement.
	maxShared = 64
	// maxUnderWay is how many statements of one kind are on their way before calls
	// wait to share one.
	maxUnderWay = 3
	// gatherPatience is how long calls that have met wait for a connection. Then
	// each waits for one of its own.
	gatherPatience = 50 * time.Millisecond
)

// sharer makes calls of one kind. Those that are made while others are on their way
// share a statement, which does for each what it would do alone in the simplest
// case, and leaves out the others. What was left out is made alone, and so are all
// if the statement certainly had no effect: the reason may be one of them.
type sharer struct {
	calls   *calls
	st      *statement
	kept    int64
	batches *flow.Batcher[*call]
}

// init makes the sharer ready for a statement whose parameters are lists of what
// the calls ask, and the time for which keys are kept.
func (s *sharer) init(c *calls, st *statement, kept int64) {
	s.calls, s.st, s.kept = c, st, kept
	s.batches = flow.NewBatcher(maxShared, maxUnderWay, s.send)
}

// company is calls that share a statement.
type company struct {
	left   atomic.Int64 // how many have not been given up
	cancel context.CancelFunc
}

// leave has the statement end when all calls that share it have been given up.
func (k *call) leave() {
	if with := k.with.Load(); with != nil && with.left.Add(-1) == 0 {
		with.cancel()
	}
}

// do makes a call about a key in company, and returns its row of the answer. Or it
// returns a function: then the call must be made alone, and the function is called
// after that. What a call asks are texts without commas.
func (s *sharer) do(ctx context.Context, key, owner string, asks ...string) (r row, end func(), err error) {
	k := &call{owner: owner, asks: asks, done: make(chan struct{})}
	k.cancel = k.leave
	if end, err = s.batches.Enter(key, k); end != nil || err != nil {
		return nil, end, err
	}
	select {
	case <-k.done:
	case <-ctx.Done():
		if s.batches.Withdraw(k) {
			return nil, nil, fmt.Errorf("%w: pglock: waiting for other requests: %w", driver.ErrNotApplied, ctx.Err())
		}
		if s.calls.giveUp(k) {
			return nil, nil, fmt.Errorf("pglock: %w: %w", errNoReply, ctx.Err())
		}
	}
	switch {
	case k.err != nil:
		return nil, nil, k.err
	case len(k.rows) > 0:
		return k.rows[0], nil, nil
	}
	return nil, func() {}, nil
}

// send makes the statement of calls that have met.
func (s *sharer) send(take func() []*call) {
	ctx, cancel := context.WithTimeout(s.calls.ctx, gatherPatience)
	session, err := s.calls.connect(ctx)
	cancel()
	batch := take()
	switch {
	case err == nil && len(batch) > 1:
		err = s.together(session, batch)
	case err == nil:
		session.release()
	}
	if errors.Is(err, driver.ErrNotApplied) {
		err = nil
	}
	for _, k := range batch {
		k.err = err
		s.calls.landed(k)
	}
}

func (s *sharer) together(on session, batch []*call) error {
	with := &company{}
	with.left.Store(int64(len(batch)))
	var ctx context.Context
	ctx, with.cancel = context.WithCancel(s.calls.ctx)
	defer with.cancel()
	lists := make([]strings.Builder, len(batch[0].asks))
	for i, k := range batch {
		k.with.Store(with)
		for j, text := range k.asks {
			if i > 0 {
				lists[j].WriteByte(',')
			}
			lists[j].WriteString(text)
		}
	}
	var args []any
	for j := range lists {
		args = append(args, lists[j].String())
	}
	rows, err := s.calls.query(ctx, on, s.st, append(args, s.kept))
	if err != nil {
		return err
	}
	for _, r := range rows {
		f := &scanner{row: r}
		place := f.int()
		if f.err != nil || place < 1 || place > int64(len(batch)) {
			return errStrange
		}
		batch[place-1].rows = []row{f.row}
	}
	return nil
}

// close ends the sharer, after its calls. What is on its way ends by itself.
func (s *sharer) close() {
	for _, k := range s.batches.Close() {
		k.err = driver.ErrClosed
		s.calls.landed(k)
	}
}
