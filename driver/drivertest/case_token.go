package drivertest

import (
	"slices"

	"github.com/go-dlm/dlm/driver"
)

var tokenCases = slices.Concat(
	both("TokensRise", "I2",
		"a resource that checks tokens would refuse a true holder, or accept a stale one",
		tokensRise),
	[]Case{
		{
			Name: "Backend/TokensRiseAfterTheRecordIsGone", Guarantee: "I2, FEN3, FEN4",
			Why: "a counter that lives and dies with the key's record begins again below the tokens in use",
			run: tokensRiseAfterTheRecordIsGone,
		},
		{
			Name: "Backend/OneHoldOneToken", Guarantee: "I2, FEN6",
			Why: "a holder whose token changes is refused by the resource that has seen the newer one",
			run: oneHoldOneToken,
		},
	},
)

func tokensRise(e *env, open func() locker) {
	lockers := []locker{open(), open()}
	var last int64
	for i := range 100 {
		l := e.take(lockers[i%2], "k", want{})
		if l.token <= last {
			e.fatalf("grant %d has token %d, the one before had %d", i+1, l.token, last)
		}
		last = l.token
		e.drop(l)
	}
}

func tokensRiseAfterTheRecordIsGone(e *env) {
	var last int64
	check := func(lease driver.Lease) {
		if lease.Token <= last {
			e.fatalf("token %d follows %d", lease.Token, last)
		}
		last = lease.Token
	}
	forget := func() {
		if e.h.Forget != nil {
			e.h.Forget(e.t, "k")
		}
	}
	a := e.open()
	for range 3 {
		lease := a.grant(driver.Request{Key: "k", Owner: e.name("a")})
		check(lease)
		a.mustRelease(lease)
		forget()
	}
	// Nobody releases this one, and its client is never heard of again.
	lease := a.grant(driver.Request{Key: "k", Owner: e.name("a"), TTL: e.unit})
	check(lease)
	a.die()
	b := e.open()
	freed := b.wait(driver.Request{Key: "k", Owner: e.name("b")})
	check(freed)
	b.mustRelease(freed)
	forget()
	c := e.open()
	lease = c.grant(driver.Request{Key: "k", Owner: e.name("c")})
	check(lease)
	c.mustRelease(lease)
}

func oneHoldOneToken(e *env) {
	a := e.open()
	req := driver.Request{Key: "k", Owner: "a"}
	lease := a.grant(req)
	same := func(what string, token int64) {
		if token != lease.Token {
			e.fatalf("%s has token %d, the grant %d", what, token, lease.Token)
		}
	}
	for range 3 {
		same("a renewal", a.mustExtend(lease, 2*e.long).Token)
		same("a repetition", a.grant(req).Token)
		req.Enqueue = !req.Enqueue
	}
	held := e.open().refuse(driver.Request{Key: "k", Owner: "b"})
	same("the holder in a refusal", held.Token)
	if info, ok := a.inspect("k"); ok {
		if len(info.Holders) != 1 {
			e.fatalf("the key has %d holders", len(info.Holders))
		}
		same("the holder in KeyInfo", info.Holders[0].Token)
	}
	a.mustRelease(lease)
}
