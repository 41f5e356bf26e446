package drivertest

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// breakage is one way to be wrong, and the cases that must find it out.
type breakage struct {
	name string
	// wrap makes what breaks the backends of one store.
	wrap func() wrapper
	// freezes makes the same for a store that can be frozen.
	freezes func() (wrapper, func(testing.TB) func())
	// core makes a broken manager.
	core func(driver.Backend, *dlm.LockConfig) (manager, error)
	// fails lists cases, which may be those of other breakages too.
	fails []string
}

var breakages = []breakage{
	{name: "a release is lost", wrap: lostRelease, fails: []string{
		"Backend/OneHolder", "Manager/OneHolder", "Backend/TokensRise", "Backend/SecondReleaseIsTold", "Manager/SecondReleaseRepeatsTheAnswer",
		"Manager/UnansweredReleaseIsRepeated", "Manager/CloseEndsEverything", "Manager/CloseFreesWhatItCan", "Manager/ReleaseEndsRenewal",
		"Backend/RefusalLeavesNothing", "Manager/RefusalLeavesNothing",
	}},
	{name: "release ignores the owner", wrap: releaseIgnoresOwner, fails: []string{"Backend/StrangersCannotTouchAGrant"}},
	{name: "the token is ignored", wrap: tokenIgnored, fails: []string{"Backend/StrangersCannotTouchAGrant", "Backend/SecondReleaseIsTold"}},
	{name: "release goes by the name of the key", wrap: releaseByName, fails: []string{
		"Backend/LateReleaseSparesTheSuccessor", "Backend/StrangersCannotTouchAGrant", "Backend/SecondReleaseIsTold",
	}},
	{name: "losses are hidden", wrap: lossHidden, fails: []string{
		"Backend/SecondReleaseIsTold", "Backend/ExpiredGrantIsNotRevived", "Backend/ExtendAnswersEach", "Manager/StolenLockIsLost",
		"Backend/ForceReleaseFreesWhatWasNamed",
	}},
	{name: "a withdrawn ticket stays", wrap: ticketLeaked, fails: []string{
		"Backend/WithdrawnTicketIsSkipped", "Manager/CancelledWaitLeavesNothing", "Manager/CancelRacesRelease", "Backend/RefusalTellsTheState",
	}},
	{name: "a withdrawal spares grants", wrap: withdrawalSparesGrants, fails: []string{
		"Backend/WithdrawnGrantIsFreed", "Manager/LostAnswerLeavesNothing", "Manager/HungStoreDoesNotHoldTheCaller",
	}},
	{name: "a withdrawal of nothing is called a loss", wrap: withdrawalOfNothingIsALoss, fails: []string{"Backend/WithdrawnGrantIsFreed"}},

	{name: "tokens are reused", wrap: tokenReused, fails: []string{
		"Backend/TokensRise", "Manager/TokensRise", "Backend/ExpiredGrantIsTaken", "Manager/ExpiredGrantIsTaken", "Backend/Permits", "Manager/Permits",
		"Backend/TokensRiseAfterTheRecordIsGone",
	}},
	{name: "tokens fall", wrap: tokensFall, fails: []string{"Backend/TokensRise", "Manager/TokensRise", "Manager/StormWithFaults"}},
	{name: "the first token is zero", wrap: tokenZero, fails: []string{"Backend/TokensRise"}},
	{name: "tokens do not fit into a float", wrap: tokenTooLarge, fails: []string{"Backend/TokensRise"}},
	{name: "the counter dies with the record", wrap: counterDies, fails: []string{"Backend/TokensRiseAfterTheRecordIsGone", "Backend/TokensRise"}},
	{name: "a repetition mints a token", wrap: repetitionMintsAToken, fails: []string{
		"Backend/OneHoldOneToken", "Backend/RepeatedAcquireReturnsTheGrant", "Manager/LostAnswerLeavesNothing",
	}},
	{name: "a repetition is refused", wrap: repetitionIsRefused, fails: []string{
		"Backend/RepeatedAcquireReturnsTheGrant", "Manager/LostAnswerLeavesNothing",
	}},

	{name: "grants never expire", wrap: neverExpires, fails: []string{
		"Backend/ExpiredGrantIsTaken", "Manager/ExpiredGrantIsTaken", "Backend/FullTTLFromTheGrant", "Backend/QueueMovesWhenAHolderDies",
		"Manager/QueueMovesWhenAHolderDies", "Backend/LateReleaseSparesTheSuccessor", "Manager/LateReleaseSparesTheSuccessor",
		"Backend/ExpiredGrantIsNotRevived", "Manager/ExpiredGrantIsNotRevived", "Backend/PermitsOfTheDeadComeBack", "Manager/PermitsOfTheDeadComeBack",
		"Backend/ShorterReaderDoesNotShorten", "Manager/ShorterReaderDoesNotShorten", "Backend/TTLIsKept",
	}},
	{name: "grants expire early", wrap: expiresEarly, fails: []string{
		"Backend/ExpiredGrantIsTaken", "Backend/FullTTLFromTheGrant", "Manager/FullTTLFromTheGrant", "Manager/LossComesAtTheDeadline",
	}},
	{name: "a TTL has at most a minute", wrap: ttlCapped, fails: []string{"Backend/TTLIsKept"}},
	{name: "a TTL is too long", wrap: ttlTooLong, fails: []string{"Backend/TTLIsKept"}},
	{name: "a TTL is told too long", wrap: ttlToldTooLong, fails: []string{
		"Manager/LossComesAtTheDeadline", "Manager/FullTTLFromTheGrant", "Backend/ExpiredGrantIsTaken",
	}},
	{name: "the age of a lease is reversed", wrap: ageReversed, fails: []string{"Manager/DeadlineCountsFromTheRequest"}},
	{name: "a renewal revives", wrap: renewalRevives, fails: []string{"Backend/ExpiredGrantIsNotRevived"}},
	{name: "renewal goes by the name of the key", wrap: renewalByName, fails: []string{
		"Backend/ExpiredGrantIsNotRevived", "Backend/StrangersCannotTouchAGrant", "Backend/ExtendAnswersEach",
	}},
	{name: "a renewal renews the others too", wrap: renewalOfAll, fails: []string{
		"Backend/ShorterReaderDoesNotShorten", "Manager/ShorterReaderDoesNotShorten", "Backend/PermitsOfTheDeadComeBack", "Manager/PermitsOfTheDeadComeBack",
	}},
	{name: "a renewal does nothing", wrap: renewalDoesNothing, fails: []string{
		"Manager/RenewalKeepsTheLock", "Manager/FailedRenewalIsNoLoss", "Manager/HungRenewalSparesOthers", "Backend/ExtendNeverShortens",
		"Manager/ReentryIsOneHold", "Backend/ExtendAnswersEach",
	}},
	{name: "a renewal renews the first of a batch", wrap: renewalOfTheFirstOnly, fails: []string{"Backend/ExtendAnswersEach"}},
	{name: "one loss fails the whole batch", wrap: oneLossFailsTheBatch, fails: []string{"Backend/ExtendAnswersEach"}},
	{name: "a renewal shortens", wrap: func() wrapper { return renewalSetsTheEnd(false) }, fails: []string{
		"Backend/ExtendNeverShortens", "Backend/RepeatedAcquireReturnsTheGrant",
	}},
	{name: "all readers end with the last request", wrap: func() wrapper { return renewalSetsTheEnd(true) }, fails: []string{
		"Backend/ShorterReaderDoesNotShorten", "Manager/ShorterReaderDoesNotShorten",
	}},
	{name: "a TTL runs in the queue", wrap: ttlRunsInTheQueue, fails: []string{"Backend/FullTTLFromTheGrant", "Manager/FullTTLFromTheGrant"}},

	{name: "a try jumps the queue", wrap: jump, fails: []string{
		"Backend/TryDoesNotJumpTheQueue", "Manager/TryDoesNotJumpTheQueue",
		"Backend/ReaderDoesNotPassAWaitingWriter", "Manager/ReaderDoesNotPassAWaitingWriter",
	}},
	{name: "last come, first served", wrap: lifo, fails: []string{"Backend/FirstComeFirstServed", "Manager/FirstComeFirstServed", "Backend/RefusalTellsTheState"}},
	{name: "a refreshed ticket loses its place", wrap: refreshLosesThePlace, fails: []string{
		"Backend/RepeatedRequestKeepsItsPlace", "Backend/LiveWaiterKeepsItsPlace",
	}},
	{name: "a refreshed ticket lapses all the same", wrap: refreshDoesNothing, fails: []string{"Backend/LiveWaiterKeepsItsPlace"}},
	{name: "dead waiters stay", wrap: deadWaitersStay, fails: []string{"Backend/DeadWaitersCostOneWindow", "Backend/GrantOfADeadWaiterLapses"}},
	{name: "dead waiters wait for their turn", wrap: deadWaitersWaitTheirTurn, fails: []string{"Backend/DeadWaitersCostOneWindow"}},
	{name: "a key is handed over for good", wrap: handOverForGood, fails: []string{"Backend/GrantOfADeadWaiterLapses", "Backend/DeadWaitersCostOneWindow"}},
	{name: "a key that was handed over lapses early", wrap: heirsLapseEarly, fails: []string{"Backend/GrantOfADeadWaiterLapses"}},
	{name: "a confirmation by Acquire is ignored", wrap: func() wrapper { return confirmationIsIgnored(true) }, fails: []string{"Backend/GrantIsConfirmed"}},
	{name: "a confirmation by Extend is ignored", wrap: func() wrapper { return confirmationIsIgnored(false) }, fails: []string{"Backend/GrantIsConfirmed"}},
	{name: "all tickets have one number", wrap: func() wrapper {
		return refusal(func(held *driver.HeldError) { held.Ticket = min(held.Ticket, 1) })
	}, fails: []string{"Backend/RefusalTellsTheState", "Backend/ReleaseWakesTheHead"}},
	{name: "only an event grants", wrap: onlyEventsGrant, fails: []string{
		"Manager/DroppedWakeUpsAreMadeGood", "Manager/BrokenSubscriptionIsRenewed", "Backend/SubscriptionSaysThatItStands",
	}},
	{name: "a refused try leaves a ticket", wrap: refusedTryLeavesATicket, fails: []string{"Backend/RefusalLeavesNothing", "Manager/RefusalLeavesNothing"}},
	{name: "refusals are blank", wrap: func() wrapper {
		return refusal(func(held *driver.HeldError) { *held = driver.HeldError{Position: held.Position} })
	}, fails: []string{"Backend/RefusalTellsTheState", "Backend/OneHoldOneToken"}},
	{name: "places begin at zero", wrap: func() wrapper {
		return refusal(func(held *driver.HeldError) { held.Position-- })
	}, fails: []string{"Backend/RefusalTellsTheState", "Backend/RepeatedRequestKeepsItsPlace"}},

	{name: "shared is exclusive", wrap: sharedIsExclusive, fails: []string{
		"Backend/ReadersXorWriter", "Manager/ReadersXorWriter", "Backend/ReadersEnterTogether", "Manager/ReadersEnterTogether", "Backend/ReadersAreWokenTogether",
	}},
	{name: "exclusive is shared", wrap: exclusiveIsShared, fails: []string{
		"Backend/OneHolder", "Manager/OneHolder", "Backend/ReadersXorWriter", "Manager/ReadersXorWriter", "Backend/Storm", "Manager/StormWithFaults",
	}},
	{name: "one permit too many", wrap: onePermitMore, fails: []string{
		"Backend/OneHolder", "Manager/OneHolder", "Backend/Permits", "Manager/Permits", "Backend/Storm", "Manager/StormWithFaults",
	}},
	{name: "one permit too few", wrap: onePermitLess, fails: []string{"Backend/Permits", "Manager/Permits"}},
	{name: "any limit goes", wrap: anyLimitGoes, fails: []string{"Backend/LimitsMustAgree", "Manager/LimitsMustAgree"}},
	{name: "a limit error is blank", wrap: limitErrorIsBlank, fails: []string{"Backend/LimitsMustAgree", "Manager/LimitsMustAgree"}},

	{name: "contexts are ignored", wrap: contextIgnored, fails: []string{"Backend/DoneContextHasNoEffect"}},
	{name: "applied, but reported as not applied", wrap: appliedButReportedNotApplied, fails: []string{"Backend/DoneContextHasNoEffect"}},
	{name: "an unknown outcome is reported as a refusal", wrap: unknownReportedAsRefusal, fails: []string{"Backend/DoneContextHasNoEffect"}},
	{name: "a store that hangs takes its callers along", freezes: func() (wrapper, func(testing.TB) func()) { return freezing(true) }, fails: []string{
		"Backend/CallsEndWithTheirContexts",
	}},
	{name: "Acquire blocks on a held key", wrap: acquireBlocks, fails: []string{"Backend/RefusalTellsTheState", "Backend/RepeatedRequestKeepsItsPlace"}},

	{name: "keys are truncated", wrap: keysTruncated, fails: []string{"Backend/KeysAreIndependent", "Manager/KeysAreIndependent"}},
	{name: "keys are folded", wrap: keysFolded, fails: []string{
		"Backend/KeysAreIndependent", "Manager/KeysAreIndependent", "Backend/StrangersCannotTouchAGrant",
	}},
	{name: "keys are trimmed", wrap: keysTrimmed, fails: []string{"Backend/KeysAreIndependent"}},
	{name: "keys are cleaned like paths", wrap: keysCleaned, fails: []string{"Backend/KeysAreIndependent"}},
	{name: "keys end at a NUL", wrap: keysEndAtNUL, fails: []string{"Backend/KeysAreIndependent"}},
	{name: "a page begins with the end of the last", wrap: listIncludesTheStart, fails: []string{"Backend/ListGivesPagesInOrder"}},
	{name: "a page has no limit", wrap: listIgnoresLimit, fails: []string{"Backend/ListGivesPagesInOrder"}},
	{name: "a prefix is a pattern", wrap: listTakesPatterns, fails: []string{"Backend/ListGivesPagesInOrder"}},
	{name: "pages are sorted by letters", wrap: listUnsorted, fails: []string{"Backend/ListGivesPagesInOrder", "Backend/KeysAreIndependent"}},

	{name: "wake-ups are dropped", wrap: eventsDropped, fails: []string{
		"Backend/ReleaseWakesTheHead", "Backend/ReadersAreWokenTogether", "Backend/SubscriptionSaysThatItStands", "Manager/HandOverIsPrompt",
	}},
	{name: "the wrong one is woken", wrap: wrongOneWoken, fails: []string{"Backend/ReleaseWakesTheHead", "Manager/HandOverIsPrompt"}},
	{name: "all are woken", wrap: allWoken, fails: []string{"Backend/ReleaseWakesTheHead"}},
	{name: "one of several readers is woken", wrap: oneReaderWoken, fails: []string{"Backend/ReadersAreWokenTogether"}},
	{name: "tickets are not told", wrap: ticketNotTold, fails: []string{"Backend/ReleaseWakesTheHead"}},
	{name: "events carry another token", wrap: wrongTokenInEvents, fails: []string{"Backend/ReleaseWakesTheHead"}},
	{name: "a subscription never says that it stands", wrap: neverUp, fails: []string{"Backend/SubscriptionSaysThatItStands", "Backend/ListenEnds"}},
	{name: "a client can subscribe once", wrap: oneSubscription, fails: []string{"Backend/SubscriptionSaysThatItStands", "Manager/BrokenSubscriptionIsRenewed"}},
	{name: "a subscription outlives its context", wrap: listenStays, fails: []string{"Backend/ListenEnds"}},
	{name: "a subscription outlives its backend", wrap: listenOutlivesClose, fails: []string{"Backend/ListenEnds"}},

	{name: "a check finds nothing", wrap: func() wrapper {
		return checks(func(context.Context, driver.Backend) []driver.Finding { return nil })
	}, fails: []string{"Backend/CheckTellsWhatToChange"}},
	{name: "a check does not say what to change", wrap: func() wrapper {
		return checks(func(context.Context, driver.Backend) []driver.Finding {
			return []driver.Finding{{Check: "all", Detail: "bad", Severity: driver.SeverityCritical}}
		})
	}, fails: []string{"Backend/CheckTellsWhatToChange"}},
	{name: "a check leaves a lock", wrap: func() wrapper {
		return checks(func(ctx context.Context, b driver.Backend) []driver.Finding {
			_, _ = b.Acquire(ctx, driver.Request{Key: "check", Owner: "check", TTL: time.Hour, Limit: 1})
			return []driver.Finding{{Check: "all", Detail: "good"}}
		})
	}, fails: []string{"Backend/CheckTellsWhatToChange"}},
	{name: "a check ignores its context", wrap: func() wrapper {
		return checks(func(context.Context, driver.Backend) []driver.Finding {
			return []driver.Finding{{Check: "all", Detail: "good"}}
		})
	}, fails: []string{"Backend/CheckTellsWhatToChange"}},
	{name: "Inspect is one answer behind", wrap: inspectStale, fails: []string{"Backend/InspectTellsTheTruth"}},
	{name: "Inspect hides waiters", wrap: inspectHidesWaiters, fails: []string{"Backend/InspectTellsTheTruth"}},
	{name: "ForceRelease ignores the token", wrap: forceIgnoresToken, fails: []string{"Backend/ForceReleaseFreesWhatWasNamed"}},
	{name: "ForceRelease does not tell what it did", wrap: forceTellsNothing, fails: []string{
		"Backend/ForceReleaseFreesWhatWasNamed", "Manager/StolenLockIsLost",
	}},

	{name: "Close does nothing", wrap: closeDoesNothing, fails: []string{"Backend/ClosedBackendRefuses", "Backend/ListenEnds"}},
	{name: "Close releases", wrap: closeReleases, fails: []string{"Backend/CloseKeepsGrants"}},
	{name: "a second Close fails", wrap: secondCloseFails, fails: []string{"Backend/ClosedBackendRefuses"}},
	{name: "the backend has no name", wrap: func() wrapper {
		return changedProperties(func(p *driver.Properties) { p.Name = "" })
	}, fails: []string{"Backend/PropertiesMakeSense"}},
	{name: "properties change", wrap: func() wrapper {
		calls := 0
		return changedProperties(func(p *driver.Properties) { calls++; p.PollInterval = time.Duration(calls) * time.Second })
	}, fails: []string{"Backend/PropertiesMakeSense", "Manager/ClosedManagerRefuses"}},

	{name: "core passes bad input on", core: coreTrusts, fails: []string{"Manager/BadInputIsRefused"}},
	{name: "core hides the context's error", core: coreHidesContexts, fails: []string{"Manager/ErrorsAreToldApart", "Manager/CancelledWaitLeavesNothing"}},
	{name: "core takes strange locks", core: coreTakesStrangeLocks, fails: []string{"Manager/LocksOfOtherManagersAreRefused", "Manager/BadInputIsRefused"}},
	{name: "core forgets owners", core: coreForgetsOwners, fails: []string{"Manager/ReentryIsOneHold"}},
	{name: "core never renews", core: coreWith(func(cfg *dlm.LockConfig) { cfg.AutoRenew = dlm.Off }), fails: []string{
		"Manager/RenewalKeepsTheLock", "Manager/FailedRenewalIsNoLoss",
	}},
	{name: "core retries without end", core: coreWith(func(cfg *dlm.LockConfig) { cfg.MaxRetries = -1 }), fails: []string{"Manager/RefusingStoreIsNotHammered"}},
	{name: "core gives up at once", core: coreGivesUp, fails: []string{"Manager/FailedRenewalIsNoLoss"}},
	{name: "core hardly retries", core: coreWith(func(cfg *dlm.LockConfig) { cfg.MaxRetries = 1 }), fails: []string{
		"Manager/UnansweredReleaseIsRepeated", "Manager/RefusingStoreIsNotHammered",
	}},
	{name: "core renews one by one", core: coreRenewsOneByOne, fails: []string{"Manager/HungRenewalSparesOthers"}},
	{name: "core waits for the store", core: coreWaits, fails: []string{"Manager/HungStoreDoesNotHoldTheCaller", "Manager/CancelledWaitLeavesNothing"}},
	{name: "core forgets what it got too late", core: coreForgetsLateLocks, fails: []string{"Manager/CancelRacesRelease"}},
	{name: "core renews without end", core: coreRenewsWithoutEnd, fails: []string{"Manager/ReleaseEndsRenewal"}},
	{name: "core works on after Close", core: coreWorksOn, fails: []string{"Manager/ClosedManagerRefuses"}},
	{name: "core loses wake-ups to a pause", core: corePauses, fails: []string{"Manager/HandOverIsPrompt"}},
}

// changed is a manager some of whose methods are replaced.
type changed struct {
	*dlm.Manager
	acquire func(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error)
	release func(ctx context.Context, l *dlm.Lock) error
	extend  func(ctx context.Context, l *dlm.Lock, ttl time.Duration) error
	close   func(ctx context.Context) error
}

func (c *changed) Acquire(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
	if c.acquire != nil {
		return c.acquire(ctx, key, ttl, opts)
	}
	return c.Manager.Acquire(ctx, key, ttl, opts)
}

func (c *changed) AcquireLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	return c.Acquire(ctx, key, ttl, nil)
}

func (c *changed) TryLock(ctx context.Context, key string, ttl time.Duration) (*dlm.Lock, error) {
	return c.Acquire(ctx, key, ttl, &dlm.AcquireOptions{NoWait: true})
}

func (c *changed) ReleaseLock(ctx context.Context, l *dlm.Lock) error {
	if c.release != nil {
		return c.release(ctx, l)
	}
	return c.Manager.ReleaseLock(ctx, l)
}

func (c *changed) ExtendLock(ctx context.Context, l *dlm.Lock, ttl time.Duration) error {
	if c.extend != nil {
		return c.extend(ctx, l, ttl)
	}
	return c.Manager.ExtendLock(ctx, l, ttl)
}

func (c *changed) Close(ctx context.Context) error {
	if c.close != nil {
		return c.close(ctx)
	}
	return c.Manager.Close(ctx)
}

func newChanged(b driver.Backend, cfg *dlm.LockConfig) (*changed, error) {
	m, err := dlm.NewManager(b, cfg)
	return &changed{Manager: m}, err
}

func coreTrusts(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	c, err := newChanged(b, cfg)
	c.acquire = func(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
		l, err := c.Manager.Acquire(ctx, key, ttl, opts)
		if errors.Is(err, dlm.ErrInvalid) && ctx != nil {
			req := driver.Request{Key: key, Owner: "bad", TTL: time.Second, Limit: 1}
			if lease, err := b.Acquire(ctx, req); err == nil {
				_ = b.Release(ctx, lease)
			}
		}
		return l, err
	}
	return c, err
}

func coreHidesContexts(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	c, err := newChanged(b, cfg)
	c.acquire = func(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
		l, err := c.Manager.Acquire(ctx, key, ttl, opts)
		if conflict, ok := errors.AsType[*dlm.LockConflictError](err); ok {
			err = &dlm.Error{Op: "acquire", Key: key, Err: conflict}
		}
		return l, err
	}
	return c, err
}

func coreTakesStrangeLocks(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	c, err := newChanged(b, cfg)
	c.release = func(ctx context.Context, l *dlm.Lock) error { return l.Release(ctx) }
	c.extend = func(ctx context.Context, l *dlm.Lock, ttl time.Duration) error { return l.Extend(ctx, ttl) }
	return c, err
}

func coreForgetsOwners(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	c, err := newChanged(b, cfg)
	c.acquire = func(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
		return c.Manager.Acquire(dlm.WithOwner(ctx, ""), key, ttl, opts)
	}
	return c, err
}

// coreWith has another configuration than it was given.
func coreWith(change func(*dlm.LockConfig)) func(driver.Backend, *dlm.LockConfig) (manager, error) {
	return func(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
		var other dlm.LockConfig
		if cfg != nil {
			other = *cfg
		}
		change(&other)
		return newChanged(b, &other)
	}
}

// coreGivesUp takes every failed renewal for a loss.
func coreGivesUp(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	return newChanged(Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
		b.Extend(ctx, batch)
		for i := range batch {
			if batch[i].Err != nil {
				batch[i].Err = &driver.LostError{Key: batch[i].Lease.Key, Token: batch[i].Lease.Token, Reason: driver.ReasonGone}
			}
		}
	}}), cfg)
}

// coreRenewsOneByOne makes one call at a time, each for one lock, and waits for
// its answer for a minute.
func coreRenewsOneByOne(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	turn := make(chan struct{}, 1)
	return newChanged(Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
		for i := range batch {
			turn <- struct{}{}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			b.Extend(ctx, batch[i:i+1])
			cancel()
			<-turn
		}
	}}), cfg)
}

// coreWaits for the store as long as it takes.
func coreWaits(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	c, err := newChanged(b, cfg)
	c.acquire = func(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
		if ctx == nil {
			return c.Manager.Acquire(ctx, key, ttl, opts)
		}
		return c.Manager.Acquire(context.WithoutCancel(ctx), key, ttl, opts)
	}
	return c, err
}

// coreForgetsLateLocks reports that the context ended, though it has the lock.
func coreForgetsLateLocks(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	c, err := newChanged(b, cfg)
	c.acquire = func(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
		l, err := c.Manager.Acquire(ctx, key, ttl, opts)
		if err == nil && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return l, err
	}
	return c, err
}

// coreRenewsWithoutEnd goes on with every renewal that it has begun.
func coreRenewsWithoutEnd(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	stop := make(chan struct{})
	c, err := newChanged(Intercept(b, Hooks{Extend: func(ctx context.Context, batch []driver.Renewal) {
		again := slices.Clone(batch)
		b.Extend(ctx, batch)
		go func() {
			for {
				if _, stopped := awaitFor(stop, 50*time.Millisecond); stopped {
					return
				}
				b.Extend(context.Background(), again)
			}
		}()
	}}), cfg)
	c.close = func(ctx context.Context) error {
		close(stop)
		return c.Manager.Close(ctx)
	}
	return c, err
}

// coreWorksOn closes itself, and asks the backend all the same.
func coreWorksOn(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	c, err := newChanged(b, cfg)
	c.acquire = func(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error) {
		l, err := c.Manager.Acquire(ctx, key, ttl, opts)
		if errors.Is(err, dlm.ErrClosed) {
			_, _ = b.Acquire(ctx, driver.Request{Key: key, Owner: "late", TTL: ttl, Limit: 1})
		}
		return l, err
	}
	return c, err
}

// corePauses waits for a moment before it does what an event says.
func corePauses(b driver.Backend, cfg *dlm.LockConfig) (manager, error) {
	return newChanged(heard(b, func(e driver.Event) []driver.Event {
		time.Sleep(300 * time.Millisecond)
		return []driver.Event{e}
	}), cfg)
}

// harness is a harness on a new store that is broken in this way.
func (b *breakage) harness(t testing.TB) *Harness {
	var wrap wrapper
	if b.wrap != nil {
		wrap = b.wrap()
	}
	var freeze func(testing.TB) func()
	if b.freezes != nil {
		wrap, freeze = b.freezes()
	}
	h := overMemory(t, wrap)
	h.exact, h.Freeze = true, freeze
	h.newManager = b.core
	return h
}

// TestBrokenBackends checks that the suite finds out what is broken on purpose:
// each breakage must be found by the cases that it names, and each case must
// find at least one.
func TestBrokenBackends(t *testing.T) {
	cases := make(map[string]Case)
	var names []string
	for _, c := range Cases() {
		if _, ok := cases[c.Name]; ok {
			t.Errorf("two cases are named %q", c.Name)
		}
		if c.Guarantee == "" || c.Why == "" {
			t.Errorf("case %q does not say what it is about", c.Name)
		}
		cases[c.Name] = c
		names = append(names, c.Name)
	}
	found := make(map[string][]string)
	for _, b := range breakages {
		if len(b.fails) == 0 {
			t.Errorf("no case finds out that %s", b.name)
		}
		for _, name := range b.fails {
			found[name] = append(found[name], b.name)
		}
	}
	for _, name := range names {
		if len(found[name]) == 0 {
			t.Errorf("nothing is broken that case %q finds out", name)
		}
		delete(found, name)
	}
	for name, by := range found {
		t.Errorf("there is no case %q (%q)", name, by)
	}
	if t.Failed() {
		return
	}

	for _, b := range breakages {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			for _, name := range b.fails {
				t.Run(name, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						err := cases[name].check(t, b.harness(t))
						time.Sleep(time.Hour) // calls that were left behind come to an end
						if err == nil {
							t.Errorf("the case passes although %s", b.name)
						}
						t.Log(err)
					})
				})
			}
		})
	}
}
