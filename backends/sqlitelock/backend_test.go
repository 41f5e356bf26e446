package sqlitelock_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	for _, w := range []time.Duration{-1, 1, 99 * time.Millisecond, time.Hour + 1} {
		_, err := sqlitelock.New(file(t), &sqlitelock.Options{LivenessWindow: w})
		if !errors.Is(err, driver.ErrInvalid) || !contains(err, "Options.LivenessWindow") {
			t.Errorf("LivenessWindow %v: %v", w, err)
		}
	}
	for _, w := range []time.Duration{100 * time.Millisecond, time.Hour} {
		b := open(t, file(t), &sqlitelock.Options{LivenessWindow: w})
		if got := b.Properties().LivenessWindow; got != w {
			t.Errorf("LivenessWindow = %v, want %v", got, w)
		}
	}
	got := open(t, file(t), nil).Properties()
	want := driver.Properties{
		Name: "sqlite", Tokens: driver.TokensStrict, LivenessWindow: 10 * time.Second,
		FairQueue: true, SharedMode: true, Permits: true,
	}
	if got != want {
		t.Errorf("Properties = %+v, want %+v", got, want)
	}
}

func TestHandOver(t *testing.T) {
	t.Parallel()
	clock := newFakeClock("boot")
	b := openAt(t, file(t), clock)

	a := acquire(t, b, ask("k", "a"))
	if again := acquire(t, b, ask("k", "a")); again.Token != a.Token {
		t.Fatalf("repeated: token %d, then %d", a.Token, again.Token)
	}
	clock.advance(10 * time.Second)
	held := refused(t, b, ask("k", "b"))
	if held.Holder != "a" || held.Token != a.Token || held.Remaining != 50*time.Second || held.Position != 1 || held.Ticket == 0 {
		t.Fatalf("refusal: %+v", held)
	}
	if again := refused(t, b, ask("k", "b")); again.Ticket != held.Ticket || again.Position != 1 {
		t.Fatalf("repeated: %+v", again)
	}
	if held := refused(t, b, ask("k", "c")); held.Position != 2 {
		t.Fatalf("second: %+v", held)
	}
	if held := refused(t, b, try("k", "d")); held.Position != 0 || held.Ticket != 0 {
		t.Fatalf("without a ticket: %+v", held)
	}

	release(t, b, a)
	// The hand-over lapses with b's ticket, 7.5s after it was refreshed.
	info := inspect(t, b, "k")
	if owners(info) != "b / c" || info.Holders[0].Remaining != 7500*time.Millisecond || info.Holders[0].Token <= a.Token {
		t.Fatalf("after the release: %+v", info)
	}
	got := acquire(t, b, ask("k", "b")) // confirms it
	if got.Token != info.Holders[0].Token {
		t.Fatalf("confirmed with token %d, granted %d", got.Token, info.Holders[0].Token)
	}
	if info := inspect(t, b, "k"); info.Holders[0].Remaining != time.Minute {
		t.Fatalf("after the confirmation: %+v", info)
	}
	lost(t, b.Release(t.Context(), a), driver.ReasonTaken)
	lost(t, extend(t.Context(), b, a), driver.ReasonTaken)
	if info := inspect(t, b, "k"); owners(info) != "b / c" {
		t.Fatalf("a late release changed something: %+v", info)
	}
	release(t, b, got)
	next := inspect(t, b, "k").Holders[0]
	if err := extend(t.Context(), b, driver.Lease{Key: "k", Owner: "c", Token: next.Token, TTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if info := inspect(t, b, "k"); owners(info) != "c /" || info.Holders[0].Remaining != time.Hour {
		t.Fatalf("after the extension: %+v", info)
	}
}

// A hand-over to a dead waiter lapses with its ticket, and the next one is
// served at that moment.
func TestDeadWaiters(t *testing.T) {
	t.Parallel()
	clock := newFakeClock("boot")
	b := openAt(t, file(t), clock)
	a := acquire(t, b, ask("k", "a"))
	for i := range 5 {
		refused(t, b, ask("k", fmt.Sprint("dead", i)))
	}
	refused(t, b, ask("k", "live"))
	clock.advance(7 * time.Second)
	refused(t, b, ask("k", "live"))
	release(t, b, a)
	if info := inspect(t, b, "k"); owners(info) != "dead0 / dead1 dead2 dead3 dead4 live" {
		t.Fatalf("%+v", info)
	}
	clock.advance(500 * time.Millisecond)
	acquire(t, b, ask("k", "live"))
}

// A stall in which all tickets lapse must not change the order of those who
// come back, but those who do not come back must go.
func TestLapsedTicketKeepsPlace(t *testing.T) {
	t.Parallel()
	clock := newFakeClock("boot")
	b := openAt(t, file(t), clock)
	a := acquire(t, b, ask("k", "a"))
	first := refused(t, b, ask("k", "b"))
	refused(t, b, ask("k", "c"))
	refused(t, b, ask("k", "dead"))
	clock.advance(8 * time.Second)
	if info := inspect(t, b, "k"); owners(info) != "a /" {
		t.Fatalf("lapsed tickets are shown: %+v", info)
	}
	if held := refused(t, b, ask("k", "c")); held.Position != 1 {
		t.Fatalf("c: %+v", held)
	}
	if held := refused(t, b, ask("k", "b")); held.Position != 1 || held.Ticket != first.Ticket {
		t.Fatalf("b: %+v", held)
	}
	clock.advance(7 * time.Second) // the dead one's ticket has been lapsed for a life
	if held := refused(t, b, ask("k", "dead")); held.Position != 3 || held.Ticket <= first.Ticket {
		t.Fatalf("dead: %+v", held)
	}
	release(t, b, a)
	if info := inspect(t, b, "k"); owners(info) != "b / c dead" {
		t.Fatalf("%+v", info)
	}
}

func TestExpiry(t *testing.T) {
	t.Parallel()
	clock := newFakeClock("boot")
	b := openAt(t, file(t), clock)
	a := acquire(t, b, ask("k", "a"))
	clock.advance(time.Minute - 1)
	refused(t, b, try("k", "b"))
	clock.advance(1)
	if info := inspect(t, b, "k"); info.Holders != nil || info.Limit != 0 {
		t.Fatalf("%+v", info)
	}
	lost(t, extend(t.Context(), b, a), driver.ReasonGone)
	lost(t, b.Release(t.Context(), a), driver.ReasonGone)
	next := acquire(t, b, try("k", "b"))
	if next.Token <= a.Token {
		t.Fatalf("token %d after %d", next.Token, a.Token)
	}
	// Never shortened, and never brought back.
	short := next
	short.TTL = time.Second
	if err := extend(t.Context(), b, short); err != nil {
		t.Fatal(err)
	}
	if got := inspect(t, b, "k").Holders[0].Remaining; got != time.Minute {
		t.Fatalf("a short extension left %v", got)
	}
	lost(t, extend(t.Context(), b, a), driver.ReasonTaken)
	lost(t, b.Release(t.Context(), a), driver.ReasonTaken)
}

// The expiry of one grant lets a waiter in even if the call is another's
// renewal, on this key or on any.
func TestExpiryServesQueue(t *testing.T) {
	t.Parallel()
	for _, through := range []string{"renewal", "other key", "failed release"} {
		t.Run(through, func(t *testing.T) {
			t.Parallel()
			clock := newFakeClock("boot")
			b := openAt(t, file(t), clock)
			sem := func(owner string, ttl time.Duration) driver.Request {
				req := ask("k", owner)
				req.Limit, req.TTL = 2, ttl
				return req
			}
			acquire(t, b, sem("long", time.Hour))
			short := acquire(t, b, sem("short", time.Second))
			refused(t, b, sem("waiter", time.Minute))
			clock.advance(2 * time.Second)
			switch through {
			case "renewal":
				acquire(t, b, sem("long", time.Hour))
			case "other key":
				acquire(t, b, ask("other", "x"))
			case "failed release":
				lost(t, b.Release(t.Context(), short), driver.ReasonTaken)
			}
			if info := inspect(t, b, "k"); owners(info) != "long waiter /" || info.Limit != 2 {
				t.Fatalf("%+v", info)
			}
		})
	}
}

func TestModes(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	shared := func(owner string) driver.Request {
		req := ask("k", owner)
		req.Mode = driver.Shared
		return req
	}
	r1 := acquire(t, b, shared("r1"))
	r2 := acquire(t, b, shared("r2"))
	refused(t, b, ask("k", "w1"))
	refused(t, b, shared("r3")) // does not pass the writer
	refused(t, b, shared("r4"))
	refused(t, b, ask("k", "w2"))
	refused(t, b, shared("r5"))
	if _, err := b.Acquire(t.Context(), ask("k", "r1")); !errors.Is(err, driver.ErrInvalid) {
		t.Fatalf("upgrade: %v", err)
	}
	acquire(t, b, shared("r1"))
	release(t, b, r1)
	release(t, b, r2)
	if got := owners(inspect(t, b, "k")); got != "w1 / r3 r4 w2 r5" {
		t.Fatal(got)
	}
	release(t, b, acquire(t, b, ask("k", "w1")))
	if got := owners(inspect(t, b, "k")); got != "r3 r4 / w2 r5" {
		t.Fatal(got)
	}
	// The withdrawal of the writer lets the reader behind it in.
	release(t, b, driver.Lease{Key: "k", Owner: "w2"})
	if got := owners(inspect(t, b, "k")); got != "r3 r4 r5 /" {
		t.Fatal(got)
	}
	release(t, b, driver.Lease{Key: "k", Owner: "nobody"})
}

func TestPermits(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	sem := func(owner string, limit int) driver.Request {
		req := ask("k", owner)
		req.Limit = limit
		return req
	}
	var leases []driver.Lease
	for i := range 3 {
		leases = append(leases, acquire(t, b, sem(fmt.Sprint(i), 3)))
	}
	refused(t, b, sem("x", 3))
	_, err := b.Acquire(t.Context(), sem("y", 5))
	if limit, ok := errors.AsType[*driver.LimitError](err); !ok || limit.Have != 3 || limit.Want != 5 {
		t.Fatalf("another limit: %v", err)
	}
	if _, err := b.Acquire(t.Context(), sem("0", 5)); !errors.Is(err, driver.ErrInvalid) {
		t.Fatalf("another limit for an own grant: %v", err)
	}
	for _, l := range leases {
		release(t, b, l)
	}
	if got := owners(inspect(t, b, "k")); got != "x /" {
		t.Fatal(got)
	}
	release(t, b, driver.Lease{Key: "k", Owner: "x"})
	acquire(t, b, sem("y", 5))
}

// A request without a ticket neither passes a live one nor leaves anything.
func TestTryDoesNotJump(t *testing.T) {
	t.Parallel()
	clock := newFakeClock("boot")
	b := openAt(t, file(t), clock)
	w := try("k", "w")
	r := try("k", "r")
	r.Mode = driver.Shared
	acquire(t, b, r)
	w.Enqueue = true
	refused(t, b, w)
	r2 := try("k", "r2")
	r2.Mode = driver.Shared
	refused(t, b, r2)
	if got := owners(inspect(t, b, "k")); got != "r / w" {
		t.Fatal(got)
	}
	clock.advance(8 * time.Second) // w's ticket lapses
	acquire(t, b, r2)
}

func TestForceRelease(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	a := acquire(t, b, ask("k", "a"))
	refused(t, b, ask("k", "b"))
	if got, err := b.ForceRelease(t.Context(), "k", a.Token+1); err != nil || got != nil {
		t.Fatal(got, err)
	}
	got, err := b.ForceRelease(t.Context(), "k", 0)
	if err != nil || len(got) != 1 || got[0].Owner != "a" || got[0].Token != a.Token || got[0].TTL != time.Minute {
		t.Fatal(got, err)
	}
	lost(t, extend(t.Context(), b, a), driver.ReasonTaken)
	next := inspect(t, b, "k").Holders[0]
	if next.Owner != "b" {
		t.Fatalf("%+v", next)
	}
	if got, err := b.ForceRelease(t.Context(), "k", next.Token); err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	if got, err := b.ForceRelease(t.Context(), "k", 0); err != nil || got != nil {
		t.Fatal(got, err)
	}
}

func TestExtendBatch(t *testing.T) {
	t.Parallel()
	clock := newFakeClock("boot")
	b := openAt(t, file(t), clock)
	batch := make([]driver.Renewal, 300)
	for i := range batch {
		l := acquire(t, b, ask(fmt.Sprint(i), "o"))
		batch[i] = driver.Renewal{Lease: l, Err: errors.New("stale")}
		batch[i].Lease.TTL = time.Hour
	}
	release(t, b, batch[7].Lease)
	batch[8].Lease.Owner = "other"
	batch[9].Lease.Token++
	b.Extend(t.Context(), batch)
	for i, r := range batch {
		switch i {
		case 7:
			lost(t, r.Err, driver.ReasonGone)
		case 8, 9:
			lost(t, r.Err, driver.ReasonTaken)
		default:
			if r.Err != nil {
				t.Fatal(r.Err)
			}
		}
	}
	if got := inspect(t, b, "7"); got.Holders != nil {
		t.Fatalf("a renewal brought it back: %+v", got)
	}
	clock.advance(2 * time.Minute)
	list, err := b.List(t.Context(), "", "", 0)
	if err != nil || len(list) != 297 {
		t.Fatal(len(list), err)
	}
}

// Keys and owners are bytes: no two meet, whatever is in them.
func TestKeysAreBytes(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	keys := []string{
		"a", "a\x00", "a\x00b", "A", "a ", " a", "a\n", "%", "_", "a%", "{}", "{a}", "'", `"`, ";", "\\", "*", "?",
		"ä", "a\u0308", "\U0010ffff", "\ufffd", "1", "1.0", "0x1", "NULL", "a/b", "a/", "a/\U0010ffff",
	}
	tokens := make(map[int64]bool)
	for _, key := range keys {
		l := acquire(t, b, ask(key, key))
		if tokens[l.Token] {
			t.Fatalf("token %d given twice", l.Token)
		}
		tokens[l.Token] = true
		refused(t, b, ask(key, key+"\x00"))
	}
	slices.Sort(keys)
	list, err := b.List(t.Context(), "", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, key := range keys {
		if info := list[i]; info.Key != key || owners(info) != key+" / "+key+"\x00" {
			t.Fatalf("entry %d is %+v, want %q", i, info, key)
		}
	}
	var names []string
	for after := ""; ; {
		page, err := b.List(t.Context(), "a", after, 3)
		if err != nil {
			t.Fatal(err)
		}
		for _, info := range page {
			names = append(names, info.Key)
		}
		if len(page) < 3 {
			break
		}
		after = page[2].Key
	}
	want := []string{"a", "a\x00", "a\x00b", "a\n", "a ", "a%", "a/", "a/b", "a/\U0010ffff", "a\u0308"}
	if !slices.Equal(names, want) {
		t.Fatalf("with prefix a: %q, want %q", names, want)
	}
}

// A waiter need not have a manager.
func TestNoManager(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	a, w := ask("k", "a"), ask("k", "w")
	a.Manager, w.Manager = "", ""
	lease := acquire(t, b, a)
	refused(t, b, w)
	release(t, b, lease)
	if got := owners(inspect(t, b, "k")); got != "w /" {
		t.Fatal(got)
	}
}

// The longest times must not wrap around into the past.
func TestLongTTL(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	req := ask("k", "a")
	req.TTL = math.MaxInt64
	req.Manager = ""
	l := acquire(t, b, req)
	refused(t, b, ask("k", "b"))
	if err := extend(t.Context(), b, l); err != nil {
		t.Fatal(err)
	}
	if got := inspect(t, b, "k").Holders[0].Remaining; got < 100*365*24*time.Hour {
		t.Fatalf("remaining: %v", got)
	}
	for _, bad := range []driver.Request{
		{Key: "k", Owner: "o", Limit: 1},
		{Key: "k", Owner: "o", Limit: 1, TTL: -1},
		{Key: "k", Owner: "o", TTL: 1},
		{Key: "k", Limit: 1, TTL: 1},
		{Owner: "o", Limit: 1, TTL: 1},
	} {
		if _, err := b.Acquire(t.Context(), bad); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("Acquire(%+v): %v", bad, err)
		}
	}
}

func TestClose(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	l := acquire(t, b, ask("k", "a"))
	for range 2 {
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, err := b.Acquire(t.Context(), ask("k", "a"))
	_, inspectErr := b.Inspect(t.Context(), "k")
	_, listErr := b.List(t.Context(), "", "", 0)
	_, forceErr := b.ForceRelease(t.Context(), "k", 0)
	for _, err := range []error{
		err, extend(t.Context(), b, l), b.Release(t.Context(), l), inspectErr, listErr, forceErr,
		b.Listen(t.Context(), "m", func(driver.Event) {}),
	} {
		if !errors.Is(err, driver.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}
