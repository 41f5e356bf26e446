package servers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// RedisConfig says what kind of server to start. The zero value is a primary
// that forgets everything when it is killed.
type RedisConfig struct {
	// Args are further arguments of redis-server, such as "--maxmemory", "5mb".
	// They win over those of the package. A password set by "--requirepass" is
	// used by [Redis.Do] too.
	Args []string
	// Persist writes every change to disk before it is answered, so that the data
	// survive Kill and Restart.
	Persist bool
	// ReplicaOf is the primary that the server follows, nil for none. A replica of
	// a server with TLS has TLS itself.
	ReplicaOf *Redis
	// TLS has the server speak TLS and not plain TCP. The test is skipped if the
	// program was built without it.
	TLS bool
}

// StartRedis starts one server. It returns when the server answers PING and, for
// a replica, when it is in step with its primary. A nil cfg is the zero value.
func StartRedis(tb TB, cfg *RedisConfig) *Redis {
	tb.Helper()
	return StartMasters(tb, 1, cfg)[0]
}

// StartMasters starts n servers side by side that know nothing of each other. A
// nil cfg is the zero value.
func StartMasters(tb TB, n int, cfg *RedisConfig) []*Redis {
	tb.Helper()
	list := make([]*Redis, n)
	for i := range list {
		list[i] = newRedis(tb, cfg)
	}
	startAll(tb, list)
	return list
}

// Redis is one server: a process that may die and be started again, on a port
// and in a folder that stay the same. Its methods are safe for concurrent use,
// but those that fail the test are for the test's goroutine.
type Redis struct {
	tb  TB
	bin string

	// Set before the server is handed out, and not changed afterwards.

	prepare  func() ([]string, error)    // writes files and returns argv, for port, bus and dir
	ready    func(context.Context) error // what it takes to be ready besides answering, nil for nothing
	withBus  bool                        // it needs a second port
	tls      *tls.Config                 // of clients
	password string

	// Set by the first start, and not changed afterwards.

	dir  string
	port int
	bus  int // port of the cluster bus
	argv []string
	id   string // of a node of a cluster

	mu     sync.Mutex // guards what follows; held while a process is started or killed
	proc   *process
	closed bool
}

func newRedis(tb TB, cfg *RedisConfig) *Redis {
	tb.Helper()
	if cfg == nil {
		cfg = &RedisConfig{}
	}
	r := &Redis{tb: tb, bin: command(tb, redisProgram)}
	r.password = option(cfg.Args, "--requirepass")
	withTLS := cfg.TLS || cfg.ReplicaOf != nil && cfg.ReplicaOf.tls != nil
	if withTLS {
		id, err := theIdentity()
		if err != nil {
			tb.Fatalf("servers: making a certificate: %v", err)
		}
		r.tls = id.clientConfig()
	}
	if primary := cfg.ReplicaOf; primary != nil {
		r.ready = func(ctx context.Context) error {
			if !primary.running() {
				return nil // not to be waited for
			}
			return r.linked(ctx)
		}
	}
	kept := *cfg
	kept.Args = slices.Clone(cfg.Args)
	r.prepare = func() ([]string, error) { return r.dataArgs(&kept) }
	return r
}

// dataArgs returns the arguments of a server that keeps data. Whom it follows is
// in a file and not among them: the server writes it anew when it is told to
// follow somebody else, and so remembers it over a restart.
func (r *Redis) dataArgs(cfg *RedisConfig) ([]string, error) {
	var conf string
	if p := cfg.ReplicaOf; p != nil {
		conf = fmt.Sprintf("replicaof 127.0.0.1 %d\n", p.port)
	}
	file := filepath.Join(r.dir, "redis.conf")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		return nil, err
	}
	args := []string{
		file,
		"--bind", "127.0.0.1",
		"--dir", r.dir,
		"--daemonize", "no",
		"--protected-mode", "no",
		"--save", "",
		"--repl-diskless-sync-delay", "0",
	}
	port := strconv.Itoa(r.port)
	if r.tls == nil {
		args = append(args, "--port", port)
	} else {
		id, err := theIdentity()
		if err != nil {
			return nil, err
		}
		if err := id.write(r.dir); err != nil {
			return nil, err
		}
		args = append(args, "--port", "0", "--tls-port", port, "--tls-auth-clients", "no",
			"--tls-ca-cert-file", caFile, "--tls-cert-file", certFile, "--tls-key-file", keyFile)
	}
	if p := cfg.ReplicaOf; p != nil {
		if p.tls != nil {
			args = append(args, "--tls-replication", "yes")
		}
		if p.password != "" {
			args = append(args, "--masterauth", p.password)
		}
	}
	if cfg.Persist {
		args = append(args, "--appendonly", "yes", "--appendfsync", "always")
	} else {
		args = append(args, "--appendonly", "no")
	}
	if redisVersion(r.bin) >= 7 {
		args = append(args, "--enable-debug-command", "yes")
	}
	return append(args, cfg.Args...), nil
}

// Addr returns the server's address, host and port.
func (r *Redis) Addr() string { return address(r.port) }

// Port returns the port that the server listens on for clients.
func (r *Redis) Port() int { return r.port }

// Dir returns the server's folder, which is removed at the end of the test.
func (r *Redis) Dir() string { return r.dir }

// TLSConfig returns a configuration for clients that trusts the server's
// certificate, nil if the server does not speak TLS.
func (r *Redis) TLSConfig() *tls.Config { return r.tls.Clone() }

// Pid returns the number of the process; each start has another one.
func (r *Redis) Pid() int { return r.current().pid() }

// Alive says whether the process is there, paused or not.
func (r *Redis) Alive() bool { return !r.current().exited() }

// running says whether the process is neither dead nor paused.
func (r *Redis) running() bool {
	p := r.current()
	return !p.exited() && !p.paused.Load()
}

// Kill ends the process with SIGKILL and waits for its death. It has no effect
// on a dead one.
func (r *Redis) Kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proc.kill()
}

// Pause stops the process with SIGSTOP and waits until it has stopped: the
// kernel goes on accepting connections for it, and what is sent is answered after
// Resume. It fails the test if the process is dead.
func (r *Redis) Pause() {
	r.tb.Helper()
	if err := r.current().pause(); err != nil {
		r.tb.Fatalf("servers: pausing redis on %s: %v", r.Addr(), err)
	}
}

// Resume lets the process go on after Pause. It has no effect on one that runs
// or is dead.
func (r *Redis) Resume() {
	r.tb.Helper()
	if err := r.current().resume(); err != nil && !errors.Is(err, errHopeless) {
		r.tb.Fatalf("servers: resuming redis on %s: %v", r.Addr(), err)
	}
}

// Restart starts the server again, with the same arguments, in the same folder
// and on the same port, and waits until it is ready. A process that is alive is
// killed first. A replica whose primary runs is ready when it is in step. Data are there afterwards only with [RedisConfig.Persist], or if
// the server is a replica of one that has them.
func (r *Redis) Restart() {
	r.tb.Helper()
	r.Kill()
	// Somebody looking for a free port may have ours for a moment.
	err := poll(startPatience, func(context.Context) error {
		err := r.launch()
		if err != nil && !errors.Is(err, errPortInUse) {
			err = fmt.Errorf("%w: %w", errHopeless, err)
		}
		return err
	})
	if err != nil {
		r.tb.Fatalf("servers: restarting redis on %s: %v", r.Addr(), err)
	}
}

func (r *Redis) current() *process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.proc
}

const redisProgram = "redis-server"

var (
	errPortInUse  = errors.New("the port is in use")
	errUnknownTLS = errors.New("the program was built without TLS")
)

// startAll starts servers for the first time, side by side, and registers their
// end. If it returns, all are ready.
func startAll(tb TB, list []*Redis) {
	tb.Helper()
	root, err := os.MkdirTemp("", "dlm-servers-")
	if err != nil {
		tb.Fatalf("servers: %v", err)
	}
	tb.Cleanup(func() {
		for _, r := range list {
			r.close()
		}
		if err := os.RemoveAll(root); err != nil {
			tb.Logf("servers: %v", err)
		}
	})
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	for i, r := range list {
		wg.Go(func() { errs[i] = r.start(filepath.Join(root, strconv.Itoa(i))) })
	}
	wg.Wait()
	if err := errors.Join(errs...); errors.Is(err, errUnknownTLS) {
		Missing(tb, err.Error())
	} else if err != nil {
		tb.Fatalf("servers: starting redis: %v", err)
	}
}

// start starts the server for the first time.
func (r *Redis) start(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	r.dir = dir
	for attempt := 1; ; attempt++ {
		if err := r.takePorts(); err != nil {
			return err
		}
		argv, err := r.prepare()
		if err != nil {
			return err
		}
		r.argv = argv
		if err = r.launch(); !errors.Is(err, errPortInUse) || attempt == 10 {
			return err
		}
	}
}

func (r *Redis) takePorts() (err error) {
	givePort(r.port)
	givePort(r.bus)
	if r.port, err = takePort(); err == nil && r.withBus {
		r.bus, err = takePort()
	}
	return err
}

// launch starts a process and waits until it is ready; if it fails, the process
// is dead.
func (r *Redis) launch() error {
	p, err := r.spawn()
	if err != nil {
		return err
	}
	err = poll(startPatience, func(ctx context.Context) error {
		if p.exited() {
			return fmt.Errorf("%w: %s", errHopeless, p.death())
		}
		if err := r.answers(ctx, p.pid()); err != nil {
			return err
		}
		if r.ready == nil {
			return nil
		}
		return r.ready(ctx)
	})
	if err == nil {
		return nil
	}
	p.kill()
	p.noted.Store(true)
	out := p.output()
	switch {
	case strings.Contains(out, "Address already in use"):
		return fmt.Errorf("%w: %s:\n%s", errPortInUse, r.Addr(), out)
	case r.tls != nil && strings.Contains(out, "Bad directive") && strings.Contains(out, "tls-"):
		return fmt.Errorf("%s: %w", r.bin, errUnknownTLS)
	}
	return fmt.Errorf("%s on %s: %w; its last output:\n%s", filepath.Base(r.bin), r.Addr(), err, out)
}

func (r *Redis) spawn() (*process, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errors.New("the test is over")
	}
	if r.proc != nil && !r.proc.exited() {
		return nil, errors.New("it was started at the same time by somebody else")
	}
	p, err := startProcess(r.dir, r.bin, r.argv)
	if err == nil {
		r.proc = p
	}
	return p, err
}

// close ends the server for good.
func (r *Redis) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if p := r.proc; p != nil {
		p.kill()
		if !p.noted.Load() {
			r.tb.Logf("servers: redis on %s: %s; its last output:\n%s", r.Addr(), p.death(), p.output())
		}
	}
	givePort(r.port)
	givePort(r.bus)
}

// answers checks that the server serves commands, and that it is our process and
// not another one that was quicker to take the port.
func (r *Redis) answers(ctx context.Context, pid int) error {
	if v, err := r.ask(ctx, "PING"); err != nil {
		return err
	} else if v != "PONG" {
		return fmt.Errorf("PING is answered by %v", v)
	}
	info, err := r.info(ctx, "server")
	if err != nil {
		return err
	}
	if got := info["process_id"]; got != strconv.Itoa(pid) {
		return fmt.Errorf("process %s answers and not %d", got, pid)
	}
	return nil
}

// linked checks that a replica is in step with its primary.
func (r *Redis) linked(ctx context.Context) error {
	info, err := r.info(ctx, "replication")
	if err != nil {
		return err
	}
	if info["role"] == "slave" && info["master_link_status"] != "up" {
		return fmt.Errorf("replica %s has no link to its primary", r.Addr())
	}
	return nil
}

// info returns a section of INFO.
func (r *Redis) info(ctx context.Context, section string) (map[string]string, error) {
	v, err := r.ask(ctx, "INFO", section)
	return fields(v), err
}

// ask is Do for the package's own questions, which a silent server must not hold
// up for long.
func (r *Redis) ask(ctx context.Context, args ...string) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	return r.Do(ctx, args...)
}

// Do sends one command on a connection of its own and returns the reply: string,
// int64, nil or a list ([]any) of these. An error reply is a [ReplyError]; within
// a list it is an element. What a connection remembers, such as MULTI, ASKING and
// what WAIT waits for, is of no use here. A ctx without end waits as long as the
// server does not answer.
func (r *Redis) Do(ctx context.Context, args ...string) (any, error) {
	if len(args) == 0 {
		return nil, errors.New("servers: no command")
	}
	c, err := r.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", args[0], err)
	}
	defer c.Close()
	v, err := c.do(ctx, args...)
	if err != nil {
		return nil, fmt.Errorf("%s on %s: %w", args[0], r.Addr(), err)
	}
	return v, nil
}

func (r *Redis) dial(ctx context.Context) (*respConn, error) {
	var d interface {
		DialContext(ctx context.Context, network, addr string) (net.Conn, error)
	} = &net.Dialer{}
	if r.tls != nil {
		d = &tls.Dialer{Config: r.tls}
	}
	nc, err := d.DialContext(ctx, "tcp", r.Addr())
	if err != nil {
		return nil, err
	}
	c := newRESPConn(nc)
	if r.password != "" {
		if _, err := c.do(ctx, "AUTH", r.password); err != nil {
			_ = c.Close() // the first error is what matters
			return nil, err
		}
	}
	return c, nil
}

// MustDo is [Redis.Do] for commands that cannot fail: if one does, or is not
// answered in some seconds, the test fails.
func (r *Redis) MustDo(args ...string) any {
	r.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*askPatience)
	defer cancel()
	v, err := r.Do(ctx, args...)
	if err != nil {
		r.tb.Fatalf("servers: %v", err)
	}
	return v
}

// Role returns "master", "slave" or "sentinel", as the server itself says.
func (r *Redis) Role() string {
	r.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*askPatience)
	defer cancel()
	role, err := r.role(ctx)
	if err != nil {
		r.tb.Fatalf("servers: %v", err)
	}
	return role
}

func (r *Redis) role(ctx context.Context) (string, error) {
	v, err := r.ask(ctx, "ROLE")
	if err != nil {
		return "", err
	}
	if list, ok := v.([]any); ok && len(list) > 0 {
		if role, ok := list[0].(string); ok {
			return role, nil
		}
	}
	return "", fmt.Errorf("ROLE on %s is answered by %v", r.Addr(), v)
}

// RunID returns the identity of the running process, as the server reports it;
// each start has another one.
func (r *Redis) RunID() string {
	r.tb.Helper()
	return fields(r.MustDo("INFO", "server"))["run_id"]
}

// Commands returns how often each command was called since the start of the
// process or CONFIG RESETSTAT, by its name in lower case, such as "get" and
// "config|get". The package's own commands count too.
func (r *Redis) Commands() map[string]int64 {
	r.tb.Helper()
	calls := map[string]int64{}
	for name, value := range fields(r.MustDo("INFO", "commandstats")) {
		name, ok := strings.CutPrefix(name, "cmdstat_")
		if !ok {
			continue
		}
		n, _, _ := strings.Cut(strings.TrimPrefix(value, "calls="), ",")
		count, err := strconv.ParseInt(n, 10, 64)
		if err != nil {
			r.tb.Fatalf("servers: INFO commandstats: %s: %v", name, err)
		}
		calls[name] = count
	}
	return calls
}

// option returns the value of an argument, "" if it is not there.
func option(args []string, name string) string {
	if i := slices.Index(args, name); i >= 0 && i+1 < len(args) {
		return args[i+1]
	}
	return ""
}
