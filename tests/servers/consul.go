package servers

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// ConsulConfig says what kind of Consul servers to start. The zero value has no
// ACLs, speaks HTTP, and grants sessions from one second.
type ConsulConfig struct {
	// ACL has the servers refuse whoever has no token. [ConsulToken] may do
	// everything.
	ACL bool
	// TLS has the servers speak HTTPS and not HTTP.
	TLS bool
	// DefaultSessions has the servers refuse sessions below 10s, as they do by
	// default outside of tests.
	DefaultSessions bool
	// HCL is further configuration, such as `limits { http_max_conns_per_client = 10 }`.
	HCL string
}

// ConsulToken is the management token of servers with ACLs.
const ConsulToken = "4c1c53ab-6d9b-4b63-bbd1-29b3e1a1f0c4"

// StartConsul starts one server. It returns when the server serves requests. A
// nil cfg is the zero value.
func StartConsul(tb TB, cfg *ConsulConfig) *Consul {
	tb.Helper()
	return StartConsulCluster(tb, 1, cfg)[0]
}

// StartConsulCluster starts n servers of one datacenter. It returns when all of
// them serve requests. A nil cfg is the zero value.
func StartConsulCluster(tb TB, n int, cfg *ConsulConfig) []*Consul {
	tb.Helper()
	if cfg == nil {
		cfg = &ConsulConfig{}
	}
	bin, err := builtProgram("consulnode")
	if err != nil {
		Missing(tb, fmt.Sprintf("consulnode cannot be built: %v", err))
	}
	root, err := os.MkdirTemp("", "dlm-servers-")
	if err != nil {
		tb.Fatalf("servers: %v", err)
	}
	var list []*Consul
	tb.Cleanup(func() {
		for _, c := range list {
			c.close()
		}
		if err := os.RemoveAll(root); err != nil {
			tb.Logf("servers: %v", err)
		}
	})
	for attempt := 1; ; attempt++ {
		list, err = startConsul(tb, bin, filepath.Join(root, strconv.Itoa(attempt)), n, cfg)
		if err == nil {
			return list
		}
		for _, c := range list {
			c.close()
		}
		if !errors.Is(err, errPortInUse) || attempt == 10 {
			tb.Fatalf("servers: starting Consul: %v", err)
		}
	}
}

// Consul is one server: a process that may die and be started again, on ports and
// in a folder that stay the same. Its methods are safe for concurrent use, but
// those that fail the test are for the test's goroutine.
type Consul struct {
	tb    TB
	bin   string
	dir   string
	ports [3]int      // for clients, for servers, and for gossip
	tls   *tls.Config // of clients
	token string
	argv  []string
	http  *http.Client

	mu     sync.Mutex // guards what follows; held while a process is started or killed
	proc   *process
	closed bool
}

// startConsul makes servers and starts them side by side.
func startConsul(tb TB, bin, root string, n int, cfg *ConsulConfig) ([]*Consul, error) {
	list := make([]*Consul, n)
	for i := range list {
		c := &Consul{tb: tb, bin: bin, dir: filepath.Join(root, strconv.Itoa(i))}
		list[i] = c
		for p := range c.ports {
			var err error
			if c.ports[p], err = takePort(); err != nil {
				return list[:i+1], err
			}
		}
	}
	for i, c := range list {
		if err := c.prepare(i, list, cfg); err != nil {
			return list, err
		}
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i, c := range list {
		wg.Go(func() { errs[i] = c.launch() })
	}
	wg.Wait()
	return list, errors.Join(errs...)
}

func (c *Consul) prepare(i int, all []*Consul, cfg *ConsulConfig) error {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	// Autopilot would remove a dead server within seconds, and with it all sessions
	// that were made through it.
	hcl := `leave_on_terminate=false autopilot{cleanup_dead_servers=false} connect{enabled=false} disable_update_check=true performance{raft_multiplier=1}
		peering{enabled=false} gossip_lan{gossip_interval="50ms" probe_interval="500ms" probe_timeout="250ms"} `
	if !strings.Contains(cfg.HCL, "http_max_conns_per_client") {
		hcl += `limits{http_max_conns_per_client=10000} `
	}
	if !cfg.DefaultSessions {
		hcl += `session_ttl_min="1s" `
	}
	if cfg.ACL {
		c.token = ConsulToken
		hcl += fmt.Sprintf(`acl{enabled=true default_policy="deny" tokens{initial_management=%q agent=%q}} `, c.token, c.token)
	}
	transport := &http.Transport{DisableKeepAlives: true}
	scheme := "-http-port"
	if cfg.TLS {
		id, err := theIdentity()
		if err != nil {
			return err
		}
		if err := id.write(c.dir); err != nil {
			return err
		}
		c.tls, scheme = id.clientConfig(), "-https-port"
		transport.TLSClientConfig = c.tls.Clone()
		hcl += fmt.Sprintf(`tls{https{cert_file=%q key_file=%q}} ports{http=-1} `, filepath.Join(c.dir, certFile), filepath.Join(c.dir, keyFile))
	}
	c.http = &http.Client{Transport: transport}
	c.argv = []string{
		"-server", "-bootstrap-expect=" + strconv.Itoa(len(all)),
		"-node=s" + strconv.Itoa(i),
		"-bind=127.0.0.1", "-client=127.0.0.1",
		"-data-dir=" + filepath.Join(c.dir, "data"),
		fmt.Sprintf("%s=%d", scheme, c.ports[0]),
		fmt.Sprintf("-server-port=%d", c.ports[1]),
		fmt.Sprintf("-serf-lan-port=%d", c.ports[2]),
		"-serf-wan-port=-1", "-dns-port=-1", "-grpc-port=-1", "-grpc-tls-port=-1",
		"-log-level=warn", "-retry-interval=1s",
		"-hcl=" + hcl + cfg.HCL,
	}
	for _, other := range all {
		if other != c {
			c.argv = append(c.argv, "-retry-join="+address(other.ports[2]))
		}
	}
	return nil
}

// Addr returns the server's address for clients, host and port.
func (c *Consul) Addr() string { return address(c.ports[0]) }

// TLSConfig returns a configuration for clients that trusts the server's
// certificate, nil if the server does not speak TLS.
func (c *Consul) TLSConfig() *tls.Config { return c.tls.Clone() }

// Token returns the token that clients need, "" if they need none.
func (c *Consul) Token() string { return c.token }

// Pid returns the number of the process; each start has another one.
func (c *Consul) Pid() int { return c.current().pid() }

// Kill ends the process with SIGKILL and waits for its death. It has no effect
// on a dead one.
func (c *Consul) Kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.proc.kill()
}

// Pause stops the process with SIGSTOP and waits until it has stopped. It fails
// the test if the process is dead.
func (c *Consul) Pause() {
	c.tb.Helper()
	if err := c.current().pause(); err != nil {
		c.tb.Fatalf("servers: pausing Consul on %s: %v", c.Addr(), err)
	}
}

// Resume lets the process go on after Pause. It has no effect on one that runs
// or is dead.
func (c *Consul) Resume() {
	c.tb.Helper()
	if err := c.current().resume(); err != nil && !errors.Is(err, errHopeless) {
		c.tb.Fatalf("servers: resuming Consul on %s: %v", c.Addr(), err)
	}
}

// Restart starts the server again, with its data, and waits until it serves
// requests, for which a majority must run. A process that is alive is killed
// first.
func (c *Consul) Restart() {
	c.tb.Helper()
	c.Kill()
	err := poll(startPatience, func(context.Context) error {
		err := c.launch()
		if err != nil && !errors.Is(err, errPortInUse) {
			err = fmt.Errorf("%w: %w", errHopeless, err)
		}
		return err
	})
	if err != nil {
		c.tb.Fatalf("servers: restarting Consul on %s: %v", c.Addr(), err)
	}
}

// WaitReady waits until the server serves requests, and so has a leader.
func (c *Consul) WaitReady() {
	c.tb.Helper()
	if err := poll(changePatience, c.healthy); err != nil {
		c.tb.Fatalf("servers: Consul on %s: %v", c.Addr(), err)
	}
}

func (c *Consul) current() *process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.proc
}

// launch starts a process and waits until it serves requests; if it fails, the
// process is dead.
func (c *Consul) launch() error {
	p, err := c.spawn()
	if err != nil {
		return err
	}
	err = poll(startPatience, func(ctx context.Context) error {
		if p.exited() {
			return fmt.Errorf("%w: %s", errHopeless, p.death())
		}
		return c.healthy(ctx)
	})
	if err == nil {
		return nil
	}
	p.kill()
	p.noted.Store(true)
	out := p.output()
	if strings.Contains(out, "address already in use") {
		return fmt.Errorf("%w: %s:\n%s", errPortInUse, c.Addr(), out)
	}
	return fmt.Errorf("Consul on %s: %w; its last output:\n%s", c.Addr(), err, out)
}

func (c *Consul) spawn() (*process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errors.New("the test is over")
	}
	if c.proc != nil && !c.proc.exited() {
		return nil, errors.New("it was started at the same time by somebody else")
	}
	p, err := startProcess(c.dir, c.bin, c.argv)
	if err == nil {
		c.proc = p
	}
	return p, err
}

// healthy makes and ends a session, for which the servers need a leader that
// knows this one.
func (c *Consul) healthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	body, err := c.ask(ctx, http.MethodPut, "/v1/session/create", `{"Name":"ready","NodeChecks":[],"TTL":"10s"}`)
	if err != nil {
		return err
	}
	var made struct{ ID string }
	if err := json.Unmarshal(body, &made); err != nil {
		return err
	}
	_, err = c.ask(ctx, http.MethodPut, "/v1/session/destroy/"+made.ID, "")
	return err
}

// Ask sends a request to the server, such as "PUT", "/v1/kv/key" and a value, and
// returns the answer. It fails the test if that is not one of success.
func (c *Consul) Ask(method, path, body string) string {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*askPatience)
	defer cancel()
	answer, err := c.ask(ctx, method, path, body)
	if err != nil {
		c.tb.Fatalf("servers: Consul on %s: %s %s: %v", c.Addr(), method, path, err)
	}
	return string(answer)
}

func (c *Consul) ask(ctx context.Context, method, path, body string) ([]byte, error) {
	scheme := "http"
	if c.tls != nil {
		scheme = "https"
	}
	req, err := http.NewRequestWithContext(ctx, method, scheme+"://"+c.Addr()+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	if c.token != "" {
		req.Header.Set("X-Consul-Token", c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(answer))
	}
	return answer, err
}

// close ends the server for good.
func (c *Consul) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if p := c.proc; p != nil {
		p.kill()
		if !p.noted.Load() {
			c.tb.Logf("servers: Consul on %s: %s; its last output:\n%s", c.Addr(), p.death(), p.output())
		}
	}
	for _, port := range c.ports {
		givePort(port)
	}
}

// ConsulLeader waits until one of some servers leads, and returns it. Dead and
// paused ones are not asked.
func ConsulLeader(tb TB, list []*Consul) *Consul {
	tb.Helper()
	var leader *Consul
	err := poll(changePatience, func(ctx context.Context) error {
		for _, c := range list {
			p := c.current()
			if p.exited() || p.paused.Load() || c.healthy(ctx) != nil {
				continue
			}
			body, err := c.ask(ctx, http.MethodGet, "/v1/status/leader", "")
			if err != nil {
				continue
			}
			var at string
			if err := json.Unmarshal(body, &at); err != nil {
				return err
			}
			for _, other := range list {
				o := other.current()
				if at == address(other.ports[1]) && !o.exited() && !o.paused.Load() {
					leader = other
					return nil
				}
			}
		}
		return errors.New("none of them leads")
	})
	if err != nil {
		tb.Fatalf("servers: Consul: %v", err)
	}
	return leader
}

// ConsulAddrs returns the addresses of servers.
func ConsulAddrs(list []*Consul) []string {
	addrs := make([]string, len(list))
	for i, c := range list {
		addrs[i] = c.Addr()
	}
	return addrs
}
