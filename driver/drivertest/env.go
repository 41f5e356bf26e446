package drivertest

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// soon is how late a call may return after its context has ended.
const soon = 5 * time.Second

// env is one run of one case.
type env struct {
	t       testing.TB
	h       *Harness
	history *history
	props   driver.Properties
	unit    time.Duration // a short TTL
	long    time.Duration // a TTL that does not run out during a case
	// patience is how long the suite waits for what should come at once.
	patience time.Duration
	ctx      context.Context // ends with the case
	cancel   context.CancelFunc

	mu       sync.Mutex
	clients  []*client
	managers []*managed
	groups   []*group
	names    map[string]int
	prober   locker // tries whether keys are free
	cancels  []context.CancelFunc
}

// failure is what ends a case: it is thrown by fatalf and caught by protect.
type failure struct{ error }

func newEnv(t testing.TB, h *Harness) *env {
	e := &env{t: t, h: h, history: newHistory(), names: make(map[string]int)}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	probe := h.Open(t)
	e.props = probe.Properties()
	if err := probe.Close(); err != nil {
		t.Errorf("Close of a backend that was not used: %v", err)
	}
	e.unit = max(h.unit(), e.props.MinTTL)
	e.long = max(time.Minute, 20*e.unit)
	e.patience = 15*time.Second + 10*e.unit + 2*e.props.LivenessWindow
	return e
}

// fatalf ends the case, or one goroutine of it, with an error.
func (e *env) fatalf(format string, args ...any) {
	panic(failure{fmt.Errorf("%s%w", caseLine(), fmt.Errorf(format, args...))})
}

// caseLine says which line of which case is being run.
func caseLine() string {
	pcs := make([]uintptr, 50)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	line := ""
	for {
		frame, more := frames.Next()
		if name := filepath.Base(frame.File); strings.HasPrefix(name, "case_") {
			line = fmt.Sprintf("%s:%d: ", name, frame.Line)
		}
		if !more {
			return line
		}
	}
}

// protect runs f and returns the error that ended it.
func (e *env) protect(f func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case failure:
			err = p.error
		default:
			panic(p)
		}
	}()
	f()
	return nil
}

// finish ends what the case has left running, and checks what it left behind.
func (e *env) finish() error {
	e.cancel()
	var errs []error
	for _, g := range e.groups {
		if err := g.join(); err != nil {
			errs = append(errs, err)
		}
	}
	for _, m := range e.managers {
		errs = append(errs, e.protect(m.shut))
	}
	errs = append(errs, e.protect(e.checkResidue))
	for _, c := range e.clients {
		if !c.killed {
			errs = append(errs, c.backend.Close())
		}
	}
	for _, cancel := range e.cancels {
		cancel()
	}
	return errors.Join(append(errs, e.history.err())...)
}

// maxProbes bounds how many keys are probed.
const maxProbes = 64

// checkResidue checks that nothing is left of what was released or withdrawn:
// by what the store says, and by taking each key that must be free.
func (e *env) checkResidue() {
	cl := e.open()
	if in, ok := driver.As[driver.Inspector](cl.backend); ok {
		for _, key := range e.history.usedKeys() {
			info, err := in.Inspect(e.within(e.patience), key)
			if err != nil {
				e.fatalf("inspect %q: %w", key, err)
			}
			e.history.residue(info)
		}
	}
	keys := e.history.cleanKeys()
	for _, key := range keys[:min(len(keys), maxProbes)] {
		lease, err := cl.acquire(driver.Request{Key: key, Owner: e.name("probe")})
		if err != nil {
			e.fatalf("key %q is not free at the end, though everything was given up: %w", key, err)
		}
		cl.mustRelease(lease)
	}
}

// within returns a context that ends after d, or when all is over.
func (e *env) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cancels = append(e.cancels, cancel)
	return ctx
}

// name returns a new name for an owner.
func (e *env) name(prefix string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.names[prefix]++
	return prefix + "#" + strconv.Itoa(e.names[prefix])
}

// open returns a new client of the store.
func (e *env) open() *client {
	cl := &client{env: e, inner: e.h.Open(e.t)}
	recorded, r := e.history.record(cl.inner)
	cl.backend, cl.recorder = e.guard(recorded), r
	e.mu.Lock()
	defer e.mu.Unlock()
	e.clients = append(e.clients, cl)
	return cl
}

// manage returns a manager over a new client, with faults in between.
func (e *env) manage(cfg *dlm.LockConfig) *managed {
	cl := e.open()
	faults := NewFaults(cl.backend)
	newManager := e.h.newManager
	if newManager == nil {
		newManager = func(b driver.Backend, cfg *dlm.LockConfig) (manager, error) { return dlm.NewManager(b, cfg) }
	}
	m, err := newManager(faults.Backend(), cfg)
	if err != nil {
		e.fatalf("NewManager: %w", err)
	}
	md := &managed{manager: m, env: e, client: cl, faults: faults}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.managers = append(e.managers, md)
	return md
}

// group is a number of goroutines of a case.
type group struct {
	env *env
	wg  sync.WaitGroup

	mu   sync.Mutex
	errs []error
}

func (e *env) group() *group {
	g := &group{env: e}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.groups = append(e.groups, g)
	return g
}

// start runs f in a goroutine.
func (g *group) start(f func()) {
	g.wg.Go(func() {
		if err := g.env.protect(f); err != nil {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.errs = append(g.errs, err)
		}
	})
}

// join waits for all goroutines and returns their errors, once.
func (g *group) join() error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.wg.Wait()
	}()
	var stuck error
	timer := time.NewTimer(2 * g.env.patience)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		stuck = errors.New("goroutines of the case are stuck")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	err := errors.Join(append(g.errs, stuck)...)
	g.errs = nil
	return err
}

// wait is join that ends the case if a goroutine failed.
func (g *group) wait() {
	if err := g.join(); err != nil {
		panic(failure{err})
	}
}

// await waits for a channel to close or to deliver.
func await[T any](e *env, ch <-chan T, what string) T {
	v, ok := awaitFor(ch, e.patience)
	if !ok {
		e.fatalf("%s did not come within %v", what, e.patience)
	}
	return v
}

// awaitFor waits for a channel for some time.
func awaitFor[T any](ch <-chan T, d time.Duration) (v T, ok bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case v = <-ch:
		return v, true
	case <-timer.C:
		return v, false
	}
}

// eventually waits until cond holds, looking again after short pauses.
func (e *env) eventually(what string, cond func() bool) {
	e.eventuallyWithin(e.patience, what, cond)
}

func (e *env) eventuallyWithin(limit time.Duration, what string, cond func() bool) {
	start := time.Now()
	for pause := time.Millisecond; !cond(); pause = min(2*pause, 20*time.Millisecond) {
		if time.Since(start) > limit {
			e.fatalf("not within %v: %s", limit, what)
		}
		time.Sleep(pause)
	}
}

// pass lets time pass until the given moment.
func pass(until time.Time) { time.Sleep(time.Until(until)) }
