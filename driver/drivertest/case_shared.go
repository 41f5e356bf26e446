package drivertest

import (
	"errors"
	"slices"
	"time"

	"github.com/go-dlm/dlm/driver"
)

var sharedCases = slices.Concat(
	both("ReadersEnterTogether", "RWM6",
		"readers that take turns behind a writer are as slow as writers",
		readersEnterTogether),
	both("ReaderDoesNotPassAWaitingWriter", "RWM6, I6",
		"where readers keep coming, a writer would wait for ever",
		readerDoesNotPassAWaitingWriter),
	both("ShorterReaderDoesNotShorten", "RWM5, REN14",
		"readers that share one expiry lose their locks with the shortest of them, or keep a dead one alive",
		shorterReaderDoesNotShorten),
)

var permitCases = slices.Concat(
	both("PermitsOfTheDeadComeBack", "SEM5, REN14",
		"every crash would cost a permit for good",
		permitsOfTheDeadComeBack),
	both("LimitsMustAgree", "SEM8",
		"with callers that differ about the limit nobody knows how many hold the key",
		limitsMustAgree),
)

func readersEnterTogether(e *env, open func() locker) {
	if !e.sharedMode() {
		return
	}
	const readers = 10
	lockers := []locker{open(), open()}
	writer := e.take(lockers[0], "k", want{})
	g := e.group()
	var waiting []<-chan *grip
	for i := range readers {
		waiting = append(waiting, e.queue(g, lockers[i%2], "k", want{shared: true}))
	}
	second := e.queue(g, lockers[0], "k", want{})
	late := e.queue(g, lockers[1], "k", want{shared: true})
	e.drop(writer)
	// None of them releases before all are in.
	var inside []*grip
	for _, ch := range waiting {
		inside = append(inside, await(e, ch, "the grant of one of several readers in front of the queue"))
	}
	if e.props.FairQueue {
		e.denied(lockers[1], "k", want{shared: true})
		select {
		case <-late:
			e.fatalf("a reader passed a writer that came before it")
		case <-second:
			e.fatalf("a writer entered beside readers")
		default:
		}
	}
	for _, r := range inside {
		e.drop(r)
	}
	e.drop(await(e, second, "the grant of the writer behind the readers"))
	e.drop(await(e, late, "the grant of the last reader"))
	g.wait()
	e.drop(e.take(lockers[0], "k", want{}))
}

func readerDoesNotPassAWaitingWriter(e *env, open func() locker) {
	if !e.sharedMode() || !e.props.FairQueue {
		return
	}
	a, b, c := open(), open(), open()
	reader := e.take(a, "k", want{shared: true})
	g := e.group()
	writer := e.queue(g, b, "k", want{})
	e.denied(c, "k", want{shared: true})
	second := e.queue(g, c, "k", want{shared: true})
	e.drop(reader)
	w := await(e, writer, "the grant of the writer")
	select {
	case <-second:
		e.fatalf("a reader entered beside the writer")
	default:
	}
	e.drop(w)
	e.drop(await(e, second, "the grant of the reader behind the writer"))
	g.wait()
}

func shorterReaderDoesNotShorten(e *env, open func() locker) {
	if !e.sharedMode() {
		return
	}
	a, b, c := open(), open(), open()
	longer := e.take(a, "k", want{shared: true, ttl: 4 * e.unit})
	shorter := e.take(b, "k", want{shared: true, ttl: e.unit})
	taken := time.Now()
	b.die()
	// While the short one's time runs out, the long one is renewed, which must
	// not prolong the other.
	if err := longer.extend(4 * e.unit); err != nil {
		e.fatalf("the longer reader cannot renew: %w", err)
	}
	pass(expired(taken, shorter.ttl+e.unit/4))
	e.denied(c, "k", want{})
	e.drop(longer)
	if !e.props.SessionLeases {
		e.drop(e.take(c, "k", want{}))
		return
	}
	e.drop(e.obtain(c, "k", want{}))
}

func permitsOfTheDeadComeBack(e *env, open func() locker) {
	if !e.permits() {
		return
	}
	a, b, c, d := open(), open(), open(), open()
	first := e.take(a, "k", want{limit: 2, ttl: e.unit})
	e.take(b, "k", want{limit: 2, ttl: e.unit})
	e.denied(c, "k", want{limit: 2})
	b.die()
	// One holder lives on and renews its own permit, not that of the other.
	if err := first.extend(e.long); err != nil {
		e.fatalf("one of two holders cannot renew: %w", err)
	}
	third := e.obtain(c, "k", want{limit: 2})
	e.denied(d, "k", want{limit: 2})
	e.drop(first)
	e.drop(e.take(d, "k", want{limit: 2}))
	e.drop(third)
	// Now both die.
	e.take(c, "k", want{limit: 2, ttl: e.unit})
	e.take(c, "k", want{limit: 2, ttl: e.unit})
	c.die()
	p1 := e.obtain(d, "k", want{limit: 2})
	p2 := e.obtain(d, "k", want{limit: 2})
	e.drop(p1)
	e.drop(p2)
}

func limitsMustAgree(e *env, open func() locker) {
	if !e.permits() {
		return
	}
	a, b := open(), open()
	disagree := func(w want, have int) {
		held, err := b.try("k", w)
		if err == nil {
			e.fatalf("limit %d was granted (token %d) on a key in use with limit %d", w.limit, held.token, have)
		}
		e.wantLimit(err, max(w.limit, 1), have)
		_, err = b.wait(e.within(e.patience), "k", w)
		e.wantLimit(err, max(w.limit, 1), have)
	}
	first := e.take(a, "k", want{limit: 3})
	disagree(want{limit: 5}, 3)
	disagree(want{limit: 2}, 3)
	disagree(want{}, 3)
	if e.props.SharedMode {
		disagree(want{shared: true}, 3)
	}
	e.drop(e.take(b, "k", want{limit: 3}))
	e.drop(first)
	// Whoever waits counts too.
	second := e.take(a, "k", want{limit: 2})
	third := e.take(a, "k", want{limit: 2})
	g := e.group()
	waiter := e.queue(g, a, "k", want{limit: 2})
	e.drop(second)
	e.drop(third)
	disagree(want{limit: 4}, 2)
	e.drop(await(e, waiter, "the grant of the waiter"))
	g.wait()
	// Nobody uses the key any more, so the limit is open again.
	e.drop(e.take(b, "k", want{limit: 4}))
	e.drop(e.take(b, "k", want{}))
}

// wantLimit checks that an error tells both limits.
func (e *env) wantLimit(err error, want, have int) {
	limit, ok := errors.AsType[*driver.LimitError](err)
	if !ok || !errors.Is(err, driver.ErrInvalid) {
		e.fatalf("a request with limit %d on a key in use with limit %d: %v, want a LimitError", want, have, err)
	}
	if limit.Want != want || limit.Have != have || limit.Key != "k" {
		e.fatalf("the LimitError says want %d, have %d of %q; asked for %d of \"k\", in use with %d", limit.Want, limit.Have, limit.Key, want, have)
	}
}
