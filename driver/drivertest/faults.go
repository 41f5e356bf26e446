package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// Op is a kind of call to a backend.
type Op string

// The calls that [Faults] tells apart. A Release without a token is an
// OpWithdraw.
const (
	OpAcquire  Op = "acquire"
	OpExtend   Op = "extend"
	OpRelease  Op = "release"
	OpWithdraw Op = "withdraw"
	OpListen   Op = "listen"
	OpInspect  Op = "inspect"
	OpList     Op = "list"
	OpForce    Op = "force"
)

// FaultKind is how a call goes wrong.
type FaultKind uint8

const (
	// Refuse does not send the call, and answers with an error that matches
	// [driver.ErrNotApplied].
	Refuse FaultKind = iota + 1
	// Fail does not send the call, and does not say so.
	Fail
	// Swallow sends the call, and answers with an error.
	Swallow
	// Hang does not send the call, and does not answer before its context
	// ends or the fault is removed.
	Hang
	// HangAfter sends the call, and holds the answer back until the context
	// ends, or until the fault is removed: then the answer gets through.
	HangAfter
	// Delay sends the call after [Fault.Delay].
	Delay
)

// Fault describes which calls go wrong, and how.
type Fault struct {
	Kind FaultKind
	// Op is the kind of call, or empty for all but OpListen.
	Op Op
	// Key and Owner are those of the call, or empty for any. A batch to
	// Extend matches if one of its entries does.
	Key, Owner string
	// Times is how many calls go wrong. Zero means all until it is removed.
	Times int
	// Delay is for the kind Delay.
	Delay time.Duration
}

// ErrFault is what calls answer that [Faults] let fail.
var ErrFault = errors.New("drivertest: injected fault")

// Injected is a fault in force.
type Injected struct {
	Fault
	faults  *Faults
	left    int
	hits    int
	hit     chan struct{}
	removed chan struct{}
}

// Hit is closed when the first call has met the fault.
func (i *Injected) Hit() <-chan struct{} { return i.hit }

// Hits is how many calls have met the fault.
func (i *Injected) Hits() int {
	i.faults.mu.Lock()
	defer i.faults.mu.Unlock()
	return i.hits
}

// Remove ends the fault, and with it the calls that hang because of it.
func (i *Injected) Remove() {
	i.faults.mu.Lock()
	defer i.faults.mu.Unlock()
	i.faults.active = slices.DeleteFunc(i.faults.active, func(a *Injected) bool { return a == i })
	select {
	case <-i.removed:
	default:
		close(i.removed)
	}
}

// Faults stands between a user of a backend and the backend, and lets calls go
// wrong on demand. It is safe for concurrent use.
type Faults struct {
	inner   driver.Backend
	backend driver.Backend

	mu      sync.Mutex
	active  []*Injected
	severed chan struct{} // closed when healed; nil if not severed
	calls   map[Op]int
	listens map[*listening]struct{}
	drop    func(driver.Event) bool
}

// listening is a Listen call under way.
type listening struct {
	cancel context.CancelCauseFunc
}

// NewFaults returns a Faults before the backend.
func NewFaults(b driver.Backend) *Faults {
	f := &Faults{inner: b, calls: make(map[Op]int), listens: make(map[*listening]struct{})}
	f.backend = Intercept(b, Hooks{
		Acquire:      f.acquire,
		Extend:       f.extend,
		Release:      f.release,
		Listen:       f.listen,
		Inspect:      f.inspect,
		List:         f.list,
		ForceRelease: f.force,
	})
	return f
}

// Backend is the backend whose calls can go wrong. Closing it closes the one
// behind it.
func (f *Faults) Backend() driver.Backend { return f.backend }

// Inject puts a fault in force. If several match a call, the oldest counts.
func (f *Faults) Inject(fault Fault) *Injected {
	i := &Injected{
		Fault: fault, faults: f, left: fault.Times,
		hit: make(chan struct{}), removed: make(chan struct{}),
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active = append(f.active, i)
	return i
}

// Calls is how many calls of this kind have arrived, whatever became of them.
func (f *Faults) Calls(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

// AllCalls is how many calls of any kind but OpListen have arrived.
func (f *Faults) AllCalls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for op, calls := range f.calls {
		if op != OpListen {
			n += calls
		}
	}
	return n
}

// Sever cuts the backend off from its store. Until heal is called no call gets
// through, no answer comes back, and calls hang until their context ends;
// subscriptions break, and new ones fail.
func (f *Faults) Sever() (heal func()) {
	healed := make(chan struct{})
	f.mu.Lock()
	f.severed = healed
	f.mu.Unlock()
	f.BreakListen()
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.severed = nil
		close(healed)
	})
}

// BreakListen ends the Listen calls under way with an error.
func (f *Faults) BreakListen() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l := range f.listens {
		l.cancel(ErrFault)
	}
}

// DropEvents keeps events from the listeners for which drop returns true.
// Nil drops nothing.
func (f *Faults) DropEvents(drop func(driver.Event) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop = drop
}

// arrive counts a call and finds out what is to happen to it.
func (f *Faults) arrive(op Op, match func(*Fault) bool) (fault *Injected, severed chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[op]++
	for n, i := range f.active {
		if i.Op != op && (i.Op != "" || op == OpListen) || !match(&i.Fault) {
			continue
		}
		if i.hits == 0 {
			close(i.hit)
		}
		i.hits++
		if i.left > 0 {
			if i.left--; i.left == 0 {
				f.active = slices.Delete(f.active, n, n+1)
			}
		}
		return i, f.severed
	}
	return nil, f.severed
}

// through passes a call on, or lets it go wrong: then send's results do not
// count, and the error does.
func (f *Faults) through(ctx context.Context, op Op, match func(*Fault) bool, send func()) error {
	fault, severed := f.arrive(op, match)
	if severed != nil {
		return hang(ctx, severed)
	}
	var kind FaultKind
	if fault != nil {
		kind = fault.Kind
	}
	switch kind {
	case Refuse:
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, ErrFault)
	case Fail:
		return ErrFault
	case Hang:
		return hang(ctx, fault.removed)
	case Delay:
		timer := time.NewTimer(fault.Delay)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
	}
	send()
	switch kind {
	case Swallow:
		return ErrFault
	case HangAfter:
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-fault.removed:
		}
	}
	f.mu.Lock()
	severed = f.severed
	f.mu.Unlock()
	if severed != nil {
		return hang(ctx, severed)
	}
	return nil
}

// hang waits for the end of the context or of the fault.
func hang(ctx context.Context, over <-chan struct{}) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrFault, ctx.Err())
	case <-over:
		return ErrFault
	}
}

// on matches calls about one key and owner.
func on(key, owner string) func(*Fault) bool {
	return func(f *Fault) bool {
		return (f.Key == "" || f.Key == key) && (f.Owner == "" || f.Owner == owner)
	}
}

func (f *Faults) acquire(ctx context.Context, req driver.Request) (lease driver.Lease, err error) {
	fault := f.through(ctx, OpAcquire, on(req.Key, req.Owner), func() { lease, err = f.inner.Acquire(ctx, req) })
	if fault != nil {
		return driver.Lease{}, fault
	}
	return lease, err
}

func (f *Faults) extend(ctx context.Context, batch []driver.Renewal) {
	match := func(fault *Fault) bool {
		return slices.ContainsFunc(batch, func(r driver.Renewal) bool { return on(r.Lease.Key, r.Lease.Owner)(fault) })
	}
	sent := slices.Clone(batch)
	fault := f.through(ctx, OpExtend, match, func() { f.inner.Extend(ctx, sent) })
	for i := range batch {
		if fault != nil {
			batch[i].Err = fault
		} else {
			batch[i] = sent[i]
		}
	}
}

func (f *Faults) release(ctx context.Context, lease driver.Lease) (err error) {
	op := OpRelease
	if lease.Token == 0 {
		op = OpWithdraw
	}
	fault := f.through(ctx, op, on(lease.Key, lease.Owner), func() { err = f.inner.Release(ctx, lease) })
	if fault != nil {
		return fault
	}
	return err
}

func (f *Faults) inspect(ctx context.Context, key string) (info driver.KeyInfo, err error) {
	i, _ := driver.As[driver.Inspector](f.inner)
	fault := f.through(ctx, OpInspect, on(key, ""), func() { info, err = i.Inspect(ctx, key) })
	if fault != nil {
		return driver.KeyInfo{}, fault
	}
	return info, err
}

func (f *Faults) list(ctx context.Context, prefix, after string, limit int) (list []driver.KeyInfo, err error) {
	i, _ := driver.As[driver.Inspector](f.inner)
	fault := f.through(ctx, OpList, on("", ""), func() { list, err = i.List(ctx, prefix, after, limit) })
	if fault != nil {
		return nil, fault
	}
	return list, err
}

func (f *Faults) force(ctx context.Context, key string, token int64) (removed []driver.HolderInfo, err error) {
	i, _ := driver.As[driver.Forcer](f.inner)
	fault := f.through(ctx, OpForce, on(key, ""), func() { removed, err = i.ForceRelease(ctx, key, token) })
	if fault != nil {
		return nil, fault
	}
	return removed, err
}

// listen passes a subscription on until it is broken.
func (f *Faults) listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	n, _ := driver.As[driver.Notifier](f.inner)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	l := &listening{cancel: cancel}
	fault, severed := f.arrive(OpListen, func(*Fault) bool { return true })
	if severed != nil || fault != nil && fault.Kind != Hang {
		return ErrFault
	}
	if fault != nil {
		return hang(ctx, fault.removed)
	}
	f.mu.Lock()
	f.listens[l] = struct{}{}
	if f.severed != nil {
		cancel(ErrFault)
	}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.listens, l)
	}()
	err := n.Listen(ctx, manager, func(e driver.Event) {
		f.mu.Lock()
		drop := f.drop
		f.mu.Unlock()
		if ctx.Err() == nil && (drop == nil || !drop(e)) {
			handle(e)
		}
	})
	if cause := context.Cause(ctx); errors.Is(cause, ErrFault) {
		return cause
	}
	return err
}
