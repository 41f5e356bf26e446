package servers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// ZooKeeperConfig says what kind of ZooKeeper to start. The zero value is one
// server with ticks of 200 ms and sessions from 500 ms to one minute.
type ZooKeeperConfig struct {
	// Nodes is how many servers form the ensemble, 1 or more. 0 means 1.
	Nodes int
	// Settings are further lines of zoo.cfg, such as "maxSessionTimeout=2000".
	// They win over those of the package.
	Settings []string
	// TLS has each server serve TLS on a port of its own, see SecureAddr.
	TLS bool
	// Sync has each change written to disk before it is answered, and gives the
	// Java machine the memory and the compiler of a real server.
	Sync bool
}

// ZooKeeper is one server: a process that may die and be started again, on ports
// and in a folder that stay the same, with the data that it had. Its methods are
// safe for concurrent use, but those that fail the test are for the test's
// goroutine.
type ZooKeeper struct {
	tb        TB
	bin, path string // the program, and its class path
	dir       string
	ports     [4]int // for clients, for peers, for elections, and for clients over TLS
	argv      []string

	mu     sync.Mutex // guards what follows; held while a process is started or killed
	proc   *process
	closed bool
}

// Jars of the Debian package libzookeeper-java. The first one knows where the
// others are, but for one that writes the log.
var zooKeeperJars = []string{"/usr/share/java/zookeeper.jar", "/usr/share/java/slf4j-simple.jar"}

// nettyJars have parts that a server needs for TLS, and that the others do not name.
var nettyJars = []string{"/usr/share/java/netty-codec.jar", "/usr/share/java/netty-resolver.jar"}

// StartZooKeeper starts an ensemble and returns its servers. It returns when all
// of them serve clients. A nil cfg is the zero value.
func StartZooKeeper(tb TB, cfg *ZooKeeperConfig) []*ZooKeeper {
	tb.Helper()
	if cfg == nil {
		cfg = &ZooKeeperConfig{}
	}
	bin := command(tb, "java")
	for _, jar := range zooKeeperJars {
		if _, err := os.Stat(jar); err != nil {
			Missing(tb, fmt.Sprintf("%s is not installed; %s", jar, installHint))
		}
	}
	root, err := os.MkdirTemp("", "dlm-servers-")
	if err != nil {
		tb.Fatalf("servers: %v", err)
	}
	list := make([]*ZooKeeper, max(cfg.Nodes, 1))
	for i := range list {
		list[i] = &ZooKeeper{tb: tb, bin: bin, path: strings.Join(zooKeeperJars, ":"), dir: filepath.Join(root, strconv.Itoa(i+1))}
	}
	tb.Cleanup(func() {
		for _, z := range list {
			z.close()
		}
		if err := os.RemoveAll(root); err != nil {
			tb.Logf("servers: %v", err)
		}
	})
	for attempt := 1; ; attempt++ {
		err := startEnsemble(list, cfg)
		if err == nil {
			return list
		}
		if !errors.Is(err, errPortInUse) || attempt == 5 {
			tb.Fatalf("servers: starting ZooKeeper: %v", err)
		}
		for _, z := range list {
			z.Kill()
		}
	}
}

func startEnsemble(list []*ZooKeeper, cfg *ZooKeeperConfig) error {
	for _, z := range list {
		for i := range z.ports {
			givePort(z.ports[i])
			port, err := takePort()
			if err != nil {
				return err
			}
			z.ports[i] = port
		}
	}
	for i, z := range list {
		if err := z.configure(i+1, list, cfg); err != nil {
			return err
		}
	}
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	for i, z := range list {
		wg.Go(func() { errs[i] = z.launch() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// configure writes what the server reads at its start.
func (z *ZooKeeper) configure(id int, all []*ZooKeeper, cfg *ZooKeeperConfig) error {
	data := filepath.Join(z.dir, "data")
	if err := os.RemoveAll(z.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	lines := []string{
		"tickTime=200",
		"initLimit=50",
		"syncLimit=10",
		"dataDir=" + data,
		"clientPort=" + strconv.Itoa(z.ports[0]),
		"clientPortAddress=127.0.0.1",
		"minSessionTimeout=500",
		"maxSessionTimeout=60000",
		"maxClientCnxns=0",
		"4lw.commands.whitelist=*",
		"admin.enableServer=false",
	}
	if len(all) > 1 {
		for i, peer := range all {
			lines = append(lines, fmt.Sprintf("server.%d=127.0.0.1:%d:%d", i+1, peer.ports[1], peer.ports[2]))
		}
	}
	if cfg.TLS {
		id, err := theIdentity()
		if err != nil {
			return err
		}
		if err := id.write(z.dir); err != nil {
			return err
		}
		keys, trust := filepath.Join(z.dir, "keys.pem"), filepath.Join(z.dir, caFile)
		if err := os.WriteFile(keys, slices.Concat(id.key, id.cert), 0o600); err != nil {
			return err
		}
		lines = append(lines,
			"serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
			"secureClientPort="+strconv.Itoa(z.ports[3]), "secureClientPortAddress=127.0.0.1",
			"ssl.keyStore.location="+keys, "ssl.keyStore.type=PEM", "ssl.trustStore.location="+trust, "ssl.trustStore.type=PEM",
			"ssl.clientAuth=none")
		z.path = strings.Join(slices.Concat(zooKeeperJars, nettyJars), ":")
	}
	lines = append(lines, cfg.Settings...) // a later line wins
	file := filepath.Join(z.dir, "zoo.cfg")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(data, "myid"), []byte(strconv.Itoa(id)), 0o600); err != nil {
		return err
	}
	z.argv = []string{"-XX:-UsePerfData", "-Dzookeeper.admin.enableServer=false", "-Dorg.slf4j.simpleLogger.defaultLogLevel=info"}
	if cfg.Sync {
		z.argv = append(z.argv, "-Xmx1g")
	} else {
		z.argv = append(z.argv, "-Xms32m", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
			"-Dzookeeper.forceSync=no", "-Dzookeeper.preAllocSize=1024",
			// So that parents without children are not there for long.
			"-Dznode.container.checkIntervalMs=1000")
	}
	z.argv = append(z.argv, "-cp", z.path, "org.apache.zookeeper.server.quorum.QuorumPeerMain", file)
	return nil
}

// Addr returns the server's address for clients, host and port.
func (z *ZooKeeper) Addr() string { return address(z.ports[0]) }

// SecureAddr returns the server's address for clients that speak TLS.
func (z *ZooKeeper) SecureAddr() string { return address(z.ports[3]) }

// TLSConfig trusts the server's certificate and no other.
func (z *ZooKeeper) TLSConfig() *tls.Config {
	z.tb.Helper()
	id, err := theIdentity()
	if err != nil {
		z.tb.Fatalf("servers: %v", err)
	}
	return id.clientConfig()
}

// Pid returns the number of the process; each start has another one.
func (z *ZooKeeper) Pid() int { return z.current().pid() }

// Alive says whether the process is there, paused or not.
func (z *ZooKeeper) Alive() bool { return !z.current().exited() }

// Kill ends the process with SIGKILL and waits for its death. It has no effect
// on a dead one.
func (z *ZooKeeper) Kill() {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.proc != nil {
		z.proc.kill()
	}
}

// Pause stops the process with SIGSTOP, as [Redis.Pause] does.
func (z *ZooKeeper) Pause() {
	z.tb.Helper()
	if err := z.current().pause(); err != nil {
		z.tb.Fatalf("servers: pausing ZooKeeper on %s: %v", z.Addr(), err)
	}
}

// Resume lets the process go on after Pause. It has no effect on one that runs
// or is dead.
func (z *ZooKeeper) Resume() {
	z.tb.Helper()
	if err := z.current().resume(); err != nil && !errors.Is(err, errHopeless) {
		z.tb.Fatalf("servers: resuming ZooKeeper on %s: %v", z.Addr(), err)
	}
}

// Restart starts the server again with its data, and waits until it serves
// clients, for which an ensemble needs a majority. A process that is alive is
// killed first.
func (z *ZooKeeper) Restart() {
	z.tb.Helper()
	z.Kill()
	err := poll(startPatience, func(context.Context) error {
		err := z.launch()
		if err != nil && !errors.Is(err, errPortInUse) {
			err = fmt.Errorf("%w: %w", errHopeless, err)
		}
		return err
	})
	if err != nil {
		z.tb.Fatalf("servers: restarting ZooKeeper on %s: %v", z.Addr(), err)
	}
}

// Leads says whether the server is the leader of its ensemble, or the only one.
func (z *ZooKeeper) Leads() bool {
	out, err := z.Ask(context.Background(), "srvr")
	return err == nil && (strings.Contains(out, "Mode: leader") || strings.Contains(out, "Mode: standalone"))
}

// Ask sends one of the four-letter words, such as "mntr", and returns the answer.
func (z *ZooKeeper) Ask(ctx context.Context, word string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", z.Addr())
	if err != nil {
		return "", err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return "", err
		}
	}
	if _, err := io.WriteString(c, word); err != nil {
		return "", err
	}
	out, err := io.ReadAll(c)
	return string(out), err
}

func (z *ZooKeeper) current() *process {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.proc
}

// launch starts a process and waits until it serves clients; if it fails, the
// process is dead.
func (z *ZooKeeper) launch() error {
	p, err := z.spawn()
	if err != nil {
		return err
	}
	err = poll(changePatience, func(ctx context.Context) error {
		if p.exited() {
			return fmt.Errorf("%w: %s", errHopeless, p.death())
		}
		out, err := z.Ask(ctx, "srvr")
		if err != nil {
			return err
		}
		if !strings.Contains(out, "Mode: ") {
			return fmt.Errorf("srvr says %q", out)
		}
		return nil
	})
	if err == nil {
		return nil
	}
	p.kill()
	out := p.output()
	if strings.Contains(out, "Address already in use") {
		return fmt.Errorf("%w: %s:\n%s", errPortInUse, z.Addr(), out)
	}
	return fmt.Errorf("ZooKeeper on %s: %w; its last output:\n%s", z.Addr(), err, out)
}

func (z *ZooKeeper) spawn() (*process, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.closed {
		return nil, errors.New("the test is over")
	}
	p, err := startProcess(z.dir, z.bin, z.argv)
	if err == nil {
		z.proc = p
	}
	return p, err
}

// close ends the server for good.
func (z *ZooKeeper) close() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.closed = true
	if p := z.proc; p != nil {
		p.kill()
		if !p.noted.Load() {
			z.tb.Logf("servers: ZooKeeper on %s: %s; its last output:\n%s", z.Addr(), p.death(), p.output())
		}
	}
	for _, port := range z.ports {
		givePort(port)
	}
}
