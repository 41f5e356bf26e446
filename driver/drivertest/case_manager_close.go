package drivertest

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/go-dlm/dlm"
)

var managerCloseCases = []Case{
	{
		Name: "Manager/CloseEndsEverything", Guarantee: "I4, I11, X6, LOST9",
		Why: "a process that shuts down would leave its locks to expire, and its goroutines waiting",
		run: closeEndsEverything,
	},
	{
		Name: "Manager/ClosedManagerRefuses", Guarantee: "X6",
		Why: "a late call after shutdown must fail cleanly, not reach a store that may be gone",
		run: closedManagerRefuses,
	},
	{
		Name: "Manager/CloseFreesWhatItCan", Guarantee: "REL4",
		Why: "one release that fails would keep all other locks of the process taken",
		run: closeFreesWhatItCan,
	},
}

func closeEndsEverything(e *env) {
	a, b, c := e.manage(renewing()), e.manage(renewing()), e.openManaged()
	ttl := e.long
	var locks []*dlm.Lock
	for range 5 {
		locks = append(locks, a.lock(e.name("held"), ttl))
	}
	ctx := locks[0].Context(context.Background())
	blocked := b.lock("k", ttl)
	g := e.group()
	before := e.history.waiting("k")
	for range 3 {
		g.start(func() {
			l, err := a.AcquireLock(e.within(2*e.patience), "k", ttl)
			if l != nil || !errors.Is(err, dlm.ErrClosed) {
				e.fatalf("AcquireLock of a manager that was closed meanwhile: %v, %v, want ErrClosed", l, err)
			}
		})
	}
	e.eventually("three waiters are in the queue", func() bool { return e.history.waiting("k") == before+3 })
	behind := e.queue(g, c, "k", want{})
	begin := time.Now()
	a.shut()
	if took := time.Since(begin); took > soon {
		e.fatalf("Close took %v", took)
	}
	for _, l := range locks {
		e.isLost(l, dlm.ReasonClosed)
		if !errors.Is(l.Err(), dlm.ErrClosed) {
			e.fatalf("Err of a lock after Close: %v, want ErrClosed to match", l.Err())
		}
		e.drop(e.take(c, l.Key, want{}))
	}
	if !errors.Is(context.Cause(ctx), dlm.ErrLost) {
		e.fatalf("the cause of a lock's context after Close is %v, want ErrLost", context.Cause(ctx))
	}
	b.unlock(blocked)
	e.drop(await(e, behind, "the grant of the waiter behind those of a closed manager"))
	g.wait()
}

func closedManagerRefuses(e *env) {
	m := e.manage(quick())
	ttl := e.long
	held, released := m.lock("held", ttl), m.lock("released", ttl)
	m.unlock(released)
	m.shut()
	before := m.faults.AllCalls()
	ctx := e.within(e.patience)
	for what, err := range map[string]error{
		"AcquireLock":  second(m.AcquireLock(ctx, "k", ttl)),
		"TryLock":      second(m.TryLock(ctx, "k", ttl)),
		"Acquire":      second(m.Acquire(ctx, "k", ttl, nil)),
		"ReleaseLock":  m.ReleaseLock(ctx, held),
		"ExtendLock":   m.ExtendLock(ctx, held, ttl),
		"GetLock":      second(m.GetLock(ctx, "k")),
		"ListLocks":    second(m.ListLocks(ctx, "", "", 0)),
		"ForceRelease": second(m.ForceRelease(ctx, "k", 0)),
		"Close":        m.Close(ctx),
	} {
		if !errors.Is(err, dlm.ErrClosed) {
			e.fatalf("%s after Close: %v, want ErrClosed", what, err)
		}
	}
	if n := m.faults.AllCalls() - before; n != 0 {
		e.fatalf("%d calls reached the backend of a closed manager", n)
	}
	if m.Properties() != e.props {
		e.fatalf("the properties changed with Close")
	}
}

func closeFreesWhatItCan(e *env) {
	m, b := e.manage(quick()), e.openManaged()
	ttl := e.long
	keys := make([]string, 10)
	for i := range keys {
		keys[i] = e.name("held")
		m.lock(keys[i], ttl)
	}
	// One cannot be released at all, and one hangs until Close has no time left.
	m.faults.Inject(Fault{Kind: Refuse, Op: OpRelease, Key: keys[2]})
	m.faults.Inject(Fault{Kind: Hang, Op: OpRelease, Key: keys[5]})
	begin := time.Now()
	var err error
	m.once.Do(func() { err = m.Close(e.within(e.unit)) })
	if err == nil || !strings.Contains(err.Error(), keys[2]) || !strings.Contains(err.Error(), keys[5]) {
		e.fatalf("Close with two failed releases: %v, want both named", err)
	}
	if took := time.Since(begin); took > e.unit+soon {
		e.fatalf("Close returned %v after its context had ended", took-e.unit)
	}
	for i, key := range keys {
		switch {
		case i != 2 && i != 5:
			e.drop(e.take(b, key, want{}))
		case !e.props.SessionLeases: // or it may be gone with the session
			e.denied(b, key, want{})
		}
	}
}
