package etcdlock_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	client := connect(t, single(t), nil)
	for _, c := range []struct {
		name string
		opts etcdlock.Options
		want string
	}{
		{"long prefix", etcdlock.Options{Prefix: strings.Repeat("x", 129)}, "Options.Prefix has 129 bytes, must have at most 128"},
		{"prefix that is no text", etcdlock.Options{Prefix: "\xff"}, "Options.Prefix"},
		{"prefix with NUL", etcdlock.Options{Prefix: "a\x00"}, "must not contain NUL"},
		{"short WaiterTTL", etcdlock.Options{WaiterTTL: time.Millisecond}, "Options.WaiterTTL is 1ms, must be between 1s and 1h"},
		{"long WaiterTTL", etcdlock.Options{WaiterTTL: 2 * time.Hour}, "Options.WaiterTTL is 2h0m0s, must be between 1s and 1h"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := etcdlock.New(client, &c.opts)
			if !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want ErrInvalid and %q", err, c.want)
			}
		})
	}
	if _, err := etcdlock.New(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("without a client: %v", err)
	}
}

// attempt asks for a lock once, and returns why it cannot be had.
func attempt(t *testing.T, cfg clientv3.Config, prefix string) error {
	t.Helper()
	cfg.Logger = zap.NewNop()
	client, err := clientv3.New(cfg)
	if err != nil {
		return err
	}
	defer client.Close()
	b, err := etcdlock.New(client, &etcdlock.Options{Prefix: prefix})
	if err != nil {
		return err
	}
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	lease, err := b.Acquire(ctx, driver.Request{Key: "k", Owner: "o", TTL: 5 * time.Second, Limit: 1})
	if err == nil {
		err = b.Release(ctx, lease)
	}
	return err
}

func wantProblem(t *testing.T, err error, sentinel error, p etcdlock.Problem) {
	t.Helper()
	e, ok := errors.AsType[*etcdlock.ServerError](err)
	if !ok || e.Problem != p || !errors.Is(err, sentinel) {
		t.Errorf("%v, want the problem %q and %v", err, p, sentinel)
	}
}

func TestRights(t *testing.T) {
	t.Parallel()
	members := single(t)
	admin := connect(t, members, nil)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(admin.RoleAdd(ctx, "root"))
	must(admin.RoleAdd(ctx, "locks"))
	must(admin.RoleGrantPermission(ctx, "locks", "mine/", clientv3.GetPrefixRangeEnd("mine/"), clientv3.PermissionType(clientv3.PermReadWrite)))
	must(admin.UserAdd(ctx, "root", "secret"))
	must(admin.UserGrantRole(ctx, "root", "root"))
	must(admin.UserAdd(ctx, "app", "secret"))
	must(admin.UserGrantRole(ctx, "app", "locks"))
	must(admin.AuthEnable(ctx))

	cfg := clientConfig(members)
	cfg.Username, cfg.Password = "app", "secret"
	if err := attempt(t, cfg, "mine/"); err != nil {
		t.Errorf("with the rights that are needed: %v", err)
	}
	wantProblem(t, attempt(t, cfg, "theirs/"), driver.ErrInvalid, etcdlock.ProblemPermission)
	if err := attempt(t, cfg, "theirs/"); err == nil || !strings.Contains(err.Error(), `"theirs/`) {
		t.Errorf("the range is not named: %v", err)
	}
	anonymous := clientConfig(members)
	wantProblem(t, attempt(t, anonymous, "mine/"), driver.ErrInvalid, etcdlock.ProblemAuth)
	cfg.Password = "wrong"
	if err := attempt(t, cfg, "mine/"); err == nil {
		t.Error("a wrong password passed")
	}

	// A watch needs the rights too.
	cfg.Password = "secret"
	client, err := clientv3.New(cfg)
	must(client, err)
	t.Cleanup(func() { client.Close() })
	m, err := etcdlock.NewLockManager(client, nil, &etcdlock.Options{Prefix: "mine/"})
	must(m, err)
	t.Cleanup(func() { _ = m.Close(context.Background()) })
	first, err := m.AcquireLock(ctx, "k", 10*time.Second)
	must(first, err)
	got := make(chan error, 1)
	go func() {
		l, err := m.AcquireLock(ctx, "k", 10*time.Second)
		if err == nil {
			err = l.Release(ctx)
		}
		got <- err
	}()
	time.AfterFunc(300*time.Millisecond, func() { _ = first.Release(ctx) })
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestNotEtcd(t *testing.T) {
	t.Parallel()
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	addr := web.Listener.Addr().String()
	wantProblem(t, attempt(t, clientv3.Config{Endpoints: []string{addr}}, ""), driver.ErrInvalid, etcdlock.ProblemNotEtcd)

	secure := servers.StartEtcdCluster(t, 1, &servers.EtcdConfig{TLS: true})
	if err := attempt(t, clientConfig(secure), ""); err != nil {
		t.Errorf("over TLS: %v", err)
	}
	cfg := clientConfig(secure)
	cfg.TLS.RootCAs = nil
	wantProblem(t, attempt(t, cfg, ""), driver.ErrInvalid, etcdlock.ProblemTLS)
	plain := clientConfig(single(t))
	plain.TLS = secure[0].TLSConfig()
	wantProblem(t, attempt(t, plain, ""), driver.ErrInvalid, etcdlock.ProblemTLS)

	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	if err := attempt(t, clientv3.Config{Endpoints: []string{closed}}, ""); !errors.Is(err, driver.ErrNotApplied) {
		t.Errorf("nobody listens: %v, want ErrNotApplied", err)
	}
}

// What is not of a lock is never overwritten or deleted (OWN9).
func TestForeignKeys(t *testing.T) {
	t.Parallel()
	r := newRig(t, single(t))
	for name, key := range map[string]string{
		"a key where the tickets are":     r.prefix + "k\x00junk",
		"a ticket with an unknown format": r.prefix + "k\x001/y/o",
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := r.admin.Put(r.within(), key, "precious"); err != nil {
				t.Fatal(err)
			}
			m := r.manager(nil, nil)
			_, err := m.TryLock(r.within(), "k", time.Second)
			wantProblem(t, err, driver.ErrInvalid, etcdlock.ProblemForeign)
			if _, err := m.ForceRelease(r.within(), "k", 0); err != nil {
				t.Error(err)
			}
			if list, err := m.ListLocks(r.within(), "", "", 0); err != nil || len(list) > 1 {
				t.Errorf("%v, %v", list, err)
			}
			resp, err := r.admin.Get(r.within(), key)
			if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != "precious" {
				t.Errorf("the key is now %v, %v", resp, err)
			}
			if _, err := r.admin.Delete(r.within(), key); err != nil {
				t.Fatal(err)
			}
			l, err := m.TryLock(r.within(), "k", time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Release(r.within()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A full database refuses locks, but takes releases, and works again when there
// is space (REL7).
func TestNoSpace(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartEtcdCluster(t, 1, &servers.EtcdConfig{Args: []string{"--quota-backend-bytes", "1048576"}}))
	m := r.manager(nil, &dlm.LockConfig{MaxRetries: 1, RetryInterval: 10 * time.Millisecond})
	l := r.lock(m, "held", 30*time.Second)
	for range 100 {
		if _, err := r.admin.Put(r.within(), "fill", strings.Repeat("x", 100_000)); err != nil {
			break
		}
	}
	_, err := m.TryLock(r.within(), "k", time.Second)
	wantProblem(t, err, driver.ErrNotApplied, etcdlock.ProblemNoSpace)
	findings, err := m.Check(r.within())
	if err != nil {
		t.Fatal(err)
	}
	critical := false
	for _, f := range findings {
		critical = critical || f.Check == "alarms" && f.Severity == driver.SeverityCritical
	}
	if !critical {
		t.Errorf("the alarm is not found: %+v", findings)
	}
	r.held(l)
	r.release(l)

	resp, err := r.admin.Delete(r.within(), "fill")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.admin.Compact(r.within(), resp.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if _, err := r.admin.Defragment(r.within(), r.admin.Endpoints()[0]); err != nil {
		t.Fatal(err)
	}
	if _, err := r.admin.AlarmDisarm(r.within(), &clientv3.AlarmMember{}); err != nil {
		t.Fatal(err)
	}
	r.release(r.lock(m, "k", 5*time.Second))
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		members []*servers.Etcd
		warns   []string // checks that are not all right
	}{
		{"one", single(t), []string{"members"}},
		{"old", old(t), []string{"members", "version"}},
		{"three", three(t), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.members)
			m := r.manager(nil, nil)
			findings, err := m.Check(r.within())
			if err != nil {
				t.Fatal(err)
			}
			bad := map[string]bool{}
			seen := map[string]bool{}
			for _, f := range findings {
				seen[f.Check] = true
				if f.Severity != driver.SeverityOK {
					bad[f.Check] = true
					if f.Fix == "" {
						t.Errorf("nothing is said about what to change: %+v", f)
					}
				}
			}
			for _, want := range c.warns {
				if !bad[want] {
					t.Errorf("no warning about %s: %+v", want, findings)
				}
				delete(bad, want)
			}
			if len(bad) > 0 {
				t.Errorf("warnings about %v: %+v", bad, findings)
			}
			for _, want := range []string{"version", "space", "alarms", "rights", "lease", "members"} {
				if !seen[want] {
					t.Errorf("%s was not looked at", want)
				}
			}
		})
	}
}
