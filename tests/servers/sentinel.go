package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// SentinelConfig says what [StartSentinel] starts. The zero value is usable.
type SentinelConfig struct {
	// Replicas is the number of replicas. Defaults to 1.
	Replicas int
	// DefaultTimers leaves the sentinels their usual periods, with which a primary
	// that comes back after it was replaced takes writes for some 10 s. Without
	// it the sentinels look more often, and the same takes about 2 s.
	DefaultTimers bool
	// Args are further arguments of the servers that hold data.
	Args []string
}

// Sentinels is a primary with its replicas, watched by three sentinels. A server
// that is killed and restarted comes back in the role that it had when it died,
// and Restart waits only until it answers; the sentinels then make a primary that
// was replaced a replica, some seconds later.
type Sentinels struct {
	MasterName string   // the name of the primary for sentinels and clients
	Servers    []*Redis // those that hold data, the first primary first
	Sentinels  []*Redis

	tb TB
}

const sentinelCount = 3

// StartSentinel starts a primary, its replicas and three sentinels. It returns
// when all know each other and a failover would succeed. A nil cfg is the zero
// value.
func StartSentinel(tb TB, cfg *SentinelConfig) *Sentinels {
	tb.Helper()
	if cfg == nil {
		cfg = &SentinelConfig{}
	}
	replicas := cfg.Replicas
	if replicas == 0 {
		replicas = 1
	}
	s := &Sentinels{MasterName: "mymaster", tb: tb}
	primary := StartRedis(tb, &RedisConfig{Args: cfg.Args})
	// With the replicas linked, the sentinels find them at their first look.
	s.Servers = append([]*Redis{primary}, StartMasters(tb, replicas, &RedisConfig{Args: cfg.Args, ReplicaOf: primary})...)
	for _, r := range s.Servers {
		r.ready = nil // whom it has to follow after a restart is for the sentinels to say
	}
	for range sentinelCount {
		s.Sentinels = append(s.Sentinels, s.newSentinel(primary, !cfg.DefaultTimers))
	}
	startAll(tb, s.Sentinels)
	s.WaitReady()
	return s
}

func (s *Sentinels) newSentinel(primary *Redis, tuned bool) *Redis {
	s.tb.Helper()
	r := &Redis{tb: s.tb, bin: command(s.tb, redisProgram)}
	r.prepare = func() ([]string, error) {
		var b strings.Builder
		fmt.Fprintf(&b, "port %d\nbind 127.0.0.1\ndir %q\ndaemonize no\nprotected-mode no\n", r.port, r.dir)
		fmt.Fprintf(&b, "sentinel monitor %s 127.0.0.1 %d %d\n", s.MasterName, primary.port, sentinelCount/2+1)
		if primary.password != "" {
			fmt.Fprintf(&b, "sentinel auth-pass %s %q\n", s.MasterName, primary.password)
		}
		// Twice the failover timeout must pass before a failed failover is tried again.
		fmt.Fprintf(&b, "sentinel down-after-milliseconds %s 1000\n", s.MasterName)
		fmt.Fprintf(&b, "sentinel failover-timeout %s 3000\n", s.MasterName)
		fmt.Fprintf(&b, "sentinel parallel-syncs %s 1\n", s.MasterName)
		file := filepath.Join(r.dir, "sentinel.conf")
		return []string{file, "--sentinel"}, os.WriteFile(file, []byte(b.String()), 0o600)
	}
	if tuned {
		r.ready = func(ctx context.Context) error {
			// The periods are no part of what a sentinel remembers over a restart.
			_, err := r.ask(ctx, "SENTINEL", "DEBUG",
				"INFO-PERIOD", "500", "PUBLISH-PERIOD", "300", "PING-PERIOD", "200", "ASK-PERIOD", "200")
			if _, replied := errors.AsType[ReplyError](err); replied {
				return nil // it is older than the command, thus slower
			}
			return err
		}
	}
	return r
}

// Addrs returns the addresses of the sentinels.
func (s *Sentinels) Addrs() []string { return addrs(s.Sentinels) }

// Primary returns the server that the sentinels name as the primary. While they
// do not agree, it is the one of the latest failover.
func (s *Sentinels) Primary() *Redis {
	s.tb.Helper()
	var primary *Redis
	err := poll(changePatience, func(ctx context.Context) (err error) {
		primary, err = s.primary(ctx)
		return err
	})
	if err != nil {
		s.tb.Fatalf("servers: no sentinel names a primary: %v", err)
	}
	return primary
}

// Replicas returns the servers that hold data and run, but for the primary.
func (s *Sentinels) Replicas() []*Redis {
	s.tb.Helper()
	primary := s.Primary()
	return slices.DeleteFunc(slices.Clone(s.Servers), func(r *Redis) bool { return r == primary || !r.running() })
}

// Failover has a sentinel replace the primary, which keeps running, waits until all
// sentinels name the new one, and returns that. The old one may take writes for
// some time yet, which are then lost: WaitReady waits for the end of that.
func (s *Sentinels) Failover() *Redis {
	s.tb.Helper()
	old := s.Primary()
	err := poll(changePatience, func(ctx context.Context) error {
		errs := []error{errors.New("no sentinel runs")}
		for _, r := range s.Sentinels {
			if !r.running() {
				continue
			}
			_, err := r.ask(ctx, "SENTINEL", "FAILOVER", s.MasterName)
			if e, ok := errors.AsType[ReplyError](err); err == nil || ok && e.Code() == "INPROG" {
				return nil
			}
			errs = append(errs, err) // NOGOODSLAVE may pass
		}
		return errors.Join(errs...)
	})
	if err != nil {
		s.tb.Fatalf("servers: failover by sentinel: %v", err)
	}
	return s.WaitPrimary(old)
}

// WaitPrimary waits until all sentinels that run name one server other than not as
// the primary, and that server says so too, and returns it. With nil it may
// be any server.
func (s *Sentinels) WaitPrimary(not *Redis) *Redis {
	s.tb.Helper()
	var primary *Redis
	err := poll(changePatience, func(ctx context.Context) error {
		views, err := s.views(ctx)
		if err != nil {
			return err
		}
		primary = views[0].primary
		for _, v := range views {
			if v.primary != primary || v.primary == not {
				return fmt.Errorf("sentinel %s names %s", v.sentinel.Addr(), v.primary.Addr())
			}
		}
		role, err := primary.role(ctx)
		if err == nil && role != "master" {
			err = fmt.Errorf("%s is named, but its role is %s", primary.Addr(), role)
		}
		return err
	})
	if err != nil {
		s.tb.Fatalf("servers: waiting for another primary: %v", err)
	}
	return primary
}

// WaitReady waits until all servers and sentinels run and agree about the
// primary, and all other servers follow it, so that another failover would
// succeed.
func (s *Sentinels) WaitReady() {
	s.tb.Helper()
	if err := poll(changePatience, s.settled); err != nil {
		s.tb.Fatalf("servers: waiting for sentinels and servers to agree: %v", err)
	}
}

func (s *Sentinels) settled(ctx context.Context) error {
	for _, r := range slices.Concat(s.Servers, s.Sentinels) {
		if !r.running() {
			return fmt.Errorf("%s is dead or paused", r.Addr())
		}
	}
	views, err := s.views(ctx)
	if err != nil {
		return err
	}
	primary := views[0].primary
	for _, v := range views {
		if v.primary != primary {
			return fmt.Errorf("sentinels name %s and %s", primary.Addr(), v.primary.Addr())
		}
		if err := s.ready(ctx, v); err != nil {
			return fmt.Errorf("sentinel %s: %w", v.sentinel.Addr(), err)
		}
	}
	for _, r := range s.Servers {
		info, err := r.info(ctx, "replication")
		if err != nil {
			return err
		}
		follows := info["role"] == "slave" && info["master_port"] == strconv.Itoa(primary.port) && info["master_link_status"] == "up"
		leads := info["role"] == "master" && info["connected_slaves"] == strconv.Itoa(len(s.Servers)-1)
		if r == primary && !leads || r != primary && !follows {
			return fmt.Errorf("%s with primary %s is role=%s master_port=%s master_link_status=%s connected_slaves=%s", r.Addr(),
				primary.Addr(), info["role"], info["master_port"], info["master_link_status"], info["connected_slaves"])
		}
	}
	return nil
}

// ready checks that a sentinel could carry out a failover.
func (s *Sentinels) ready(ctx context.Context, v sentinelView) error {
	if v.state["flags"] != "master" ||
		v.state["num-slaves"] != strconv.Itoa(len(s.Servers)-1) ||
		v.state["num-other-sentinels"] != strconv.Itoa(len(s.Sentinels)-1) {
		return fmt.Errorf("primary has flags=%s num-slaves=%s num-other-sentinels=%s",
			v.state["flags"], v.state["num-slaves"], v.state["num-other-sentinels"])
	}
	if _, err := v.sentinel.ask(ctx, "SENTINEL", "CKQUORUM", s.MasterName); err != nil {
		return err
	}
	list, err := v.sentinel.ask(ctx, "SENTINEL", "REPLICAS", s.MasterName)
	if err != nil {
		return err
	}
	replicas, _ := list.([]any)
	for _, r := range replicas {
		m := pairs(r)
		if m["flags"] != "slave" || m["master-link-status"] != "ok" || m["master-port"] != strconv.Itoa(v.primary.port) {
			return fmt.Errorf("replica %s has flags=%s master-link-status=%s master-port=%s",
				m["name"], m["flags"], m["master-link-status"], m["master-port"])
		}
	}
	return nil
}

// A sentinelView is what one sentinel thinks of the primary.
type sentinelView struct {
	sentinel *Redis
	primary  *Redis
	epoch    int               // of the failover that made it the primary
	state    map[string]string // as in SENTINEL MASTER
}

// view asks one sentinel.
func (s *Sentinels) view(ctx context.Context, r *Redis) (sentinelView, error) {
	reply, err := r.ask(ctx, "SENTINEL", "MASTER", s.MasterName)
	if err != nil {
		return sentinelView{}, err
	}
	v := sentinelView{sentinel: r, state: pairs(reply)}
	if v.primary = byPort(s.Servers, v.state["port"]); v.primary == nil {
		return sentinelView{}, fmt.Errorf("sentinel %s names port %q", r.Addr(), v.state["port"])
	}
	if v.epoch, err = strconv.Atoi(v.state["config-epoch"]); err != nil {
		return sentinelView{}, fmt.Errorf("sentinel %s: %w", r.Addr(), err)
	}
	return v, nil
}

// views asks all sentinels that run, side by side. If it returns no error,
// there is at least one view.
func (s *Sentinels) views(ctx context.Context) ([]sentinelView, error) {
	views, errs := s.answers(ctx)
	if len(views)+len(errs) == 0 {
		return nil, errors.New("no sentinel runs")
	}
	return views, errors.Join(errs...)
}

func (s *Sentinels) answers(ctx context.Context) (views []sentinelView, errs []error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, r := range s.Sentinels {
		if !r.running() {
			continue
		}
		wg.Go(func() {
			v, err := s.view(ctx, r)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			} else {
				views = append(views, v)
			}
		})
	}
	wg.Wait()
	return views, errs
}

// primary returns what the sentinel says that knows most, of those that answer.
func (s *Sentinels) primary(ctx context.Context) (*Redis, error) {
	views, errs := s.answers(ctx)
	if len(views) == 0 {
		return nil, errors.Join(append(errs, errors.New("no sentinel answers"))...)
	}
	return slices.MaxFunc(views, func(a, b sentinelView) int { return a.epoch - b.epoch }).primary, nil
}

// addrs returns the addresses of servers.
func addrs(list []*Redis) []string {
	a := make([]string, len(list))
	for i, r := range list {
		a[i] = r.Addr()
	}
	return a
}

// byPort returns the server with a port, nil if there is none.
func byPort(list []*Redis, port string) *Redis {
	for _, r := range list {
		if strconv.Itoa(r.port) == port {
			return r
		}
	}
	return nil
}
