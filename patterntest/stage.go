package patterntest

import (
	"context"
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

// over waits for a channel to be closed.
func (s *stage) over(what string, done <-chan struct{}) {
	s.Helper()
	select {
	case <-done:
	case <-s.ctx.Done():
		s.Fatalf("%s: still waiting", what)
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
