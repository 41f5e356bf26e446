package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// client is one backend of a case. Its methods bound every call by time, and
// fill in what a request leaves open: a long TTL and limit 1.
type client struct {
	env      *env
	inner    driver.Backend // as the harness opened it
	backend  driver.Backend // recorded and guarded
	recorder *recorder
	killed   bool
}

func (cl *client) acquire(req driver.Request) (driver.Lease, error) {
	if req.TTL == 0 {
		req.TTL = cl.env.long
	}
	if req.Limit == 0 {
		req.Limit = 1
	}
	ctx, cancel := context.WithTimeout(context.Background(), cl.env.patience)
	defer cancel()
	return cl.backend.Acquire(ctx, req)
}

const (
	// slowCall is how long a call takes at least that fails because the machine
	// is busy, and slowCalls is how often that is borne in a row.
	slowCall  = 100 * time.Millisecond
	slowCalls = 4
)

// insist makes a call until it has an answer: where a store takes too long,
// backends give up without knowing the outcome, and package dlm asks again. It says
// whether there was a call without an answer.
func insist(call func() error) (doubtful bool, err error) {
	for range slowCalls {
		start := time.Now()
		err = call()
		if err == nil || time.Since(start) < slowCall {
			return doubtful, err
		}
		for _, answer := range []error{driver.ErrHeld, driver.ErrLost, driver.ErrInvalid, driver.ErrClosed} {
			if errors.Is(err, answer) {
				return doubtful, err
			}
		}
		doubtful = doubtful || !errors.Is(err, driver.ErrNotApplied)
	}
	return doubtful, err
}

// acquireSurely is acquire with an answer.
func (cl *client) acquireSurely(req driver.Request) (lease driver.Lease, err error) {
	_, err = insist(func() error {
		lease, err = cl.acquire(req)
		return err
	})
	return lease, err
}

// grant is acquire that must succeed.
func (cl *client) grant(req driver.Request) driver.Lease {
	lease, err := cl.acquireSurely(req)
	if err != nil {
		cl.env.fatalf("%q was not granted to %q: %w", req.Key, req.Owner, err)
	}
	return lease
}

// refuse is acquire that must be refused.
func (cl *client) refuse(req driver.Request) *driver.HeldError {
	lease, err := cl.acquireSurely(req)
	held, ok := errors.AsType[*driver.HeldError](err)
	switch {
	case err == nil:
		cl.env.fatalf("%q was granted to %q (token %d), but should have been refused", req.Key, req.Owner, lease.Token)
	case !ok:
		cl.env.fatalf("the refusal of %q to %q is no HeldError: %w", req.Key, req.Owner, err)
	case !errors.Is(err, driver.ErrHeld):
		cl.env.fatalf("the refusal of %q to %q does not match ErrHeld: %w", req.Key, req.Owner, err)
	}
	return held
}

// enqueue is refuse that leaves a ticket.
func (cl *client) enqueue(req driver.Request) *driver.HeldError {
	req.Enqueue = true
	return cl.refuse(req)
}

// wait repeats a request until it is granted, as often as a live waiter must
// to keep its ticket.
func (cl *client) wait(req driver.Request) driver.Lease {
	lease, ok := cl.waitFor(req, cl.env.patience)
	if !ok {
		cl.env.fatalf("%q was not granted to %q within %v", req.Key, req.Owner, cl.env.patience)
	}
	return lease
}

// waitFor is wait for a limited time.
func (cl *client) waitFor(req driver.Request, limit time.Duration) (driver.Lease, bool) {
	req.Enqueue = true
	start := time.Now()
	for pause := time.Millisecond; ; pause = cl.nextPause(pause) {
		lease, err := cl.acquireSurely(req)
		if err == nil {
			return lease, true
		}
		if !errors.Is(err, driver.ErrHeld) {
			cl.env.fatalf("%q could not wait for %q: %w", req.Owner, req.Key, err)
		}
		if time.Since(start) > limit || cl.env.ctx.Err() != nil {
			return lease, false
		}
		time.Sleep(pause)
	}
}

// nextPause is how long a waiter waits until it asks again: longer from time
// to time, but not so long that its ticket lapses.
func (cl *client) nextPause(pause time.Duration) time.Duration {
	pause = min(pause+pause/2, 40*time.Millisecond)
	if w := cl.env.props.LivenessWindow; w > 0 {
		pause = min(pause, w/8)
	}
	return pause
}

// extend renews one grant.
func (cl *client) extend(lease driver.Lease, ttl time.Duration) (driver.Lease, error) {
	lease.TTL = ttl
	batch := []driver.Renewal{{Lease: lease}}
	cl.extendAll(batch)
	return batch[0].Lease, batch[0].Err
}

func (cl *client) extendAll(batch []driver.Renewal) {
	ctx, cancel := context.WithTimeout(context.Background(), cl.env.patience)
	defer cancel()
	cl.backend.Extend(ctx, batch)
}

func (cl *client) mustExtend(lease driver.Lease, ttl time.Duration) driver.Lease {
	var renewed driver.Lease
	_, err := insist(func() (err error) {
		renewed, err = cl.extend(lease, ttl)
		return err
	})
	if err != nil {
		cl.env.fatalf("%q was not renewed for %q: %w", lease.Key, lease.Owner, err)
	}
	return renewed
}

func (cl *client) release(lease driver.Lease) error {
	ctx, cancel := context.WithTimeout(context.Background(), cl.env.patience)
	defer cancel()
	return cl.backend.Release(ctx, lease)
}

func (cl *client) mustRelease(lease driver.Lease) {
	doubtful, err := insist(func() error { return cl.release(lease) })
	if doubtful && errors.Is(err, driver.ErrLost) {
		return // the call without an answer has released it
	}
	if err != nil {
		cl.env.fatalf("%q was not released by %q: %w", lease.Key, lease.Owner, err)
	}
}

// withdraw gives up whatever the owner has on the key.
func (cl *client) withdraw(key, owner string) {
	if _, err := insist(func() error { return cl.release(driver.Lease{Key: key, Owner: owner}) }); err != nil {
		cl.env.fatalf("%q could not withdraw from %q: %w", owner, key, err)
	}
}

// die ends the client as the death of its process would.
func (cl *client) die() {
	e := cl.env
	if e.h.Kill == nil {
		if e.props.SessionLeases || e.props.LivenessWindow == 0 {
			e.fatalf("Harness.Kill is required for a backend with sessions")
		}
		return
	}
	cl.recorder.sessionEnds()
	e.h.Kill(e.t, cl.inner)
	cl.killed = true
}

// expired returns the moment at which the store must have ended a grant that
// was asked for before start, if its owner is dead.
func expired(granted time.Time, ttl time.Duration) time.Time {
	return granted.Add(ttl + ttl/20 + 2*time.Millisecond)
}

// wantLost checks that an error reports a loss, with one of the reasons.
func (e *env) wantLost(err error, what string, reasons ...driver.LostReason) {
	lost, ok := errors.AsType[*driver.LostError](err)
	switch {
	case err == nil:
		e.fatalf("%s succeeded, want a LostError", what)
	case !ok || !errors.Is(err, driver.ErrLost):
		e.fatalf("%s: %w, want a LostError that matches ErrLost", what, err)
	}
	if len(reasons) > 0 && !slices.Contains(reasons, lost.Reason) {
		e.fatalf("%s: reason is %q, want %q", what, lost.Reason, reasons)
	}
}

// inspect reads one key. It returns false if the backend cannot.
func (cl *client) inspect(key string) (driver.KeyInfo, bool) {
	in, ok := driver.As[driver.Inspector](cl.backend)
	if !ok {
		return driver.KeyInfo{}, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), cl.env.patience)
	defer cancel()
	info, err := in.Inspect(ctx, key)
	if err != nil {
		cl.env.fatalf("inspect %q: %w", key, err)
	}
	return info, true
}

// errStuck is the answer of a call that did not return after its context had
// ended.
var errStuck = errors.New("drivertest: the call did not return though its context had ended")

// guard returns b with a watch on every call: one that does not return soon
// after its context has ended is left behind, and answers errStuck.
func (e *env) guard(b driver.Backend) driver.Backend {
	in, _ := driver.As[driver.Inspector](b)
	n, _ := driver.As[driver.Notifier](b)
	f, _ := driver.As[driver.Forcer](b)
	return Intercept(b, Hooks{
		Acquire: func(ctx context.Context, req driver.Request) (driver.Lease, error) {
			return watch(ctx, e, "Acquire", func() (driver.Lease, error) { return b.Acquire(ctx, req) })
		},
		Extend: func(ctx context.Context, batch []driver.Renewal) {
			answers, err := watch(ctx, e, "Extend", func() ([]driver.Renewal, error) {
				sent := slices.Clone(batch)
				b.Extend(ctx, sent)
				return sent, nil
			})
			copy(batch, answers)
			for i := range batch {
				if err != nil {
					batch[i].Err = err
				}
			}
		},
		Release: func(ctx context.Context, lease driver.Lease) error {
			_, err := watch(ctx, e, "Release", func() (struct{}, error) { return struct{}{}, b.Release(ctx, lease) })
			return err
		},
		Listen: func(ctx context.Context, manager string, handle func(driver.Event)) error {
			_, err := watch(ctx, e, "Listen", func() (struct{}, error) { return struct{}{}, n.Listen(ctx, manager, handle) })
			return err
		},
		Inspect: func(ctx context.Context, key string) (driver.KeyInfo, error) {
			return watch(ctx, e, "Inspect", func() (driver.KeyInfo, error) { return in.Inspect(ctx, key) })
		},
		List: func(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
			return watch(ctx, e, "List", func() ([]driver.KeyInfo, error) { return in.List(ctx, prefix, after, limit) })
		},
		ForceRelease: func(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
			return watch(ctx, e, "ForceRelease", func() ([]driver.HolderInfo, error) { return f.ForceRelease(ctx, key, token) })
		},
	})
}

// watch runs call in a goroutine, and gives up on it some time after the
// context has ended.
func watch[T any](ctx context.Context, e *env, what string, call func() (T, error)) (T, error) {
	type answer struct {
		result T
		err    error
	}
	done := make(chan answer, 1)
	go func() {
		result, err := call()
		done <- answer{result, err}
	}()
	select {
	case a := <-done:
		return a.result, a.err
	case <-ctx.Done():
	}
	if a, ok := awaitFor(done, soon); ok {
		return a.result, a.err
	}
	err := fmt.Errorf("%s: %w", what, errStuck)
	e.history.mu.Lock()
	defer e.history.mu.Unlock()
	e.history.errorf("%w", err)
	var none T
	return none, err
}
