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

var readWriteCases = []testCase{
	{"Exclusion", readWriteExclusion},
	{"WaitingWriterIsNotPassed", waitingWriterIsNotPassed},
	{"ReadersEnterTogether", readersEnterTogether},
	{"WriterAmongManyReaders", writerAmongManyReaders},
	{"DeadReader", deadReader},
	{"ReadAgainBesideAWriter", readAgainBesideAWriter},
	{"UpgradeIsRefused", upgradeIsRefused},
	{"ReadWithinWrite", readWithinWrite},
	{"TokensRise", readWriteTokensRise},
}

// readWriteLocks runs the cases, or checks the refusal.
func readWriteLocks(t *testing.T, cfg *Config) {
	s := newStage(t, cfg)
	if c := s.open(nil); !c.Properties().SharedMode {
		if _, err := dlm.NewReadWriteLock(c, "rw"); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("a read-write lock on a store without shared locks: %v", err)
		}
		return
	}
	runCases(t, cfg, readWriteCases)
}

// readWrite returns the read-write lock that the cases use.
func (s *stage) readWrite(c *client) *dlm.ReadWriteLock {
	s.Helper()
	rw, err := dlm.NewReadWriteLock(c, "rw")
	if err != nil {
		s.Fatal(err)
	}
	return rw
}

// owned takes a lock for an owner.
func owned(owner string, a acquire) acquire {
	return func(ctx context.Context, ttl time.Duration) (*dlm.Lock, error) {
		return a(dlm.WithOwner(ctx, owner), ttl)
	}
}

func readWriteExclusion(s *stage) {
	const rounds = 4
	var readers, writers atomic.Int32
	read := func(rw *dlm.ReadWriteLock) (*dlm.Lock, error) {
		l, err := rw.AcquireRead(s.ctx, ttl)
		if err == nil {
			readers.Add(1)
			if n := writers.Load(); n > 0 {
				s.Errorf("a reader beside %d writers", n)
			}
			readers.Add(-1)
		}
		return l, err
	}
	write := func(rw *dlm.ReadWriteLock) (*dlm.Lock, error) {
		l, err := rw.AcquireWrite(s.ctx, ttl)
		if err == nil {
			if r, w := readers.Load(), writers.Add(1); r > 0 || w > 1 {
				s.Errorf("a writer beside %d readers and %d writers", r, w-1)
			}
			writers.Add(-1)
		}
		return l, err
	}
	var group sync.WaitGroup
	for range 2 {
		rw := s.readWrite(s.open(nil))
		for _, enter := range []func(*dlm.ReadWriteLock) (*dlm.Lock, error){read, read, write, write} {
			group.Go(func() {
				for range rounds {
					l, err := enter(rw)
					if err == nil {
						err = l.Release(s.ctx)
					}
					if err != nil {
						s.Error(err)
						return
					}
				}
			})
		}
	}
	group.Wait()
	s.free(s.open(nil), "rw")
}

func waitingWriterIsNotPassed(s *stage) {
	a, b := s.open(nil), s.open(nil)
	if !a.Properties().FairQueue {
		return
	}
	readA, readB := s.readWrite(a), s.readWrite(b)
	reader := s.take(readA.AcquireRead)
	writer := s.wait(b, readB.AcquireWrite)
	s.refused("a reader past a waiting writer", readA.TryRead)
	late := s.wait(a, readA.AcquireRead)
	second := s.wait(b, readB.AcquireWrite)
	s.release(reader)
	w := await(s, "the writer", writer)
	still(s, "a reader beside the writer", late)
	s.refused("a reader beside the writer", readA.TryRead)
	s.release(w)
	r := await(s, "the reader behind the writer", late)
	still(s, "a writer beside the reader", second)
	s.release(r)
	s.release(await(s, "the second writer", second))
	s.free(a, "rw")
}

func readersEnterTogether(s *stage) {
	clients := []*client{s.open(nil), s.open(nil)}
	writer := s.take(s.readWrite(clients[0]).AcquireWrite)
	var waiting []*pending[*dlm.Lock]
	for i := range 6 {
		c := clients[i%2]
		waiting = append(waiting, s.wait(c, s.readWrite(c).AcquireRead))
	}
	s.release(writer)
	// None of them releases before all are in.
	var inside []*dlm.Lock
	for _, p := range waiting {
		inside = append(inside, await(s, "one of the readers", p))
	}
	s.refused("a writer beside readers", s.readWrite(clients[1]).TryWrite)
	for _, l := range inside {
		s.release(l)
	}
	s.free(clients[0], "rw")
}

// Readers that come all the time, and leave no moment without a reader, do not
// keep a writer out.
func writerAmongManyReaders(s *stage) {
	a, b := s.open(nil), s.open(nil)
	if !a.Properties().FairQueue {
		return
	}
	rw := s.readWrite(a)
	first := s.take(rw.AcquireRead)
	writer := s.wait(b, s.readWrite(b).AcquireWrite)
	var group sync.WaitGroup
	written := make(chan struct{})
	for range 3 {
		group.Go(func() {
			for over := false; !over; {
				select {
				case <-written:
					over = true
				default:
				}
				l, err := rw.AcquireRead(s.ctx, ttl)
				if err == nil {
					err = l.Release(s.ctx)
				}
				if err != nil {
					s.Error(err)
					return
				}
			}
		})
	}
	s.release(first)
	l := await(s, "the writer among readers", writer)
	close(written)
	s.release(l)
	group.Wait()
	s.free(a, "rw")
}

func deadReader(s *stage) {
	dead, c := s.open(&dlm.LockConfig{AutoRenew: dlm.Off}), s.open(nil)
	if !s.lapses(c) {
		return
	}
	live := s.take(s.readWrite(c).AcquireRead)
	abandoned, err := s.readWrite(dead).AcquireRead(s.ctx, lapse)
	if err != nil {
		s.Fatal(err)
	}
	writer := s.wait(c, s.readWrite(c).AcquireWrite)
	s.release(live)
	w := await(s, "the writer behind a dead reader", writer)
	if err := abandoned.Err(); !errors.Is(err, dlm.ErrLost) {
		s.Errorf("a writer entered while a reader was told: %v", err)
	}
	s.release(w)
	s.free(c, "rw")
}

func readAgainBesideAWriter(s *stage) {
	a, b := s.open(nil), s.open(nil)
	rw := s.readWrite(a)
	outer := s.take(owned("o", rw.AcquireRead))
	writer := s.wait(b, s.readWrite(b).AcquireWrite)
	inner := s.take(owned("o", rw.AcquireRead))
	if inner.Token != outer.Token || inner.Value != outer.Value {
		s.Errorf("entered again with another lock: %v, %v", outer, inner)
	}
	s.release(outer)
	still(s, "the writer, beside a reader", writer)
	s.release(inner)
	s.release(await(s, "the writer", writer))
	s.free(a, "rw")
}

func upgradeIsRefused(s *stage) {
	a, b := s.open(nil), s.open(nil)
	rw := s.readWrite(a)
	locks := map[string]*dlm.Lock{"o": s.take(owned("o", rw.AcquireRead)), "p": s.take(owned("p", rw.AcquireRead))}
	writer := s.wait(b, s.readWrite(b).AcquireWrite)
	for owner, reading := range locks {
		for _, write := range []acquire{rw.AcquireWrite, rw.TryWrite} {
			l, err := owned(owner, write)(s.ctx, ttl)
			up, ok := errors.AsType[*dlm.UpgradeError](err)
			if !ok || up.Key != "rw" || up.Token != reading.Token || !errors.Is(err, dlm.ErrInvalid) {
				s.Fatalf("an upgrade: %v, %v", l, err)
			}
		}
	}
	for _, l := range locks {
		if err := l.Err(); err != nil {
			s.Errorf("a reader after its upgrade was refused: %v", err)
		}
		s.release(l)
	}
	s.release(await(s, "the writer", writer))
	// An owner that reads no more may write.
	s.release(s.take(owned("o", rw.TryWrite)))
	s.free(a, "rw")
}

func readWithinWrite(s *stage) {
	a, b := s.open(nil), s.open(nil)
	rw := s.readWrite(a)
	write := s.take(owned("o", rw.AcquireWrite))
	read := s.take(owned("o", rw.AcquireRead))
	if read.Token != write.Token || read.Mode != dlm.Exclusive {
		s.Errorf("reading within %v as %v (%v)", write, read, read.Mode)
	}
	s.release(write)
	s.refused("a reader beside a former writer", s.readWrite(b).TryRead)
	s.release(read)
	s.release(s.take(s.readWrite(b).TryRead))
	s.free(a, "rw")
}

func readWriteTokensRise(s *stage) {
	a, b := s.open(nil), s.open(nil)
	var last int64
	for i, c := range []*client{a, b, b, a, a} {
		enter := s.readWrite(c).AcquireRead
		if i%2 == 1 {
			enter = s.readWrite(c).AcquireWrite
		}
		l := s.take(enter)
		if l.Token <= last {
			s.Errorf("token %d (%v) after %d", l.Token, l.Mode, last)
		}
		last = l.Token
		s.release(l)
	}
}
