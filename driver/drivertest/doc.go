// Package drivertest is the conformance suite that every backend must pass,
// with the tools to write tests around backends.
//
// A backend's own tests call [Run] with a function that opens clients of one
// store:
//
//	func TestConformance(t *testing.T) {
//		drivertest.Run(t, func(t *testing.T) *drivertest.Harness {
//			store := startStore(t)
//			return &drivertest.Harness{
//				Open: func(t testing.TB) driver.Backend { return connect(t, store) },
//			}
//		})
//	}
//
// Every case runs on a store of its own, on the backend itself or through a
// [dlm.Manager] over it, and says which guarantee it checks and why somebody
// needs it. Whatever a case is about, all its calls to the backend are recorded
// and checked against the contract of package driver, and in the end nothing
// may be left in the store that was released or withdrawn.
//
// A property that a backend does not have is no reason to skip: the case then
// checks that a Manager over it refuses what rests on that property.
//
// [RunSynctest] is Run in testing/synctest bubbles, for backends that do no
// more than compute: time is then free. [Operations] compares a backend with a
// model of the contract in long random runs. [Bench] is the benchmark that all
// backends share. [Main] checks that a package's tests leave no goroutine
// behind.
//
// [Intercept] and [Faults] stand between a manager and its backend: they
// count, replace, refuse, hang or swallow calls.
package drivertest
