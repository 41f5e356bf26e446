// Package gocronlock lets the schedulers of several nodes, made with
// github.com/go-co-op/gocron/v2, run each job on one node only.
//
// [NewLocker] is for jobs that any node may run: each run is claimed by one
// node, with [dlm.Once].
//
//	locker, err := gocronlock.NewLocker(manager, 10*time.Second, nil)
//	…
//	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
//
// [NewElector] is for schedulers of which one runs all jobs, and another when
// that one has gone, with [dlm.LeaderElection].
//
// # Guarantees
//
// gocron tells neither a locker nor an elector which tick a run is for, and has
// no way to end a run whose lock was lost. So two runs of a tick can happen if a
// scheduler is behind by more than the minimum hold, or if the leader changes
// between the moments at which two schedulers come to that tick; and a run goes
// on after a loss. Where that would do harm, call [dlm.Once] with the tick, or
// [dlm.LeaderElection], in the job itself.
package gocronlock
