package servers

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// EtcdConfig says what kind of server to start. The zero value is the newest
// version, which does not wait for the disk.
type EtcdConfig struct {
	// Old takes the oldest supported version, the program etcd that is installed
	// on the machine, in place of the newest one, which is built from its module.
	Old bool
	// Args are further arguments, such as "--quota-backend-bytes", "16777216".
	// They win over those of the package.
	Args []string
	// Sync has each change written to disk before it is answered, as it is by
	// default outside of tests. The old version always does.
	Sync bool
	// TLS has the server speak TLS and not plain TCP to clients.
	TLS bool
}

// StartEtcd starts one server. It returns when the server serves requests. A nil
// cfg is the zero value.
func StartEtcd(tb TB, cfg *EtcdConfig) *Etcd {
	tb.Helper()
	return StartEtcdCluster(tb, 1, cfg)[0]
}

// StartEtcdCluster starts n members of one cluster. It returns when all of them
// serve requests. A nil cfg is the zero value.
func StartEtcdCluster(tb TB, n int, cfg *EtcdConfig) []*Etcd {
	tb.Helper()
	if cfg == nil {
		cfg = &EtcdConfig{}
	}
	bin := etcdProgram(tb, cfg.Old)
	root, err := os.MkdirTemp("", "dlm-servers-")
	if err != nil {
		tb.Fatalf("servers: %v", err)
	}
	var members []*Etcd
	tb.Cleanup(func() {
		for _, e := range members {
			e.close()
		}
		if err := os.RemoveAll(root); err != nil {
			tb.Logf("servers: %v", err)
		}
	})
	for attempt := 1; ; attempt++ {
		members, err = startEtcd(tb, bin, filepath.Join(root, fmt.Sprint(attempt)), n, cfg)
		if err == nil {
			return members
		}
		for _, e := range members {
			e.close()
		}
		if !errors.Is(err, errPortInUse) || attempt == 10 {
			tb.Fatalf("servers: starting etcd: %v", err)
		}
	}
}

// Etcd is one member: a process that may die and be started again, on ports and
// in a folder that stay the same. Its methods are safe for concurrent use, but
// those that fail the test are for the test's goroutine.
type Etcd struct {
	tb         TB
	bin        string
	name       string
	dir        string
	port, peer int
	tls        *tls.Config // of clients
	argv       []string
	http       *http.Client

	mu     sync.Mutex // guards what follows; held while a process is started or killed
	proc   *process
	closed bool
}

// startEtcd makes members and starts them side by side.
func startEtcd(tb TB, bin, root string, n int, cfg *EtcdConfig) ([]*Etcd, error) {
	members := make([]*Etcd, n)
	var cluster []string
	for i := range members {
		e := &Etcd{tb: tb, bin: bin, name: fmt.Sprintf("n%d", i), dir: filepath.Join(root, fmt.Sprint(i))}
		members[i] = e
		var err error
		if e.port, err = takePort(); err != nil {
			return nil, err
		}
		if e.peer, err = takePort(); err != nil {
			return nil, err
		}
		cluster = append(cluster, fmt.Sprintf("%s=http://%s", e.name, address(e.peer)))
	}
	for _, e := range members {
		if err := e.prepare(cfg, root, strings.Join(cluster, ",")); err != nil {
			return members, err
		}
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i, e := range members {
		wg.Go(func() { errs[i] = e.launch() })
	}
	wg.Wait()
	return members, errors.Join(errs...)
}

func (e *Etcd) prepare(cfg *EtcdConfig, token, cluster string) error {
	if err := os.MkdirAll(e.dir, 0o700); err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	scheme := "http"
	var secure []string
	if cfg.TLS {
		id, err := theIdentity()
		if err != nil {
			return err
		}
		if err := id.write(e.dir); err != nil {
			return err
		}
		scheme, e.tls = "https", id.clientConfig()
		secure = []string{"--cert-file", filepath.Join(e.dir, certFile), "--key-file", filepath.Join(e.dir, keyFile)}
		transport.TLSClientConfig = e.tls.Clone()
	}
	e.http = &http.Client{Transport: transport}
	client, peer := scheme+"://"+address(e.port), "http://"+address(e.peer)
	e.argv = []string{
		"--name", e.name,
		"--data-dir", filepath.Join(e.dir, "data"),
		"--listen-client-urls", client,
		"--listen-peer-urls", peer,
		"--initial-cluster", cluster,
		"--initial-cluster-token", token,
		// A leader is missed sooner, and leases may be shorter, than by default.
		"--heartbeat-interval", "50", "--election-timeout", "500",
	}
	e.argv = append(e.argv, secure...)
	switch {
	case cfg.Old:
		e.argv = append(e.argv, "--advertise-client-urls", client, "--initial-advertise-peer-urls", peer,
			"--logger", "zap", "--log-level", "warn")
	case !cfg.Sync:
		e.argv = append(e.argv, "--unsafe-no-fsync")
	}
	e.argv = append(e.argv, cfg.Args...)
	return nil
}

// Addr returns the server's address for clients, host and port.
func (e *Etcd) Addr() string { return address(e.port) }

// TLSConfig returns a configuration for clients that trusts the server's
// certificate, nil if the server does not speak TLS.
func (e *Etcd) TLSConfig() *tls.Config { return e.tls.Clone() }

// Pid returns the number of the process; each start has another one.
func (e *Etcd) Pid() int { return e.current().pid() }

// Kill ends the process with SIGKILL and waits for its death. It has no effect
// on a dead one.
func (e *Etcd) Kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.proc.kill()
}

// Pause stops the process with SIGSTOP and waits until it has stopped. It fails
// the test if the process is dead.
func (e *Etcd) Pause() {
	e.tb.Helper()
	if err := e.current().pause(); err != nil {
		e.tb.Fatalf("servers: pausing etcd on %s: %v", e.Addr(), err)
	}
}

// Resume lets the process go on after Pause. It has no effect on one that runs
// or is dead.
func (e *Etcd) Resume() {
	e.tb.Helper()
	if err := e.current().resume(); err != nil && !errors.Is(err, errHopeless) {
		e.tb.Fatalf("servers: resuming etcd on %s: %v", e.Addr(), err)
	}
}

// Restart starts the server again, with its data, and waits until it serves
// requests, for which a majority must run. A process that is alive is killed
// first.
func (e *Etcd) Restart() {
	e.tb.Helper()
	e.Kill()
	err := poll(startPatience, func(context.Context) error {
		err := e.launch()
		if err != nil && !errors.Is(err, errPortInUse) {
			err = fmt.Errorf("%w: %w", errHopeless, err)
		}
		return err
	})
	if err != nil {
		e.tb.Fatalf("servers: restarting etcd on %s: %v", e.Addr(), err)
	}
}

// WaitReady waits until the server serves requests, and so has a leader.
func (e *Etcd) WaitReady() {
	e.tb.Helper()
	if err := poll(changePatience, e.healthy); err != nil {
		e.tb.Fatalf("servers: etcd on %s: %v", e.Addr(), err)
	}
}

func (e *Etcd) current() *process {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.proc
}

// launch starts a process and waits until it serves requests; if it fails, the
// process is dead.
func (e *Etcd) launch() error {
	p, err := e.spawn()
	if err != nil {
		return err
	}
	err = poll(startPatience, func(ctx context.Context) error {
		if p.exited() {
			return fmt.Errorf("%w: %s", errHopeless, p.death())
		}
		return e.healthy(ctx)
	})
	if err == nil {
		return nil
	}
	p.kill()
	p.noted.Store(true)
	out := p.output()
	if strings.Contains(out, "address already in use") {
		return fmt.Errorf("%w: %s:\n%s", errPortInUse, e.Addr(), out)
	}
	return fmt.Errorf("%s on %s: %w; its last output:\n%s", filepath.Base(e.bin), e.Addr(), err, out)
}

func (e *Etcd) spawn() (*process, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, errors.New("the test is over")
	}
	if e.proc != nil && !e.proc.exited() {
		return nil, errors.New("it was started at the same time by somebody else")
	}
	p, err := startProcess(e.dir, e.bin, e.argv)
	if err == nil {
		e.proc = p
	}
	return p, err
}

// healthy asks the server for a read that needs a leader.
func (e *Etcd) healthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	var health struct{ Health string }
	body, err := e.get(ctx, "/health")
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, &health); err != nil {
		return err
	}
	if health.Health != "true" {
		return fmt.Errorf("its health is %s", body)
	}
	return nil
}

func (e *Etcd) get(ctx context.Context, path string) ([]byte, error) {
	scheme := "http"
	if e.tls != nil {
		scheme = "https"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+e.Addr()+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := e.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// Metric returns a number that the server counts, the sum of those whose name
// and labels begin like this, such as `grpc_server_started_total{`.
func (e *Etcd) Metric(begin string) float64 {
	e.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*askPatience)
	defer cancel()
	body, err := e.get(ctx, "/metrics")
	if err != nil {
		e.tb.Fatalf("servers: etcd on %s: %v", e.Addr(), err)
	}
	var sum float64
	for line := range strings.Lines(string(body)) {
		if !strings.HasPrefix(line, begin) {
			continue
		}
		var n float64
		fields := strings.Fields(line)
		if _, err := fmt.Sscan(fields[len(fields)-1], &n); err == nil {
			sum += n
		}
	}
	return sum
}

// close ends the server for good.
func (e *Etcd) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	if p := e.proc; p != nil {
		p.kill()
		if !p.noted.Load() {
			e.tb.Logf("servers: etcd on %s: %s; its last output:\n%s", e.Addr(), p.death(), p.output())
		}
	}
	givePort(e.port)
	givePort(e.peer)
}

// leaderOf is what a member says through its metrics.
const isLeader = "etcd_server_is_leader "

// EtcdLeader waits until one of some members leads the cluster, and returns it.
// Dead and paused ones are not asked.
func EtcdLeader(tb TB, members []*Etcd) *Etcd {
	tb.Helper()
	var leader *Etcd
	err := poll(changePatience, func(ctx context.Context) error {
		for _, e := range members {
			p := e.current()
			if p.exited() || p.paused.Load() || e.healthy(ctx) != nil {
				continue
			}
			if e.Metric(isLeader) == 1 {
				leader = e
				return nil
			}
		}
		return errors.New("none of them leads")
	})
	if err != nil {
		tb.Fatalf("servers: etcd: %v", err)
	}
	return leader
}

// EtcdAddrs returns the addresses of members.
func EtcdAddrs(members []*Etcd) []string {
	addrs := make([]string, len(members))
	for i, e := range members {
		addrs[i] = e.Addr()
	}
	return slices.Clip(addrs)
}

// etcdProgram returns the path of the program, and builds it if it is the newest
// and has not been built yet.
func etcdProgram(tb TB, old bool) string {
	tb.Helper()
	if old {
		return command(tb, "etcd")
	}
	path, err := builtProgram("etcdnode")
	if err != nil {
		Missing(tb, fmt.Sprintf("etcdnode cannot be built: %v", err))
	}
	return path
}

// buildPatience bounds the building of a server.
const buildPatience = 10 * time.Minute
