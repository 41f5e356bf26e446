package drivertest

import (
	"errors"
	"slices"
	"time"

	"github.com/go-dlm/dlm/driver"
)

var inspectCases = []Case{{
	Name: "Backend/InspectTellsTheTruth", Guarantee: "contract of Inspector",
	Why: "whoever is on call decides by it whom to blame and what to free",
	run: inspectTellsTheTruth,
}}

var forceCases = []Case{{
	Name: "Backend/ForceReleaseFreesWhatWasNamed", Guarantee: "contract of Forcer, I5",
	Why: "an operator who frees one lock must not free another, and must be told what he did",
	run: forceReleaseFreesWhatWasNamed,
}}

// wantUnsupported checks that a manager refuses to read from a backend that
// cannot be read.
func (e *env) wantUnsupported() {
	m := e.manage(quick())
	if _, err := m.GetLock(e.within(e.patience), "k"); !errors.Is(err, errors.ErrUnsupported) {
		e.fatalf("GetLock: %v, want an error that matches errors.ErrUnsupported", err)
	}
	if _, err := m.ListLocks(e.within(e.patience), "", "", 0); !errors.Is(err, errors.ErrUnsupported) {
		e.fatalf("ListLocks: %v, want an error that matches errors.ErrUnsupported", err)
	}
}

func inspectTellsTheTruth(e *env) {
	a, b := e.open(), e.open()
	if _, ok := a.inspect("k"); !ok {
		e.wantUnsupported()
		return
	}
	look := func(key string, limit, holders, waiters int) driver.KeyInfo {
		info, _ := b.inspect(key)
		if info.Key != key || info.Limit != limit || len(info.Holders) != holders || len(info.Waiters) != waiters {
			e.fatalf("key %q, want limit %d, %d holders and %d waiters: %+v", key, limit, holders, waiters, info)
		}
		return info
	}
	look("k", 0, 0, 0)
	ttl := e.long
	began := time.Now()
	lease := a.grant(driver.Request{Key: "k", Owner: "a", TTL: ttl})
	granted := time.Now()
	b.enqueue(driver.Request{Key: "k", Owner: "b"})
	a.enqueue(driver.Request{Key: "k", Owner: "c"})
	pass(granted.Add(e.unit / 4))
	info := look("k", 1, 1, 2)
	age := time.Since(began)
	h := info.Holders[0]
	if h.Owner != "a" || h.Token != lease.Token || h.Mode != driver.Exclusive || h.TTL != lease.TTL && !e.props.SessionLeases {
		e.fatalf("the holder is %+v, want %+v", h, lease)
	}
	slack := 50 * time.Millisecond
	if h.Held < e.unit/4-slack || h.Held > age+slack { // it was granted between began and granted
		e.fatalf("held for %v, want between %v and %v", h.Held, e.unit/4, age)
	}
	if !e.props.SessionLeases && (h.Remaining <= 0 || h.Remaining > lease.TTL) {
		e.fatalf("%v remain of a TTL of %v", h.Remaining, lease.TTL)
	}
	if e.props.FairQueue {
		if info.Waiters[0].Owner != "b" || info.Waiters[1].Owner != "c" {
			e.fatalf("the waiters are %+v, want b and c", info.Waiters)
		}
	}
	for _, w := range info.Waiters {
		if w.Mode != driver.Exclusive || w.Waiting < 0 || w.Waiting > age+slack {
			e.fatalf("the waiter %+v has been waiting for less than %v", w, age)
		}
	}
	b.withdraw("k", "b")
	b.withdraw("k", "c")
	look("k", 1, 1, 0)
	a.mustRelease(lease)
	look("k", 0, 0, 0)

	// What has expired is not shown, though nobody has touched it since.
	if !e.props.SessionLeases {
		lease = a.grant(driver.Request{Key: "k", Owner: "a", TTL: e.unit})
		pass(expired(time.Now(), lease.TTL))
		look("k", 0, 0, 0)
	}
	if e.props.Permits {
		var leases []driver.Lease
		for _, owner := range []string{"z", "y", "x"} {
			leases = append(leases, a.grant(driver.Request{Key: "p", Owner: owner, Limit: 4}))
		}
		e.wantHolders(look("p", 4, 3, 0), leases...)
		a.mustRelease(leases[1])
		e.wantHolders(look("p", 4, 2, 0), leases[0], leases[2])
		a.mustRelease(leases[0])
		a.mustRelease(leases[2])
	}
	if e.props.SharedMode {
		r1 := a.grant(driver.Request{Key: "s", Owner: "r2", Mode: driver.Shared})
		r2 := a.grant(driver.Request{Key: "s", Owner: "r1", Mode: driver.Shared})
		b.enqueue(driver.Request{Key: "s", Owner: "w"})
		b.enqueue(driver.Request{Key: "s", Owner: "r3", Mode: driver.Shared})
		info := look("s", 1, 2, 2)
		e.wantHolders(info, r1, r2)
		if w := slices.IndexFunc(info.Waiters, func(w driver.WaiterInfo) bool { return w.Owner == "r3" }); w < 0 || info.Waiters[w].Mode != driver.Shared {
			e.fatalf("the waiters are %+v, want r3 among them, shared", info.Waiters)
		}
		b.withdraw("s", "w")
		b.withdraw("s", "r3")
		a.mustRelease(r1)
		a.mustRelease(r2)
	}
}

// wantHolders checks that the holders are these, in this order.
func (e *env) wantHolders(info driver.KeyInfo, leases ...driver.Lease) {
	for i, lease := range leases {
		h := info.Holders[i]
		if h.Owner != lease.Owner || h.Token != lease.Token || h.Mode != lease.Mode {
			e.fatalf("holder %d of %q is %+v, want %+v", i+1, info.Key, h, lease)
		}
	}
}

func forceReleaseFreesWhatWasNamed(e *env) {
	a, b := e.open(), e.open()
	f, ok := driver.As[driver.Forcer](b.backend)
	if !ok {
		m := e.manage(quick())
		if _, err := m.ForceRelease(e.within(e.patience), "k", 0); !errors.Is(err, errors.ErrUnsupported) {
			e.fatalf("ForceRelease: %v, want an error that matches errors.ErrUnsupported", err)
		}
		return
	}
	force := func(key string, token int64, want ...driver.Lease) {
		removed, err := f.ForceRelease(e.within(e.patience), key, token)
		if err != nil {
			e.fatalf("ForceRelease(%q, %d): %w", key, token, err)
		}
		if len(removed) != len(want) {
			e.fatalf("ForceRelease(%q, %d) removed %+v, want %+v", key, token, removed, want)
		}
		e.wantHolders(driver.KeyInfo{Key: key, Holders: removed}, want...)
	}
	force("k", 0)
	force("k", 17)
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	other := a.grant(driver.Request{Key: "other", Owner: "a"})
	force("k", lease.Token+1)
	force("k", other.Token)
	a.mustExtend(lease, e.long)
	force("k", lease.Token, lease)
	_, err := a.extend(lease, e.long)
	e.wantLost(err, "a renewal after a forced release", driver.ReasonGone)
	e.wantLost(a.release(lease), "a release after a forced release", driver.ReasonGone)

	// What is taken away goes to the next in the queue.
	lease = a.grant(driver.Request{Key: "k", Owner: "a"})
	waiting := driver.Request{Key: "k", Owner: "b"}
	b.enqueue(waiting)
	force("k", 0, lease)
	next := b.grant(waiting)
	e.wantLost(a.release(lease), "a release after a forced release, with the key taken", driver.ReasonTaken)
	b.mustRelease(next)

	if e.props.Permits {
		p1 := a.grant(driver.Request{Key: "p", Owner: "p1", Limit: 3})
		p2 := a.grant(driver.Request{Key: "p", Owner: "p2", Limit: 3})
		p3 := a.grant(driver.Request{Key: "p", Owner: "p3", Limit: 3})
		force("p", p2.Token, p2)
		a.mustExtend(p1, e.long)
		force("p", 0, p1, p3)
		a.mustRelease(a.grant(driver.Request{Key: "p", Owner: "p4"}))
	}
	a.mustRelease(other)
}
