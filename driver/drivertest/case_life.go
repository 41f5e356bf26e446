package drivertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/go-dlm/dlm/driver"
)

var lifeCases = []Case{
	{
		Name: "Backend/PropertiesMakeSense", Guarantee: "contract of Properties",
		Why: "core computes deadlines and polling from them",
		run: propertiesMakeSense,
	},
	{
		Name: "Backend/ClosedBackendRefuses", Guarantee: "X6, contract of Close",
		Why: "a call after Close would use what was freed, or hang",
		run: closedBackendRefuses,
	},
	{
		Name: "Backend/CloseKeepsGrants", Guarantee: "contract of Close",
		Why: "one client that leaves must not take the locks of others along, nor hurry its own to others",
		run: closeKeepsGrants,
	},
	{
		Name: "Backend/Storm", Guarantee: "I1, I2, I4, I5, WAIT3",
		Why: "what no single case thought of shows when everything happens at once",
		run: storm,
	},
}

func propertiesMakeSense(e *env) {
	cl := e.open()
	p := cl.backend.Properties()
	switch {
	case p.Name == "":
		e.fatalf("the backend has no name")
	case p.MinTTL < 0 || p.LivenessWindow < 0 || p.PollInterval < 0:
		e.fatalf("a duration is negative: %+v", p)
	case p.MinTTL > time.Minute:
		e.fatalf("the shortest TTL is %v", p.MinTTL)
	case p.Tokens > driver.TokensClock:
		e.fatalf("unknown token strength %d", p.Tokens)
	case p != e.open().backend.Properties():
		e.fatalf("two clients of one store differ: %+v", p)
	}
	// The shortest TTL is granted. It may be over before anybody can release it,
	// and a busy machine may need it all before a quorum has answered once.
	e.eventually("the shortest TTL is granted", func() bool {
		_, err := cl.acquire(driver.Request{Key: "k", Owner: "a", TTL: max(p.MinTTL, time.Millisecond)})
		if errors.Is(err, driver.ErrInvalid) || errors.Is(err, errors.ErrUnsupported) {
			e.fatalf("the shortest TTL is refused: %w", err)
		}
		return err == nil
	})
	cl.withdraw("k", "a")
	if q := cl.backend.Properties(); p != q {
		e.fatalf("the properties changed from %+v to %+v", p, q)
	}
}

func closedBackendRefuses(e *env) {
	cl, other := e.open(), e.open()
	lease := cl.grant(driver.Request{Key: "k", Owner: "a"})
	cl.mustRelease(lease)
	for range 2 {
		if err := cl.backend.Close(); err != nil {
			e.fatalf("Close: %w", err)
		}
	}
	closed := func(what string, err error) {
		if !errors.Is(err, driver.ErrClosed) {
			e.fatalf("%s after Close: %v, want ErrClosed", what, err)
		}
	}
	_, err := cl.acquire(driver.Request{Key: "k", Owner: "b", Enqueue: true})
	closed("Acquire", err)
	batch := []driver.Renewal{{Lease: lease}, {Lease: lease}}
	cl.extendAll(batch)
	closed("Extend", batch[0].Err)
	closed("Extend, second entry", batch[1].Err)
	closed("Release", cl.release(lease))
	closed("withdrawing", cl.release(driver.Lease{Key: "k", Owner: "b"}))
	if in, ok := driver.As[driver.Inspector](cl.backend); ok {
		_, err := in.Inspect(e.within(e.patience), "k")
		closed("Inspect", err)
		_, err = in.List(e.within(e.patience), "", "", 0)
		closed("List", err)
	}
	if f, ok := driver.As[driver.Forcer](cl.backend); ok {
		_, err := f.ForceRelease(e.within(e.patience), "k", 0)
		closed("ForceRelease", err)
	}
	if n, ok := driver.As[driver.Notifier](cl.backend); ok {
		closed("Listen", n.Listen(e.within(e.patience), "m", func(driver.Event) {}))
	}
	// The other clients do not notice.
	other.mustRelease(other.grant(driver.Request{Key: "k", Owner: "c"}))
}

func closeKeepsGrants(e *env) {
	a, b := e.open(), e.open()
	if e.props.SessionLeases {
		// What a session holds goes with it, soon or at its end; what others
		// hold does not.
		lease := b.grant(driver.Request{Key: "k", Owner: "b"})
		if err := a.backend.Close(); err != nil {
			e.fatalf("Close: %w", err)
		}
		b.mustExtend(lease, e.long)
		b.mustRelease(lease)
		return
	}
	lease := a.grant(driver.Request{Key: "k", Owner: "a"})
	if err := a.backend.Close(); err != nil {
		e.fatalf("Close: %w", err)
	}
	b.refuse(driver.Request{Key: "k", Owner: "b"})
	// Who knows owner and token can go on with it.
	b.mustExtend(lease, e.long)
	b.mustRelease(lease)
}

// storm lets many callers do what they like on a few keys. The recorder finds
// out whether the answers fit together.
func storm(e *env) {
	const callers, rounds = 24, 30
	clients := []*client{e.open(), e.open(), e.open()}
	keys := []string{"k1", "k2", "k3"}
	seed := rand.Uint64()
	g := e.group()
	for i := range callers {
		cl := clients[i%len(clients)]
		g.start(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			for range rounds {
				if err := e.stormRound(rnd, cl, keys[rnd.IntN(len(keys))]); err != nil {
					e.fatalf("seed %d: %w", seed, err)
				}
			}
		})
	}
	g.wait()
	// Whatever was cut off in the middle of a call may have come late, but it
	// does not stay.
	for _, key := range keys {
		req := driver.Request{Key: key, Owner: e.name("after")}
		e.eventuallyWithin(e.patience+stormTTL(e), "key "+key+" is free after the storm", func() bool {
			lease, err := clients[0].acquire(req)
			return err == nil && clients[0].release(lease) == nil
		})
	}
}

// stormTTL outlasts every round of a storm, but not the suite's patience.
func stormTTL(e *env) time.Duration { return max(10*time.Second, 5*e.unit) }

func (e *env) stormRound(rnd *rand.Rand, cl *client, key string) error {
	req := driver.Request{Key: key, Owner: e.name("owner"), TTL: stormTTL(e), Limit: 1, Enqueue: rnd.IntN(3) > 0}
	if key == "k2" && e.props.SharedMode && rnd.IntN(3) > 0 {
		req.Mode = driver.Shared
	}
	if key == "k3" && e.props.Permits {
		req.Limit = 3
	}
	var lease driver.Lease
	var err error
	for range 1 + rnd.IntN(5) {
		ctx, cancel := context.WithTimeout(context.Background(), e.patience)
		if rnd.IntN(8) == 0 {
			// A caller that goes away at some moment of its call.
			time.AfterFunc(time.Duration(rnd.IntN(300))*time.Microsecond, cancel)
		}
		lease, err = cl.backend.Acquire(ctx, req)
		cancel()
		if err == nil {
			break
		}
		if !errors.Is(err, driver.ErrHeld) && !errors.Is(err, context.Canceled) {
			return err
		}
		time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
	}
	if err != nil || rnd.IntN(6) == 0 {
		return cl.release(driver.Lease{Key: key, Owner: req.Owner})
	}
	if rnd.IntN(3) == 0 {
		if _, err := cl.extend(lease, stormTTL(e)); err != nil {
			return err
		}
	}
	time.Sleep(time.Duration(rnd.IntN(500)) * time.Microsecond)
	if err := cl.release(lease); err != nil {
		return err
	}
	if rnd.IntN(4) == 0 {
		if err := cl.release(lease); !errors.Is(err, driver.ErrLost) {
			return errors.Join(errors.New("a second release was not told of a loss"), err)
		}
	}
	return nil
}
