package patterntest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
)

const (
	// ttl is for locks that do not expire during a case.
	ttl = time.Minute
	// patience is for waits that only a fault makes long.
	patience = time.Minute
	// lapse is the TTL that cases wait to run out. Cases do not wait for the longer
	// ones of some stores: package drivertest, which can kill a client, checks that
	// the dead lose what they hold there.
	lapse = 2 * time.Second
)

// testCase is one property of a pattern.
type testCase struct {
	name string
	run  func(s *stage)
}

// runCases runs each case as a parallel subtest on a store of its own.
func runCases(t *testing.T, cfg *Config, cases []testCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(newStage(t, cfg))
		})
	}
}

// stage is what one case runs on.
type stage struct {
	*testing.T
	ctx        context.Context // ends with the case, or when patience does
	newManager func(cfg *dlm.LockConfig) *dlm.Manager
	workers    sync.WaitGroup
	// unsure says that a machine too busy to withdraw something in time has left
	// that to the background.
	unsure bool
}

func newStage(t *testing.T, cfg *Config) *stage {
	t.Helper()
	s := &stage{T: t}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	s.ctx = ctx
	t.Cleanup(func() {
		cancel()
		s.workers.Wait()
	})
	s.newManager = cfg.Open(t)
	return s
}

// client is one process of a case.
type client struct {
	*dlm.Manager
	waits  chan struct{} // one for each caller that got its place in a queue
	failed chan struct{} // one for each acquisition that failed
}

// Observe implements [dlm.Observer].
func (c *client) Observe(e dlm.Event) {
	var to chan struct{}
	switch e.Kind {
	case dlm.EventWaiting:
		to = c.waits
	case dlm.EventAcquireFailed:
		to = c.failed
	}
	select {
	case to <- struct{}{}:
	default:
	}
}

// open returns another client of the store.
func (s *stage) open(cfg *dlm.LockConfig) *client {
	s.Helper()
	c := &client{waits: make(chan struct{}, 1000), failed: make(chan struct{}, 1000)}
	var conf dlm.LockConfig
	if cfg != nil {
		conf = *cfg
	}
	conf.Observer = c
	c.Manager = s.newManager(&conf)
	return c
}

// acquire is one way of taking a lock.
type acquire func(ctx context.Context, ttl time.Duration) (*dlm.Lock, error)

// take takes a lock and fails the case if that is not possible.
func (s *stage) take(a acquire) *dlm.Lock {
	s.Helper()
	l, err := a(s.ctx, ttl)
	if err != nil {
		s.Fatal(err)
	}
	return l
}

// release releases something that is held.
func (s *stage) release(held ...interface{ Release(context.Context) error }) {
	s.Helper()
	for _, h := range held {
		if err := h.Release(s.ctx); err != nil {
			s.Fatal(err)
		}
	}
}

// refused checks that something cannot be taken now.
func (s *stage) refused(what string, try acquire) {
	s.Helper()
	l, err := try(s.ctx, ttl)
	if err == nil {
		s.Fatalf("%s: granted, as %v", what, l)
	}
	if _, ok := errors.AsType[*dlm.LockConflictError](err); !ok || !errors.Is(err, dlm.ErrHeld) {
		s.Fatalf("%s: %v, want a conflict", what, err)
	}
}

// pending is an acquisition under way.
type pending[T any] struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when it is over
	lock   T
	err    error
}

// begin starts an acquisition.
func begin[T any](s *stage, f func(ctx context.Context) (T, error)) *pending[T] {
	ctx, cancel := context.WithCancel(s.ctx)
	p := &pending[T]{cancel: cancel, done: make(chan struct{})}
	s.workers.Go(func() {
		defer close(p.done)
		p.lock, p.err = f(ctx)
	})
	return p
}

// queue starts an acquisition of the client, which has to wait, and returns when
// it has its place in the queue.
func queue[T any](s *stage, c *client, f func(ctx context.Context) (T, error)) *pending[T] {
	s.Helper()
	p := begin(s, f)
	select {
	case <-c.waits:
	case <-p.done:
		s.Fatalf("did not wait: %v, %v", p.lock, p.err)
	case <-s.ctx.Done():
		s.Fatal("got no place in the queue")
	}
	return p
}

// wait queues for a lock.
func (s *stage) wait(c *client, a acquire) *pending[*dlm.Lock] {
	s.Helper()
	return queue(s, c, func(ctx context.Context) (*dlm.Lock, error) { return a(ctx, ttl) })
}

// await returns what an acquisition got.
func await[T any](s *stage, what string, p *pending[T]) T {
	s.Helper()
	s.over(what, p.done)
	if p.err != nil {
		s.Fatalf("%s: %v", what, p.err)
	}
	return p.lock
}

// giveUp cancels an acquisition and returns its error.
func giveUp[T any](s *stage, p *pending[T]) error {
	s.Helper()
	p.cancel()
	s.over("a cancelled acquisition", p.done)
	if !errors.Is(p.err, context.Canceled) {
		s.Fatalf("cancelled: %v, %v", p.lock, p.err)
	}
	s.note(p.err)
	return p.err
}

// note takes note of the error of an acquisition that must leave nothing behind.
func (s *stage) note(err error) { s.unsure = s.unsure || errors.Is(err, dlm.ErrIndeterminate) }

// over waits for a channel to be closed.
func (s *stage) over(what string, done <-chan struct{}) {
	s.Helper()
	select {
	case <-done:
	case <-s.ctx.Done():
		s.Fatalf("%s: still waiting", what)
	}
}

// still checks that an acquisition is waiting.
func still[T any](s *stage, what string, p *pending[T]) {
	s.Helper()
	select {
	case <-p.done:
		s.Fatalf("%s: over already, with %v, %v", what, p.lock, p.err)
	default:
	}
}

// free checks that nobody holds the keys or waits for them.
func (s *stage) free(c *client, keys ...string) {
	s.Helper()
	try := c.TryLock
	ctx, cancel := context.WithTimeout(s.ctx, ttl/4) // what is left behind lasts longer
	defer cancel()
	if s.unsure {
		try = c.AcquireLock
	}
	for _, key := range keys {
		l, err := try(ctx, key, ttl)
		if err != nil {
			s.Fatalf("left behind on %q: %v", key, err)
		}
		s.release(l)
	}
}

// lapses says whether the client's store grants locks for a lapse.
func (s *stage) lapses(c *client) bool {
	s.Helper()
	floor := c.Properties().MinTTL
	if floor > lapse {
		s.Logf("not waited for the end of a TTL of %v", floor)
	}
	return floor <= lapse
}
