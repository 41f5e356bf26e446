package dlm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// lossOf takes reason and cause out of a backend's error.
func lossOf(err error) (LostReason, error) {
	if lost, ok := errors.AsType[*driver.LostError](err); ok {
		return lost.Reason, lost.Cause
	}
	return ReasonGone, err
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
	m.keeper.expire(g, m.clock.now())
	if l.err != nil {
		defer m.mu.Unlock()
		return l.err
	}
	g.busy = true
	m.keeper.schedule(g)
	batch := []driver.Renewal{{Lease: g.lease}}
	m.mu.Unlock()

	batch[0].Lease.TTL = ttl
	start := m.clock.now()
	err := m.callStore(ctx, "extend", l.Key, func(ctx context.Context) error {
		m.backend.Extend(ctx, batch)
		return batch[0].Err
	})
	batch[0].Err = err

	m.mu.Lock()
	defer m.mu.Unlock()
	m.keeper.release(g)
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

	var err error
	if free {
		err = m.free(ctx, l)
	}

	m.mu.Lock()
	close(l.releasing)
	l.releasing = nil
	if err == nil || errors.Is(err, ErrLost) {
		l.answered, l.answer = true, err
	}
	first := !l.reported
	l.reported = true
	m.mu.Unlock()
	if first {
		e := Event{
			Kind: EventReleased, Key: l.Key, Value: l.Value, Token: l.Token, Mode: l.Mode,
			Duration: now - l.since, Err: err,
		}
		if lost, ok := errors.AsType[*LostError](err); ok {
			e.Kind, e.Reason = EventLost, lost.Reason
		}
		m.observe(e)
	}
	return err
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
// leaves it to the cleaner if there is no answer.
func (m *Manager) free(ctx context.Context, l *Lock) error {
	g := l.g
	m.mu.Lock()
	err := m.keeper.join(ctx, g)
	lease, deadline, doubtful := g.lease, g.deadline, l.doubtful
	m.mu.Unlock()
	if err != nil {
		err = fmt.Errorf("%w: a renewal is under way: %w", ErrNotApplied, ctxErr(ctx))
	} else {
		doubtful, err = m.releaseLease(ctx, lease, deadline, doubtful)
	}
	if err == nil || errors.Is(err, ErrLost) {
		return err
	}
	m.mu.Lock()
	l.doubtful = true // from here on the cleaner may release it
	m.mu.Unlock()
	m.cleanLater(leftover{lease: lease, giveUp: deadline + driftMargin(lease.TTL), lock: l})
	if doubtful {
		return fmt.Errorf("%w: %w", ErrIndeterminate, err)
	}
	return err
}

// releaseLease asks the store to release a lease, again and again until it
// answers. doubtful says whether a request may have reached it unanswered.
func (m *Manager) releaseLease(
	ctx context.Context, lease driver.Lease, deadline instant, doubtful bool,
) (bool, error) {
	for failures := 1; ; failures++ {
		err := m.callStore(ctx, "release", lease.Key, func(ctx context.Context) error {
			return m.backend.Release(ctx, lease)
		})
		if err == nil {
			return false, nil
		}
		if errors.Is(err, ErrLost) {
			// Nobody else can have it before the deadline, so the request
			// that went unanswered must have released it.
			if doubtful && m.clock.now() < deadline {
				return false, nil
			}
			reason, cause := lossOf(err)
			return false, &LostError{Key: lease.Key, Token: lease.Token, Reason: reason, Cause: cause}
		}
		doubtful = doubtful || !errors.Is(err, ErrNotApplied) && !refused(err)
		if permanent(err) || failures > m.cfg.MaxRetries && m.cfg.MaxRetries >= 0 {
			return doubtful, err
		}
		sleep(ctx, m.ctx, m.cfg.backoff(failures))
		if ctx.Err() != nil || m.ctx.Err() != nil || m.clock.now() >= deadline {
			return doubtful, err
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
