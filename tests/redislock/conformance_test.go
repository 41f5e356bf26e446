package redislock_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// prefixes numbers the prefixes, by which tests share servers.
var prefixes atomic.Int64

func newPrefix() string { return fmt.Sprintf("t%d:", prefixes.Add(1)) }

// record names the record of a lock whose key needs no escaping.
func record(prefix, key string) string { return prefix + "{" + key + "}" }

// cuts puts a proxy of one test's own before each server that its clients
// reach.
type cuts struct {
	tb testing.TB

	mu      sync.Mutex
	proxies map[string]*servers.Proxy // by the server's address
	closed  bool
}

func newCuts(tb testing.TB) *cuts {
	c := &cuts{tb: tb, proxies: make(map[string]*servers.Proxy)}
	tb.Cleanup(c.close)
	return c
}

// close ends the proxies, after the clients: these dial whenever they like.
func (c *cuts) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, p := range c.proxies {
		p.Close()
	}
}

// withoutCleanup keeps proxies open for longer than what they were opened by.
type withoutCleanup struct{ testing.TB }

func (withoutCleanup) Cleanup(func()) {}

func (c *cuts) to(addr string) (*servers.Proxy, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.proxies[addr]
	if p == nil {
		if c.closed {
			return nil, net.ErrClosed
		}
		p = servers.StartProxy(withoutCleanup{c.tb}, addr)
		c.proxies[addr] = p
	}
	return p, nil
}

func (c *cuts) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	p, err := c.to(addr)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	return d.DialContext(ctx, network, p.Addr())
}

// freeze holds back all bytes of the clients.
func (c *cuts) freeze(testing.TB) (thaw func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.proxies {
		p.Blackhole()
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, p := range c.proxies {
			p.Resume()
		}
	}
}

// harness is the harness of a store that all clients reach through a dialer.
func harness(tb testing.TB, connect func(dial dialer) redis.UniversalClient, opts redislock.Options) *drivertest.Harness {
	cut := newCuts(tb)
	opts.Prefix = newPrefix()
	if opts.LivenessWindow == 0 {
		opts.LivenessWindow = window
	}
	plain := connect(nil)
	tb.Cleanup(func() { plain.Close() })
	return &drivertest.Harness{
		Unit: unit,
		Open: func(t testing.TB) driver.Backend {
			client := connect(cut.dial)
			b, err := redislock.New(client, &opts)
			if err != nil {
				t.Fatal(err)
			}
			tb.Cleanup(func() { client.Close() })
			return b
		},
		Freeze: cut.freeze,
		Forget: func(t testing.TB, key string) {
			escaped := strings.NewReplacer("%", "%25", "}", "%7D").Replace(key)
			if err := plain.Del(context.Background(), record(opts.Prefix, escaped)).Err(); err != nil {
				t.Fatal(err)
			}
		},
	}
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// unit and window are the shortest times that a busy machine keeps up with.
const (
	unit   = 600 * time.Millisecond
	window = 2 * time.Second
)

func single(s *servers.Redis) func(dialer) redis.UniversalClient {
	return func(dial dialer) redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: s.Addr(), Dialer: dial})
	}
}

func TestConformanceSingle(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return harness(t, single(s), redislock.Options{}) })
}

func TestOperationsSingle(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness {
				return harness(t, single(s), redislock.Options{})
			})
		})
	}
}
