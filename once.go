package dlm

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Once runs the ticks of a job on one node each, though every node has a
// scheduler that would run them. A lock alone does not do that: it keeps runs
// from overlapping, but a fast node may be done, and the lock free again, before
// a node with a slower clock comes to the same tick. So a tick is held for some
// time at least, the minimum hold, however short the run was.
//
// What is guaranteed: within the minimum hold, counted from the start of the
// run, and for as long as the run lasts, no other node runs the same tick. It
// rests on what the lock rests on: see docs/GUARANTEES.md.
//
// What is not guaranteed:
//
//   - That a tick is run exactly once. A node that comes to it after the hold
//     runs it again: make the hold longer than the clocks are apart, plus
//     the longest delay of a scheduler. And if the node dies in the run, nobody
//     repeats it, unless a node asks for that tick after the hold and what was
//     left of the lease: that is one minimum hold, and a tenth, after the last
//     renewal.
//   - That a tick is run at all. The nodes that come first can hinder each other:
//     one whose request gets no answer before its context ends gives the tick back,
//     when the others have been refused; and on a Redis quorum several that come
//     in the same instant may all be refused.
//   - That a run that failed is repeated: it counts as a run.
//   - That runs of different ticks do not overlap, nor that their fencing tokens
//     are ordered. Take a lock in the run if that matters.
//   - On a store whose leases belong to a session (etcd, ZooKeeper, Consul,
//     PostgreSQL advisory locks; Properties.SessionLeases), that the tick stays
//     held after the process that ran it has ended: call Wait before it does.
//     On other stores the hold outlasts the process, and Manager.Close, too.
//
// It is safe for concurrent use.
type Once struct {
	m       LockManager
	job     string
	minHold time.Duration
	ttl     time.Duration

	mu    sync.Mutex
	holds int           // claims that are not over
	idle  chan struct{} // closed when holds falls to 0; nil if nobody waits
}

// onceSeparator stands between the job and the tick in the key of a lock. A tick
// must not contain it, so that no two pairs meet.
const onceSeparator = "@"

// NewOnce returns the guard of a job. All nodes must use the same name and the
// same minimum hold, which must be between [MinTTL] and half of [MaxTTL]. The
// manager must renew its locks, and must not bound how long they are held to less
// than the minimum hold.
func NewOnce(m LockManager, job string, minHold time.Duration) (*Once, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	if job == "" {
		return nil, invalidf("job is empty")
	}
	if err := checkKey(job + onceSeparator); err != nil {
		return nil, err
	}
	if minHold < MinTTL || minHold > MaxTTL/2 {
		return nil, invalidf("minimum hold is %v, must be between %v and %v", minHold, MinTTL, MaxTTL/2)
	}
	if mgr, ok := m.(*Manager); ok {
		if err := mgr.cfg.checkOnce(minHold); err != nil {
			return nil, err
		}
	}
	// More than the minimum hold, for the drift margin and for a timer that is
	// late: the hold then needs no renewal.
	return &Once{m: m, job: job, minHold: minHold, ttl: minHold + minHold/20 + 20*time.Millisecond}, nil
}

func (c *LockConfig) checkOnce(minHold time.Duration) error {
	if c.MaxHold > 0 && c.MaxHold < minHold {
		return invalidf("minimum hold is %v, must not exceed LockConfig.MaxHold, %v", minHold, c.MaxHold)
	}
	return c.checkAutoRenew("Once")
}

// TickAt names the tick of a point in time: that for which the run was
// planned, not that at which it began, which differs from node to node.
func TickAt(planned time.Time) string { return planned.UTC().Format(time.RFC3339Nano) }

// Do runs fn for a tick if no other node has run it, or does so, within the
// minimum hold. Otherwise the error matches [ErrHeld], and fn is not called. It
// returns when fn has returned; the tick stays held in the background.
//
// A tick is any text without "@", such as that of [TickAt]. An empty one is for
// schedulers that cannot tell ticks apart: the minimum hold must then be
// shorter than the time between two runs.
//
// The context passed to fn is derived from ctx and ends when the lock is lost,
// because another node may then run the tick; the error matches [ErrLost] in
// that case, whatever fn returned. Otherwise it is that of fn, joined with that
// of the release if the run lasted longer than the minimum hold. A panic in fn
// goes on, and counts as a run.
func (o *Once) Do(ctx context.Context, tick string, fn func(ctx context.Context) error) (err error) {
	if fn == nil {
		return invalidf("function is nil")
	}
	c, err := o.Claim(ctx, tick)
	if err != nil {
		return err
	}
	defer func() {
		// This runs, too, when fn panics.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		err = errors.Join(err, c.End(ctx))
	}()
	return fn(c.lock.Context(ctx))
}

// Claim is a tick that this node runs. It is safe for concurrent use.
type Claim struct {
	o     *Once
	lock  *Lock
	until time.Time // end of the minimum hold

	mu    sync.Mutex
	ended bool
}

// Claim is Do for those who cannot pass the run as a function: it claims the
// tick, and End must be called when the run is over.
func (o *Once) Claim(ctx context.Context, tick string) (*Claim, error) {
	if ctx == nil {
		return nil, invalidf("context is nil")
	}
	if strings.Contains(tick, onceSeparator) {
		return nil, invalidf("tick %q must not contain %q", tick, onceSeparator)
	}
	// Whoever runs a tick does not run it again within the run.
	lock, err := o.m.TryLock(WithOwner(ctx, ""), o.job+onceSeparator+tick, o.ttl)
	if err != nil {
		return nil, err
	}
	if lock.g != nil { // of another manager than the one that was checked
		if err := lock.g.m.cfg.checkOnce(o.minHold); err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
			defer cancel()
			return nil, errors.Join(err, o.m.ReleaseLock(ctx, lock))
		}
	}
	lock.keep()
	if lost := lock.Err(); lost != nil {
		// The manager may have closed before, and the tick may be free.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		if err := o.m.ReleaseLock(ctx, lock); err != nil {
			return nil, err
		}
		return nil, lost
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.holds++
	return &Claim{o: o, lock: lock, until: lock.AcquiredAt.Add(o.minHold)}, nil
}

// Lock returns the lock behind the claim, to watch it: its Context ends when the
// tick is lost. Releasing it would end the minimum hold.
func (c *Claim) Lock() *Lock { return c.lock }

// End says that the run is over. If the minimum hold is over, too, it releases
// the tick and returns the error of that; otherwise it returns at once, and the
// tick is released in the background. If the tick was lost during the run, the
// error matches [ErrLost]. A second call does nothing and returns nil.
func (c *Claim) End(ctx context.Context) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	c.mu.Lock()
	ended := c.ended
	c.ended = true
	c.mu.Unlock()
	if ended {
		return nil
	}
	left := time.Until(c.until)
	if err := c.lock.Err(); err != nil || left <= 0 {
		defer c.o.over()
		return c.o.m.ReleaseLock(ctx, c.lock)
	}
	c.lock.finalize(c.until)
	time.AfterFunc(left, func() {
		defer c.o.over()
		ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
		defer cancel()
		_ = c.o.m.ReleaseLock(ctx, c.lock) // it ends with its TTL at the latest
	})
	return nil
}

// over counts a claim as over.
func (o *Once) over() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.holds--; o.holds == 0 && o.idle != nil {
		close(o.idle)
		o.idle = nil
	}
}

// Wait waits until no run is under way and no tick is held any more, or until
// ctx ends, whose error it then returns.
func (o *Once) Wait(ctx context.Context) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	for {
		o.mu.Lock()
		if o.holds == 0 {
			o.mu.Unlock()
			return nil
		}
		if o.idle == nil {
			o.idle = make(chan struct{})
		}
		idle := o.idle
		o.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return fmt.Errorf("dlm: ticks are still held: %w", ctxErr(ctx))
		}
	}
}
