package dlm

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// maxBatch is how many grants are renewed in one call to the store.
	maxBatch = 256
	// retryBatch and a single grant are the sizes after a call that failed:
	// one grant whose renewal hangs must not take the others along.
	retryBatch = 16
	// maxCalls bounds the renewal calls under way at once.
	maxCalls = 8
	// joinPatience is how long a release waits for the renewal under way
	// before it cancels it.
	joinPatience = 200 * time.Millisecond
	// suspendTick is how often the keeper looks at the clock though nothing
	// is due: timers do not notice that the machine was suspended.
	suspendTick = 250 * time.Millisecond
	// minRetry is the shortest pause before a renewal is repeated.
	minRetry = 5 * time.Millisecond
)

// keeper renews the grants of one manager and ends those whose time is up. It
// is one goroutine, whatever the number of locks, and never talks to the store
// itself: each batch of renewals is a short-lived goroutine, of which there are
// at most maxCalls. All state is guarded by Manager.mu.
type keeper struct {
	m      *Manager
	heap   dueHeap
	ready  []*grant // due for renewal, waiting for a call
	calls  int      // calls under way
	spare  []*renewalCall
	wake   chan struct{} // has room for one
	lastOK instant       // when a call to the store last succeeded
}

// renewalCall is one batch. Its buffers are used again.
type renewalCall struct {
	grants []*grant
	batch  []driver.Renewal
	cancel context.CancelFunc
}

// run is the keeper's goroutine.
func (k *keeper) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		k.m.mu.Lock()
		wait := k.turn()
		k.m.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case <-k.wake:
		case <-timer.C:
		}
	}
}

// turn does what is due and returns how long nothing will be.
func (k *keeper) turn() time.Duration {
	now := k.m.clock.now()
	renewing := false
	for len(k.heap) > 0 {
		g := k.heap[0]
		if min(g.deadline, g.maxEnd) <= now {
			k.expire(g, now)
			continue
		}
		// Once a batch is being made, take along what will be due soon.
		soon := now
		if renewing {
			soon += k.m.interval(g.lease.TTL) / 4
		}
		if g.busy || g.renewAt > soon {
			break
		}
		renewing = true
		g.busy, g.queued = true, true
		k.ready = append(k.ready, g)
		k.schedule(g)
	}
	k.launch(now)
	if len(k.heap) == 0 {
		return time.Hour
	}
	return min(max(k.heap[0].due-now, 0), suspendTick)
}

// nudge makes the keeper look again.
func (k *keeper) nudge() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// add takes on a grant, whose deadline and renewAt are set.
func (k *keeper) add(g *grant) {
	g.slot = -1
	k.schedule(g)
	if k.heap[0] == g {
		k.nudge()
	}
}

// schedule puts the grant at its place in the heap.
func (k *keeper) schedule(g *grant) {
	g.due = min(g.deadline, g.maxEnd)
	if !g.busy {
		g.due = min(g.due, g.renewAt)
	}
	if g.slot < 0 {
		heap.Push(&k.heap, g)
	} else {
		heap.Fix(&k.heap, g.slot)
	}
}

// expire ends the grant if its time is up.
func (k *keeper) expire(g *grant, now instant) {
	switch {
	case len(g.locks) == 0 || min(g.deadline, g.maxEnd) > now:
	case g.maxEnd <= g.deadline:
		k.lose(g, ReasonMaxHold, nil)
	default:
		k.lose(g, ReasonExpired, g.lastErr)
	}
}

// lose ends a grant and all its handles. No network call comes before it.
func (k *keeper) lose(g *grant, reason LostReason, cause error) {
	if len(g.locks) == 0 {
		return
	}
	m := k.m
	now := m.clock.now()
	err := &LostError{Key: g.key, Token: g.token, Reason: reason, Cause: cause}
	locks := g.locks
	k.drop(g)
	for _, l := range locks {
		l.end(err, true)
		m.report(Event{
			Kind: EventLost, Key: g.key, Value: g.value, Token: g.token, Mode: g.mode,
			Duration: now - l.since, Reason: reason, Err: err,
		})
	}
	switch {
	case reason == ReasonMaxHold:
		m.cleanLater(leftover{lease: g.lease, giveUp: now + g.lease.TTL})
	case reason == ReasonExpired && m.props.SessionLeases:
		// The store would keep it for as long as the session lives.
		m.cleanLater(leftover{lease: g.lease, giveUp: now + 10*m.cfg.CallTimeout})
	}
}

// drop forgets a grant that is being released or was lost.
func (k *keeper) drop(g *grant) {
	g.locks = nil
	if g.slot >= 0 {
		heap.Remove(&k.heap, g.slot)
	}
	delete(k.m.grants, g.value)
	k.m.disown(g)
	if g.queued {
		k.unqueue(g)
	}
}

// launch starts calls for the grants that are ready.
func (k *keeper) launch(now instant) {
	for k.calls < maxCalls && len(k.ready) > 0 {
		c := k.newCall()
		size := maxBatch
		timeout := k.m.cfg.CallTimeout
		for _, g := range k.ready {
			size = min(size, g.batchSize())
			if len(c.grants) >= size {
				break
			}
			// Leave time to repeat the call before the deadline.
			timeout = min(timeout, max((g.deadline-now)/4, minRetry))
			g.call, g.queued = c, false
			c.grants = append(c.grants, g)
			c.batch = append(c.batch, driver.Renewal{Lease: g.lease})
		}
		k.ready = slices.Delete(k.ready, 0, len(c.grants))
		k.calls++
		ctx, cancel := context.WithTimeout(k.m.ctx, timeout)
		c.cancel = cancel
		go k.call(ctx, c)
	}
}

// batchSize is the most grants that may share a call with this one. After a
// failure it is renewed in smaller company, and alone if the store answered
// others meanwhile.
func (g *grant) batchSize() int {
	switch {
	case g.failures == 0:
		return maxBatch
	case g.alone:
		return 1
	}
	return retryBatch
}

func (k *keeper) newCall() *renewalCall {
	if n := len(k.spare); n > 0 {
		c := k.spare[n-1]
		k.spare = k.spare[:n-1]
		return c
	}
	return &renewalCall{grants: make([]*grant, 0, maxBatch), batch: make([]driver.Renewal, 0, maxBatch)}
}

// call is the goroutine of one batch.
func (k *keeper) call(ctx context.Context, c *renewalCall) {
	m := k.m
	start := m.clock.now()
	m.extendBatch(ctx, c.batch)
	c.cancel()

	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.clock.now()
	for i, g := range c.grants {
		k.release(g)
		k.settle(g, &c.batch[i], start, now)
	}
	clear(c.grants)
	clear(c.batch)
	c.grants, c.batch = c.grants[:0], c.batch[:0]
	k.spare = append(k.spare, c)
	k.calls--
	k.nudge()
}

// extendBatch calls the backend, and turns a panic into an error.
func (m *Manager) extendBatch(ctx context.Context, batch []driver.Renewal) {
	defer func() {
		if p := recover(); p != nil {
			for i := range batch {
				batch[i].Err = fmt.Errorf("dlm: backend %s panicked: %v", m.props.Name, p)
			}
		}
	}()
	m.backend.Extend(ctx, batch)
}

// release ends the grant's busy time.
func (k *keeper) release(g *grant) {
	g.busy, g.queued, g.call = false, false, nil
	if g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// settle takes note of the answer to one renewal.
func (k *keeper) settle(g *grant, r *driver.Renewal, start, now instant) {
	m := k.m
	if r.Err == nil {
		k.lastOK = now
	}
	// A handle that has been lost or is being released does not come back.
	k.expire(g, now)
	if len(g.locks) == 0 {
		return
	}
	margin := g.deadline - now
	if lost, ok := errors.AsType[*driver.LostError](r.Err); ok {
		k.lose(g, lost.Reason, lost.Cause)
		return
	}
	event := Event{Kind: EventExtended, Key: g.key, Value: g.value, Token: g.token, Mode: g.mode, Margin: margin}
	switch {
	case r.Err == nil:
		g.lease.TTL = max(r.Lease.TTL, g.lease.TTL)
		g.deadline = max(g.deadline, validUntil(start, &r.Lease))
		g.failures, g.lastErr, g.alone = 0, nil, false
		g.renewAt = m.renewAt(start, g.lease.TTL)
	case m.ctx.Err() != nil:
		return // the manager is closing
	default:
		g.failures++
		g.lastErr = r.Err
		g.alone = k.lastOK >= start
		if g.renewAt != forever {
			// Closer to the deadline, try more often.
			pause := min(m.cfg.backoff(g.failures), jitter(margin/8))
			g.renewAt = now + max(pause, minRetry)
		}
		event.Kind, event.Err = EventExtendFailed, r.Err
	}
	m.report(event)
	k.schedule(g)
	k.nudge()
}

// join waits until no renewal of the grant is under way. The mutex is held
// before and after, but not meanwhile.
func (k *keeper) join(ctx context.Context, g *grant) error {
	if g.queued {
		k.unqueue(g)
	}
	var patience <-chan time.Time
	for g.busy {
		if g.idle == nil {
			g.idle = make(chan struct{})
		}
		idle := g.idle
		k.m.mu.Unlock()
		if patience == nil {
			timer := time.NewTimer(joinPatience)
			defer timer.Stop()
			patience = timer.C
		}
		var err error
		impatient := false
		select {
		case <-idle:
		case <-patience:
			impatient = true
		case <-ctx.Done():
			err = ctx.Err()
		}
		k.m.mu.Lock()
		if err != nil {
			return err
		}
		if impatient && g.call != nil {
			g.call.cancel()
		}
	}
	return nil
}

// unqueue takes a grant whose renewal has not begun out of the line.
func (k *keeper) unqueue(g *grant) {
	k.ready = slices.DeleteFunc(k.ready, func(r *grant) bool { return r == g })
	k.release(g)
}

// validUntil is the deadline of a lease whose call began at start.
func validUntil(start instant, lease *driver.Lease) instant {
	return start - lease.Age + lease.TTL - driftMargin(lease.TTL)
}

// interval is the time between renewals for a TTL.
func (m *Manager) interval(ttl time.Duration) time.Duration {
	if m.cfg.RenewInterval != 0 {
		return m.cfg.RenewInterval
	}
	return ttl / 3
}

// renewAt is when to renew a grant that was won or renewed at start. A little
// chance keeps managers that started together from staying in step.
func (m *Manager) renewAt(start instant, ttl time.Duration) instant {
	if m.cfg.AutoRenew == Off {
		return forever
	}
	interval := m.interval(ttl)
	return start + interval - rand.N(interval/10+1)
}

// backoff is the pause after a number of failures in a row.
func (c *LockConfig) backoff(failures int) time.Duration {
	pause := c.RetryInterval
	for ; failures > 1 && pause < maxRetryInterval; failures-- {
		pause = min(2*pause, maxRetryInterval)
	}
	return jitter(pause)
}

// jitter cuts a pause at random by up to a half.
func jitter(d time.Duration) time.Duration {
	if d <= 1 {
		return d
	}
	return d - rand.N(d/2)
}

// dueHeap orders grants by due.
type dueHeap []*grant

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].slot, h[j].slot = i, j
}

func (h *dueHeap) Push(x any) {
	g := x.(*grant)
	g.slot = len(*h)
	*h = append(*h, g)
}

func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	g := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	g.slot = -1
	return g
}
