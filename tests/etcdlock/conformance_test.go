package etcdlock_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// prefixes numbers the prefixes, by which tests share servers.
var prefixes atomic.Int64

func newPrefix() string { return fmt.Sprintf("t%d/", prefixes.Add(1)) }

// cuts puts a proxy of one client's own before each member that it reaches.
type cuts struct {
	tb testing.TB

	mu      sync.Mutex
	proxies map[string]*servers.Proxy // by the member's address
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
	}
	return p, nil
}

func (c *cuts) dial(ctx context.Context, addr string) (net.Conn, error) {
	p, err := c.to(addr)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", p.Addr())
}

// each applies a fault to all proxies.
func (c *cuts) each(fault func(*servers.Proxy)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.proxies {
		fault(p)
	}
}

// clientConfig is how tests reach members.
func clientConfig(members []*servers.Etcd) clientv3.Config {
	return clientv3.Config{
		Endpoints: servers.EtcdAddrs(members), Logger: zap.NewNop(), DialTimeout: 5 * time.Second, TLS: tlsOf(members),
	}
}

func tlsOf(members []*servers.Etcd) *tls.Config { return members[0].TLSConfig() }

// connect opens a client that is closed at the end of the test.
func connect(tb testing.TB, members []*servers.Etcd, cut *cuts, change ...func(*clientv3.Config)) *clientv3.Client {
	tb.Helper()
	cfg := clientConfig(members)
	if cut != nil {
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithContextDialer(cut.dial))
	}
	for _, c := range change {
		c(&cfg)
	}
	client, err := clientv3.New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { client.Close() })
	return client
}

// harness is the harness of a cluster that each client reaches through proxies
// of its own.
func harness(tb testing.TB, members []*servers.Etcd) *drivertest.Harness {
	opts := &etcdlock.Options{Prefix: newPrefix(), WaiterTTL: 2 * time.Second}
	var mu sync.Mutex
	all := make(map[driver.Backend]*cuts)
	return &drivertest.Harness{
		Unit: unit,
		Open: func(t testing.TB) driver.Backend {
			cut := newCuts(tb)
			client := connect(tb, members, cut)
			b, err := etcdlock.New(client, opts)
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

// unit is the shortest time to live that a busy machine keeps up with.
const unit = 2 * time.Second

// shared starts servers that several tests use, once.
func shared(n int, cfg servers.EtcdConfig) func(tb testing.TB) []*servers.Etcd {
	return func(tb testing.TB) []*servers.Etcd { return servers.StartEtcdCluster(tb, n, &cfg) }
}

var single, old, three = shared(1, servers.EtcdConfig{}), shared(1, servers.EtcdConfig{Old: true}), shared(3, servers.EtcdConfig{})

func conformance(t *testing.T, start func(testing.TB) []*servers.Etcd) {
	t.Parallel()
	members := start(t)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return harness(t, members) })
}

func TestConformanceSingle(t *testing.T) { conformance(t, single) }

func TestConformanceOld(t *testing.T) { conformance(t, old) }

func TestConformanceThree(t *testing.T) { conformance(t, three) }

func TestOperations(t *testing.T) {
	t.Parallel()
	members := single(t)
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness { return harness(t, members) })
		})
	}
}
