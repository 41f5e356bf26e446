package drivertest

import (
	"slices"
	"time"
)

var expiryCases = slices.Concat(
	both("ExpiredGrantIsTaken", "I1, I2, WAIT6",
		"a holder that died would keep the key for ever, or lose it before its time",
		expiredGrantIsTaken),
	both("FullTTLFromTheGrant", "WAIT11, REN11",
		"waiters whose time ran while they queued would all enter together",
		fullTTLFromTheGrant),
	both("QueueMovesWhenAHolderDies", "WAIT6, I6",
		"waiters that only a release can wake wait for ever behind a dead holder",
		queueMovesWhenAHolderDies),
)

func expiredGrantIsTaken(e *env, open func() locker) {
	a, b := open(), open()
	first := e.take(a, "k", want{ttl: e.unit})
	a.die()
	e.denied(b, "k", want{})
	second := e.obtain(b, "k", want{})
	if second.owner == first.owner {
		e.fatalf("both holders have the owner value %q", first.owner)
	}
	if second.token <= first.token {
		e.fatalf("the second holder has token %d, the first %d", second.token, first.token)
	}
	e.denied(open(), "k", want{})
	e.drop(second)
}

func fullTTLFromTheGrant(e *env, open func() locker) {
	first := open()
	e.take(first, "k", want{ttl: e.unit})
	// Nobody releases anything. That each of them gets its full TTL, and that
	// no two of them hold the key together, is what the recorder checks.
	g := e.group()
	type entered struct {
		at   time.Time
		held *grip
	}
	var got []entered
	order := make(chan entered, 3)
	for range 3 {
		l := open()
		g.start(func() {
			held := e.obtain(l, "k", want{ttl: e.unit})
			order <- entered{time.Now(), held}
			if held.lock != nil {
				if left := time.Until(held.lock.Deadline()); left < e.unit/2 {
					e.fatalf("a lock with TTL %v was handed out with %v left", e.unit, left)
				}
			}
			l.die()
		})
	}
	first.die()
	g.wait()
	close(order)
	for o := range order {
		got = append(got, o)
	}
	if e.props.SessionLeases {
		return // a session ends when the store sees fit
	}
	for i := 1; i < len(got); i++ {
		if gap := got[i].at.Sub(got[i-1].at); gap < e.unit/2 {
			e.fatalf("grants with TTL %v follow each other after %v", e.unit, gap)
		}
	}
}

func queueMovesWhenAHolderDies(e *env, open func() locker) {
	dead := open()
	e.take(dead, "k", want{ttl: e.unit})
	dead.die()
	g := e.group()
	var queue []<-chan *grip
	for range 3 {
		queue = append(queue, e.queue(g, open(), "k", want{}))
	}
	for _, ch := range queue {
		// The next one gets it only after this one has released it.
		e.drop(await(e, ch, "the grant of the next in the queue"))
	}
	g.wait()
}
