package consullock_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/consullock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// prefixes numbers the prefixes, by which tests share servers.
var prefixes atomic.Int64

func newPrefix() string { return fmt.Sprintf("t%d/", prefixes.Add(1)) }

// cuts puts a proxy of one client's own before each server that it reaches.
type cuts struct {
	tb testing.TB

	mu      sync.Mutex
	proxies map[string]*servers.Proxy // by the server's address
	fault   func(*servers.Proxy)      // of all of them
	closed  bool
}

func newCuts(tb testing.TB) *cuts {
	c := &cuts{tb: tb, proxies: make(map[string]*servers.Proxy)}
	tb.Cleanup(c.close)
	return c
}

// close ends the proxies, after the client: it dials whenever it likes.
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
		if c.fault != nil {
			c.fault(p)
		}
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

// each applies a fault to all proxies, those to come included.
func (c *cuts) each(fault func(*servers.Proxy)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault = fault
	for _, p := range c.proxies {
		fault(p)
	}
}

// config is how tests reach servers.
func config(list []*servers.Consul, cut *cuts) *consullock.Config {
	cfg := &consullock.Config{Addresses: servers.ConsulAddrs(list), Token: list[0].Token(), TLS: list[0].TLSConfig()}
	if cut != nil {
		cfg.Dial = cut.dial
	}
	return cfg
}

// unit is the TTL of the shortest session of the servers in tests, which lasts up
// to twice as long.
const unit = 2 * time.Second

// harness is the harness of servers that each client reaches through proxies of
// its own.
func harness(tb testing.TB, list []*servers.Consul, opts consullock.Options) *drivertest.Harness {
	opts.Prefix, opts.MinSessionTTL, opts.WaiterTTL = newPrefix(), unit, unit
	var mu sync.Mutex
	all := make(map[driver.Backend]*cuts)
	return &drivertest.Harness{
		// Some cases give a first acquisition a quarter of it, sessions included.
		Unit: 3 * time.Second,
		Open: func(t testing.TB) driver.Backend {
			cut := newCuts(tb)
			b, err := consullock.Open(config(list, cut), &opts)
			if err != nil {
				t.Fatal(err)
			}
			tb.Cleanup(func() { b.Close() })
			mu.Lock()
			defer mu.Unlock()
			all[b] = cut
			return b
		},
		Kill: func(_ testing.TB, b driver.Backend) {
			mu.Lock()
			defer mu.Unlock()
			all[b].each((*servers.Proxy).Refuse)
		},
		Freeze: func(testing.TB) (thaw func()) {
			mu.Lock()
			defer mu.Unlock()
			for _, cut := range all {
				cut.each((*servers.Proxy).Blackhole)
			}
			return func() {
				mu.Lock()
				defer mu.Unlock()
				for _, cut := range all {
					cut.each((*servers.Proxy).Resume)
				}
			}
		},
	}
}

func conformance(t *testing.T, list []*servers.Consul, opts consullock.Options) {
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return harness(t, list, opts) })
}

func TestConformanceSingle(t *testing.T) {
	t.Parallel()
	conformance(t, servers.StartConsulCluster(t, 1, nil), consullock.Options{})
}

func TestConformanceThree(t *testing.T) {
	t.Parallel()
	conformance(t, servers.StartConsulCluster(t, 3, nil), consullock.Options{})
}

func TestOperations(t *testing.T) {
	t.Parallel()
	list := servers.StartConsulCluster(t, 1, nil)
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness { return harness(t, list, consullock.Options{}) })
		})
	}
}
