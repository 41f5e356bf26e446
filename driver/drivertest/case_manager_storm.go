package drivertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

var managerStormCases = []Case{{
	Name: "Manager/StormWithFaults", Guarantee: "I1, I2, I3, I4, I11, WAIT3",
	Why: "what no single case thought of shows when everything happens at once, and the store fails meanwhile",
	run: stormWithFaults,
}}

// registry knows the last lock of every key, and finds out when two are held
// at once.
type registry struct {
	mu   sync.Mutex
	last map[string]*dlm.Lock
}

// entered checks a new lock against the one before it.
func (r *registry) entered(e *env, l *dlm.Lock) {
	r.mu.Lock()
	before := r.last[l.Key]
	if before == nil || before.Token < l.Token {
		r.last[l.Key] = l
	}
	r.mu.Unlock()
	if before == nil || l.Err() != nil {
		return
	}
	if before.Token >= l.Token {
		e.fatalf("%v was granted after %v, which is held: %v", l, before, before.Err() == nil)
	}
	if before.Err() == nil && l.Err() == nil {
		e.fatalf("%v was granted while %v is held", l, before)
	}
}

func stormWithFaults(e *env) {
	const callers = 12
	rounds := 3
	if e.h.exact {
		rounds = 20 // time costs nothing
	}
	ttl := e.renewed()
	seed := rand.Uint64()
	var managers []*managed
	for range 3 {
		managers = append(managers, e.manage(renewing()))
	}
	registry := &registry{last: make(map[string]*dlm.Lock)}
	keys := []string{"k1", "k2", "k3"}

	calm := make(chan struct{})
	faults := e.group()
	for i, m := range managers {
		faults.start(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			for calmed := false; !calmed; {
				undo := e.stormFault(rnd, m, ttl)
				_, calmed = awaitFor(calm, time.Duration(rnd.Int64N(int64(ttl))))
				undo()
				if !calmed {
					_, calmed = awaitFor(calm, time.Duration(rnd.Int64N(int64(ttl/2))))
				}
			}
		})
	}
	g := e.group()
	for i := range callers {
		m := managers[i%len(managers)]
		g.start(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(100+i)))
			for range rounds {
				e.stormTurn(rnd, m, registry, keys[rnd.IntN(len(keys))], ttl)
			}
		})
	}
	err := g.join()
	close(calm)
	faults.wait()
	if err != nil {
		e.fatalf("seed %d: %w", seed, err)
	}
	for _, key := range keys {
		e.free(key)
	}
}

// stormFault lets something go wrong for one manager, and returns what ends it.
func (e *env) stormFault(rnd *rand.Rand, m *managed, ttl time.Duration) (undo func()) {
	if rnd.IntN(5) == 0 {
		return m.faults.Sever()
	}
	ops := []Op{"", OpAcquire, OpExtend, OpRelease, OpWithdraw, OpListen}
	fault := Fault{
		Kind: []FaultKind{Refuse, Fail, Swallow, Hang, HangAfter, Delay}[rnd.IntN(6)],
		Op:   ops[rnd.IntN(len(ops))], Times: rnd.IntN(5), Delay: time.Duration(rnd.Int64N(int64(ttl))),
	}
	injected := m.faults.Inject(fault)
	if fault.Op == OpListen {
		m.faults.BreakListen()
	}
	m.faults.DropEvents(func(driver.Event) bool { return fault.Op == OpListen && fault.Kind == Swallow })
	return injected.Remove
}

// stormTurn is one attempt to hold a key for a while.
func (e *env) stormTurn(rnd *rand.Rand, m *managed, r *registry, key string, ttl time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rnd.Int64N(int64(3*ttl))))
	defer cancel()
	began := time.Now()
	l, err := m.Acquire(ctx, key, ttl, &dlm.AcquireOptions{NoWait: rnd.IntN(4) == 0})
	if late := time.Since(began) - 3*ttl; late > soon {
		e.fatalf("Acquire returned %v after its context had ended", late)
	}
	if err != nil {
		if l != nil {
			e.fatalf("Acquire gave both %v and %w", l, err)
		}
		if !errors.Is(err, dlm.ErrHeld) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrFault) {
			e.fatalf("Acquire: %w", err)
		}
		return
	}
	r.entered(e, l)
	held := time.Duration(rnd.Int64N(int64(ttl)))
	if rnd.IntN(3) == 0 {
		held *= 2
	}
	if _, ended := awaitFor(l.Done(), held); ended {
		if !errors.Is(l.Err(), dlm.ErrLost) {
			e.fatalf("a lock ended with %v, want ErrLost", l.Err())
		}
	}
	if rnd.IntN(4) == 0 {
		if err := m.ExtendLock(e.within(ttl/4), l, ttl); err == nil && l.Err() != nil && !errors.Is(l.Err(), dlm.ErrLost) {
			e.fatalf("ExtendLock succeeded on a lock that is not held: %w", l.Err())
		}
	}
	err = m.ReleaseLock(e.within(ttl), l)
	if l.Err() == nil {
		e.fatalf("the lock is held after ReleaseLock: %w", err)
	}
	if err != nil && !errors.Is(err, dlm.ErrLost) && !errors.Is(err, dlm.ErrIndeterminate) && !errors.Is(err, dlm.ErrNotApplied) {
		e.fatalf("ReleaseLock: %w", err)
	}
}
