package patterntest

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
)

var multiLockCases = []testCase{
	{"HeldAsOne", multiHeldAsOne},
	{"AllOrNothing", multiAllOrNothing},
	{"TryAllOrNothing", multiTryAllOrNothing},
	{"AnyOrder", multiAnyOrder},
	{"LossOfOne", multiLossOfOne},
	{"KeptAliveWhileWaiting", multiKeptAlive},
	{"Reentry", multiReentry},
}

func multiLocks(t *testing.T, cfg *Config) { runCases(t, cfg, multiLockCases) }

// takeAll takes keys that are free.
func (s *stage) takeAll(ctx context.Context, c *client, keys ...string) *dlm.MultiLock {
	s.Helper()
	l, err := dlm.AcquireMulti(ctx, c, keys, ttl)
	if err != nil {
		s.Fatal(err)
	}
	return l
}

// waitAll queues for keys of which one is held.
func (s *stage) waitAll(c *client, keys ...string) *pending[*dlm.MultiLock] {
	s.Helper()
	return queue(s, c, func(ctx context.Context) (*dlm.MultiLock, error) { return dlm.AcquireMulti(ctx, c, keys, ttl) })
}

// tryKey takes one key.
func tryKey(c *client, key string) acquire {
	return func(ctx context.Context, ttl time.Duration) (*dlm.Lock, error) { return c.TryLock(ctx, key, ttl) }
}

func multiHeldAsOne(s *stage) {
	a, b := s.open(nil), s.open(nil)
	l := s.takeAll(s.ctx, a, "c", "a", "b", "a")
	if keys := l.Keys(); !slices.Equal(keys, []string{"a", "b", "c"}) {
		s.Errorf("keys %q", keys)
	}
	if err := l.Err(); err != nil {
		s.Error(err)
	}
	for _, key := range l.Keys() {
		if l.Token(key) == 0 {
			s.Errorf("%q has no token", key)
		}
		s.refused(key, tryKey(b, key))
	}
	if l.Token("d") != 0 {
		s.Error("a key that it has not has a token")
	}
	deadline := l.Deadline() // on some stores it is that of a session
	if d := time.Until(deadline); d <= 0 || d > ttl {
		s.Errorf("the deadline is in %v", d)
	}
	if err := l.Extend(s.ctx, 2*ttl); err != nil {
		s.Error(err)
	}
	if d := l.Deadline(); d.Before(deadline) {
		s.Errorf("Extend moved the deadline from %v to %v", deadline, d)
	}
	tokens := []int64{l.Token("a"), l.Token("b"), l.Token("c")}
	ctx := l.Context(s.ctx)
	if err := l.Release(ctx); err != nil { // its own context ends meanwhile
		s.Error(err)
	}
	s.over("Done after the release", l.Done())
	if err := l.Release(s.ctx); err != nil {
		s.Errorf("the second release: %v", err)
	}
	if err := l.Err(); !errors.Is(err, dlm.ErrReleased) || !errors.Is(context.Cause(ctx), context.Canceled) {
		s.Errorf("after the release: %v, %v", err, context.Cause(ctx))
	}
	if err := l.Extend(s.ctx, ttl); !errors.Is(err, dlm.ErrReleased) {
		s.Errorf("Extend after the release: %v", err)
	}
	next := s.takeAll(s.ctx, b, "a", "b", "c")
	for i, key := range next.Keys() {
		if next.Token(key) <= tokens[i] {
			s.Errorf("token %d of %q after %d", next.Token(key), key, tokens[i])
		}
	}
	s.release(next)
	s.free(a, "a", "b", "c")
}

func multiAllOrNothing(s *stage) {
	a, b := s.open(nil), s.open(nil)
	held := s.take(tryKey(a, "b"))
	p := s.waitAll(b, "c", "b", "a")
	s.refused("the first key, which is taken already", tryKey(a, "a"))
	s.free(a, "c") // the last one is not
	if err := giveUp(s, p); !errors.Is(err, dlm.ErrHeld) {
		s.Errorf("cancelled: %v", err)
	}
	s.free(a, "a", "c")
	s.release(held)
	s.free(a, "b")

	// One that is not cancelled gets them all.
	held = s.take(tryKey(a, "b"))
	p = s.waitAll(b, "c", "b", "a")
	s.release(held)
	l := await(s, "all keys", p)
	for _, key := range l.Keys() {
		s.refused(key, tryKey(a, key))
	}
	s.release(l)
	s.free(a, "a", "b", "c")
}

func multiTryAllOrNothing(s *stage) {
	a, b := s.open(nil), s.open(nil)
	held := s.take(tryKey(a, "c"))
	l, err := dlm.TryMulti(s.ctx, b, []string{"c", "b", "a"}, ttl)
	if conflict, ok := errors.AsType[*dlm.LockConflictError](err); !ok || conflict.Key != "c" {
		s.Fatalf("one key is held: %v, %v", l, err)
	}
	s.note(err)
	s.free(a, "a", "b")
	s.release(held)
	l, err = dlm.TryMulti(s.ctx, b, []string{"c", "b", "a"}, ttl)
	if err != nil {
		s.Fatal(err)
	}
	s.release(l)
	s.free(a, "a", "b", "c")
}

func multiAnyOrder(s *stage) {
	const workers, rounds = 3, 4
	names := []string{"a", "b", "c", "d"}
	inside := make(map[string]*atomic.Int32)
	for _, name := range names {
		inside[name] = new(atomic.Int32)
	}
	var group sync.WaitGroup
	for range 2 {
		c := s.open(nil)
		for w := range workers {
			group.Go(func() {
				for range rounds {
					keys := slices.Clone(names)
					rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
					keys = keys[:w+1] // one worker takes one key at a time
					l, err := dlm.AcquireMulti(s.ctx, c, keys, ttl)
					if err != nil {
						s.Error(err)
						return
					}
					for _, key := range keys {
						if inside[key].Add(1) > 1 {
							s.Errorf("two hold %q", key)
						}
					}
					for _, key := range keys {
						inside[key].Add(-1)
					}
					if err := l.Release(s.ctx); err != nil {
						s.Error(err)
						return
					}
				}
			})
		}
	}
	group.Wait()
	s.free(s.open(nil), names...)
}

func multiLossOfOne(s *stage) {
	a, b := s.open(&dlm.LockConfig{RenewInterval: 100 * time.Millisecond}), s.open(nil)
	l := s.takeAll(s.ctx, a, "a", "b", "c")
	ctx := l.Context(s.ctx)
	_, err := b.ForceRelease(s.ctx, "b", l.Token("b"))
	if errors.Is(err, errors.ErrUnsupported) {
		s.release(l)
		return
	}
	if err != nil {
		s.Fatal(err)
	}
	s.over("Done after a loss", l.Done())
	for _, err := range []error{l.Err(), context.Cause(ctx), l.Extend(s.ctx, ttl)} {
		if lost, ok := errors.AsType[*dlm.LostError](err); !ok || lost.Key != "b" || lost.Token != l.Token("b") {
			s.Errorf("after the loss of %q: %v", "b", err)
		}
	}
	if ctx.Err() == nil {
		s.Error("the context goes on")
	}
	// The others stay until the holder has stopped.
	s.refused("a key that was not lost", tryKey(b, "a"))
	taken := s.take(tryKey(b, "b"))
	for range 2 {
		if err := l.Release(s.ctx); !errors.Is(err, dlm.ErrLost) {
			s.Errorf("Release after the loss: %v", err)
		}
	}
	if err := l.Err(); !errors.Is(err, dlm.ErrLost) {
		s.Errorf("after the release: %v", err)
	}
	s.free(b, "a", "c")
	s.refused("another's lock, after the release", tryKey(a, "b"))
	s.release(taken)
	s.free(b, "b")
}

// Keys that are held while others are waited for do not expire, whatever the
// manager's configuration, and have their time before them in the end.
func multiKeptAlive(s *stage) {
	a, b := s.open(nil), s.open(&dlm.LockConfig{AutoRenew: dlm.Off})
	if !s.lapses(b) {
		return
	}
	held := s.take(tryKey(a, "b"))
	var left time.Duration
	p := queue(s, b, func(ctx context.Context) (*dlm.MultiLock, error) {
		l, err := dlm.AcquireMulti(ctx, b, []string{"a", "b"}, lapse)
		if err == nil {
			left = time.Until(l.Deadline())
		}
		return l, err
	})
	// This one sees the first key expire, if it does.
	q := begin(s, func(ctx context.Context) (*dlm.Lock, error) { return a.AcquireLock(ctx, "a", ttl) })
	select {
	case <-time.After(lapse + lapse/4):
	case <-p.done:
	}
	still(s, "a key whose time would be up", q)
	s.release(held)
	l := await(s, "both keys", p)
	if left < lapse/2 {
		s.Errorf("of %v there are %v left", lapse, left)
	}
	if err := l.Release(s.ctx); err != nil {
		s.Error(err)
	}
	s.release(await(s, "the first key", q))
	s.free(a, "a", "b")
}

func multiReentry(s *stage) {
	a, b := s.open(nil), s.open(nil)
	owner := dlm.WithOwner(s.ctx, "o")
	outer := s.takeAll(owner, a, "a", "b")
	inner := s.takeAll(owner, a, "b", "c")
	if inner.Token("b") != outer.Token("b") {
		s.Errorf("entered %q again with token %d, not %d", "b", inner.Token("b"), outer.Token("b"))
	}
	s.release(outer)
	s.free(b, "a")
	s.refused("the key that is still held", tryKey(b, "b"))
	s.release(inner)
	s.free(b, "a", "b", "c")
}
