package drivertest

import (
	"errors"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

var exclusionCases = slices.Concat(
	both("OneHolder", "I1",
		"two holders at once are what a lock is there to prevent",
		oneHolder),
	both("ReadersXorWriter", "I1",
		"a writer beside a reader, or beside another writer, corrupts what they share",
		readersXorWriter),
	both("Permits", "I1, SEM",
		"one permit too many overloads what the limit protects; one too few wastes it",
		permits),
)

func oneHolder(e *env, open func() locker) {
	const callers, tries = 100, 5
	lockers := []locker{open(), open(), open(), open()}
	var inside, wins atomic.Int64
	begin := make(chan struct{})
	g := e.group()
	for i := range callers {
		g.start(func() {
			<-begin
			for range tries {
				l, err := lockers[i%len(lockers)].try("k", want{})
				if errors.Is(err, driver.ErrHeld) {
					continue
				}
				if err != nil {
					e.fatalf("try: %w", err)
				}
				if n := inside.Add(1); n != 1 {
					e.fatalf("%d hold the lock", n)
				}
				wins.Add(1)
				runtime.Gosched()
				inside.Add(-1)
				e.drop(l)
			}
		})
	}
	close(begin)
	g.wait()
	if wins.Load() == 0 {
		e.fatalf("nobody got a free lock")
	}
}

func readersXorWriter(e *env, open func() locker) {
	if !e.sharedMode() {
		return
	}
	a, b := open(), open()
	reader, writer := want{shared: true}, want{}
	r1 := e.take(a, "k", reader)
	r2 := e.take(b, "k", reader)
	if r2.token <= r1.token {
		e.fatalf("the second reader has token %d, the first %d", r2.token, r1.token)
	}
	e.denied(a, "k", writer)
	e.drop(r1)
	e.denied(b, "k", writer)
	e.drop(r2)
	w := e.take(a, "k", writer)
	e.denied(b, "k", reader)
	e.denied(b, "k", writer)
	e.drop(w)
	e.drop(e.take(b, "k", reader))

	const callers, tries = 24, 6
	var readers, writers atomic.Int64
	begin := make(chan struct{})
	g := e.group()
	for i := range callers {
		l, mode, mine, others := a, reader, &readers, &writers
		if i%2 == 1 {
			l = b
		}
		if i%3 == 0 {
			mode, mine, others = writer, &writers, &readers
		}
		g.start(func() {
			<-begin
			for range tries {
				held, err := l.try("k", mode)
				if errors.Is(err, driver.ErrHeld) {
					continue
				}
				if err != nil {
					e.fatalf("try: %w", err)
				}
				if n, m := mine.Add(1), others.Load(); m != 0 || !mode.shared && n != 1 {
					e.fatalf("%d of the same kind hold the lock beside %d others (shared: %v)", n, m, mode.shared)
				}
				runtime.Gosched()
				mine.Add(-1)
				e.drop(held)
			}
		})
	}
	close(begin)
	g.wait()
}

func permits(e *env, open func() locker) {
	if !e.permits() {
		return
	}
	const limit = 3
	one := want{limit: limit}
	lockers := []locker{open(), open()}
	var held []*grip
	for i := range limit {
		p := e.take(lockers[i%2], "k", one)
		if i > 0 && p.token <= held[i-1].token {
			e.fatalf("permit %d has token %d, the one before %d", i+1, p.token, held[i-1].token)
		}
		held = append(held, p)
	}
	e.denied(lockers[0], "k", one)
	e.drop(held[1])
	held[1] = e.take(lockers[0], "k", one)
	e.denied(lockers[1], "k", one)
	for _, p := range held {
		e.drop(p)
	}

	const callers, tries = 30, 5
	var inside atomic.Int64
	begin := make(chan struct{})
	g := e.group()
	for i := range callers {
		g.start(func() {
			<-begin
			for range tries {
				p, err := lockers[i%2].try("k", one)
				if errors.Is(err, driver.ErrHeld) {
					continue
				}
				if err != nil {
					e.fatalf("try: %w", err)
				}
				if n := inside.Add(1); n > limit {
					e.fatalf("%d hold one of %d permits", n, limit)
				}
				runtime.Gosched()
				inside.Add(-1)
				e.drop(p)
			}
		})
	}
	close(begin)
	g.wait()
}

// sharedMode says whether the backend has shared grants. If not, it checks
// that a manager refuses to ask for one.
func (e *env) sharedMode() bool {
	if !e.props.SharedMode {
		e.refused(&dlm.AcquireOptions{Shared: true})
	}
	return e.props.SharedMode
}

// permits says whether the backend has limits above 1. If not, it checks that
// a manager refuses to ask for one.
func (e *env) permits() bool {
	if !e.props.Permits {
		e.refused(&dlm.AcquireOptions{Limit: 2})
	}
	return e.props.Permits
}

// refused checks that a manager refuses options without asking the backend.
func (e *env) refused(opts *dlm.AcquireOptions) {
	m := e.manage(quick())
	_, err := m.Acquire(e.within(e.patience), "k", e.long, opts)
	if !errors.Is(err, errors.ErrUnsupported) {
		e.fatalf("Acquire with %+v: %v, want an error that matches errors.ErrUnsupported", *opts, err)
	}
	if n := m.faults.AllCalls(); n != 0 {
		e.fatalf("%d calls reached a backend that does not support them", n)
	}
}
