package drivertest

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

var managerLossCases = []Case{
	{
		Name: "Manager/RenewalKeepsTheLock", Guarantee: "I2, I8, REN8, REN10, RWM3",
		Why: "work that takes longer than the TTL would lose its lock in the middle",
		run: renewalKeepsTheLock,
	},
	{
		Name: "Manager/LossComesAtTheDeadline", Guarantee: "I3, LOST3, LOST4, LOST6",
		Why: "a holder that is cut off must stop before the store gives the key to another, with nobody there to tell it",
		run: lossComesAtTheDeadline,
	},
	{
		Name: "Manager/DeadlineCountsFromTheRequest", Guarantee: "I3, QUO5",
		Why: "an answer that comes late would make a lock out of a grant that is over, or lengthen it by the delay",
		run: deadlineCountsFromTheRequest,
	},
	{
		Name: "Manager/FailedRenewalIsNoLoss", Guarantee: "I8, REN7",
		Why: "a single reset connection would end work that has most of its TTL left",
		run: failedRenewalIsNoLoss,
	},
	{
		Name: "Manager/StolenLockIsLost", Guarantee: "LOST8, LOST9, I5",
		Why: "a holder whose grant was removed would work on until its deadline, or for ever",
		run: stolenLockIsLost,
	},
	{
		Name: "Manager/HungRenewalSparesOthers", Guarantee: "I9, REN9",
		Why: "one sick key would take all locks of the process along",
		run: hungRenewalSparesOthers,
	},
	{
		Name: "Manager/ReleaseEndsRenewal", Guarantee: "I5, REN2, REN3",
		Why: "a renewal that outlives its lock goes on for ever, or cries loss over a lock that was given back",
		run: releaseEndsRenewal,
	},
	{
		Name: "Manager/ReentryIsOneHold", Guarantee: "I2, FEN6, REN5, RWM9",
		Why: "nested code would wait for itself, or free the lock of the code around it",
		run: reentryIsOneHold,
	},
}

// renewing is the configuration of managers that renew.
func renewing() *dlm.LockConfig {
	return &dlm.LockConfig{RetryInterval: 5 * time.Millisecond, Label: "conformance"}
}

// renewed is a TTL that is renewed several times within a case.
func (e *env) renewed() time.Duration { return 3 * e.unit }

// slack is how late something may come that takes no time in principle.
func (e *env) slack() time.Duration {
	if e.h.exact {
		return 0
	}
	return soon / 5
}

// isHeld checks that a lock is held.
func (e *env) isHeld(l *dlm.Lock) {
	if err := l.Err(); err != nil {
		e.fatalf("the lock on %q is not held: %w", l.Key, err)
	}
	select {
	case <-l.Done():
		e.fatalf("Done of the lock on %q is closed while Err is nil", l.Key)
	default:
	}
	if left := time.Until(l.Deadline()); left <= 0 {
		e.fatalf("the lock on %q is held %v after its deadline", l.Key, -left)
	}
}

// isLost waits until a lock is lost and checks the reason.
func (e *env) isLost(l *dlm.Lock, reasons ...dlm.LostReason) {
	await(e, l.Done(), "the loss of the lock on "+l.Key)
	lost, ok := errors.AsType[*dlm.LostError](l.Err())
	if !ok || !errors.Is(l.Err(), dlm.ErrLost) {
		e.fatalf("Err of a lost lock: %v, want a LostError", l.Err())
	}
	if lost.Key != l.Key || lost.Token != l.Token || !slices.Contains(reasons, lost.Reason) {
		e.fatalf("Err of a lost lock: %#v, want key %q, token %d and one of the reasons %q", lost, l.Key, l.Token, reasons)
	}
}

func renewalKeepsTheLock(e *env) {
	a, b := e.manage(renewing()), e.openManaged()
	ttl := e.renewed()
	l := a.lock("k", ttl)
	first := l.Deadline()
	var shared *dlm.Lock
	if e.props.SharedMode {
		var err error
		if shared, err = a.Acquire(e.within(e.patience), "s", ttl, &dlm.AcquireOptions{Shared: true}); err != nil {
			e.fatalf("shared lock: %w", err)
		}
	}
	for end := time.Now().Add(3 * ttl); time.Now().Before(end); time.Sleep(ttl / 10) {
		e.denied(b, "k", want{})
		e.isHeld(l)
		if shared != nil {
			e.denied(b, "s", want{})
			e.isHeld(shared)
		}
	}
	if !l.Deadline().After(first.Add(ttl)) {
		e.fatalf("the deadline moved by %v in three TTLs of %v", l.Deadline().Sub(first), ttl)
	}
	if l.TTL < ttl || l.Token < 1 {
		e.fatalf("the lock has TTL %v and token %d", l.TTL, l.Token)
	}
	if info, ok := e.open().inspect("k"); ok && (len(info.Holders) != 1 || info.Holders[0].Token != l.Token || info.Holders[0].TTL != l.TTL && !e.props.SessionLeases) {
		e.fatalf("after several renewals the holders are %+v, want token %d and TTL %v", info.Holders, l.Token, l.TTL)
	}
	a.unlock(l)
	if shared != nil {
		a.unlock(shared)
	}
	e.drop(e.take(b, "k", want{}))
}

func lossComesAtTheDeadline(e *env) {
	a, b := e.manage(renewing()), e.openManaged()
	ttl := e.renewed()
	l := a.lock("k", ttl)
	ctx := l.Context(context.Background())
	heal := a.faults.Sever()
	defer heal()
	deadline := l.Deadline() // no renewal gets through from here on

	// Whatever hangs, the handle answers at once.
	g := e.group()
	g.start(func() {
		// Done by the loss of the lock, or by the end of this context.
		if err := a.ExtendLock(e.within(ttl/2), l, ttl); err == nil {
			e.fatalf("ExtendLock succeeded on an unreachable store")
		}
	})
	asked := time.Now()
	e.isHeld(l)
	if took := time.Since(asked); took > e.slack() {
		e.fatalf("the handle took %v to answer", took)
	}
	successor := e.queue(g, b, "k", want{})
	var next *grip
	select {
	case <-l.Done():
	case next = <-successor:
		// Where time is real, the test itself may be late to notice the loss.
		if e.h.exact {
			e.fatalf("the key was granted to another (token %d) before the holder was told of its loss", next.token)
		}
		if _, ok := awaitFor(l.Done(), soon); !ok {
			e.fatalf("the key was granted to another (token %d) and the holder was not told of its loss", next.token)
		}
	}
	now := time.Now()
	if late := now.Sub(deadline); late > e.slack() {
		e.fatalf("the loss came %v after the deadline", late)
	}
	if early := deadline.Sub(now); early > ttl/20 {
		e.fatalf("the loss came %v before the deadline", early)
	}
	e.isLost(l, dlm.ReasonExpired)
	await(e, ctx.Done(), "the end of the lock's context")
	if !errors.Is(context.Cause(ctx), dlm.ErrLost) {
		e.fatalf("the cause of the lock's context is %v, want ErrLost", context.Cause(ctx))
	}
	if e.props.SessionLeases {
		heal() // the session lives on, so the manager has to release the key
	}
	if next == nil {
		next = await(e, successor, "the grant of the successor")
	}
	if next.token <= l.Token {
		e.fatalf("the successor has token %d, the lost lock %d", next.token, l.Token)
	}
	// It stays lost, whatever comes.
	if err := a.ExtendLock(e.within(e.patience), l, ttl); !errors.Is(err, dlm.ErrLost) {
		e.fatalf("ExtendLock of a lost lock: %v, want ErrLost", err)
	}
	if err := a.ReleaseLock(e.within(e.patience), l); !errors.Is(err, dlm.ErrLost) {
		e.fatalf("ReleaseLock of a lost lock: %v, want ErrLost", err)
	}
	g.wait()
	heal()
	e.isLost(l, dlm.ReasonExpired)
	e.drop(next)
	a.unlock(a.lock("k", ttl))
}

func deadlineCountsFromTheRequest(e *env) {
	m := e.manage(quick())
	ttl := e.renewed()
	// The answer is held back for half the TTL.
	held := m.faults.Inject(Fault{Kind: HangAfter, Op: OpAcquire, Times: 1})
	timer := time.AfterFunc(ttl/2, held.Remove)
	defer timer.Stop()
	asked := time.Now()
	l := m.lock("k", ttl)
	if latest := asked.Add(l.TTL + ttl/20); l.Deadline().After(latest) {
		e.fatalf("the deadline is %v after the request, with a TTL of %v", l.Deadline().Sub(asked), l.TTL)
	}
	e.isHeld(l)
	m.unlock(l)

	// This time the grant is over when its answer comes: it must not be handed
	// out, and the key must be had by another attempt, or not at all.
	held = m.faults.Inject(Fault{Kind: HangAfter, Op: OpAcquire, Times: 1})
	timer = time.AfterFunc(ttl+ttl/4, held.Remove)
	defer timer.Stop()
	if l, err := m.AcquireLock(e.within(e.patience), "k2", ttl); err == nil {
		e.isHeld(l)
		m.unlock(l)
	}

	// A renewal counts from its request too.
	l = m.lock("k3", ttl)
	held = m.faults.Inject(Fault{Kind: HangAfter, Op: OpExtend, Times: 1})
	timer = time.AfterFunc(ttl/2, held.Remove)
	defer timer.Stop()
	asked = time.Now()
	if err := m.ExtendLock(e.within(e.patience), l, ttl); err != nil {
		e.fatalf("ExtendLock with a slow answer: %w", err)
	}
	if latest := asked.Add(l.TTL + ttl/20); l.Deadline().After(latest) {
		e.fatalf("the deadline is %v after the renewal, with a TTL of %v", l.Deadline().Sub(asked), l.TTL)
	}
	m.unlock(l)
}

func failedRenewalIsNoLoss(e *env) {
	m, b := e.manage(renewing()), e.openManaged()
	ttl := e.renewed()
	l := m.lock("k", ttl)
	for _, kind := range []FaultKind{Refuse, Fail, Swallow, Hang, HangAfter} {
		fault := m.faults.Inject(Fault{Kind: kind, Op: OpExtend, Times: 1})
		await(e, fault.Hit(), "a renewal")
		met := time.Now()
		e.isHeld(l)
		deadline := l.Deadline()
		// It is tried again well before the deadline.
		e.eventually("a renewal gets through", func() bool { return l.Deadline().After(deadline) })
		if took := time.Since(met); took > ttl {
			e.fatalf("the next renewal got through after %v, with a TTL of %v", took, ttl)
		}
		e.isHeld(l)
		e.denied(b, "k", want{})
		fault.Remove()
	}
	m.unlock(l)
	e.drop(e.take(b, "k", want{}))
}

func stolenLockIsLost(e *env) {
	m, thief := e.manage(renewing()), e.open()
	ttl := e.renewed()
	forcer, hasForcer := driver.As[driver.Forcer](thief.backend)
	steal := func(l *dlm.Lock) {
		if !e.props.SessionLeases {
			thief.mustRelease(driver.Lease{Key: l.Key, Owner: l.Value, Token: l.Token})
			return
		}
		if _, err := forcer.ForceRelease(e.within(e.patience), l.Key, l.Token); err != nil {
			e.fatalf("ForceRelease: %w", err)
		}
	}
	if e.props.SessionLeases && !hasForcer {
		// Nobody but its own client can take a grant away, or the store, when
		// it ends the session.
		l := m.lock("session", ttl)
		m.client.die()
		e.isLost(l, dlm.ReasonGone, dlm.ReasonSession, dlm.ReasonExpired)
		return
	}
	gone := m.lock("gone", ttl)
	steal(gone)
	e.isLost(gone, dlm.ReasonGone)
	if early := time.Until(gone.Deadline()); early < 0 {
		e.fatalf("the loss came %v after the deadline instead of with the next renewal", -early)
	}

	taken := m.lock("taken", ttl)
	steal(taken)
	next := thief.grant(driver.Request{Key: "taken", Owner: "thief"})
	reasons := []dlm.LostReason{dlm.ReasonTaken}
	if e.props.SessionLeases {
		reasons = append(reasons, dlm.ReasonGone) // told before it was taken
	}
	e.isLost(taken, reasons...)
	if err := m.ReleaseLock(e.within(e.patience), taken); !errors.Is(err, dlm.ErrLost) {
		e.fatalf("ReleaseLock of a lost lock: %v, want ErrLost", err)
	}
	thief.mustExtend(next, e.long)
	thief.mustRelease(next)

	// A release finds out too.
	quiet := e.manage(quick())
	unaware := quiet.lock("unaware", e.long)
	steal(unaware)
	if err := quiet.ReleaseLock(e.within(e.patience), unaware); !errors.Is(err, dlm.ErrLost) {
		e.fatalf("ReleaseLock of a lock that was removed: %v, want ErrLost", err)
	}

	if !hasForcer {
		return
	}
	forced := m.lock("forced", ttl)
	removed, err := e.manage(quick()).ForceRelease(e.within(e.patience), "forced", forced.Token)
	if err != nil || len(removed) != 1 || removed[0].Owner != forced.Value {
		e.fatalf("ForceRelease: %+v, %v, want %q removed", removed, err, forced.Value)
	}
	e.isLost(forced, dlm.ReasonGone)
}

func hungRenewalSparesOthers(e *env) {
	cfg := renewing()
	m := e.manage(cfg)
	ttl := e.renewed()
	var others []*dlm.Lock
	for range 20 {
		others = append(others, m.lock(e.name("k"), ttl))
	}
	sick := m.lock("sick", ttl)
	fault := m.faults.Inject(Fault{Kind: Hang, Op: OpExtend, Key: "sick"})
	e.isLost(sick, dlm.ReasonExpired)
	lost := time.Now()
	for time.Since(lost) < ttl {
		for _, l := range others {
			e.isHeld(l)
		}
		time.Sleep(ttl / 10)
	}
	fault.Remove()
	for _, l := range others {
		m.unlock(l)
	}
}

func releaseEndsRenewal(e *env) {
	m, b := e.manage(renewing()), e.openManaged()
	ttl := e.renewed()
	// The answer to a renewal is on its way when the lock is released.
	l := m.lock("k", ttl)
	fault := m.faults.Inject(Fault{Kind: HangAfter, Op: OpExtend, Times: 1})
	await(e, fault.Hit(), "a renewal")
	timer := time.AfterFunc(e.unit/8, fault.Remove)
	defer timer.Stop()
	m.unlock(l)
	if !errors.Is(l.Err(), dlm.ErrReleased) {
		e.fatalf("Err after Release: %v, want ErrReleased", l.Err())
	}
	calls := m.faults.Calls(OpExtend)
	e.drop(e.take(b, "k", want{}))
	pass(time.Now().Add(ttl))
	if n := m.faults.Calls(OpExtend) - calls; n != 0 {
		e.fatalf("%d renewals were sent after the release", n)
	}

	// Releases at the very time of renewals.
	cfg := renewing()
	cfg.RenewInterval = time.Millisecond
	fast := e.manage(cfg)
	for i := range 50 {
		l := fast.lock("k", ttl)
		pass(time.Now().Add(time.Duration(i%5) * time.Millisecond / 2))
		e.isHeld(l)
		fast.unlock(l)
		if !errors.Is(l.Err(), dlm.ErrReleased) {
			e.fatalf("Err after Release: %v, want ErrReleased", l.Err())
		}
	}
}

func reentryIsOneHold(e *env) {
	m, b := e.manage(renewing()), e.openManaged()
	ttl := e.renewed()
	ctx := dlm.WithOwner(e.within(e.patience), "me")
	var locks []*dlm.Lock
	for range 3 {
		l, err := m.AcquireLock(ctx, "k", ttl)
		if err != nil {
			e.fatalf("nested AcquireLock: %w", err)
		}
		if len(locks) > 0 && (l.Token != locks[0].Token || l.Value != locks[0].Value) {
			e.fatalf("the nested lock is %v, the outer one %v", l, locks[0])
		}
		locks = append(locks, l)
	}
	if n := m.faults.Calls(OpAcquire); n != 1 {
		e.fatalf("%d requests for one hold", n)
	}
	// Other owners stay out, of this manager and of others.
	if _, err := m.TryLock(dlm.WithOwner(e.within(e.patience), "you"), "k", ttl); !errors.Is(err, dlm.ErrHeld) {
		e.fatalf("TryLock of another owner: %v, want ErrHeld", err)
	}
	if _, err := m.TryLock(e.within(e.patience), "k", ttl); !errors.Is(err, dlm.ErrHeld) {
		e.fatalf("TryLock without an owner: %v, want ErrHeld", err)
	}
	e.denied(b, "k", want{})
	// Released in any order, it is held to the last, and renewed.
	m.unlock(locks[0])
	m.unlock(locks[2])
	for end := time.Now().Add(2 * ttl); time.Now().Before(end); time.Sleep(ttl / 10) {
		e.denied(b, "k", want{})
		e.isHeld(locks[1])
	}
	if !errors.Is(locks[0].Err(), dlm.ErrReleased) {
		e.fatalf("Err of a released handle: %v", locks[0].Err())
	}
	m.unlock(locks[1])
	e.drop(e.take(b, "k", want{}))
}
