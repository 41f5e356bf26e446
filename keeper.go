package dlm

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// joinPatience is how long a release waits for the renewal under way
	// before it cancels it.
	joinPatience = 500 * time.Millisecond
	// suspendTick is how often the keeper looks at the clock though nothing
	// is due: timers do not notice that the machine was suspended.
	suspendTick = 250 * time.Millisecond
	// minRetry is the shortest pause before a renewal is repeated, and the
	// shortest time-out of one.
	minRetry = 5 * time.Millisecond
	// maxLosses is how many grants may end before others get the mutex.
	maxLosses = 1000
)

// errNoAnswer stands in every entry of a batch until the backend answers it.
var errNoAnswer = errors.New("dlm: the backend did not answer this renewal")

// keeper renews the grants of one manager and ends those whose time is up. It
// is one goroutine, whatever the number of locks, and never talks to the store
// itself: each batch of renewals is a short-lived goroutine, and the number of
// those is bounded. All state is guarded by Manager.mu.
type keeper struct {
	m      *Manager
	heap   dueHeap
	lanes  [3]lane
	wake   chan struct{} // has room for one
	lastOK instant       // when a call to the store last succeeded
	wakeAt instant       // when the goroutine wakes up unless it is nudged
	idle   bool          // no grant has come since the last turn that found none
}

// lane is a queue of grants that are due for renewal. There are several, so
// that renewals which hang or fail do not hold up the others: a grant moves to
// the second after a failure, in smaller company, and to the third, alone, if
// the store answered others meanwhile. To find out whether it does, one in
// eight goes alone at once.
type lane struct {
	line  []*grant // nil where one has left
	head  int
	calls int // under way
	spare []*renewalCall

	maxBatch int
	maxCalls int
	// share of the time left until the deadline that a call may take.
	share time.Duration
}

func newKeeper(m *Manager) keeper {
	return keeper{
		m:    m,
		wake: make(chan struct{}, 1),
		lanes: [3]lane{
			{maxBatch: 256, maxCalls: 8, share: 2},
			{maxBatch: 16, maxCalls: 16, share: 4},
			{maxBatch: 1, maxCalls: 64, share: 8},
		},
		lastOK: -1,
	}
}

// renewalCall is one batch. Its buffers are used again.
type renewalCall struct {
	grants []*grant
	batch  []driver.Renewal
}

// run is the keeper's goroutine.
func (k *keeper) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		k.m.mu.Lock()
		wait := k.turn()
		k.wakeAt = k.m.clock.now() + wait
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
	for losses := 0; len(k.heap) > 0; {
		g := k.heap[0]
		if min(g.deadline, g.maxEnd) <= now {
			if losses++; losses > maxLosses {
				break
			}
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
		g.busy = true
		k.enqueue(g)
		k.schedule(g)
	}
	for i := range k.lanes {
		k.launch(&k.lanes[i], now)
	}
	if len(k.heap) == 0 {
		// Locks that are held for a moment follow each other: stay awake for
		// the next, so that it need not wake the goroutine up.
		if k.idle {
			return time.Hour
		}
		k.idle = true
		return suspendTick
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
	k.idle = false
	k.schedule(g)
	if g.due < k.wakeAt {
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
		if l.silent {
			continue
		}
		m.report(Event{
			Kind: EventLost, Key: g.key, Value: g.value, Token: g.token, Mode: g.mode,
			Duration: now - l.since, Reason: reason, Err: err,
		})
	}
	// What the store would keep although it is over here.
	if reason == ReasonMaxHold || reason == ReasonExpired && m.props.SessionLeases {
		m.cleanLater(leftover{lease: g.lease, giveUp: m.giveUp(now + g.lease.TTL)})
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
	k.unqueue(g)
}

// enqueue puts a grant, which is busy, into its lane.
func (k *keeper) enqueue(g *grant) {
	n := &k.lanes[0]
	switch {
	case g.alone:
		n = &k.lanes[2]
	case g.failures > 0:
		n = &k.lanes[1]
	}
	if n.head > len(n.line)/2 {
		n.line = append(n.line[:0], n.line[n.head:]...)
		n.head = 0
		for i, other := range n.line {
			if other != nil {
				other.place = i
			}
		}
	}
	g.lane, g.place = n, len(n.line)
	n.line = append(n.line, g)
}

// unqueue takes a grant whose renewal has not begun out of its lane.
func (k *keeper) unqueue(g *grant) {
	if g.lane == nil {
		return
	}
	g.lane.line[g.place] = nil
	k.rest(g)
	if g.slot >= 0 {
		k.schedule(g)
	}
}

// launch starts calls for the grants in a lane.
func (k *keeper) launch(n *lane, now instant) {
	for n.calls < n.maxCalls {
		c := n.newCall()
		timeout := k.m.cfg.CallTimeout
		for len(c.grants) < n.maxBatch && n.head < len(n.line) {
			g := n.line[n.head]
			n.line[n.head] = nil
			n.head++
			if g == nil {
				continue
			}
			g.lane = nil
			// Leave time to repeat the call before the deadline.
			timeout = min(timeout, max((g.deadline-now)/n.share, minRetry))
			c.grants = append(c.grants, g)
			c.batch = append(c.batch, driver.Renewal{Lease: g.lease, Err: errNoAnswer})
		}
		if len(c.grants) == 0 {
			n.spare = append(n.spare, c)
			return
		}
		ctx, cancel := context.WithTimeout(k.m.ctx, timeout)
		for _, g := range c.grants {
			g.cancel = cancel
		}
		n.calls++
		k.m.calls.Go(func() {
			defer cancel()
			k.call(ctx, n, c)
		})
	}
}

func (n *lane) newCall() *renewalCall {
	if last := len(n.spare) - 1; last >= 0 {
		c := n.spare[last]
		n.spare = n.spare[:last]
		return c
	}
	return &renewalCall{grants: make([]*grant, 0, n.maxBatch), batch: make([]driver.Renewal, 0, n.maxBatch)}
}

// call is the goroutine of one batch.
func (k *keeper) call(ctx context.Context, n *lane, c *renewalCall) {
	m := k.m
	start := m.clock.now()
	m.extendBatch(ctx, c.batch)

	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.clock.now()
	for i, g := range c.grants {
		k.rest(g)
		k.settle(g, &c.batch[i], start, now)
	}
	clear(c.grants)
	clear(c.batch)
	c.grants, c.batch = c.grants[:0], c.batch[:0]
	n.spare = append(n.spare, c)
	n.calls--
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

// rest ends the grant's busy time.
func (k *keeper) rest(g *grant) {
	g.busy, g.lane, g.cancel = false, nil, nil
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
	if loss := lossOf(r.Err, &g.lease); loss != nil {
		k.lose(g, loss.Reason, loss.Cause)
		return
	}
	margin := g.deadline - now
	event := Event{Kind: EventExtended, Key: g.key, Value: g.value, Token: g.token, Mode: g.mode, Margin: margin}
	switch {
	case r.Err == nil:
		g.lease.TTL = max(r.Lease.TTL, g.lease.TTL)
		g.deadline = max(g.deadline, validUntil(start, &r.Lease))
		g.failures, g.lastErr, g.alone = 0, nil, false
		m.planRenewal(g, start, now)
	case m.ctx.Err() != nil:
		return // the manager is closing
	default:
		g.failures++
		g.lastErr = r.Err
		g.alone = k.lastOK >= start || rand.N(8) == 0
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
	k.unqueue(g)
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
		var ended error
		impatient := false
		select {
		case <-idle:
		case <-patience:
			impatient = true
		case <-ctx.Done():
			ended = ctxErr(ctx) // not under the mutex, which a lock's context takes
		}
		k.m.mu.Lock()
		if ended != nil {
			return ended
		}
		if impatient && g.cancel != nil {
			g.cancel()
		}
	}
	return nil
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

// planRenewal sets when to renew a grant that was won or renewed by a call
// that began at start. A little chance keeps managers that started together
// from staying in step.
func (m *Manager) planRenewal(g *grant, start, now instant) {
	if m.cfg.AutoRenew == Off || g.ending {
		g.renewAt = forever
		return
	}
	interval := m.interval(g.lease.TTL)
	g.renewAt = start + interval - rand.N(interval/10+1)
	// A grant can have less than its TTL to live: it was handed over, or its
	// session is older.
	if left := g.deadline - now; g.renewAt > now+left/10*9 {
		g.renewAt = now + left/2
	}
	g.slack = g.deadline - g.renewAt
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
