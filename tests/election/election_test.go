// Package election_test has the processes of an election, and the servers of its
// store, die, stop and lose each other.
package election_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/tests/servers"
)

// nodes is how many take part.
const nodes = 5

// chaosTime is for how long things are broken.
func chaosTime(t *testing.T) time.Duration {
	text := os.Getenv("DLM_TEST_CHAOS")
	if text == "" {
		return 8 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("DLM_TEST_CHAOS: %v", err)
	}
	return d
}

// Terms rise, and there are never two leaders whose contexts are both alive,
// whatever dies, stops or is cut off. With DLM_TEST_CHAOS=3m it takes as long.

func TestRedisSentinel(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, nil)
	addrs := s.Addrs()
	for _, r := range s.Servers {
		addrs = append(addrs, r.Addr())
	}
	c := newCluster(t, spec{Store: "redis", Master: s.MasterName, Addrs: s.Addrs()}, addrs)
	c.chaos(func() {
		old := s.Primary()
		switch rand.N(3) {
		case 0:
			s.Failover()
		case 1:
			old.Kill()
			s.WaitPrimary(old)
			old.Restart()
		case 2:
			old.Pause()
			s.WaitPrimary(old)
			old.Resume()
		}
		s.WaitReady()
	})
}

func TestEtcd(t *testing.T) {
	t.Parallel()
	members := servers.StartEtcdCluster(t, 3, nil)
	addrs := servers.EtcdAddrs(members)
	c := newCluster(t, spec{Store: "etcd", Addrs: addrs}, addrs)
	c.chaos(func() {
		e := members[rand.N(len(members))]
		if rand.N(2) == 0 {
			e.Kill()
			time.Sleep(rand.N(ttl)) // the length of the fault
			e.Restart()
		} else {
			e.Pause()
			time.Sleep(rand.N(ttl)) // the length of the fault
			e.Resume()
		}
		for _, e := range members {
			e.WaitReady()
		}
	})
}

func TestPostgres(t *testing.T) {
	t.Parallel()
	s := servers.StartPostgres(t, nil)
	pool, err := pgxpool.New(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	err = pglock.CreateSchema(t.Context(), pool, nil)
	pool.Close()
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, spec{Store: "postgres", URL: s.URL("postgres")}, []string{s.Addr()})
	c.chaos(func() {
		if rand.N(2) == 0 {
			s.Kill()
			time.Sleep(rand.N(ttl / 3)) // the length of the fault
			s.Restart()
		} else {
			s.Pause()
			time.Sleep(rand.N(ttl)) // the length of the fault
			s.Resume()
		}
	})
}

// cluster is the nodes of an election and what they have said.
type cluster struct {
	t     *testing.T
	nodes []*process

	mu    sync.Mutex
	terms map[int64]*term
}

// term is what is known of one.
type term struct {
	node        int
	first, last int64 // times at which its context was surely alive; 0 if not told
	stepping    int64 // time at which its leader was about to step down, or 0
}

// process is a node: a process after another, with proxies of its own.
type process struct {
	c       *cluster
	index   int
	spec    spec
	proxies []*servers.Proxy

	mu    sync.Mutex
	cmd   *exec.Cmd
	stdin io.WriteCloser
	done  chan struct{} // closed when its output has ended
}

func newCluster(t *testing.T, s spec, addrs []string) *cluster {
	t.Helper()
	c := &cluster{t: t, terms: make(map[int64]*term)}
	for i := range nodes {
		p := &process{c: c, index: i, spec: s}
		p.spec.Node, p.spec.Routes = fmt.Sprint("node-", i), make(map[string]string)
		for _, addr := range addrs {
			proxy := servers.StartProxy(t, addr)
			p.proxies = append(p.proxies, proxy)
			p.spec.Routes[addr] = proxy.Addr()
		}
		c.nodes = append(c.nodes, p)
		t.Cleanup(p.kill)
		if err := p.start(); err != nil {
			t.Fatal(err)
		}
	}
	c.await("a first leader", 0, 0)
	return c
}

func (p *process) start() error {
	text, err := json.Marshal(p.spec)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), nodeEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	p.cmd, p.done = cmd, done
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var r report
			// A process that is killed may leave half a line.
			if n, _ := fmt.Sscan(lines.Text(), &r.what, &r.term, &r.time); n == 3 {
				p.c.take(p.index, r)
			}
		}
		_ = cmd.Wait() // it may have been killed
	}()
	return nil
}

// signal sends a signal to the present process.
func (p *process) signal(s os.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(s) // it may be dead
	}
}

// kill kills the process and waits for it.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	if done != nil {
		<-done
	}
}

// write asks a leader to step down, or with an empty text the process to end.
func (p *process) write(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if text == "" {
		_ = p.stdin.Close()
		return
	}
	_, _ = io.WriteString(p.stdin, text) // it may be dead
}

// each applies a fault to all proxies.
func (p *process) each(fault func(*servers.Proxy)) {
	for _, proxy := range p.proxies {
		fault(proxy)
	}
}

// take takes note of a report.
func (c *cluster) take(node int, r report) {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.terms[r.term]
	if x == nil {
		x = &term{node: node}
		c.terms[r.term] = x
	}
	if x.node != node {
		c.t.Errorf("nodes %d and %d both lead term %d", x.node, node, r.term)
	}
	switch r.what {
	case "alive":
		if x.first == 0 {
			x.first = r.time
		}
		x.last = r.time
	case "stepping":
		x.stepping = r.time
	}
}

// await waits until somebody leads after a time, in a later term than this one. It
// returns the term.
func (c *cluster) await(what string, after, later int64) (number int64) {
	c.t.Helper()
	servers.Until(c.t, what, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for n, x := range c.terms {
			if n > later && x.last > after {
				number = n
				return true
			}
		}
		return false
	})
	return number
}

// chaos breaks nodes, their network and, by fault, the store, and checks what came
// of it.
func (c *cluster) chaos(fault func()) {
	ctx, cancel := context.WithTimeout(c.t.Context(), chaosTime(c.t))
	defer cancel()
	counts := make(map[string]int)
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			p := c.nodes[rand.N(nodes)]
			switch kind := rand.N(8); kind {
			case 0:
				counts["kills"]++
				p.kill()
				if err := p.start(); err != nil {
					c.t.Error(err)
				}
			case 1:
				counts["stops"]++
				p.signal(syscall.SIGSTOP)
				pause(ctx, rand.N(2*ttl))
				p.signal(syscall.SIGCONT)
			case 2, 3:
				counts["partitions"]++
				if kind == 2 {
					p.each((*servers.Proxy).Blackhole)
				} else {
					p.each((*servers.Proxy).Refuse)
				}
				pause(ctx, rand.N(2*ttl))
				p.each((*servers.Proxy).Resume)
			default:
				for _, p := range c.nodes {
					p.write("step down\n")
				}
			}
			pause(ctx, rand.N(400*time.Millisecond))
		}
	})
	broken := 0
	for {
		pause(ctx, time.Second+rand.N(2*ttl))
		if ctx.Err() != nil {
			break
		}
		fault()
		broken++
	}
	wg.Wait()
	// In quiet, everybody hands over a few times.
	leads := c.await("a leader after all", now(), 0)
	for range nodes {
		for _, p := range c.nodes {
			p.write("step down\n")
		}
		leads = c.await("a leader after a hand-over", 0, leads)
	}
	for _, p := range c.nodes {
		p.write("")
	}
	for _, p := range c.nodes {
		select {
		case <-p.done:
		case <-time.After(time.Minute):
			c.t.Errorf("node %d does not end", p.index)
		}
	}
	c.check()
	c.t.Logf("the store was broken %d times, nodes: %v", broken, counts)
}

// check compares the terms.
func (c *cluster) check() {
	c.mu.Lock()
	defer c.mu.Unlock()
	var handOvers []time.Duration
	var before *term
	last := int64(0)
	for _, number := range slices.Sorted(maps.Keys(c.terms)) {
		x := c.terms[number]
		if x.first == 0 {
			continue // its leader was killed before it could say more
		}
		if before != nil {
			if x.first <= before.last {
				c.t.Errorf("term %d of node %d was alive at %d, and term %d of node %d until %d",
					number, x.node, x.first, last, before.node, before.last)
			}
			if before.stepping != 0 {
				handOvers = append(handOvers, time.Duration(x.first-before.stepping))
			}
			// An earlier one can have lived longer than the last.
			x.last = max(x.last, before.last)
		}
		before, last = x, number
	}
	if len(c.terms) < 2 {
		c.t.Errorf("%d terms", len(c.terms))
	}
	if n := len(handOvers); n > 0 {
		slices.Sort(handOvers)
		c.t.Logf("%d terms; %d hand-overs on step-down, p50 %v, p90 %v, longest %v",
			len(c.terms), n, handOvers[n/2], handOvers[n*9/10], handOvers[n-1])
	}
}

// pause waits for some time, or until the context ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
