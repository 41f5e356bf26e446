package dlm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// errLate says that a grant was over before its answer came.
var errLate = errors.New("dlm: the lease had run out before the store's answer arrived")

// ctxErr is why a context ended. It matches the context's error and its cause.
func ctxErr(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == nil || cause == nil || errors.Is(err, cause) {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// acquire implements Acquire.
func (m *Manager) acquire(ctx context.Context, key string, ttl time.Duration, opts *AcquireOptions) (*Lock, error) {
	began := m.clock.now()
	req, maxHold, err := m.prepare(key, ttl, opts)
	if err == nil {
		err = m.enter(ctx)
	}
	if err != nil {
		m.observe(Event{Kind: EventAcquireFailed, Key: key, Mode: req.Mode, Err: err, Duration: m.clock.now() - began})
		return nil, err
	}
	defer m.calls.Done()

	a := acquisition{m: m, req: req, maxHold: maxHold, label: m.cfg.Label}
	if opts != nil && opts.Label != "" {
		a.label = opts.Label
	}
	l, err := a.enter(ctx)
	e := Event{Kind: EventAcquired, Key: key, Mode: req.Mode, Waited: a.queued, Duration: m.clock.now() - began, Err: err}
	if err != nil {
		e.Kind = EventAcquireFailed
	} else {
		e.Value, e.Token, e.Mode = l.Value, l.Token, l.Mode
	}
	m.observe(e)
	return l, err
}

// prepare checks the arguments of an acquisition before anything is sent.
func (m *Manager) prepare(key string, ttl time.Duration, opts *AcquireOptions) (driver.Request, time.Duration, error) {
	maxHold := m.cfg.MaxHold
	if opts != nil && opts.MaxHold > 0 {
		maxHold = opts.MaxHold
	}
	for _, err := range []error{checkKey(key), checkTTL(ttl), m.cfg.checkRenewInterval(max(ttl, m.props.MinTTL))} {
		if err != nil {
			return driver.Request{}, 0, err
		}
	}
	req, err := opts.request(key, ttl, &m.props)
	req.Manager = m.id
	return req, maxHold, err
}

// acquisition is one call of Acquire.
type acquisition struct {
	m       *Manager
	req     driver.Request
	maxHold time.Duration
	label   string

	asked    instant // start of the last Acquire that the store answered
	ticket   int64   // from that answer
	ups      int     // listener.ups before it
	traces   bool    // the store may hold a ticket or a grant of ours
	queued   bool    // we have waited
	waiting  instant // since then
	waiter   *waiter
	failures int // failed calls in a row
	lastErr  error
	conflict *LockConflictError // the last refusal
}

// enter takes the lock, by re-entry if the context's owner has it already.
func (a *acquisition) enter(ctx context.Context) (*Lock, error) {
	owner := OwnerFromContext(ctx)
	if owner == "" {
		g, err := a.run(ctx)
		if err != nil {
			return nil, err
		}
		return a.m.admit(g)
	}
	m, key := a.m, ownedKey{key: a.req.Key, owner: owner}
	for {
		m.mu.Lock()
		o := m.owned[key]
		if o == nil {
			o = &owned{ready: make(chan struct{})}
			m.owned[key] = o
			m.mu.Unlock()
			return a.enterFirst(ctx, key, o)
		}
		m.mu.Unlock()
		select {
		case <-o.ready:
		default:
			if !a.req.Enqueue {
				return nil, &LockConflictError{Key: a.req.Key}
			}
		}
		select {
		case <-o.ready:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", &LockConflictError{Key: a.req.Key}, ctxErr(ctx))
		case <-m.ctx.Done():
			return nil, ErrClosed
		}
		if o.g == nil {
			continue
		}
		l, err := m.reenter(ctx, o.g, &a.req, a.maxHold)
		if l != nil || err != nil {
			return l, err
		}
	}
}

// enterFirst takes the lock for an owner that does not have it yet. Others of
// the same owner wait for the outcome.
func (a *acquisition) enterFirst(ctx context.Context, key ownedKey, o *owned) (l *Lock, err error) {
	m := a.m
	defer func() {
		if l == nil {
			m.mu.Lock()
			if m.owned[key] == o {
				delete(m.owned, key)
			}
			m.mu.Unlock()
		}
		close(o.ready)
	}()
	g, err := a.run(ctx)
	if err != nil {
		return nil, err
	}
	g.owned = &key
	o.g = g
	if l, err = m.admit(g); err != nil {
		o.g = nil
	}
	return l, err
}

// disown closes a grant to re-entry. The mutex is held.
func (m *Manager) disown(g *grant) {
	if g.owned == nil {
		return
	}
	if o := m.owned[*g.owned]; o != nil && o.g == g {
		delete(m.owned, *g.owned)
	}
}

// reenter adds a handle to a grant, or returns nil if the grant is over.
func (m *Manager) reenter(ctx context.Context, g *grant, req *driver.Request, maxHold time.Duration) (*Lock, error) {
	now := m.clock.now()
	m.mu.Lock()
	m.keeper.expire(g, now)
	if len(g.locks) == 0 {
		m.mu.Unlock()
		return nil, nil
	}
	if err := g.admits(req); err != nil {
		m.mu.Unlock()
		return nil, err
	}
	l := g.newLock(now)
	if maxHold > 0 {
		g.maxEnd = min(g.maxEnd, now+maxHold)
		m.keeper.schedule(g)
		m.keeper.nudge()
	}
	longer := req.TTL > g.lease.TTL
	l.silent = longer // until that has succeeded
	m.mu.Unlock()
	if !longer {
		return l, nil
	}
	// An inner lock that wants to last longer prolongs the whole.
	err := m.extend(ctx, l, req.TTL)
	m.mu.Lock()
	over := l.lost
	l.silent = err != nil
	m.mu.Unlock()
	switch {
	case over:
		return nil, nil
	case err == nil:
		return l, nil
	}
	return nil, errors.Join(err, m.release(context.WithoutCancel(ctx), l))
}

// admits says why an owner's grant does not serve a further request of its own,
// or returns nil. An exclusive lock is as good as a shared one; the other way
// round the owner would wait for itself.
func (g *grant) admits(req *driver.Request) error {
	switch {
	case g.limit != req.Limit:
		return &LimitError{Key: g.key, Want: req.Limit, Have: g.limit}
	case g.mode == Shared && req.Mode == Exclusive:
		return &UpgradeError{Key: g.key, Token: g.token}
	}
	return nil
}

// run asks the store until it has the grant, and leaves nothing behind if it
// fails.
func (a *acquisition) run(ctx context.Context) (*grant, error) {
	m := a.m
	a.req.Owner = newValue(a.label)
	if a.req.Enqueue {
		// Events can arrive as soon as the store has seen the request.
		a.waiter = m.addWaiter(a.req.Owner)
		defer m.removeWaiter(a.waiter)
	}
	g, err := a.loop(ctx)
	if a.queued {
		m.observe(Event{Kind: EventWaitEnded, Key: a.req.Key, Mode: a.req.Mode, Duration: m.clock.now() - a.waiting})
	}
	if err != nil && a.traces {
		if werr := m.withdraw(ctx, &a.req); werr != nil {
			err = fmt.Errorf("%w; %w", err, werr)
		}
	}
	return g, err
}

// loop asks, waits, and asks again. Repeating a request with the same owner
// also finds out what became of one that was not answered.
func (a *acquisition) loop(ctx context.Context) (*grant, error) {
	m := a.m
	for {
		if a.req.Enqueue {
			a.ups = m.subscriptions()
		}
		start := m.clock.now()
		var lease driver.Lease
		err := m.callStore(ctx, "acquire", a.req.Key, func(ctx context.Context) (err error) {
			if a.queued && m.props.LivenessWindow > 0 {
				// A refresh that hangs must not outlast the ticket.
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, m.props.LivenessWindow/4)
				defer cancel()
			}
			lease, err = m.backend.Acquire(ctx, a.req)
			return err
		})
		if err == nil {
			a.traces = true
			if deadline := validUntil(start, &lease); deadline > m.clock.now() {
				return a.grant(&lease, deadline, start), nil
			}
			err = errLate
		}
		if held, ok := errors.AsType[*driver.HeldError](err); ok {
			a.failures, a.lastErr = 0, nil
			a.conflict = conflict(a.req.Key, held)
			if !a.req.Enqueue {
				return nil, a.conflict
			}
			a.traces = true
			a.asked, a.ticket = start, held.Ticket
			if g, err := a.wait(ctx, held); g != nil || err != nil {
				return g, err
			}
			continue
		}

		a.failures++
		if end := ctx.Err(); a.conflict == nil || end == nil || !errors.Is(err, ErrNotApplied) || !errors.Is(err, end) {
			a.lastErr = err
		} // else the context of a waiter ended as it was to look again
		if !errors.Is(err, ErrNotApplied) && !refused(err) {
			a.traces = true
		}
		if g := a.granted(); g != nil {
			return g, nil
		}
		if err := a.ended(ctx); err != nil {
			return nil, err
		}
		if permanent(err) || a.failures > m.cfg.MaxRetries && m.cfg.MaxRetries >= 0 {
			return nil, err
		}
		sleep(ctx, m.ctx, m.cfg.backoff(a.failures))
		if err := a.ended(ctx); err != nil {
			return nil, err
		}
	}
}

// ended returns the error for a context that has ended, or for a manager that
// was closed, or nil.
func (a *acquisition) ended(ctx context.Context) error {
	switch {
	case a.m.ctx.Err() != nil:
		return a.failed(ErrClosed)
	case ctx.Err() != nil:
		return a.failed(ctxErr(ctx))
	}
	return nil
}

// failed puts together what ended the call and what stood in its way until
// then.
func (a *acquisition) failed(end error) error {
	if a.conflict != nil {
		end = fmt.Errorf("%w; %w", end, a.conflict)
	}
	if a.lastErr != nil {
		end = fmt.Errorf("%w; last failure: %w", end, a.lastErr)
	}
	return end
}

// grant builds the grant for a lease.
func (a *acquisition) grant(lease *driver.Lease, deadline, start instant) *grant {
	m := a.m
	g := &grant{
		m: m, key: a.req.Key, value: a.req.Owner, token: lease.Token, mode: a.req.Mode, limit: a.req.Limit,
		lease: *lease, deadline: deadline, maxEnd: forever, slot: -1,
	}
	g.lease.Age = 0 // it is in the deadline
	if a.maxHold > 0 {
		g.maxEnd = m.clock.now() + a.maxHold
	}
	m.planRenewal(g, start, m.clock.now())
	return g
}

// admit makes a grant a held lock. If the manager was closed meanwhile, it
// gives the grant back.
func (m *Manager) admit(g *grant) (*Lock, error) {
	m.mu.Lock()
	if !m.closed {
		l := g.newLock(m.clock.now())
		m.grants[g.value] = g
		m.keeper.add(g)
		if m.props.SessionLeases {
			m.listenNow()
		}
		m.mu.Unlock()
		return l, nil
	}
	m.mu.Unlock()
	err := ErrClosed
	req := driver.Request{Key: g.key, Owner: g.value, TTL: g.lease.TTL, Mode: g.mode}
	if werr := m.withdraw(context.Background(), &req); werr != nil {
		err = fmt.Errorf("%w; %w", err, werr)
	}
	return nil, err
}
