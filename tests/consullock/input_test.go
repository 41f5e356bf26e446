package consullock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/consullock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// attempt asks for a lock once, and returns why it cannot be had.
func attempt(t *testing.T, cfg *consullock.Config, opts *consullock.Options) error {
	t.Helper()
	b, err := consullock.Open(cfg, opts)
	if err != nil {
		return err
	}
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	lease, err := b.Acquire(ctx, driver.Request{Key: "k", Owner: "o", TTL: 15 * time.Second, Limit: 1})
	if err == nil {
		err = b.Release(ctx, lease)
	}
	return err
}

// token makes a token with some rules.
func token(t *testing.T, s *servers.Consul, rules string) string {
	t.Helper()
	name := strings.NewReplacer("/", "-", "#", "-").Replace(t.Name()) + fmt.Sprint(prefixes.Add(1))
	body, err := json.Marshal(map[string]string{"Name": name, "Rules": rules})
	if err != nil {
		t.Fatal(err)
	}
	s.Ask(http.MethodPut, "/v1/acl/policy", string(body))
	body, err = json.Marshal(map[string]any{"Policies": []map[string]string{{"Name": name}}})
	if err != nil {
		t.Fatal(err)
	}
	var made struct{ SecretID string }
	if err := json.Unmarshal([]byte(s.Ask(http.MethodPut, "/v1/acl/token", string(body))), &made); err != nil {
		t.Fatal(err)
	}
	return made.SecretID
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	plain := servers.StartConsulCluster(t, 1, &servers.ConsulConfig{DefaultSessions: true})
	acl := servers.StartConsulCluster(t, 1, &servers.ConsulConfig{ACL: true})
	secure := servers.StartConsulCluster(t, 1, &servers.ConsulConfig{TLS: true})
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }))
	t.Cleanup(web.Close)
	old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"Config":{"Version":"1.9.17","Datacenter":"dc1","NodeName":"n","Server":true}}`)
	}))
	t.Cleanup(old.Close)
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) }))
	t.Cleanup(busy.Close)
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := l.Addr().String()
	l.Close()

	const session = `session_prefix "" { policy = "write" } `
	write := func(prefix string) string { return fmt.Sprintf(`key_prefix %q { policy = "write" } `, prefix) }
	at := func(list []*servers.Consul, token string) *consullock.Config {
		cfg := config(list, nil)
		cfg.Token = token
		return cfg
	}
	withTLS := func(cfg *consullock.Config, trust bool) *consullock.Config {
		cfg.TLS = secure[0].TLSConfig()
		if !trust {
			cfg.TLS.RootCAs = nil
		}
		return cfg
	}
	withoutTLS := func(cfg *consullock.Config) *consullock.Config {
		cfg.TLS = nil
		return cfg
	}
	inDatacenter := config(plain, nil)
	inDatacenter.Datacenter = "nowhere"
	for _, c := range []struct {
		name     string
		cfg      *consullock.Config
		opts     *consullock.Options
		sentinel error
		problem  consullock.Problem
		text     string
	}{
		{"as by default", config(plain, nil), nil, nil, "", ""},
		{"https", config(secure, nil), nil, nil, "", ""},
		{"two, of which the first is dead", &consullock.Config{Addresses: []string{nobody, plain[0].Addr()}}, nil, nil, "", ""},
		{"all rights", config(acl, nil), nil, nil, "", ""},
		{"the rights that are needed", at(acl, token(t, acl[0], session+write("mine/"))), &consullock.Options{Prefix: "mine/"}, nil, "", ""},
		{"no token", at(acl, ""), nil, driver.ErrInvalid, consullock.ProblemPermission, `key_prefix "dlm/" { policy = "write" }`},
		{"wrong token", at(acl, "9d0b5b6e-0000-4000-8000-000000000000"), nil, driver.ErrInvalid, consullock.ProblemToken, ""},
		{"no right to sessions", at(acl, token(t, acl[0], write("dlm/"))), nil, driver.ErrInvalid, consullock.ProblemPermission, "session_prefix"},
		{"no right to keys", at(acl, token(t, acl[0], session)), nil, driver.ErrInvalid, consullock.ProblemPermission, `key_prefix "dlm/"`},
		{
			"another prefix", at(acl, token(t, acl[0], session+write("theirs/"))), &consullock.Options{Prefix: "mine/"},
			driver.ErrInvalid, consullock.ProblemPermission, `key_prefix "mine/"`,
		},
		{
			"no right to the lock itself", at(acl, token(t, acl[0], session+write("dlm/")+`key_prefix "dlm/k" { policy = "read" }`)), nil,
			driver.ErrInvalid, consullock.ProblemPermission, "key_prefix",
		},
		{"http to https", withoutTLS(config(secure, nil)), nil, driver.ErrInvalid, consullock.ProblemTLS, ""},
		{"https to http", withTLS(config(plain, nil), true), nil, driver.ErrInvalid, consullock.ProblemTLS, ""},
		{"unknown authority", withTLS(config(secure, nil), false), nil, driver.ErrInvalid, consullock.ProblemTLS, ""},
		{"wrong datacenter", inDatacenter, nil, driver.ErrInvalid, consullock.ProblemDatacenter, ""},
		{"a session that is long enough", config(plain, nil), &consullock.Options{MinSessionTTL: time.Second, WaiterTTL: time.Second}, nil, "", ""},
		{"a web server", &consullock.Config{Addresses: []string{web.Listener.Addr().String()}}, nil, driver.ErrInvalid, consullock.ProblemNotConsul, ""},
		{
			"an old server", &consullock.Config{Addresses: []string{old.Listener.Addr().String()}}, nil,
			driver.ErrInvalid, consullock.ProblemTooOld, "1.9.17, must be 1.10 or later",
		},
		{"a busy server", &consullock.Config{Addresses: []string{busy.Listener.Addr().String()}}, nil, driver.ErrNotApplied, consullock.ProblemBusy, ""},
		{"nobody there", &consullock.Config{Addresses: []string{nobody}}, nil, driver.ErrNotApplied, "", "refused"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			err := attempt(t, c.cfg, c.opts)
			if c.sentinel == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			e, ok := errors.AsType[*consullock.ServerError](err)
			if !errors.Is(err, c.sentinel) || ok != (c.problem != "") || ok && e.Problem != c.problem || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want the problem %q, %v and %q", err, c.problem, c.sentinel, c.text)
			}
			if c.cfg.Token != "" && strings.Contains(err.Error(), c.cfg.Token) {
				t.Error("the error shows the token")
			}
		})
	}
}

// Sessions that are shorter than servers allow are refused with what to change.
func TestShortSessions(t *testing.T) {
	t.Parallel()
	list := servers.StartConsulCluster(t, 1, &servers.ConsulConfig{DefaultSessions: true})
	b, err := consullock.Open(config(list, nil), &consullock.Options{MinSessionTTL: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	_, err = b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "o", TTL: time.Second, Limit: 1})
	e, ok := errors.AsType[*consullock.ServerError](err)
	if !ok || e.Problem != consullock.ProblemSession || !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), "session_ttl_min") {
		t.Errorf("%v, want what to change", err)
	}
}

// A client that is passed in is used as it is, and still works afterwards.
func TestOwnClient(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	client, err := api.NewClient(&api.Config{Address: r.list[0].Addr()})
	if err != nil {
		t.Fatal(err)
	}
	opts := &consullock.Options{Prefix: r.prefix}
	m, err := consullock.NewLockManager(client, nil, opts)
	if err != nil {
		t.Fatal(err)
	}
	l := r.lock(m, "k", time.Second)
	if left := time.Until(l.Deadline()); left > time.Second {
		t.Errorf("a lock of one second is held for %v", left)
	}
	// The server's start may have left a session, too.
	ours := func() (list []*api.SessionEntry) {
		all, _, err := client.Session().List(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			if s.Name == "dlm" {
				list = append(list, s)
			}
		}
		return list
	}
	sessions := ours()
	if len(sessions) != 1 {
		t.Fatalf("%d sessions", len(sessions))
	}
	s := sessions[0]
	if s.TTL != "10s" || s.LockDelay != 0 || s.Behavior != api.SessionBehaviorDelete || len(s.NodeChecks)+len(s.Checks)+len(s.ServiceChecks) > 0 {
		t.Errorf("the session is %+v", s)
	}
	if err := m.Close(r.within()); err != nil {
		t.Fatal(err)
	}
	if left := ours(); len(left) != 0 {
		t.Errorf("after Close there are %d sessions", len(left))
	}
	if left := r.keys(""); len(left) != 0 {
		t.Errorf("left behind: %+v", left)
	}
}

// What is not of a lock is never overwritten or deleted (OWN9).
func TestForeignKeys(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	s, m := r.list[0], r.manager(nil)
	s.Ask(http.MethodPut, "/v1/kv/"+r.prefix+"k/junk", "precious")
	s.Ask(http.MethodPut, "/v1/kv/"+r.prefix+"k/wait/junk", "precious")
	r.release(r.lock(m, "k", time.Second))
	s.Ask(http.MethodPut, "/v1/kv/"+r.prefix+"k/lock", "precious")
	_, err := m.TryLock(r.within(), "k", time.Second)
	e, ok := errors.AsType[*consullock.ServerError](err)
	if !ok || e.Problem != consullock.ProblemForeign || !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("%v, want the problem %q", err, consullock.ProblemForeign)
	}
	if list, err := m.ListLocks(r.within(), "", "", 0); err != nil || len(list) > 0 {
		t.Errorf("%v, %v", list, err)
	}
	for _, key := range []string{"junk", "wait/junk", "lock"} {
		if got := s.Ask(http.MethodGet, "/v1/kv/"+r.prefix+"k/"+key+"?raw", ""); got != "precious" {
			t.Errorf("%s is now %q", key, got)
		}
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	acl := servers.StartConsulCluster(t, 1, &servers.ConsulConfig{ACL: true})
	cleaned := servers.StartConsulCluster(t, 3, &servers.ConsulConfig{ACL: true})
	cleaned[0].Ask(http.MethodPut, "/v1/operator/autopilot/configuration", `{"CleanupDeadServers": true}`)
	for _, c := range []struct {
		name  string
		list  []*servers.Consul
		token string
		bad   map[string]driver.Severity
	}{
		{"one", servers.StartConsulCluster(t, 1, nil), "", map[string]driver.Severity{"servers": driver.SeverityWarning}},
		{"three", servers.StartConsulCluster(t, 3, nil), "", nil},
		{"dead servers are removed", cleaned, "", map[string]driver.Severity{"autopilot": driver.SeverityWarning}},
		{
			"no right to ask autopilot", cleaned,
			token(t, cleaned[0], `key_prefix "" { policy = "write" } session_prefix "" { policy = "write" } agent_prefix "" { policy = "read" }`),
			map[string]driver.Severity{"autopilot": driver.SeverityUnknown},
		},
		{
			"little rights", acl, token(t, acl[0], `key_prefix "" { policy = "write" } session_prefix "" { policy = "write" }`),
			map[string]driver.Severity{"servers": driver.SeverityWarning, "version": driver.SeverityUnknown},
		},
		{
			"no rights", acl, token(t, acl[0], `key_prefix "other/" { policy = "write" } agent_prefix "" { policy = "read" }`),
			map[string]driver.Severity{"servers": driver.SeverityWarning, "rights": driver.SeverityCritical},
		},
		{
			"short sessions", servers.StartConsulCluster(t, 1, &servers.ConsulConfig{DefaultSessions: true}), "",
			map[string]driver.Severity{"servers": driver.SeverityWarning, "session": driver.SeverityCritical},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, c.list)
			m := r.manager(nil, func(cfg *consullock.Config, _ *consullock.Options) {
				if c.token != "" {
					cfg.Token = c.token
				}
			})
			findings, err := m.Check(r.within())
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range findings {
				if f.Severity != c.bad[f.Check] {
					t.Errorf("%+v, want severity %v", f, c.bad[f.Check])
				}
				if f.Severity != driver.SeverityOK && f.Fix == "" {
					t.Errorf("nothing is said about what to change: %+v", f)
				}
				delete(c.bad, f.Check)
			}
			if len(c.bad) > 0 {
				t.Errorf("nothing was found about %v", c.bad)
			}
			if left := r.keys(""); len(left) > 0 {
				t.Errorf("left behind: %+v", left)
			}
		})
	}
}
