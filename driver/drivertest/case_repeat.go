package drivertest

import (
	"slices"
	"time"

	"github.com/go-dlm/dlm/driver"
)

var repetitionCases = []Case{
	{
		Name: "Backend/RepeatedAcquireReturnsTheGrant", Guarantee: "I4, contract of Acquire",
		Why: "core repeats an unanswered request; if that is refused, or granted anew, the first grant is orphaned",
		run: repeatedAcquireReturnsTheGrant,
	},
	{
		Name: "Backend/RepeatedRequestKeepsItsPlace", Guarantee: "I6, contract of Acquire",
		Why: "every waiter repeats its request all the time, and would move to the tail each time",
		run: repeatedRequestKeepsItsPlace,
	},
}

var extendCases = []Case{
	{
		Name: "Backend/ExtendAnswersEach", Guarantee: "I9, contract of Extend",
		Why: "the keeper renews all locks in one call; one lost lock must not take others along, nor hide among them",
		run: extendAnswersEach,
	},
	{
		Name: "Backend/ExtendNeverShortens", Guarantee: "contract of Extend, RWM5",
		Why: "a renewal that arrives late, or asks for less, would take away time that the holder counts on",
		run: extendNeverShortens,
	},
	{
		Name: "Backend/TTLIsKept", Guarantee: "REN10, TTL3",
		Why: "a TTL that is cut, rounded down or converted twice ends locks early, or keeps them for years",
		run: ttlIsKept,
	},
}

func repeatedAcquireReturnsTheGrant(e *env) {
	a, b := e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a", TTL: e.unit})
	granted := time.Now()
	for _, ttl := range []time.Duration{0, e.unit} { // a long one, then a shorter one
		again := a.grant(driver.Request{Key: "k", Owner: "a", TTL: ttl, Enqueue: true})
		if again.Token != lease.Token {
			e.fatalf("repeated Acquire answered token %d, the grant has %d", again.Token, lease.Token)
		}
	}
	pass(expired(granted, lease.TTL))
	b.refuse(driver.Request{Key: "k", Owner: "b"})
	if info, ok := a.inspect("k"); ok && (len(info.Holders) != 1 || len(info.Waiters) != 0) {
		e.fatalf("one owner that repeats itself makes %d holders and %d waiters", len(info.Holders), len(info.Waiters))
	}
	a.mustRelease(lease)
	b.mustRelease(b.grant(driver.Request{Key: "k", Owner: "b"}))
}

func repeatedRequestKeepsItsPlace(e *env) {
	a, b, c := e.open(), e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	first, second := driver.Request{Key: "k", Owner: "b"}, driver.Request{Key: "k", Owner: "c"}
	b.enqueue(first)
	c.enqueue(second)
	for range 3 {
		held := b.enqueue(first)
		e.wantPosition(held, 1)
		e.wantPosition(c.enqueue(second), 2)
	}
	if info, ok := a.inspect("k"); ok && len(info.Waiters) != 2 {
		e.fatalf("two owners that repeat themselves make %d waiters", len(info.Waiters))
	}
	a.mustRelease(lease)
	if e.props.FairQueue {
		c.enqueue(second)
	}
	b.mustRelease(b.wait(first))
	c.mustRelease(c.wait(second))
	c.mustRelease(c.grant(driver.Request{Key: "k", Owner: "d"}))
}

// wantPosition checks the place in the queue. If the queue is not fair, it may
// be a guess.
func (e *env) wantPosition(held *driver.HeldError, position int) {
	if !e.props.FairQueue && position > 0 && held.Position >= 0 {
		return
	}
	if held.Position != position {
		e.fatalf("place %d in the queue, want %d", held.Position, position)
	}
}

func extendAnswersEach(e *env) {
	a, b := e.open(), e.open()
	granted := time.Now()
	good1 := a.grant(driver.Request{Key: "good1", Owner: "a", TTL: e.unit})
	good2 := a.grant(driver.Request{Key: "good2", Owner: "a", TTL: e.unit})
	released := a.grant(driver.Request{Key: "released", Owner: "a"})
	a.mustRelease(released)
	foreign := b.grant(driver.Request{Key: "foreign", Owner: "b", TTL: e.unit})
	lapsing := a.grant(driver.Request{Key: "lapsed", Owner: "a", TTL: e.unit})
	if !e.props.SessionLeases {
		// All but the one that is to lapse are kept up meanwhile.
		good1, good2, foreign = a.mustExtend(good1, 4*e.unit), a.mustExtend(good2, 4*e.unit), b.mustExtend(foreign, 4*e.unit)
		pass(expired(time.Now(), lapsing.TTL))
	} else {
		a.mustRelease(lapsing)
	}
	many := make([]driver.Lease, 100)
	for i := range many {
		many[i] = a.grant(driver.Request{Key: e.name("many"), Owner: "a"})
	}
	renewed := append([]driver.Lease{good1, good2}, many...)

	type entry struct {
		what  string
		lease driver.Lease
		lost  bool
	}
	entries := []entry{
		{"a grant released before", released, true},
		{"a good grant at the second place", good1, false},
		{"somebody else's grant", driver.Lease{Key: "foreign", Owner: "a", Token: foreign.Token}, true},
		{"a grant that has expired", lapsing, true},
		{"a key that nobody ever held", driver.Lease{Key: "never", Owner: "a", Token: 1}, true},
	}
	for _, lease := range many {
		entries = append(entries, entry{"one of many good grants", lease, false})
	}
	entries = append(entries,
		entry{"a good grant with the wrong token", driver.Lease{Key: "good2", Owner: "a", Token: good2.Token + 1000}, true},
		entry{"a good grant at the last place", good2, false},
	)
	batch := make([]driver.Renewal, len(entries))
	for i, entry := range entries {
		batch[i].Lease = entry.lease
		batch[i].Lease.TTL = e.long
	}
	a.extendAll(batch)
	for i, entry := range entries {
		if entry.lost {
			e.wantLost(batch[i].Err, "the renewal of "+entry.what)
		} else if batch[i].Err != nil {
			e.fatalf("the renewal of %s: %w", entry.what, batch[i].Err)
		}
	}
	pass(expired(granted, 4*e.unit+e.unit/2))
	for _, lease := range renewed {
		b.refuse(driver.Request{Key: lease.Key, Owner: "b"})
		a.mustRelease(lease)
	}
	if !e.props.SessionLeases {
		// The foreign one was not renewed.
		b.mustRelease(b.grant(driver.Request{Key: "foreign", Owner: "c"}))
	}
	a.mustRelease(a.grant(driver.Request{Key: "never", Owner: "c"}))
	// An empty batch is no fault.
	a.extendAll(nil)
}

func extendNeverShortens(e *env) {
	a, b := e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	short := a.grant(driver.Request{Key: "short", Owner: "a", TTL: e.unit})
	a.mustExtend(short, e.long)
	asked := time.Now()
	a.mustExtend(lease, e.unit)
	a.mustExtend(short, e.unit)
	pass(expired(asked, e.unit))
	b.refuse(driver.Request{Key: "k", Owner: "b"})
	b.refuse(driver.Request{Key: "short", Owner: "b"})
	a.mustRelease(lease)
	a.mustRelease(short)
}

func ttlIsKept(e *env) {
	a, b := e.open(), e.open()
	check := func(ttl time.Duration, remaining time.Duration, since time.Time, what string) {
		if e.props.SessionLeases {
			return // that is the session's time
		}
		slack := max(ttl/100, 50*time.Millisecond)
		if most := ttl + slack; remaining > most {
			e.fatalf("%s: %v remain of a TTL of %v", what, remaining, ttl)
		}
		if least := ttl - time.Since(since) - slack; remaining < least {
			e.fatalf("%s: %v remain of a TTL of %v after %v", what, remaining, ttl, time.Since(since))
		}
	}
	ttls := []time.Duration{2 * time.Second, 90 * time.Second, 10 * time.Minute, 25 * time.Hour, 300 * 24 * time.Hour}
	for i, ttl := range ttls {
		ttls[i] = max(ttl, e.props.MinTTL)
	}
	for _, ttl := range slices.Compact(ttls) {
		req := driver.Request{Key: e.name("k"), Owner: "a", TTL: ttl}
		since := time.Now()
		lease := a.grant(req)
		for _, what := range []string{"grant", "first renewal", "second renewal"} {
			if what != "grant" {
				since = time.Now()
				lease = a.mustExtend(lease, ttl)
			}
			if info, ok := a.inspect(req.Key); ok && len(info.Holders) == 1 {
				check(lease.TTL, info.Holders[0].Remaining, since, what)
				if have := info.Holders[0].TTL; have != lease.TTL && !e.props.SessionLeases {
					e.fatalf("%s: Inspect tells TTL %v, the lease %v", what, have, lease.TTL)
				}
			}
			if held := b.refuse(driver.Request{Key: req.Key, Owner: "b"}); held.Remaining > 0 {
				check(lease.TTL, held.Remaining, since, what)
			}
		}
		a.mustRelease(lease)
	}
}
