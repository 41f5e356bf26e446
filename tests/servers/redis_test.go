package servers_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

func TestRedisReplies(t *testing.T) {
	t.Parallel()
	r := servers.StartRedis(t, nil)
	tests := []struct {
		name    string
		command []string
		want    any
		code    string
	}{
		{"status", []string{"SET", "k", "a\r\nb"}, "OK", ""},
		{"bulk", []string{"GET", "k"}, "a\r\nb", ""},
		{"nil", []string{"GET", "none"}, nil, ""},
		{"empty", []string{"ECHO", ""}, "", ""},
		{"integer", []string{"DECR", "n"}, int64(-1), ""},
		{"list", []string{"MGET", "k", "none"}, []any{"a\r\nb", nil}, ""},
		{"nested", []string{"EVAL", "return {1, {'x', {}}}", "0"}, []any{int64(1), []any{"x", []any{}}}, ""},
		{"error in list", []string{"EVAL", "return {redis.error_reply('ODD no')}", "0"}, []any{servers.ReplyError("ODD no")}, ""},
		{"error", []string{"INCR", "k"}, nil, "ERR"},
		{"nil list", []string{"BLPOP", "none", "0.01"}, nil, ""},
	}
	for _, tt := range tests {
		got, err := r.Do(t.Context(), tt.command...)
		if code(err) != tt.code || tt.code == "" && err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %q = %#v, %v", tt.name, tt.command, got, err)
		}
	}
	if _, err := r.Do(t.Context()); err == nil {
		t.Error("no command at all gave no error")
	}
	if r.Role() != "master" || r.TLSConfig() != nil || r.Addr() != "127.0.0.1:"+strconv.Itoa(r.Port()) {
		t.Errorf("Role %q, TLSConfig %v, Addr %q, Port %d", r.Role(), r.TLSConfig(), r.Addr(), r.Port())
	}
	r.MustDo("CONFIG", "RESETSTAT")
	r.MustDo("GET", "k")
	r.MustDo("GET", "k")
	r.MustDo("CONFIG", "GET", "port")
	if calls := r.Commands(); calls["get"] != 2 || calls["config|get"] != 1 || calls["set"] != 0 {
		t.Errorf("Commands = %v", calls)
	}
}

func TestRedisRestart(t *testing.T) {
	t.Parallel()
	for _, persist := range []bool{false, true} {
		r := servers.StartRedis(t, &servers.RedisConfig{Persist: persist})
		r.MustDo("SET", "k", "v")
		pid, id, addr, dir := r.Pid(), r.RunID(), r.Addr(), r.Dir()
		r.Kill()
		r.Kill()
		if r.Alive() || !gone(pid) {
			t.Errorf("after Kill: Alive %t, process gone: %t", r.Alive(), gone(pid))
		}
		if _, err := r.Do(t.Context(), "PING"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("PING to a dead server: %v", err)
		}
		r.Resume() // no effect
		r.Restart()
		if !r.Alive() || r.Pid() == pid || r.RunID() == id || r.Addr() != addr || r.Dir() != dir {
			t.Errorf("after Restart: alive %t, pid %d after %d, run id %s after %s, %s after %s, %s after %s",
				r.Alive(), r.Pid(), pid, r.RunID(), id, r.Addr(), addr, r.Dir(), dir)
		}
		if got := r.MustDo("GET", "k"); (got == "v") != persist {
			t.Errorf("persist %t: GET after the restart = %v", persist, got)
		}
		pid = r.Pid()
		r.Pause()
		r.Restart() // of one that is alive, though paused
		if r.Pid() == pid || !gone(pid) {
			t.Errorf("restarted without Kill: process %d after %d, gone: %t", r.Pid(), pid, gone(pid))
		}
	}
}

// Somebody else's socket on the port is waited for, and not taken for the server.
func TestRedisPortInUse(t *testing.T) {
	t.Parallel()
	var r *servers.Redis
	var l net.Listener
	eventually(t, "the port of a server that died is ours", func() bool {
		r = servers.StartRedis(t, nil)
		r.Kill()
		var c net.ListenConfig
		var err error
		l, err = c.Listen(t.Context(), "tcp", r.Addr())
		return err == nil
	})
	time.AfterFunc(100*time.Millisecond, func() { l.Close() })
	r.Restart()
	r.MustDo("PING")
}

func TestRedisPause(t *testing.T) {
	t.Parallel()
	r := servers.StartRedis(t, nil)
	for range 3 {
		r.Pause()
		r.Pause()
		if !r.Alive() {
			t.Error("paused is not dead")
		}
		if _, err := r.Do(brief(t), "PING"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("PING to a paused server: %v", err)
		}
		// On a busy machine a brief question may not be asked at all.
		dial(t, r.Addr()).send("SET k late\r\n")
		r.Resume()
		r.Resume()
		eventually(t, "the command sent during the pause is carried out", func() bool { return r.MustDo("GET", "k") == "late" })
		r.MustDo("DEL", "k")
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.Pause()
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := r.Do(ctx, "PING"); !errors.Is(err, context.Canceled) {
		t.Errorf("PING that is cancelled: %v", err)
	}
	r.Kill()
	if r.Alive() {
		t.Error("alive after Kill in a pause")
	}
}

func TestRedisReplica(t *testing.T) {
	t.Parallel()
	primary := servers.StartRedis(t, &servers.RedisConfig{Args: []string{"--requirepass", "secret word"}})
	primary.MustDo("SET", "k", "v")
	replica := servers.StartRedis(t, &servers.RedisConfig{ReplicaOf: primary})
	check := func() {
		t.Helper()
		if role, got := replica.Role(), replica.MustDo("GET", "k"); role != "slave" || got != "v" {
			t.Errorf("role %s, GET = %v", role, got)
		}
	}
	check()
	replica.Restart()
	check()
	primary.Kill()
	replica.Restart() // it does not wait for the primary
	// A server remembers what it was made, if it is told to.
	replica.MustDo("REPLICAOF", "NO", "ONE")
	replica.MustDo("CONFIG", "REWRITE")
	replica.Restart()
	if role := replica.Role(); role != "master" {
		t.Errorf("promoted and restarted: role %s", role)
	}
}

func TestRedisTLS(t *testing.T) {
	t.Parallel()
	primary := servers.StartRedis(t, &servers.RedisConfig{TLS: true, Persist: true})
	primary.MustDo("SET", "k", "v")
	replica := servers.StartRedis(t, &servers.RedisConfig{ReplicaOf: primary})
	if got := replica.MustDo("GET", "k"); got != "v" || replica.TLSConfig() == nil {
		t.Errorf("replica: GET = %v, TLSConfig %v", got, replica.TLSConfig())
	}
	primary.Restart()
	if got := primary.MustDo("GET", "k"); got != "v" {
		t.Errorf("GET after the restart = %v", got)
	}
}

func TestMasters(t *testing.T) {
	t.Parallel()
	list := servers.StartMasters(t, 5, &servers.RedisConfig{Args: []string{"--maxmemory", "7mb"}})
	ports := map[int]bool{}
	for i, r := range list {
		ports[r.Port()] = true
		if got := r.MustDo("GET", "k"); got != nil {
			t.Errorf("server %d has the key of another one", i)
		}
		r.MustDo("SET", "k", "v")
		if got := r.MustDo("CONFIG", "GET", "maxmemory"); !reflect.DeepEqual(got, []any{"maxmemory", "7340032"}) {
			t.Errorf("server %d: maxmemory = %v", i, got)
		}
		if _, err := r.Do(t.Context(), "DEBUG", "SLEEP", "0"); err != nil {
			t.Errorf("server %d: %v", i, err)
		}
	}
	if len(ports) != 5 {
		t.Errorf("ports %v", ports)
	}
}

// The cleanup leaves nothing, whatever state servers are in.
func TestNothingLeft(t *testing.T) {
	drivertest.CheckLeaks(t)
	var pids []int
	var dirs []string
	t.Run("servers", func(t *testing.T) {
		list := servers.StartMasters(t, 4, nil)
		proxy := servers.StartProxy(t, list[0].Addr())
		proxy.Blackhole()
		for _, r := range list {
			pids = append(pids, r.Pid())
			dirs = append(dirs, r.Dir(), filepath.Dir(r.Dir()))
		}
		list[1].Pause()
		list[2].Kill()
		list[3].Restart()
		pids = append(pids, list[3].Pid())
	})
	for _, pid := range pids {
		if !gone(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
	for _, dir := range dirs {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("folder %s is left: %v", dir, err)
		}
	}
}

func TestRedisStartFails(t *testing.T) {
	t.Parallel()
	f := &fakeTB{}
	f.run(func() { servers.StartRedis(f, &servers.RedisConfig{Args: []string{"--no-such-option", "1"}}) })
	contains(t, f.fatal, "starting redis", "no-such-option", "Bad directive", "is dead (exit status 1)")
	if f.logged != "" {
		t.Errorf("said again: %q", f.logged)
	}
}

func TestRedisMisuse(t *testing.T) {
	t.Parallel()
	f := &fakeTB{}
	f.run(func() {
		r := servers.StartRedis(f, nil)
		r.Kill()
		r.Pause()
	})
	contains(t, f.fatal, "pausing redis", "is dead")
	f = &fakeTB{}
	f.run(func() { servers.StartRedis(f, nil).MustDo("NONSENSE") })
	contains(t, f.fatal, "NONSENSE", "unknown command")
	f = &fakeTB{}
	var late *servers.Redis
	f.run(func() { late = servers.StartRedis(f, nil) })
	f.run(late.Restart)
	contains(t, f.fatal, "the test is over")
	if late.Alive() {
		t.Error("started after the test")
	}
}

// A server that dies on its own is worth a line.
func TestRedisCrash(t *testing.T) {
	t.Parallel()
	f := &fakeTB{}
	f.run(func() {
		r := servers.StartRedis(f, nil)
		if _, err := r.Do(context.Background(), "SHUTDOWN", "NOSAVE"); err == nil {
			t.Error("SHUTDOWN was answered")
		}
		eventually(t, "the server shuts down", func() bool { return !r.Alive() })
	})
	contains(t, f.logged, "is dead (exit status 0)", "bye bye")
}

func TestRedisMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("CI", "")
	t.Setenv("DLM_TEST_REQUIRE", "")
	f := &fakeTB{}
	f.run(func() { servers.StartRedis(f, nil) })
	contains(t, f.skipped, "redis-server is not installed", "scripts/install-servers.sh")
	for _, name := range []string{"CI", "DLM_TEST_REQUIRE"} {
		t.Setenv(name, "1")
		f := &fakeTB{}
		f.run(func() { servers.StartCluster(f, 3, 0) })
		contains(t, f.fatal, "redis-server is not installed", name)
		if f.skipped != "" {
			t.Errorf("skipped in spite of %s: %s", name, f.skipped)
		}
		t.Setenv(name, "")
	}
}
