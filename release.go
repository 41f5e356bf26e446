package dlm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// lossOf finds the store's word that this very grant is gone, or returns nil.
// The loss of another lock can be part of any error, because a context that
// ends with a lock carries it.
func lossOf(err error, lease *driver.Lease) *LostError {
	lost, ok := errors.AsType[*LostError](err)
	if !ok || lost.Key != lease.Key || lost.Token != lease.Token {
		return nil
	}
	return &LostError{Key: lost.Key, Token: lost.Token, Reason: lost.Reason, Cause: lost.Cause}
}

// extend implements Lock.Extend.
func (m *Manager) extend(ctx context.Context, l *Lock, ttl time.Duration) error {
	if err := checkTTL(ttl); err != nil {
		return err
	}
	ttl = max(ttl, m.props.MinTTL)
	if err := m.cfg.checkRenewInterval(ttl); err != nil {
		return err
	}
	if ctx != nil { // enter says that it is nil
		if err := l.Err(); err != nil {
			return err
		}
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.calls.Done()

	// One renewal of a grant at a time: wait for the keeper's.
	g := l.g
	m.mu.Lock()
	if err := m.keeper.join(ctx, g); err != nil {
		defer m.mu.Unlock()
		if l.err != nil {
			return l.err
		}
		return fmt.Errorf("%w: %w", ErrNotApplied, err)
	}
	m.keeper.expire(g, m.clock.exactly())
	if l.err != nil {
		defer m.mu.Unlock()
		return l.err
	}
	callCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	g.busy, g.cancel = true, cancel
	m.keeper.schedule(g)
	batch := []driver.Renewal{{Lease: g.lease, Err: errNoAnswer}}
	m.mu.Unlock()

	batch[0].Lease.TTL = ttl
	start := m.clock.now()
	err := m.callStore(callCtx, "extend", l.Key, func(ctx context.Context) error {
		m.backend.Extend(ctx, batch)
		return batch[0].Err
	})
	batch[0].Err = err

	m.mu.Lock()
	defer m.mu.Unlock()
	m.keeper.rest(g)
	m.keeper.settle(g, &batch[0], start, m.clock.now())
	switch {
	case l.err != nil:
		return l.err
	case err == nil || errors.Is(err, ErrNotApplied) || permanent(err):
		return err
	}
	return fmt.Errorf("%w: %w", ErrIndeterminate, err)
}

// release implements Lock.Release.
func (m *Manager) release(ctx context.Context, l *Lock) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	if ctx.Err() == nil && l.ownContext(ctx) {
		var cancel context.CancelFunc
		ctx, cancel = detach(ctx)
		defer cancel()
	}
	now := m.clock.now()
	m.mu.Lock()
	for l.releasing != nil {
		other := l.releasing
		m.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return fmt.Errorf("%w: another release is under way: %w", ErrIndeterminate, ctxErr(ctx))
		}
		m.mu.Lock()
	}
	if l.err == nil {
		m.keeper.expire(l.g, now)
	}
	switch {
	case l.answered:
		defer m.mu.Unlock()
		return l.answer
	case l.lost:
		defer m.mu.Unlock()
		l.answered, l.answer = true, l.err
		return l.err
	case m.closed:
		defer m.mu.Unlock()
		return ErrClosed
	}
	m.calls.Add(1)
	defer m.calls.Done()
	l.releasing = make(chan struct{})
	free := m.letGo(l)
	m.mu.Unlock()

	var loss *LostError
	var err error
	if free {
		loss, err = m.free(ctx, l)
	}
	e := Event{
		Kind: EventReleased, Key: l.Key, Value: l.Value, Token: l.Token, Mode: l.Mode, Duration: now - l.since, Err: err,
	}
	if loss != nil {
		err = loss
		e.Kind, e.Reason, e.Err = EventLost, loss.Reason, loss
	}

	m.mu.Lock()
	close(l.releasing)
	l.releasing = nil
	if err == nil || loss != nil {
		l.answered, l.answer = true, err
	}
	first := !l.reported && !l.silent
	l.reported = true
	m.mu.Unlock()
	if first {
		m.observe(e)
	}
	return err
}

// detach returns a context with ctx's values and deadline, but not its end.
func detach(ctx context.Context) (context.Context, context.CancelFunc) {
	out, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	if deadline, ok := ctx.Deadline(); ok {
		var inner context.CancelFunc
		out, inner = context.WithDeadline(out, deadline)
		return out, func() { inner(); cancel() }
	}
	return out, cancel
}

// letGo ends a handle, and says whether its grant goes with it. The mutex is
// held.
func (m *Manager) letGo(l *Lock) (last bool) {
	g := l.g
	if l.err != nil {
		return true // a release that is tried again
	}
	l.end(ErrReleased, false)
	for i, other := range g.locks {
		if other == l {
			g.locks = append(g.locks[:i], g.locks[i+1:]...)
			break
		}
	}
	if len(g.locks) > 0 {
		return false
	}
	m.keeper.drop(g)
	return true
}

// free asks the store to release the grant of a handle that has ended, and
// leaves it to the cleaner if there is no answer. The loss is the answer that
// the grant was not there any more.
func (m *Manager) free(ctx context.Context, l *Lock) (loss *LostError, err error) {
	g := l.g
	m.mu.Lock()
	joined := m.keeper.join(ctx, g)
	lease, deadline, doubtful := g.lease, g.deadline, l.doubtful
	m.mu.Unlock()
	if joined != nil {
		err = fmt.Errorf("%w: a renewal is under way: %w", ErrNotApplied, joined)
	} else {
		loss, doubtful, err = m.releaseLease(ctx, lease, deadline, doubtful)
	}
	if err == nil {
		return loss, nil
	}
	m.mu.Lock()
	l.doubtful = true // from here on the cleaner may release it
	m.mu.Unlock()
	m.cleanLater(leftover{lease: lease, giveUp: m.giveUp(deadline + driftMargin(lease.TTL)), lock: l})
	if doubtful {
		err = fmt.Errorf("%w: %w", ErrIndeterminate, err)
	}
	return nil, err
}

// releaseLease asks the store to release a lease, again and again until it
// answers. doubtful says whether a request may have reached it unanswered.
func (m *Manager) releaseLease(
	ctx context.Context, lease driver.Lease, deadline instant, doubtful bool,
) (*LostError, bool, error) {
	for failures := 1; ; failures++ {
		err := m.callStore(ctx, "release", lease.Key, func(ctx context.Context) error {
			return m.backend.Release(ctx, lease)
		})
		if err == nil {
			return nil, false, nil
		}
		if loss := lossOf(err, &lease); loss != nil {
			// Nobody else can have it before the deadline, so the request
			// that went unanswered must have released it.
			if doubtful && m.clock.now() < deadline {
				loss = nil
			}
			return loss, false, nil
		}
		doubtful = doubtful || !errors.Is(err, ErrNotApplied) && !refused(err)
		if permanent(err) || failures > m.cfg.MaxRetries && m.cfg.MaxRetries >= 0 {
			return nil, doubtful, err
		}
		sleep(ctx, m.ctx, m.cfg.backoff(failures))
		if ctx.Err() != nil || m.ctx.Err() != nil || m.clock.now() >= deadline {
			return nil, doubtful, err
		}
	}
}

// sleep pauses until the time is over or either context ends.
func sleep(ctx, other context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-other.Done():
	case <-timer.C:
	}
}
