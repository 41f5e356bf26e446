package gocronlock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/gocronlock"
	"github.com/go-dlm/dlm/memlock"
)

func manager(t *testing.T, store *memlock.Store) *dlm.Manager {
	t.Helper()
	m, err := memlock.NewLockManager(store, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

func locker(t *testing.T, m dlm.LockManager, minHold time.Duration) *gocronlock.Locker {
	t.Helper()
	l, err := gocronlock.NewLocker(m, minHold, nil)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// schedule runs a job every second from then on, until the test ends or the
// scheduler is shut down.
func schedule(t *testing.T, by gocron.SchedulerOption, start time.Time, job func()) gocron.Scheduler {
	t.Helper()
	s, err := gocron.NewScheduler(by)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Shutdown() })
	if _, err := s.NewJob(gocron.DurationJob(time.Second), gocron.NewTask(job), gocron.WithName("report"),
		gocron.WithStartAt(gocron.WithStartDateTime(start))); err != nil {
		t.Fatal(err)
	}
	s.Start()
	return s
}

// runs counts the runs of each second.
type runs struct {
	mu    sync.Mutex
	start time.Time
	times map[int][]int // the nodes that ran a tick
}

func newRuns() *runs {
	return &runs{start: time.Now().Add(time.Second), times: make(map[int][]int)}
}

func (r *runs) add(node int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	tick := int(time.Since(r.start) / time.Second)
	r.times[tick] = append(r.times[tick], node)
}

// check checks that each of n ticks was run once.
func (r *runs) check(t *testing.T, n int) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.times) != n {
		t.Errorf("%d ticks were run, want %d", len(r.times), n)
	}
	for tick, nodes := range r.times {
		if len(nodes) != 1 {
			t.Errorf("tick %d was run by %v", tick, nodes)
		}
	}
}

// TTL8: schedulers that are apart run a job of no time once a tick.
func TestLocker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		r := newRuns()
		var lockers []*gocronlock.Locker
		var schedulers []gocron.Scheduler
		for i, behind := range []time.Duration{100 * time.Millisecond, 0, 200 * time.Millisecond} {
			l := locker(t, manager(t, store), 500*time.Millisecond)
			lockers = append(lockers, l)
			schedulers = append(schedulers, schedule(t, gocron.WithDistributedLocker(l), r.start.Add(behind), func() { r.add(i) }))
		}
		time.Sleep(10*time.Second + 900*time.Millisecond)
		for _, s := range schedulers {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
		}
		for _, l := range lockers {
			if err := l.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
		r.check(t, 10)
	})
}

func TestElector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		r := newRuns()
		var elections []*dlm.LeaderElection
		for i := range 2 {
			election, err := dlm.NewLeaderElection(manager(t, store), "scheduler", fmt.Sprint("node-", i), nil)
			if err != nil {
				t.Fatal(err)
			}
			elector, err := gocronlock.NewElector(election)
			if err != nil {
				t.Fatal(err)
			}
			if err := elector.IsLeader(t.Context()); !errors.Is(err, gocronlock.ErrNotLeader) {
				t.Errorf("before the election: %v", err)
			}
			if err := election.Start(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := election.Stop(context.Background()); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
			elections = append(elections, election)
			schedule(t, gocron.WithDistributedElector(elector), r.start, func() { r.add(i) })
		}
		time.Sleep(5*time.Second + 500*time.Millisecond)
		if err := elections[0].StepDown(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(5 * time.Second)
		r.check(t, 10)
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.times[0][0] != 0 || r.times[9][0] != 1 {
			t.Errorf("the leader was not followed: %v", r.times)
		}
	})
}

func TestArguments(t *testing.T) {
	t.Parallel()
	m := manager(t, memlock.NewStore())
	_, noManager := gocronlock.NewLocker(nil, time.Second, nil)
	_, noHold := gocronlock.NewLocker(m, 0, nil)
	_, noElection := gocronlock.NewElector(nil)
	_, badJob := locker(t, m, time.Second).Lock(t.Context(), string(make([]byte, 1000)))
	for _, err := range []error{noManager, noHold, noElection, badJob} {
		if !errors.Is(err, dlm.ErrInvalid) {
			t.Error(err)
		}
	}
}

// A run is held from other lockers, by its name and prefix, and Unlock works when
// the scheduler's context has ended.
func TestLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := locker(t, manager(t, store), time.Minute), locker(t, manager(t, store), time.Minute)
		other, err := gocronlock.NewLocker(manager(t, store), time.Minute, &gocronlock.Options{Prefix: "other/"})
		if err != nil {
			t.Fatal(err)
		}
		held, err := a.Lock(t.Context(), "job")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Lock(t.Context(), "job"); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("locked twice: %v", err)
		}
		another, err := other.Lock(t.Context(), "job")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := errors.Join(held.Unlock(ended), another.Unlock(ended)); err != nil {
			t.Error(err)
		}
		again, err := b.Lock(t.Context(), "job")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(again.Unlock(ended)); err != nil {
			t.Error(err)
		}
		if err := b.Wait(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("Wait: %v", err)
		}
		if err := b.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func ExampleNewLocker() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer m.Close(context.Background())
	locker, err := gocronlock.NewLocker(m, 10*time.Second, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
	if err != nil {
		fmt.Println(err)
		return
	}
	done := make(chan struct{})
	_, err = scheduler.NewJob(gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()),
		gocron.NewTask(func() {
			fmt.Println("on one node")
			close(done)
		}), gocron.WithName("report"))
	if err != nil {
		fmt.Println(err)
		return
	}
	scheduler.Start()
	<-done
	fmt.Println(scheduler.Shutdown())
	// Output:
	// on one node
	// <nil>
}
