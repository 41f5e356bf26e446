package patterntest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
)

var semaphoreCases = []testCase{
	{"NoMoreThanItsCapacity", noMoreThanItsCapacity},
	{"InOrderOfArrival", permitsInOrderOfArrival},
	{"PermitOfTheDead", permitOfTheDead},
	{"CapacityDisagreement", capacityDisagreement},
	{"Resize", resize},
	{"Usage", usage},
	{"CancelledWaiters", cancelledPermitWaiters},
	{"Reentry", permitReentry},
	{"TokensRise", permitTokensRise},
}

// semaphores runs the cases, or checks the refusal.
func semaphores(t *testing.T, cfg *Config) {
	s := newStage(t, cfg)
	if c := s.open(nil); !c.Properties().Permits {
		if _, err := dlm.NewDistributedSemaphore(c, "s", 1); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("a semaphore on a store without permits: %v", err)
		}
		return
	}
	runCases(t, cfg, semaphoreCases)
}

// semaphore returns the semaphore that the cases use.
func (s *stage) semaphore(c *client, capacity int) *dlm.Semaphore {
	s.Helper()
	sem, err := dlm.NewDistributedSemaphore(c, "s", capacity)
	if err != nil {
		s.Fatal(err)
	}
	return sem
}

func noMoreThanItsCapacity(s *stage) {
	const capacity, workers, rounds = 3, 3, 4
	c := s.open(nil)
	var held []*dlm.Lock
	for range capacity {
		held = append(held, s.take(s.semaphore(c, capacity).TryAcquire))
	}
	s.refused("one more than there are", s.semaphore(c, capacity).TryAcquire)
	for _, l := range held {
		s.release(l)
	}

	var inside atomic.Int32
	var group sync.WaitGroup
	for range 3 {
		sem := s.semaphore(s.open(nil), capacity)
		for range workers {
			group.Go(func() {
				for range rounds {
					l, err := sem.Acquire(s.ctx, ttl)
					if err != nil {
						s.Error(err)
						return
					}
					if n := inside.Add(1); n > capacity {
						s.Errorf("%d inside, %d permits", n, capacity)
					}
					if err := l.Err(); err != nil {
						s.Error(err)
					}
					inside.Add(-1)
					if err := l.Release(s.ctx); err != nil {
						s.Error(err)
						return
					}
				}
			})
		}
	}
	group.Wait()
	s.free(c, "s")
}

func permitsInOrderOfArrival(s *stage) {
	a, b := s.open(nil), s.open(nil)
	if !a.Properties().FairQueue {
		return
	}
	sems := []*dlm.Semaphore{s.semaphore(a, 2), s.semaphore(b, 2)}
	inside := []*dlm.Lock{s.take(sems[0].Acquire), s.take(sems[1].Acquire)}
	var waiting []*pending[*dlm.Lock]
	for i := range 5 {
		waiting = append(waiting, s.wait([]*client{a, b}[i%2], sems[i%2].Acquire))
	}
	s.refused("past those who wait", sems[0].TryAcquire)
	_ = giveUp(s, waiting[2])
	waiting = append(waiting[:2], waiting[3:]...)
	for i, p := range waiting {
		s.release(inside[i])
		inside = append(inside, await(s, "the next in the queue", p))
		for _, later := range waiting[i+1:] {
			still(s, "one further back", later)
		}
	}
	s.release(inside[len(waiting)], inside[len(waiting)+1])
	s.free(a, "s")
}

func permitOfTheDead(s *stage) {
	dead, c := s.open(&dlm.LockConfig{AutoRenew: dlm.Off}), s.open(nil)
	if !s.lapses(c) {
		return
	}
	kept := s.take(s.semaphore(c, 2).Acquire)
	abandoned, err := s.semaphore(dead, 2).Acquire(s.ctx, lapse)
	if err != nil {
		s.Fatal(err)
	}
	next, err := s.semaphore(c, 2).Acquire(s.ctx, ttl)
	if err != nil {
		s.Fatalf("the permit did not come back: %v", err)
	}
	if err := abandoned.Err(); !errors.Is(err, dlm.ErrLost) {
		s.Errorf("the permit was granted again while its holder was told: %v", err)
	}
	if next.Token <= abandoned.Token {
		s.Errorf("token %d after %d", next.Token, abandoned.Token)
	}
	s.refused("the live holder's permit", s.semaphore(c, 2).TryAcquire)
	s.release(kept, next)
	s.free(c, "s")
}

// disagrees checks that an acquisition is refused with both capacities.
func (s *stage) disagrees(want, have int, a acquire) {
	s.Helper()
	l, err := a(s.ctx, ttl)
	limit, ok := errors.AsType[*dlm.LimitError](err)
	if !ok || limit.Want != want || limit.Have != have || !errors.Is(err, dlm.ErrInvalid) {
		s.Fatalf("capacity %d where %d is in force: %v, %v", want, have, l, err)
	}
}

func capacityDisagreement(s *stage) {
	a, b := s.open(nil), s.open(nil)
	three := s.semaphore(a, 3)
	held := s.take(three.Acquire)
	for _, other := range []int{1, 2, 5} {
		sem := s.semaphore(b, other)
		s.disagrees(other, 3, sem.Acquire)
		s.disagrees(other, 3, sem.TryAcquire)
	}
	// Nobody was hurt.
	same := s.take(s.semaphore(b, 3).TryAcquire)
	s.release(held, same)
	s.free(b, "s")
}

func resize(s *stage) {
	a, b := s.open(nil), s.open(nil)
	five, two := s.semaphore(a, 5), s.semaphore(b, 2)
	held := s.take(five.Acquire)
	try := func() *pending[*dlm.Lock] {
		p := begin(s, func(ctx context.Context) (*dlm.Lock, error) { return two.Resize(ctx, ttl) })
		select {
		case <-b.failed: // it has seen the disagreement
		case <-s.ctx.Done():
			s.Fatal("Resize did not ask")
		}
		still(s, "while the old capacity is in force", p)
		return p
	}
	err := giveUp(s, try())
	if limit, ok := errors.AsType[*dlm.LimitError](err); !ok || limit.Have != 5 {
		s.Errorf("the error does not say what stood in the way: %v", err)
	}
	p := try()
	s.release(held)
	first := await(s, "the first permit of the new capacity", p)
	s.disagrees(5, 2, five.Acquire)
	second := s.take(two.TryAcquire)
	s.refused("the third of two", two.TryAcquire)
	s.release(first, second)
	s.free(a, "s")
}

func usage(s *stage) {
	c := s.open(nil)
	sem := s.semaphore(c, 2)
	want := func(u dlm.SemaphoreUsage) bool {
		s.Helper()
		got, err := s.semaphore(c, 9).Usage(s.ctx)
		if errors.Is(err, errors.ErrUnsupported) {
			return false
		}
		if err != nil || got != u {
			s.Fatalf("usage is %+v, %v; want %+v", got, err, u)
		}
		return true
	}
	if !want(dlm.SemaphoreUsage{Capacity: 9}) {
		return
	}
	first := s.take(sem.Acquire)
	want(dlm.SemaphoreUsage{Capacity: 2, Held: 1})
	second := s.take(sem.Acquire)
	p, q := s.wait(c, sem.Acquire), s.wait(c, sem.Acquire)
	want(dlm.SemaphoreUsage{Capacity: 2, Held: 2, Waiting: 2})
	_ = giveUp(s, p)
	want(dlm.SemaphoreUsage{Capacity: 2, Held: 2, Waiting: 1})
	s.release(first, second)
	s.release(await(s, "the waiter", q))
	want(dlm.SemaphoreUsage{Capacity: 9})
}

func cancelledPermitWaiters(s *stage) {
	a, b := s.open(nil), s.open(nil)
	held := s.take(s.semaphore(a, 1).Acquire)
	var waiting []*pending[*dlm.Lock]
	for range 5 {
		waiting = append(waiting, s.wait(b, s.semaphore(b, 1).Acquire))
	}
	for _, p := range waiting {
		if err := giveUp(s, p); !errors.Is(err, dlm.ErrHeld) {
			s.Errorf("the error does not say why it waited: %v", err)
		}
	}
	s.release(held)
	s.free(b, "s")
}

func permitReentry(s *stage) {
	c := s.open(nil)
	sem := s.semaphore(c, 2)
	owner := dlm.WithOwner(s.ctx, "o")
	as := func(a acquire) acquire {
		return func(_ context.Context, ttl time.Duration) (*dlm.Lock, error) { return a(owner, ttl) }
	}
	outer := s.take(as(sem.Acquire))
	inner := s.take(as(sem.TryAcquire))
	if inner.Token != outer.Token || inner.Value != outer.Value {
		s.Errorf("entered again with another permit: %v, %v", outer, inner)
	}
	s.disagrees(3, 2, as(s.semaphore(c, 3).Acquire))
	other := s.take(sem.TryAcquire) // so the owner has but one
	s.refused("a third permit", sem.TryAcquire)
	s.release(outer)
	s.refused("while the owner is still inside", sem.TryAcquire)
	s.release(inner)
	s.release(s.take(sem.TryAcquire), other)
	s.free(c, "s")
}

func permitTokensRise(s *stage) {
	a, b := s.open(nil), s.open(nil)
	var last int64
	for i := range 6 {
		sem := s.semaphore([]*client{a, b}[i%2], 3)
		l := s.take(sem.Acquire)
		if l.Token <= last {
			s.Errorf("token %d after %d", l.Token, last)
		}
		last = l.Token
		if i%3 != 0 {
			s.release(l)
		} else {
			defer s.release(l)
		}
	}
}
