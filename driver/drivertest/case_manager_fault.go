package drivertest

import (
	"context"
	"errors"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

var managerFaultCases = []Case{
	{
		Name: "Manager/LostAnswerLeavesNothing", Guarantee: "I4",
		Why: "a grant whose answer was lost is held by nobody, and keeps everybody out until it ends",
		run: lostAnswerLeavesNothing,
	},
	{
		Name: "Manager/HungStoreDoesNotHoldTheCaller", Guarantee: "I4, I11",
		Why: "a caller with a deadline would hang with the store",
		run: hungStoreDoesNotHoldTheCaller,
	},
	{
		Name: "Manager/RefusingStoreIsNotHammered", Guarantee: "RED9, WAIT9",
		Why: "a store that is down is not helped by callers that ask a thousand times a second",
		run: refusingStoreIsNotHammered,
	},
	{
		Name: "Manager/UnansweredReleaseIsRepeated", Guarantee: "I5, REL7",
		Why: "a release that got lost keeps everybody out for a TTL; one that was applied must not be called a loss",
		run: unansweredReleaseIsRepeated,
	},
}

// free checks that a key is free, though perhaps not at once: a manager may
// clean up in the background.
func (e *env) free(key string) {
	e.mu.Lock()
	l := e.prober
	e.mu.Unlock()
	if l == nil {
		l = e.openManaged()
		e.mu.Lock()
		e.prober = l
		e.mu.Unlock()
	}
	e.eventually("key "+key+" is free", func() bool {
		held, err := l.try(key, want{})
		if err != nil {
			return false
		}
		e.drop(held)
		return true
	})
}

func lostAnswerLeavesNothing(e *env) {
	m := e.manage(quick())
	ttl := e.long
	for _, kind := range []FaultKind{Swallow, Fail} {
		// Asked again, the store gives the grant that it made before.
		m.faults.Inject(Fault{Kind: kind, Op: OpAcquire, Times: 1})
		l := m.lock("k", ttl)
		if info, ok := e.open().inspect("k"); ok && (len(info.Holders) != 1 || info.Holders[0].Token != l.Token || info.Holders[0].Owner != l.Value) {
			e.fatalf("the holders are %+v, want %q with token %d alone", info.Holders, l.Value, l.Token)
		}
		m.unlock(l)
		e.free("k")
		m.faults.Inject(Fault{Kind: kind, Op: OpAcquire, Times: 1})
		l, err := m.TryLock(e.within(e.patience), "k", ttl)
		if err != nil {
			e.fatalf("TryLock with one failed call: %w", err)
		}
		m.unlock(l)
		e.free("k")

		// Never answered, it is withdrawn: a grant, and a ticket.
		fault := m.faults.Inject(Fault{Kind: kind, Op: OpAcquire})
		if _, err := m.AcquireLock(e.within(e.unit/2), "k", ttl); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrFault) {
			e.fatalf("AcquireLock that was never answered: %v, want context.DeadlineExceeded and the fault", err)
		}
		e.free("k")
		other := e.openManaged()
		held := e.take(other, "k", want{})
		if _, err := m.AcquireLock(e.within(e.unit/2), "k", ttl); !errors.Is(err, context.DeadlineExceeded) {
			e.fatalf("AcquireLock that was never answered: %v, want context.DeadlineExceeded", err)
		}
		e.drop(held)
		e.free("k")

		// The withdrawal gets lost as well, and is repeated.
		lost := m.faults.Inject(Fault{Kind: kind, Op: OpWithdraw, Times: 1})
		if _, err := m.AcquireLock(e.within(e.unit/2), "k", ttl); !errors.Is(err, dlm.ErrIndeterminate) {
			e.fatalf("AcquireLock of which no trace could be removed: %v, want ErrIndeterminate", err)
		}
		await(e, lost.Hit(), "a withdrawal")
		fault.Remove()
		e.free("k")
	}
}

func hungStoreDoesNotHoldTheCaller(e *env) {
	m := e.manage(renewing())
	ttl := e.long
	for _, kind := range []FaultKind{Hang, HangAfter} {
		fault := m.faults.Inject(Fault{Kind: kind, Op: OpAcquire})
		for _, acquire := range []func(context.Context) (*dlm.Lock, error){
			func(ctx context.Context) (*dlm.Lock, error) { return m.AcquireLock(ctx, "k", ttl) },
			func(ctx context.Context) (*dlm.Lock, error) { return m.TryLock(ctx, "k", ttl) },
		} {
			asked := time.Now()
			if _, err := acquire(e.within(e.unit / 2)); !errors.Is(err, context.DeadlineExceeded) {
				e.fatalf("with a store that hangs: %v, want context.DeadlineExceeded", err)
			}
			if took := time.Since(asked); took > e.unit/2+soon {
				e.fatalf("the call returned %v after its context had ended", took-e.unit/2)
			}
			e.free("k")
		}
		fault.Remove()
	}
	l := m.lock("k", ttl)
	fault := m.faults.Inject(Fault{Kind: Hang, Op: OpExtend})
	if err := m.ExtendLock(e.within(e.unit/2), l, ttl); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, dlm.ErrLost) {
		e.fatalf("ExtendLock with a store that hangs: %v, want context.DeadlineExceeded", err)
	}
	e.isHeld(l)
	fault.Remove()
	m.unlock(l)
	if _, ok := driver.As[driver.Inspector](e.open().backend); ok {
		m.faults.Inject(Fault{Kind: Hang, Op: OpInspect, Times: 1})
		if _, err := m.GetLock(e.within(e.unit/2), "k"); !errors.Is(err, context.DeadlineExceeded) {
			e.fatalf("GetLock with a store that hangs: %v, want context.DeadlineExceeded", err)
		}
	}
}

func refusingStoreIsNotHammered(e *env) {
	cfg := quick()
	cfg.RetryInterval = 10 * time.Millisecond
	cfg.MaxRetries = 3
	m := e.manage(cfg)
	ttl := e.long
	for _, kind := range []FaultKind{Refuse, Fail} {
		before := m.faults.Calls(OpAcquire)
		fault := m.faults.Inject(Fault{Kind: kind, Op: OpAcquire})
		if _, err := m.AcquireLock(e.within(e.patience), "k", ttl); !errors.Is(err, ErrFault) || errors.Is(err, driver.ErrNotApplied) != (kind == Refuse) {
			e.fatalf("AcquireLock on a store that fails: %v, want the store's error", err)
		}
		if n := m.faults.Calls(OpAcquire) - before; n != cfg.MaxRetries+1 {
			e.fatalf("%d requests with MaxRetries %d", n, cfg.MaxRetries)
		}
		fault.Remove()
		// Short of that, a failure is not seen.
		m.faults.Inject(Fault{Kind: kind, Op: OpAcquire, Times: cfg.MaxRetries})
		m.unlock(m.lock("k", ttl))
	}

	// Without a bound the pauses grow.
	cfg.MaxRetries = -1
	patient := e.manage(cfg)
	fault := patient.faults.Inject(Fault{Kind: Refuse, Op: OpAcquire})
	if _, err := patient.AcquireLock(e.within(500*time.Millisecond), "k", ttl); !errors.Is(err, context.DeadlineExceeded) {
		e.fatalf("AcquireLock on a store that fails: %v, want context.DeadlineExceeded", err)
	}
	if n := patient.faults.Calls(OpAcquire); n > 20 {
		e.fatalf("%d requests within 500ms, with pauses that begin at %v and double", n, cfg.RetryInterval)
	}
	fault.Remove()
	patient.unlock(patient.lock("k", ttl))
}

func unansweredReleaseIsRepeated(e *env) {
	m := e.manage(renewing())
	ttl := e.long
	for _, kind := range []FaultKind{Swallow, Fail, Refuse} {
		l := m.lock("k", ttl)
		m.faults.Inject(Fault{Kind: kind, Op: OpRelease, Times: 2})
		if err := m.ReleaseLock(e.within(e.patience), l); err != nil {
			e.fatalf("ReleaseLock with two failed calls: %w", err)
		}
		if !errors.Is(l.Err(), dlm.ErrReleased) {
			e.fatalf("Err after Release: %v, want ErrReleased", l.Err())
		}
		e.free("k")
	}
	for _, kind := range []FaultKind{Hang, HangAfter} {
		l := m.lock("k", ttl)
		fault := m.faults.Inject(Fault{Kind: kind, Op: OpRelease})
		asked := time.Now()
		if err := m.ReleaseLock(e.within(e.unit/2), l); !errors.Is(err, dlm.ErrIndeterminate) || errors.Is(err, dlm.ErrLost) {
			e.fatalf("ReleaseLock with a store that hangs: %v, want ErrIndeterminate", err)
		}
		if took := time.Since(asked); took > e.unit/2+soon {
			e.fatalf("the call returned %v after its context had ended", took-e.unit/2)
		}
		await(e, l.Done(), "the end of a lock whose release was not answered")
		fault.Remove()
		if err := m.ReleaseLock(e.within(e.patience), l); err != nil {
			e.fatalf("ReleaseLock, repeated: %w", err)
		}
		e.free("k")
		// Without a second call the manager sees to it by itself.
		l = m.lock("k", ttl)
		fault = m.faults.Inject(Fault{Kind: kind, Op: OpRelease})
		if err := m.ReleaseLock(e.within(e.unit/2), l); !errors.Is(err, dlm.ErrIndeterminate) {
			e.fatalf("ReleaseLock with a store that hangs: %v, want ErrIndeterminate", err)
		}
		fault.Remove()
		e.free("k")
	}
}
