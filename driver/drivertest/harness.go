package drivertest

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// Harness gives the suite access to one store, which nothing else uses.
type Harness struct {
	// Open returns a new backend on the store: another client, as of another
	// process. The suite closes it. Open may call t.Fatal. Required.
	//
	// Set the liveness window of the backends to about one second, so that the
	// cases about dead waiters do not take long.
	Open func(t testing.TB) driver.Backend

	// Unit is the TTL of grants that the suite waits to see expire: as short
	// as the store and the machine allow without live grants being lost by
	// chance. It is raised to the backend's MinTTL. Defaults to 200ms.
	Unit time.Duration

	// Kill ends a client as the death of its process would: nothing is
	// released or withdrawn, and whatever the store does about a client that
	// has vanished takes its course. It is required for backends whose grants
	// or tickets belong to a session (no LivenessWindow, or SessionLeases);
	// with others a dead client is one that makes no more calls.
	Kill func(t testing.TB, b driver.Backend)

	// Forget makes the store forget a key that is free, as it would by itself
	// after a long time, or as the loss of a counter's record would. Nil if
	// there is nothing to forget, or no way to.
	Forget func(t testing.TB, key string)

	// Freeze makes the store stop answering, as a stopped process or a cut
	// cable would, and returns what sets it going again. Nil if there is no way
	// to: then it is not checked that calls to a store that hangs end with
	// their contexts.
	Freeze func(t testing.TB) (thaw func())

	// exact says that time is not real, so that nothing comes late.
	exact bool
	// newManager takes the place of dlm.NewManager in tests of the suite.
	newManager func(driver.Backend, *dlm.LockConfig) (manager, error)
}

func (h *Harness) unit() time.Duration {
	if h.Unit == 0 {
		return 200 * time.Millisecond
	}
	return h.Unit
}

// Case is one property that every backend must have.
type Case struct {
	// Name names the subtest: "Backend/…" if the case calls the backend itself,
	// "Manager/…" if it does so through a [dlm.Manager].
	Name string
	// Guarantee names what is checked: the invariants I1 to I12 of the design,
	// and ids of the catalogue of known faults.
	Guarantee string
	// Why says who is hurt if it does not hold.
	Why string

	run func(*env)
}

// Cases returns all cases, in the order in which they run.
func Cases() []Case {
	var all []Case
	for _, group := range [][]Case{
		exclusionCases, tokenCases, expiryCases, ownershipCases, repetitionCases, extendCases,
		queueCases, livenessCases, withdrawCases, sharedCases, permitCases, keyCases,
		notifyCases, inspectCases, forceCases, checkCases, lifeCases,
		managerInputCases, managerLossCases, managerFaultCases, managerWaitCases, managerCloseCases,
		managerStormCases,
	} {
		all = append(all, group...)
	}
	return all
}

// Run runs all cases, each as a parallel subtest with a harness of its own.
//
// A case that fails while the machine is too busy to run this process says
// nothing, so it is run again on another harness.
//
// The cases wait more than they work, so that -parallel 8 makes them faster on
// a small machine.
func Run(t *testing.T, open func(t *testing.T) *Harness) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			report(t, c, attempts(t, open, func(h *Harness) error { return c.check(t, h) }))
		})
	}
}

// RunSynctest runs all cases like Run, but each in a bubble of testing/synctest,
// where waiting takes no time. It is for backends that do nothing but compute
// and wait: no network, no files.
func RunSynctest(t *testing.T, open func(t *testing.T) *Harness) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				h := open(t)
				h.exact = true
				report(t, c, c.check(t, h))
			})
		})
	}
}

func report(t *testing.T, c Case, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%v\n\nchecks %s: %s", err, c.Guarantee, c.Why)
	}
}

// check runs the case and returns what went wrong.
func (c Case) check(t testing.TB, h *Harness) error {
	e := newEnv(t, h)
	err := e.protect(func() { c.run(e) })
	return errors.Join(err, e.finish())
}
