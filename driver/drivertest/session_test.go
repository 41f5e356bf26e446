package drivertest

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// sessions makes backends whose grants and tickets last as long as a session
// that each client keeps alive, as those of etcd, ZooKeeper and Consul do. A
// session outlives its client for a while.
type sessions struct {
	mu  sync.Mutex
	all map[driver.Backend]*session
}

const (
	sessionTTL = 500 * time.Millisecond
	forever    = 1000 * time.Hour
)

type session struct {
	inner driver.Backend
	stop  chan struct{}
	once  sync.Once
	ended sync.WaitGroup

	mu      sync.Mutex
	tickets map[string]driver.Request // by key and owner
	leases  map[string]driver.Lease
	asked   map[string]time.Duration
}

func overSessions(t *testing.T) *Harness {
	s := &sessions{all: make(map[driver.Backend]*session)}
	h := overMemory(t, s.open)
	t.Cleanup(func() {
		for _, c := range s.all {
			c.ended.Wait()
		}
	})
	h.Kill = func(_ testing.TB, b driver.Backend) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.all[b].end(sessionTTL)
	}
	return h
}

func (s *sessions) open(b driver.Backend) driver.Backend {
	c := &session{inner: b, stop: make(chan struct{}), tickets: make(map[string]driver.Request), leases: make(map[string]driver.Lease), asked: make(map[string]time.Duration)}
	out := Intercept(heard(b, c.told), Hooks{
		Properties: func() driver.Properties {
			p := b.Properties()
			p.Name, p.LivenessWindow, p.SessionLeases = "sessions", 0, true
			return p
		},
		Acquire: c.acquire,
		Release: c.release,
		Extend: func(ctx context.Context, batch []driver.Renewal) {
			for i := range batch {
				ttl := batch[i].Lease.TTL
				batch[i].Lease.TTL = forever
				b.Extend(ctx, batch[i:i+1])
				batch[i].Lease.TTL = ttl
			}
		},
		Close: func() error {
			c.end(0)
			c.ended.Wait()
			return b.Close()
		},
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[out] = c
	c.ended.Go(c.keepAlive)
	return out
}

// keepAlive refreshes the tickets, and confirms what has been handed over.
func (c *session) keepAlive() {
	for {
		if _, stopped := awaitFor(c.stop, window/8); stopped {
			return
		}
		c.mu.Lock()
		for id, req := range c.tickets {
			if lease, err := c.inner.Acquire(context.Background(), req); err == nil {
				c.leases[id] = lease
				delete(c.tickets, id)
			}
		}
		c.mu.Unlock()
	}
}

// end ends the session after a while.
func (c *session) end(after time.Duration) {
	c.once.Do(func() {
		close(c.stop)
		c.ended.Go(func() {
			time.Sleep(after)
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, req := range c.tickets {
				_ = c.inner.Release(context.Background(), driver.Lease{Key: req.Key, Owner: req.Owner})
			}
			for _, lease := range c.leases {
				_ = c.inner.Release(context.Background(), lease)
			}
		})
	})
}

// told makes what an event tells fit what was asked for.
func (c *session) told(e driver.Event) []driver.Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.Kind == driver.EventGrant {
		e.Lease.TTL = c.asked[e.Lease.Key+"\xff"+e.Lease.Owner]
	}
	return []driver.Event{e}
}

func (c *session) acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ttl, id := req.TTL, req.Key+"\xff"+req.Owner
	c.asked[id] = ttl
	req.TTL = forever
	lease, err := c.inner.Acquire(ctx, req)
	switch {
	case err == nil:
		c.leases[id] = lease
		delete(c.tickets, id)
	case req.Enqueue:
		c.tickets[id] = req
	}
	lease.TTL = ttl
	return lease, err
}

func (c *session) release(ctx context.Context, lease driver.Lease) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := lease.Key + "\xff" + lease.Owner
	err := c.inner.Release(ctx, lease)
	if err == nil {
		delete(c.leases, id)
		delete(c.tickets, id)
	}
	return err
}

func TestSoundSessions(t *testing.T) {
	RunSynctest(t, overSessions)
}

func TestOperationsOnSessions(t *testing.T) {
	for seed := range uint64(10) {
		synctest.Test(t, func(t *testing.T) { Operations(t, seed, overSessions) })
	}
}
