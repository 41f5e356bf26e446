package zklock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/backends/zklock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// session and unit are the shortest times that a busy machine keeps up with.
const (
	session = 6 * time.Second
	unit    = 800 * time.Millisecond
)

// roots numbers the roots, by which tests share servers.
var roots atomic.Int64

func newRoot() string { return fmt.Sprintf("/t%d", roots.Add(1)) }

func addrs(nodes []*servers.ZooKeeper) []string {
	list := make([]string, len(nodes))
	for i, z := range nodes {
		list[i] = z.Addr()
	}
	return list
}

// cuts puts a proxy of one client's own before each server that it reaches.
type cuts struct {
	tb testing.TB

	mu      sync.Mutex
	proxies map[string]*servers.Proxy // by the server's address
	fault   func(*servers.Proxy)      // of those still to come
	closed  bool
}

func newCuts(tb testing.TB) *cuts {
	c := &cuts{tb: tb, proxies: make(map[string]*servers.Proxy), fault: func(*servers.Proxy) {}}
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

func (c *cuts) dial(network, addr string, timeout time.Duration) (net.Conn, error) {
	c.mu.Lock()
	p := c.proxies[addr]
	if p == nil && !c.closed {
		p = servers.StartProxy(withoutCleanup{c.tb}, addr)
		c.fault(p)
		c.proxies[addr] = p
	}
	c.mu.Unlock()
	if p == nil {
		return nil, net.ErrClosed
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var d net.Dialer
	return d.DialContext(ctx, network, p.Addr())
}

// all applies a fault to all proxies, those still to come included.
func (c *cuts) all(fault func(*servers.Proxy)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault = fault
	for _, p := range c.proxies {
		fault(p)
	}
}

// freeze holds back all bytes of the client.
func (c *cuts) freeze() (thaw func()) {
	c.all((*servers.Proxy).Blackhole)
	return func() { c.all((*servers.Proxy).Resume) }
}

// plain returns a client of its own, for looking and breaking.
func plain(tb testing.TB, nodes []*servers.ZooKeeper) *zk.Conn {
	tb.Helper()
	conn, _, err := zk.Connect(addrs(nodes), 10*time.Second, zk.WithLogger(quiet{}))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(conn.Close)
	return conn
}

type quiet struct{}

func (quiet) Printf(string, ...any) {}

// harness is the harness of a root of its own.
func harness(tb testing.TB, nodes []*servers.ZooKeeper) *drivertest.Harness {
	root := newRoot()
	var mu sync.Mutex
	clients := make(map[driver.Backend]*cuts)
	forgetful := sync.OnceValue(func() *zk.Conn { return plain(tb, nodes) })
	return &drivertest.Harness{
		Unit: unit,
		Open: func(t testing.TB) driver.Backend {
			cut := newCuts(tb)
			b, err := zklock.New(addrs(nodes), &zklock.Options{Root: root, SessionTimeout: session, Dial: cut.dial})
			if err != nil {
				t.Fatal(err)
			}
			tb.Cleanup(func() { b.Close() })
			mu.Lock()
			defer mu.Unlock()
			clients[b] = cut
			return b
		},
		Kill: func(_ testing.TB, b driver.Backend) {
			mu.Lock()
			defer mu.Unlock()
			clients[b].all((*servers.Proxy).Refuse)
		},
		Freeze: func(testing.TB) func() {
			mu.Lock()
			defer mu.Unlock()
			var thaws []func()
			for _, cut := range clients {
				thaws = append(thaws, cut.freeze())
			}
			return func() {
				for _, thaw := range thaws {
					thaw()
				}
			}
		},
		Forget: func(t testing.TB, key string) {
			if err := forgetful().Delete(root+"/"+key, -1); err != nil && !errors.Is(err, zk.ErrNoNode) && !errors.Is(err, zk.ErrNotEmpty) {
				t.Fatal(err)
			}
		},
	}
}

func TestConformanceSingle(t *testing.T) {
	t.Parallel()
	nodes := servers.StartZooKeeper(t, nil)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return harness(t, nodes) })
}

func TestConformanceThree(t *testing.T) {
	t.Parallel()
	nodes := servers.StartZooKeeper(t, &servers.ZooKeeperConfig{Nodes: 3})
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return harness(t, nodes) })
}

func TestOperations(t *testing.T) {
	t.Parallel()
	nodes := servers.StartZooKeeper(t, nil)
	for seed := range uint64(5) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness { return harness(t, nodes) })
		})
	}
}
