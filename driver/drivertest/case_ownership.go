package drivertest

import (
	"errors"
	"slices"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

var ownershipCases = slices.Concat(
	both("LateReleaseSparesTheSuccessor", "I5, OWN1, OWN6",
		"a release by name alone frees the next holder's lock, and the overlaps go on from there",
		lateReleaseSparesTheSuccessor),
	both("ExpiredGrantIsNotRevived", "I5, REN15",
		"a renewal that re-creates a grant, or renews a stranger's, makes two holders",
		expiredGrantIsNotRevived),
	[]Case{
		{
			Name: "Backend/StrangersCannotTouchAGrant", Guarantee: "I5, OWN5",
			Why: "whoever guesses half of a grant's identity could free or prolong it",
			run: strangersCannotTouchAGrant,
		},
		{
			Name: "Backend/SecondReleaseIsTold", Guarantee: "I5, REL6",
			Why: "a release that always succeeds hides that the lock had long been lost",
			run: secondReleaseIsTold,
		},
		{
			Name: "Manager/SecondReleaseRepeatsTheAnswer", Guarantee: "I5, REL5",
			Why: "deferred releases run after explicit ones, and must neither fail nor free somebody else's lock",
			run: secondReleaseRepeatsTheAnswer,
		},
		{
			Name: "Manager/LocksOfOtherManagersAreRefused", Guarantee: "I5, OWN5",
			Why: "a handle that strays to another manager must not be released as if it were its own",
			run: locksOfOtherManagersAreRefused,
		},
	},
)

// lapse lets a grant come to its end while its client lives on.
func (e *env) lapse(l locker, g *grip, granted time.Time) {
	if raw, ok := l.(*rawLocker); ok && e.props.SessionLeases {
		// It lasts as long as the session; a manager would now do this.
		raw.mustRelease(driver.Lease{Key: "k", Owner: g.owner, Token: g.token})
		return
	}
	pass(expired(granted, g.ttl))
}

func lateReleaseSparesTheSuccessor(e *env, open func() locker) {
	a, b, c := open(), open(), open()
	first := e.take(a, "k", want{ttl: e.unit})
	e.lapse(a, first, time.Now())
	second := e.take(b, "k", want{})
	e.wantLost(first.release(), "a release after the grant has expired")
	e.denied(c, "k", want{})
	if err := second.extend(e.long); err != nil {
		e.fatalf("the successor cannot renew its grant: %w", err)
	}
	e.drop(second)
	e.drop(e.take(c, "k", want{}))
}

func expiredGrantIsNotRevived(e *env, open func() locker) {
	a, b := open(), open()
	first := e.take(a, "k", want{ttl: e.unit})
	e.lapse(a, first, time.Now())
	e.wantLost(first.extend(e.long), "a renewal after expiry, with the key free",
		driver.ReasonGone, driver.ReasonExpired)
	cl := e.open()
	if info, ok := cl.inspect("k"); ok && len(info.Holders) != 0 {
		e.fatalf("a refused renewal left a grant of %q", info.Holders[0].Owner)
	}

	second := e.take(b, "k", want{ttl: 2 * e.unit})
	granted := time.Now()
	e.wantLost(first.extend(e.long), "a renewal after expiry, with the key taken",
		driver.ReasonTaken, driver.ReasonExpired)
	if info, ok := cl.inspect("k"); ok {
		if len(info.Holders) != 1 || info.Holders[0].Owner != second.owner {
			e.fatalf("the key is held by %+v, want %q alone", info.Holders, second.owner)
		}
	}
	e.lapse(b, second, granted)
	// Had the renewal touched the second grant, it would still be there.
	e.drop(e.take(a, "k", want{}))
}

func strangersCannotTouchAGrant(e *env) {
	a, b := e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	elsewhere := a.grant(driver.Request{Key: "other", Owner: "b"})
	for _, s := range []struct {
		name  string
		lease driver.Lease
	}{
		{"the wrong owner", driver.Lease{Key: "k", Owner: "b", Token: lease.Token}},
		{"an owner that differs in one letter", driver.Lease{Key: "k", Owner: "A", Token: lease.Token}},
		{"a token too high", driver.Lease{Key: "k", Owner: "a", Token: lease.Token + 1}},
		{"the wrong owner and token", driver.Lease{Key: "k", Owner: "b", Token: elsewhere.Token}},
		{"the right owner, and the token of another key", driver.Lease{Key: "k", Owner: "a", Token: elsewhere.Token}},
		{"the wrong key", driver.Lease{Key: "K", Owner: "a", Token: lease.Token}},
		{"a prefix of the key", driver.Lease{Key: "oth", Owner: "b", Token: elsewhere.Token}},
	} {
		_, err := b.extend(s.lease, e.long)
		e.wantLost(err, "a renewal with "+s.name)
		e.wantLost(b.release(s.lease), "a release with "+s.name)
		b.refuse(driver.Request{Key: "k", Owner: "c"})
		b.refuse(driver.Request{Key: "other", Owner: "c"})
	}
	// An owner that has nothing withdraws nothing.
	b.withdraw("k", "b")
	b.refuse(driver.Request{Key: "k", Owner: "c"})
	a.mustExtend(lease, e.long)
	a.mustRelease(lease)
	a.mustRelease(elsewhere)
}

func secondReleaseIsTold(e *env) {
	a, b := e.open(), e.open()
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	a.mustRelease(lease)
	e.wantLost(a.release(lease), "a second release", driver.ReasonGone)
	next := b.grant(driver.Request{Key: "k", Owner: "b"})
	e.wantLost(a.release(lease), "a third release, with the key taken", driver.ReasonTaken)
	_, err := a.extend(lease, e.long)
	e.wantLost(err, "a renewal after the release", driver.ReasonTaken)
	b.mustExtend(next, e.long)
	// The owner comes back for another turn; its former token is worth nothing.
	b.mustRelease(next)
	again := a.grant(driver.Request{Key: "k", Owner: "a"})
	e.wantLost(a.release(lease), "a release with the token of the owner's former grant")
	_, err = a.extend(lease, e.long)
	e.wantLost(err, "a renewal with the token of the owner's former grant")
	a.mustRelease(again)
	// Never granted at all.
	e.wantLost(a.release(driver.Lease{Key: "nobody's", Owner: "a", Token: 1}), "a release of a key that nobody ever held", driver.ReasonGone)
}

func secondReleaseRepeatsTheAnswer(e *env) {
	a, b := e.manage(nil), e.manage(nil)
	ttl := e.long
	l := a.lock("k", ttl)
	g := e.group()
	for range 50 {
		g.start(func() {
			if err := l.Release(e.within(e.patience)); err != nil {
				e.fatalf("one of many concurrent releases: %w", err)
			}
		})
	}
	g.wait()
	if !errors.Is(l.Err(), dlm.ErrReleased) {
		e.fatalf("Err after Release: %v, want ErrReleased", l.Err())
	}
	next := b.lock("k", ttl)
	if err := a.ReleaseLock(e.within(e.patience), l); err != nil {
		e.fatalf("a late second release: %w", err)
	}
	if err := a.ExtendLock(e.within(e.patience), l, ttl); !errors.Is(err, dlm.ErrReleased) {
		e.fatalf("ExtendLock after ReleaseLock: %v, want ErrReleased", err)
	}
	if err := b.ExtendLock(e.within(e.patience), next, ttl); err != nil {
		e.fatalf("the successor's lock is gone: %w", err)
	}
	b.unlock(next)
	if n := a.faults.Calls(OpRelease); n != 1 {
		e.fatalf("%d releases of one lock reached the backend", n)
	}
}

func locksOfOtherManagersAreRefused(e *env) {
	a, b := e.manage(nil), e.manage(nil)
	ttl := e.long
	l := a.lock("k", ttl)
	calls := b.faults.AllCalls()
	if err := b.ReleaseLock(e.within(e.patience), l); !errors.Is(err, dlm.ErrInvalid) {
		e.fatalf("ReleaseLock of another manager's lock: %v, want ErrInvalid", err)
	}
	if err := b.ExtendLock(e.within(e.patience), l, ttl); !errors.Is(err, dlm.ErrInvalid) {
		e.fatalf("ExtendLock of another manager's lock: %v, want ErrInvalid", err)
	}
	if n := b.faults.AllCalls() - calls; n != 0 {
		e.fatalf("%d calls about another manager's lock reached the backend", n)
	}
	if l.Err() != nil {
		e.fatalf("the lock is no longer held: %w", l.Err())
	}
	e.denied(&managedLocker{b}, "k", want{})
	a.unlock(l)
}
