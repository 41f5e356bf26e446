package redislock_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// checked returns what a check finds. The client is closed at the end.
func checked(t *testing.T, client redis.UniversalClient, opts *redislock.Options) []driver.Finding {
	t.Helper()
	t.Cleanup(func() { client.Close() })
	b, err := redislock.New(client, opts)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	findings, err := b.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		if f.Check == "" || f.Detail == "" {
			t.Errorf("incomplete: %+v", f)
		}
		if f.Severity == driver.SeverityCritical && f.Fix == "" {
			t.Errorf("nothing to do: %+v", f)
		}
	}
	return findings
}

func checkedAt(t *testing.T, addr string) []driver.Finding {
	t.Helper()
	return checked(t, redis.NewClient(&redis.Options{Addr: addr}), nil)
}

// expectFinding looks for a finding that has all texts in its detail or fix.
func expectFinding(t *testing.T, findings []driver.Finding, check string, severity driver.Severity, texts ...string) driver.Finding {
	t.Helper()
	for _, f := range findings {
		if f.Check == check && f.Severity == severity &&
			!slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(f.Detail+"\n"+f.Fix, s) }) {
			return f
		}
	}
	t.Errorf("no %s finding on %s with %q:\n%s", severity, check, texts, showFindings(findings))
	return driver.Finding{}
}

// expectWorst fails if anything is worse than a severity.
func expectWorst(t *testing.T, findings []driver.Finding, most driver.Severity) {
	t.Helper()
	for _, f := range findings {
		if f.Severity > most {
			t.Errorf("worse than %s: %+v", most, f)
		}
	}
}

func showFindings(findings []driver.Finding) string {
	var b strings.Builder
	for _, f := range findings {
		fmt.Fprintf(&b, "%s %s [%s] %s\n    %s\n", f.Severity, f.Check, f.Server, f.Detail, f.Fix)
	}
	return b.String()
}

func TestCheckGoodServer(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, &servers.RedisConfig{Persist: true})
	findings := checkedAt(t, s.Addr())
	expectWorst(t, findings, driver.SeverityOK)
	for _, name := range []string{
		"connection", "version", "role", "eviction", "memory", "persistence", "replicas", "rights", "channels", "clock",
	} {
		if f := expectFinding(t, findings, name, driver.SeverityOK); f.Server != s.Addr() {
			t.Errorf("%s names server %q, want %q", name, f.Server, s.Addr())
		}
	}
	if keys := s.MustDo("DBSIZE"); keys != int64(0) {
		t.Errorf("%v keys are left behind", keys)
	}
}

func TestCheckEviction(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	for _, c := range []struct {
		policy, limit string
		want          driver.Severity
	}{
		{"noeviction", "0", driver.SeverityOK},
		{"noeviction", "100mb", driver.SeverityOK},
		{"allkeys-lru", "100mb", driver.SeverityCritical},
		{"allkeys-random", "100mb", driver.SeverityCritical},
		{"volatile-ttl", "100mb", driver.SeverityCritical},
		{"volatile-lru", "0", driver.SeverityWarning},
		{"allkeys-lfu", "0", driver.SeverityWarning},
	} {
		s.MustDo("CONFIG", "SET", "maxmemory-policy", c.policy)
		s.MustDo("CONFIG", "SET", "maxmemory", c.limit)
		f := expectFinding(t, checkedAt(t, s.Addr()), "eviction", c.want, c.policy)
		if c.want != driver.SeverityOK && !strings.Contains(f.Fix, "CONFIG SET maxmemory-policy noeviction") {
			t.Errorf("%s: fix %q", c.policy, f.Fix)
		}
		// The fix does it.
		s.MustDo("CONFIG", "SET", "maxmemory-policy", "noeviction")
		expectFinding(t, checkedAt(t, s.Addr()), "eviction", driver.SeverityOK)
	}
}

func TestCheckMemory(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	s.MustDo("SET", "ballast", strings.Repeat("x", 20<<20))
	used := func() int64 {
		_, rest, _ := strings.Cut(fmt.Sprint(s.MustDo("INFO", "memory")), "used_memory:")
		text, _, _ := strings.Cut(rest, "\r\n")
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}()
	s.MustDo("CONFIG", "SET", "maxmemory", fmt.Sprint(used+1<<20))
	expectFinding(t, checkedAt(t, s.Addr()), "memory", driver.SeverityWarning, "no new lock")
	s.MustDo("CONFIG", "SET", "maxmemory", "10mb")
	findings := checkedAt(t, s.Addr())
	expectFinding(t, findings, "memory", driver.SeverityCritical, "10 MiB", "maxmemory")
	// That memory is full is no lack of rights.
	expectFinding(t, findings, "rights", driver.SeverityOK)
}

func TestCheckPersistence(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
		want driver.Severity
		text string
	}{
		{"none", nil, driver.SeverityWarning, "forgets all locks"},
		{"snapshots", []string{"--save", "3600 1"}, driver.SeverityWarning, "snapshot"},
		{"always", []string{"--appendonly", "yes", "--appendfsync", "always"}, driver.SeverityOK, "always"},
		{"everysec", []string{"--appendonly", "yes", "--appendfsync", "everysec"}, driver.SeverityOK, "one or two seconds"},
		{"no", []string{"--appendonly", "yes", "--appendfsync", "no"}, driver.SeverityWarning, "appendfsync everysec"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := servers.StartRedis(t, &servers.RedisConfig{Args: c.args})
			expectFinding(t, checkedAt(t, s.Addr()), "persistence", c.want, c.text)
		})
	}
}

func TestCheckFailedSnapshot(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, &servers.RedisConfig{Args: []string{"--save", "3600 1"}})
	// The snapshot cannot take the place of a folder.
	if err := os.MkdirAll(filepath.Join(s.Dir(), "dump.rdb", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.MustDo("BGSAVE")
	eventually(t, "the snapshot fails", func() bool {
		return strings.Contains(fmt.Sprint(s.MustDo("INFO", "persistence")), "rdb_last_bgsave_status:err")
	})
	expectFinding(t, checkedAt(t, s.Addr()), "persistence", driver.SeverityCritical, "MISCONF", "BGSAVE")
	s.MustDo("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")
	expectWorst(t, checkedAt(t, s.Addr()), driver.SeverityWarning)
}

func TestCheckReplicas(t *testing.T) {
	t.Parallel()
	primary := servers.StartRedis(t, nil)
	replica := servers.StartRedis(t, &servers.RedisConfig{ReplicaOf: primary})
	eventually(t, "the replica is online", func() bool {
		return strings.Contains(fmt.Sprint(primary.MustDo("INFO", "replication")), "state=online")
	})
	open := func() redis.UniversalClient { return redis.NewClient(&redis.Options{Addr: primary.Addr()}) }

	findings := checked(t, open(), nil)
	expectFinding(t, findings, "replicas", driver.SeverityWarning, "1 replicas are connected", "Options.Replicas", "min-replicas-to-write 1")
	expectFinding(t, findings, "clock", driver.SeverityOK, "2 servers")
	expectFinding(t, checked(t, open(), &redislock.Options{Replicas: 1}), "replicas", driver.SeverityOK)
	expectFinding(t, checked(t, open(), &redislock.Options{Replicas: 2}), "replicas", driver.SeverityCritical, "Options.Replicas is 2")

	primary.MustDo("CONFIG", "SET", "min-replicas-to-write", "2")
	expectFinding(t, checked(t, open(), nil), "replicas", driver.SeverityCritical, "NOREPLICAS")
	primary.MustDo("CONFIG", "SET", "min-replicas-to-write", "0")

	replica.MustDo("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
	f := expectFinding(t, checked(t, open(), nil), "eviction", driver.SeverityWarning, "after a failover", "allkeys-lru")
	if f.Server != replica.Addr() {
		t.Errorf("names %q, want %q", f.Server, replica.Addr())
	}
	replica.Pause()
	began := time.Now()
	expectFinding(t, checked(t, open(), nil), "replicas", driver.SeverityUnknown, "cannot be looked at")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	replica.Resume()

	findings = checkedAt(t, replica.Addr())
	expectFinding(t, findings, "role", driver.SeverityCritical, "a replica of "+primary.Addr(), "redis+sentinel://")
	replica.MustDo("CONFIG", "SET", "replica-read-only", "no")
	expectFinding(t, checkedAt(t, replica.Addr()), "role", driver.SeverityCritical, "takes writes")
}

// without makes a user who has all rights but some, and returns a client.
func without(s *servers.Redis, rights ...string) *redis.Client {
	s.MustDo(append([]string{"ACL", "SETUSER", "app", "reset", "on", ">secret", "~*", "&*", "+@all"}, rights...)...)
	return redis.NewClient(&redis.Options{Addr: s.Addr(), Username: "app", Password: "secret"})
}

func TestCheckRights(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	for _, c := range []struct {
		name     string
		rights   []string
		check    string
		severity driver.Severity
		texts    []string
	}{
		{"a command", []string{"-zrank"}, "rights", driver.SeverityCritical, []string{"app", "ZRANK: "}},
		{"commands", []string{"-pexpire", "-hset"}, "rights", driver.SeverityCritical, []string{"PEXPIRE: ", "HSET: "}},
		{"no scripts", []string{"-@scripting"}, "rights", driver.SeverityCritical, []string{"may not run the scripts", "eval"}},
		{"no script that is new", []string{"-eval"}, "rights", driver.SeverityCritical, []string{"may not run the scripts", "eval"}},
		{"keys", []string{"resetkeys", "~other:*"}, "rights", driver.SeverityCritical, []string{"app", "key"}},
		{"no publishing", []string{"-publish"}, "rights", driver.SeverityCritical, []string{"PUBLISH: "}},
		{"channels", []string{"resetchannels"}, "rights", driver.SeverityCritical, []string{"PUBLISH: ", "channel"}},
		{"no subscribing", []string{"-subscribe"}, "channels", driver.SeverityWarning, []string{"subscribe"}},
	} {
		// Otherwise the server knows the probe from the case before.
		s.MustDo("SCRIPT", "FLUSH")
		findings := checked(t, without(s, c.rights...), nil)
		f := expectFinding(t, findings, c.check, c.severity, c.texts...)
		if !strings.Contains(f.Fix, "ACL SETUSER dlm reset on >PASSWORD ~dlm:* &dlm:!* +eval ") {
			t.Errorf("%s: fix %q", c.name, f.Fix)
		}
	}
	findings := checked(t, without(s, "-wait"), &redislock.Options{Replicas: 1})
	expectFinding(t, findings, "rights", driver.SeverityCritical, "WAIT: ", "+wait")
}

// aclLine is the line that a check says to type, for a server that is asked
// with few rights.
func aclLine(t *testing.T, findings []driver.Finding, password string) []string {
	t.Helper()
	f := expectFinding(t, findings, "rights", driver.SeverityCritical, "ACL SETUSER")
	_, line, _ := strings.Cut(f.Fix, "ACL SETUSER ")
	words := append([]string{"ACL", "SETUSER"}, strings.Fields(line)...)
	for i, w := range words {
		words[i] = strings.Replace(w, "PASSWORD", password, 1)
	}
	return words
}

// makeEveryCall makes every kind of call there is.
func makeEveryCall(t *testing.T, client redis.UniversalClient, opts *redislock.Options) {
	t.Helper()
	open := func() *dlm.Manager {
		m, err := redislock.NewLockManager(client, nil, opts)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close(context.Background()) })
		return m
	}
	m, other := open(), open()
	for _, key := range []string{"a", "b", "c", "d"} {
		for _, o := range []*dlm.AcquireOptions{nil, {Shared: true}, {Limit: 2}} {
			l, err := m.Acquire(t.Context(), key, time.Minute, o)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Extend(t.Context(), time.Minute); err != nil {
				t.Fatal(err)
			}
			handed := make(chan error, 1)
			go func() {
				next, err := other.Acquire(t.Context(), key, time.Minute, nil)
				if err == nil {
					err = next.Release(t.Context())
				}
				handed <- err
			}()
			// With permits in use the other one asks for another limit.
			if o == nil || o.Limit < 2 {
				eventually(t, "the other one waits", func() bool {
					info, err := m.GetLock(t.Context(), key)
					if err != nil {
						t.Fatal(err)
					}
					return len(info.Waiters) == 1
				})
			} else if err := <-handed; !errors.As(err, new(*dlm.LimitError)) {
				t.Fatal(err)
			} else {
				handed <- nil
			}
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-handed; err != nil {
				t.Fatal(err)
			}
		}
		if _, err := m.Acquire(t.Context(), key, time.Minute, nil); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := m.ListLocks(t.Context(), "", "", 0); err != nil || len(list) != 4 {
		t.Errorf("list: %d locks, %v", len(list), err)
	}
	if removed, err := m.ForceRelease(t.Context(), "a", 0); err != nil || len(removed) != 1 {
		t.Errorf("force: %v, %v", removed, err)
	}
}

// The line that the check prints is enough for everything.
func TestCheckLineSuffices(t *testing.T) {
	t.Parallel()
	t.Run("single", func(t *testing.T) {
		t.Parallel()
		s := servers.StartRedis(t, &servers.RedisConfig{Persist: true})
		s.MustDo("ACL", "SETUSER", "app", "reset", "on", ">secret")
		line := aclLine(t, checked(t, redis.NewClient(&redis.Options{
			Addr: s.Addr(), Username: "app", Password: "secret",
		}), nil), "pw")
		s.MustDo(line...)
		s.MustDo("ACL", "SETUSER", "default", "off")
		client := redis.NewClient(&redis.Options{Addr: s.Addr(), Username: "dlm", Password: "pw"})
		expectWorst(t, checked(t, client, nil), driver.SeverityOK)
		makeEveryCall(t, client, nil)
	})
	t.Run("database and prefix", func(t *testing.T) {
		t.Parallel()
		s := servers.StartRedis(t, &servers.RedisConfig{Persist: true})
		opts := &redislock.Options{Prefix: "x*y:"}
		s.MustDo("ACL", "SETUSER", "app", "reset", "on", ">secret", "+select")
		line := aclLine(t, checked(t, redis.NewClient(&redis.Options{
			Addr: s.Addr(), Username: "app", Password: "secret", DB: 1,
		}), opts), "pw")
		for i := range line { // as redis-cli reads it
			if strings.HasPrefix(line[i], `"`) {
				line[i] = strings.ReplaceAll(strings.Trim(line[i], `"`), `\\`, `\`)
			}
		}
		s.MustDo(line...)
		client := redis.NewClient(&redis.Options{Addr: s.Addr(), Username: "dlm", Password: "pw", DB: 1})
		expectWorst(t, checked(t, client, opts), driver.SeverityOK)
		makeEveryCall(t, client, opts)
		if err := client.Set(t.Context(), "xzy:{a}", "", 0).Err(); err == nil {
			t.Error("it gives rights to other keys")
		}
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		c := servers.StartCluster(t, 3, 0)
		line := aclLine(t, withoutRights(t, c), "pw")
		for _, s := range c.Nodes {
			s.MustDo(line...)
		}
		client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), Username: "dlm", Password: "pw"})
		expectWorst(t, checked(t, client, nil), driver.SeverityWarning)
		makeEveryCall(t, client, nil)
	})
}

// withoutRights checks a cluster as a user who may do next to nothing.
func withoutRights(t *testing.T, c *servers.Cluster) []driver.Finding {
	t.Helper()
	for _, s := range c.Nodes {
		s.MustDo("ACL", "SETUSER", "app", "reset", "on", ">secret", "+cluster")
	}
	return checked(t, redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: c.Addrs(), Username: "app", Password: "secret",
	}), nil)
}

func TestCheckAuthentication(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, &servers.RedisConfig{Args: []string{"--requirepass", "right"}})
	for _, c := range []struct {
		name string
		o    redis.Options
	}{
		{"no password", redis.Options{}},
		{"wrong password", redis.Options{Password: "wrong-secret"}},
		{"wrong user", redis.Options{Username: "nobody", Password: "wrong-secret"}},
		{"RESP2", redis.Options{Password: "wrong-secret", Protocol: 2}},
	} {
		c.o.Addr = s.Addr()
		findings := checked(t, redis.NewClient(&c.o), nil)
		if len(findings) != 1 {
			t.Errorf("%s: %s", c.name, showFindings(findings))
		}
		expectFinding(t, findings, "authentication", driver.SeverityCritical)
		if strings.Contains(showFindings(findings), "wrong-secret") {
			t.Errorf("%s: it shows the password", c.name)
		}
	}
}

func TestCheckTLS(t *testing.T) {
	t.Parallel()
	secure := servers.StartRedis(t, &servers.RedisConfig{TLS: true, Persist: true})
	plain := servers.StartRedis(t, nil)
	client := func(addr string, config *tls.Config) *redis.Client {
		return redis.NewClient(&redis.Options{Addr: addr, TLSConfig: config, DialTimeout: time.Second, DialerRetries: 1})
	}
	findings := checked(t, client(secure.Addr(), secure.TLSConfig()), nil)
	expectWorst(t, findings, driver.SeverityOK)
	expectFinding(t, findings, "connection", driver.SeverityOK, "over TLS")
	for _, c := range []struct {
		name   string
		client *redis.Client
		text   string
	}{
		{"plain client", client(secure.Addr(), nil), "the client does not"},
		{"plain server", client(plain.Addr(), secure.TLSConfig()), "the server's port does not"},
		{"unknown authority", client(secure.Addr(), &tls.Config{}), "unknown authority"},
	} {
		findings := checked(t, c.client, nil)
		if len(findings) != 1 {
			t.Errorf("%s: %s", c.name, showFindings(findings))
		}
		expectFinding(t, findings, "TLS", driver.SeverityCritical, c.text, "TLSConfig")
	}
}

func TestCheckUnreachable(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	s.Pause()
	expectFinding(t, checkedAt(t, s.Addr()), "connection", driver.SeverityCritical, "no answer")
	// Contexts end it, whatever the client does with them.
	client := redis.NewClient(&redis.Options{Addr: s.Addr(), ReadTimeout: time.Minute, DialTimeout: time.Minute})
	b, err := redislock.New(client, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	findings, err := b.Check(ctx)
	if err != nil {
		t.Error(err)
	}
	expectFinding(t, findings, "connection", driver.SeverityCritical, "no answer")
	ctx, stop := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, stop)
	if findings, err := b.Check(ctx); !errors.Is(err, context.Canceled) || findings != nil {
		t.Errorf("got %v, %v", findings, err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
	if _, err := b.Check(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	s.Resume()
	client.Close()
	s.Kill()
	expectFinding(t, checkedAt(t, s.Addr()), "connection", driver.SeverityCritical, "refused")
	b.Close()
	if _, err := b.Check(t.Context()); !errors.Is(err, driver.ErrClosed) {
		t.Error(err)
	}
}

func TestCheckNotRedis(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(s.Close)
	expectFinding(t, checkedAt(t, strings.TrimPrefix(s.URL, "http://")), "product", driver.SeverityCritical, "no Redis")
}

// fakeServer speaks the protocol and gives the answers of a function, "" for
// those to unknown commands.
func fakeServer(t *testing.T, answer func(words []string) string) (addr string) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for r := bufio.NewReader(conn); ; {
					words, err := readCommand(r)
					if err != nil {
						return
					}
					text := answer(words)
					if text == "" {
						text = "-ERR unknown command `" + words[0] + "`\r\n"
					}
					if _, err := conn.Write([]byte(text)); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

func bulk(text string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text) }

func TestCheckTooOld(t *testing.T) {
	t.Parallel()
	addr := fakeServer(t, func(words []string) string {
		switch words[0] {
		case "time":
			return "*2\r\n" + bulk("1790000000") + bulk("7")
		case "info":
			return bulk("# Server\r\nredis_version:5.0.7\r\nrole:master\r\n")
		}
		return ""
	})
	expectFinding(t, checkedAt(t, addr), "version", driver.SeverityCritical, "5.0.7", "6.2")
}

// The clock of the primary, which is not a real one, is ahead of its replica's.
func TestCheckClocks(t *testing.T) {
	t.Parallel()
	replica := servers.StartRedis(t, nil)
	for _, c := range []struct {
		ahead time.Duration
		want  driver.Severity
		texts []string
	}{
		{0, driver.SeverityOK, []string{"2 servers"}},
		{300 * time.Millisecond, driver.SeverityOK, []string{"2 servers"}},
		{5 * time.Second, driver.SeverityWarning, []string{replica.Addr(), "ahead of", "chrony"}},
		{-5 * time.Second, driver.SeverityWarning, []string{replica.Addr(), "ahead of", "chrony"}},
	} {
		addr := fakeServer(t, func(words []string) string {
			switch words[0] {
			case "time":
				now := time.Now().Add(c.ahead)
				return "*2\r\n" + bulk(fmt.Sprint(now.Unix())) + bulk(fmt.Sprint(now.Nanosecond()/1000))
			case "info":
				return bulk(fmt.Sprintf("redis_version:7.2.0\r\nrole:master\r\nconnected_slaves:1\r\n"+
					"slave0:ip=127.0.0.1,port=%d,state=online,offset=1,lag=0\r\n", replica.Port()))
			}
			return ""
		})
		expectFinding(t, checkedAt(t, addr), "clock", c.want, c.texts...)
	}
}

func readCommand(r *bufio.Reader) ([]string, error) {
	var n int
	if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil {
		return nil, err
	}
	words := make([]string, n)
	for i := range words {
		var size int
		if _, err := fmt.Fscanf(r, "$%d\r\n", &size); err != nil {
			return nil, err
		}
		text := make([]byte, size+2)
		for have := 0; have < len(text); {
			got, err := r.Read(text[have:])
			if err != nil {
				return nil, err
			}
			have += got
		}
		words[i] = string(text[:size])
	}
	return words, nil
}

func TestCheckQuestionsForbidden(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, &servers.RedisConfig{Args: []string{"--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"}})
	// INFO says it too.
	findings := checked(t, without(s, "-config"), nil)
	expectFinding(t, findings, "eviction", driver.SeverityCritical, "allkeys-lru")
	expectFinding(t, findings, "persistence", driver.SeverityWarning)
	// So does CONFIG GET.
	findings = checked(t, without(s, "-info"), nil)
	expectFinding(t, findings, "eviction", driver.SeverityCritical, "allkeys-lru")
	for _, name := range []string{"version", "role", "memory", "persistence", "replicas"} {
		expectFinding(t, findings, name, driver.SeverityUnknown)
	}
	findings = checked(t, without(s, "-info", "-config"), nil)
	expectWorst(t, findings, driver.SeverityUnknown)
	expectFinding(t, findings, "eviction", driver.SeverityUnknown, "noeviction")
	expectFinding(t, findings, "rights", driver.SeverityOK)
	expectFinding(t, findings, "channels", driver.SeverityOK)
}

func TestCheckSentinel(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, nil)
	findings := checked(t, failover(s)(nil), nil)
	expectWorst(t, findings, driver.SeverityWarning)
	if f := expectFinding(t, findings, "role", driver.SeverityOK); f.Server != s.Primary().Addr() {
		t.Errorf("names %q, want %q", f.Server, s.Primary().Addr())
	}
	expectFinding(t, findings, "replicas", driver.SeverityWarning, "1 replicas")
	expectFinding(t, findings, "clock", driver.SeverityOK, "2 servers")
	for _, r := range s.Sentinels {
		r.Kill()
	}
	expectFinding(t, checked(t, failover(s)(nil), nil), "connection", driver.SeverityCritical, "entinel")
}

func TestCheckCluster(t *testing.T) {
	t.Parallel()
	c := servers.StartCluster(t, 3, 3)
	findings := checked(t, cluster(c)(nil), nil)
	expectWorst(t, findings, driver.SeverityWarning)
	for _, name := range []string{"connection", "rights", "channels", "cluster", "eviction"} {
		var got []string
		for _, f := range findings {
			if f.Check == name && f.Severity == driver.SeverityOK {
				got = append(got, f.Server)
			}
		}
		slices.Sort(got)
		want := c.Addrs()[:3]
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s is good on %v, want %v:\n%s", name, got, want, showFindings(findings))
		}
	}
	expectFinding(t, findings, "clock", driver.SeverityOK, "6 servers")
	for _, s := range c.Nodes {
		if keys := s.MustDo("DBSIZE"); keys != int64(0) {
			t.Errorf("%v keys are left behind on %s", keys, s.Addr())
		}
	}

	// Rights may differ from node to node.
	for _, s := range c.Nodes {
		s.MustDo("ACL", "SETUSER", "app", "reset", "on", ">secret", "~*", "&*", "+@all")
	}
	odd := c.Nodes[1]
	odd.MustDo("ACL", "SETUSER", "app", "-hset")
	findings = checked(t, redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: c.Addrs(), Username: "app", Password: "secret",
	}), nil)
	if f := expectFinding(t, findings, "rights", driver.SeverityCritical, "HSET: "); f.Server != odd.Addr() {
		t.Errorf("names %q, want %q", f.Server, odd.Addr())
	}

	expectFinding(t, checkedAt(t, c.Nodes[0].Addr()), "cluster", driver.SeverityCritical, "redis.NewClusterClient")
}

func TestCheckClusterWithHoles(t *testing.T) {
	t.Parallel()
	c := servers.StartCluster(t, 3, 0)
	client := cluster(c)(nil)
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	c.Nodes[2].Kill()
	eventually(t, "the slots fail", func() bool {
		return strings.Contains(fmt.Sprint(c.Nodes[0].MustDo("CLUSTER", "INFO")), "cluster_slots_fail:5")
	})
	findings := checked(t, client, nil)
	expectFinding(t, findings, "cluster", driver.SeverityCritical, "of 16384 slots")
}

func TestCheckClusterClientOnSingleServer(t *testing.T) {
	t.Parallel()
	s := servers.StartRedis(t, nil)
	findings := checked(t, redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{s.Addr()}}), nil)
	expectFinding(t, findings, "cluster", driver.SeverityCritical, "redis.NewClient")
}
