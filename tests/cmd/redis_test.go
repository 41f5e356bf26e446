package cmd_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

func redisStore(s *servers.Redis) store { return store{url: "redis://" + s.Addr()} }

func clusterStore(c *servers.Cluster) store {
	return store{url: "redis+cluster://" + strings.Join(c.Addrs(), ",")}
}

func sentinelStore(s *servers.Sentinels, query string) store {
	return store{url: "redis+sentinel://" + strings.Join(s.Addrs(), ",") + "/" + s.MasterName + query}
}

func quorumStore(list []*servers.Redis) store {
	var addrs []string
	for _, s := range list {
		addrs = append(addrs, s.Addr())
	}
	return store{url: "redis+quorum://" + strings.Join(addrs, ",")}
}

// All commands work on all kinds of Redis.
func TestRedis(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		open func(t *testing.T) store
	}{
		{"single", func(t *testing.T) store { return redisStore(servers.StartRedis(t, nil)) }},
		{"sentinel", func(t *testing.T) store { return sentinelStore(servers.StartSentinel(t, nil), "?replicas=1") }},
		{"cluster", func(t *testing.T) store { return clusterStore(servers.StartCluster(t, 3, 0)) }},
		{"quorum", func(t *testing.T) store { return quorumStore(servers.StartMasters(t, 3, nil)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			testCommands(t, c.open(t))
		})
	}
}

func testCommands(t *testing.T, s store) {
	watch := s.start(t, "watch", "--interval", "10ms", "k")
	// What a quorum shows while its servers have not all heard is passed over.
	sees := func(texts ...string) {
		t.Helper()
		for line := ""; slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }); {
			line = watch.line()
		}
	}
	sees("k free; 0 waiting")

	first, token := s.hold(t, "k")
	sees("held by", token, "0 waiting")
	if i := s.get(t, "k"); len(i.Holders) != 1 || i.Holders[0].Token != token ||
		!strings.Contains(i.Holders[0].Owner, ":"+strconv.Itoa(first.Process.Pid)+"/") {
		t.Errorf("get says %+v, want token %s of process %d", i, token, first.Process.Pid)
	}
	if out := s.run(t, 0, "ls"); !strings.Contains(out, "\nk ") || !strings.Contains(out, token) {
		t.Errorf("ls says %s", out)
	}
	s.run(t, 75, "run", "--no-wait", "k", "--", "true")

	second := s.queue(t, "k")
	sees("held by", token, "1 waiting")
	first.let()
	next := second.line()
	sees("held by", next, "0 waiting")
	if a, b := number(t, token), number(t, next); b <= a {
		t.Errorf("token %d follows %d", b, a)
	}

	if out := s.run(t, 0, "release", "--force", "--json", "k", "--token", next); !strings.Contains(out, next) {
		t.Errorf("release says %s", out)
	}
	sees("k free; 0 waiting")
	second.expect(79)
	s.run(t, 1, "release", "--force", "k")
	s.run(t, 0, "doctor")

	watch.signal(syscall.SIGTERM)
	watch.expect(143)
}

func number(t *testing.T, text string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestRedisRunsExclude(t *testing.T) {
	t.Parallel()
	s := redisStore(servers.StartRedis(t, nil))
	dir := t.TempDir()
	count := filepath.Join(dir, "count")
	if err := os.WriteFile(count, []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
	const n = 10
	var list []*process
	for range n {
		list = append(list, s.start(t, "run", "--quiet", "k", "--", "sh", "-c",
			`cd "$0" && mkdir busy && read n < count; echo $((n+1)) > count && rmdir busy`, dir))
	}
	for _, p := range list {
		p.expect(0)
	}
	if got, err := os.ReadFile(count); err != nil || strings.TrimSpace(string(got)) != strconv.Itoa(n) {
		t.Errorf("counted to %s, %v", got, err)
	}
}

// The lock of a holder that was killed ends with its TTL, and its command with
// itself.
func TestRedisHolderKilled(t *testing.T) {
	t.Parallel()
	s := redisStore(servers.StartRedis(t, nil))
	const ttl = 3 * time.Second
	p := s.start(t, "run", "--ttl", ttl.String(), "k", "--", "sh", "-c", "echo $$; exec sleep 1000")
	pid := int(number(t, p.line()))
	waiter := s.queue(t, "k")
	p.signal(syscall.SIGKILL)
	killed := time.Now()
	p.expect(-int(syscall.SIGKILL))
	eventually(t, "the command is killed", func() bool { return !alive(pid) })
	waiter.line()
	// It was renewed a third of the TTL before at the earliest.
	if took := time.Since(killed); took < ttl/3 || took > ttl+5*time.Second {
		t.Errorf("the lock went over after %v", took)
	}
	waiter.let()
}

// A server that hangs for longer than the TTL: the command is dead before
// anybody else can have the lock.
func TestRedisHangs(t *testing.T) {
	t.Parallel()
	r := servers.StartRedis(t, nil)
	s := redisStore(r)
	const ttl = 3 * time.Second
	p := s.start(t, "run", "--ttl", ttl.String(), "k", "--", "sh", "-c", "trap '' TERM; echo $$; while :; do sleep 1000; done")
	pid := int(number(t, p.line()))
	r.Pause()
	paused := time.Now()
	eventually(t, "the command is killed", func() bool { return !alive(pid) })
	if took := time.Since(paused); took > ttl {
		t.Errorf("the command was alive for %v, %v after the last renewal could be", took, ttl)
	}
	p.expect(79)
	r.Resume()
	s.run(t, 0, "run", "k", "--", "true")
}

// A failover does not cost a lock that the replica has acknowledged.
func TestRedisFailover(t *testing.T) {
	t.Parallel()
	r := servers.StartSentinel(t, nil)
	s := sentinelStore(r, "?replicas=1")
	p, token := s.hold(t, "k", "--ttl", "20s")
	waiter := s.queue(t, "k")
	r.Failover()
	r.WaitReady()
	i := s.get(t, "k")
	if len(i.Holders) != 1 || i.Holders[0].Token != token || len(i.Waiters) != 1 {
		t.Errorf("get says %+v, want token %s", i, token)
	}
	p.let()
	if next := waiter.line(); number(t, next) <= number(t, token) {
		t.Errorf("token %s follows %s", next, token)
	}
	waiter.let()
}

// A node of a cluster dies and its replica takes over.
func TestRedisClusterFailover(t *testing.T) {
	t.Parallel()
	c := servers.StartCluster(t, 3, 3)
	s := clusterStore(c)
	s.url += "?replicas=1"
	p, token := s.hold(t, "k", "--ttl", "30s")
	for i := range 3 { // one of them has the lock
		if r := c.ReplicaOf(c.Nodes[i]); r != nil {
			c.Failover(r)
		}
	}
	if i := s.get(t, "k"); len(i.Holders) != 1 || i.Holders[0].Token != token {
		t.Errorf("get says %+v, want token %s", i, token)
	}
	p.let()
}

// A quorum goes on without a minority.
func TestRedisQuorumWithoutOne(t *testing.T) {
	t.Parallel()
	list := servers.StartMasters(t, 3, &servers.RedisConfig{Persist: true})
	s := quorumStore(list)
	p, token := s.hold(t, "k")
	waiter := s.queue(t, "k")
	list[1].Kill()
	p.let()
	if next := waiter.line(); number(t, next) <= number(t, token) {
		t.Errorf("token %s follows %s", next, token)
	}
	waiter.let()
}

// A signal ends the wait, whether the server answers or hangs.
func TestRedisSignalWhileWaiting(t *testing.T) {
	t.Parallel()
	r := servers.StartRedis(t, nil)
	s := redisStore(r)
	holder, _ := s.hold(t, "k", "--ttl", "10m")
	waiter := s.queue(t, "k")
	waiter.signal(syscall.SIGINT)
	waiter.expect(130)
	if i := s.get(t, "k"); len(i.Waiters) != 0 {
		t.Errorf("it is still in the queue: %+v", i)
	}
	waiter = s.queue(t, "k")
	r.Pause()
	began := time.Now()
	waiter.signal(syscall.SIGTERM)
	waiter.expect(143)
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("took %v", took)
	}
	r.Resume()
	holder.let()
}

func TestRedisPassword(t *testing.T) {
	t.Parallel()
	const password = "p@ss/w:rd?#%"
	r := servers.StartRedis(t, &servers.RedisConfig{Args: []string{"--requirepass", password}})
	inURL := store{url: "redis://:p%40ss%2Fw%3Ard%3F%23%25@" + r.Addr()}
	inEnv := store{url: "redis://" + r.Addr(), env: []string{"DLM_REDIS_PASSWORD=" + password}}
	for _, s := range []store{inURL, inEnv} {
		s.run(t, 0, "run", "k", "--", "true")
	}
	wrong := store{url: inEnv.url, env: []string{"DLM_REDIS_PASSWORD=S3CRET"}}
	for _, args := range [][]string{{"ls"}, {"run", "k", "--", "true"}} {
		p := wrong.start(t, args...)
		p.expect(69)
		if msg := p.said.String(); strings.Contains(msg, "S3CRET") || !strings.Contains(msg, "WRONGPASS") {
			t.Errorf("%v: message %q", args, msg)
		}
	}
	if out := wrong.run(t, 78, "doctor"); strings.Contains(out, "S3CRET") || !strings.HasPrefix(out, "critical  authentication") {
		t.Errorf("doctor says %s", out)
	}
}

func TestRedisOverTLS(t *testing.T) {
	t.Parallel()
	r := servers.StartRedis(t, &servers.RedisConfig{TLS: true})
	ca := filepath.Join(r.Dir(), "ca.crt")
	store{url: "rediss://" + r.Addr() + "?ca=" + ca}.run(t, 0, "run", "k", "--", "true")
	store{url: "rediss://" + r.Addr() + "?insecure=true"}.run(t, 0, "run", "k", "--", "true")
	store{url: "rediss://" + r.Addr() + "?server_name=localhost&ca=" + ca}.run(t, 0, "run", "k", "--", "true")
	for _, s := range []store{
		{url: "rediss://" + r.Addr()},
		{url: "rediss://" + r.Addr() + "?server_name=other&ca=" + ca},
		{url: "redis://" + r.Addr()},
	} {
		s.run(t, 69, "run", "--wait", "5s", "k", "--", "true")
		if out := s.run(t, 78, "doctor"); !strings.HasPrefix(out, "critical  TLS") {
			t.Errorf("%s: doctor says %s", s.url, out)
		}
	}
}

func TestRedisDoctor(t *testing.T) {
	t.Parallel()
	r := servers.StartRedis(t, nil)
	s := redisStore(r)
	out := s.run(t, 0, "doctor")
	if !strings.HasPrefix(out, "warning  persistence  "+r.Addr()) || !strings.Contains(out, "\n    fix: CONFIG SET appendonly yes") {
		t.Errorf("doctor says %s", out)
	}
	s.run(t, 78, "doctor", "--strict")
	r.MustDo("CONFIG", "SET", "appendonly", "yes")
	s.run(t, 0, "doctor", "--strict")
	r.MustDo("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
	r.MustDo("CONFIG", "SET", "maxmemory", "100mb")
	out = s.run(t, 78, "doctor", "--json")
	var list []struct{ Severity, Check, Server, Detail, Fix string }
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) < 8 {
		t.Fatalf("%v: %s", err, out)
	}
	if f := list[0]; f.Severity != "critical" || f.Check != "eviction" || f.Server != r.Addr() || !strings.Contains(f.Fix, "noeviction") {
		t.Errorf("the first finding is %+v", f)
	}
	r.Kill()
	if out := s.run(t, 78, "doctor"); !strings.HasPrefix(out, fmt.Sprintf("critical  connection  %s  ", r.Addr())) {
		t.Errorf("doctor says %s", out)
	}
}
