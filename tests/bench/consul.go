package main

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/consullock"
	"github.com/go-dlm/dlm/tests/servers"
)

func init() {
	stores["consul"] = &store{
		name:    "consul",
		rows:    consulRows,
		unit:    "requests",
		floors:  map[workload]string{w1: "api-lock", w2: "api-lock", w3: "api-lock", w4: "api-lock"},
		targets: consulTargets,
		start:   startConsul,
		flush:   flushConsul,
		version: consulVersion,
		count:   countConsul,
	}
}

// consulRows are in the order in which they are shown.
var consulRows = []row{
	{
		name: "leader", workloads: []workload{w1, w2},
		settings: "floor: the question who leads; one round trip and no write, no release",
		open:     openConsulLeader,
	},
	{
		name: "kv-floor", workloads: []workload{w1, w2},
		settings: "floor: a key acquired with a session that all share, and deleted",
		open:     openConsulKV,
	},
	{
		name: "api-lock", workloads: []workload{w1, w2, w3, w4},
		settings: "api.Lock with a session of its own for each lock",
		open:     openConsulLock(false),
	},
	{
		name: "api-lock-session", workloads: []workload{w1, w2, w3},
		settings: "api.Lock with a session for each goroutine",
		open:     openConsulLock(true),
	},
	{
		name: "dlm-consul", workloads: []workload{w1, w2, w3, w4, w5},
		settings: "one manager for the whole process",
		open:     openDLM(1, newConsulManager),
	},
	{
		name: "dlm-consul-x16", workloads: []workload{w3, w4},
		settings: "16 managers with a client each, as in 16 processes: goroutine i uses manager i%16",
		open:     openDLM(16, newConsulManager),
	},
}

var consulTargets = slices.Concat(
	[]target{
		{w1, "dlm-consul", "pairP50", "api-lock", atMost(0.7)},
		{w2, "dlm-consul", "rate", "api-lock", bound{}},
	},
	consulHandOverTargets("dlm-consul"),
	consulHandOverTargets("dlm-consul-x16"),
	[]target{
		{w4, "dlm-consul", "unserved", "", atMost(0)},
		{w4, "dlm-consul", "violations", "", atMost(0)},
		{w4, "dlm-consul", "drain", "", bound{}},
		{w5, "dlm-consul", "lost", "", atMost(0)},
		{w5, "dlm-consul", "goroutines", "", bound{}},
		{w5, "dlm-consul", "grown", "", bound{}},
		{w5, "dlm-consul", "round", "", bound{}},
	},
)

// consulHandOverTargets are those of W3.
func consulHandOverTargets(row string) []target {
	return []target{
		{w3, row, "handOvers", "api-lock", atLeast(5)},
		{w3, row, "violations", "", atMost(0)},
	}
}

// consulMetrics is what counts the requests; the server keeps it for a while only.
const (
	consulMetrics = "consul_api_http_count"
	consulKeep    = `telemetry{prometheus_retention_time="24h" disable_hostname=true} `
)

// startConsul starts a server with the bounds for sessions that it has by default.
func startConsul(tb servers.TB) map[string][]server {
	c := servers.StartConsul(tb, &servers.ConsulConfig{DefaultSessions: true, HCL: consulKeep})
	return map[string][]server{"": {{addr: c.Addr(), pid: c.Pid()}}}
}

// newConsulClient returns a client that keeps as many connections as are used at
// the same time.
func newConsulClient(addr string) (*api.Client, error) {
	transport := &http.Transport{MaxIdleConnsPerHost: 2000}
	return api.NewClient(&api.Config{Address: addr, HttpClient: &http.Client{Transport: transport}})
}

func newConsulManager(_ context.Context, cfg openConfig) (*dlm.Manager, error) {
	return consullock.OpenLockManager(&consullock.Config{Addresses: cfg.addrs}, nil, nil)
}

// flushConsul ends all sessions and deletes all keys.
func flushConsul(ctx context.Context, list []server) error {
	client, err := newConsulClient(list[0].addr)
	if err != nil {
		return err
	}
	sessions, _, err := client.Session().List((&api.QueryOptions{}).WithContext(ctx))
	if err != nil {
		return err
	}
	w := (&api.WriteOptions{}).WithContext(ctx)
	err = each(len(sessions), 64, func(i int) error {
		_, err := client.Session().Destroy(sessions[i].ID, w)
		return err
	})
	if err != nil {
		return err
	}
	_, err = client.KV().DeleteTree("", w)
	return err
}

func consulVersion(ctx context.Context, list []server) (string, error) {
	client, err := newConsulClient(list[0].addr)
	if err != nil {
		return "", err
	}
	var self struct{ Config struct{ Version string } }
	_, err = client.Raw().Query("/v1/agent/self", &self, (&api.QueryOptions{}).WithContext(ctx))
	return "Consul " + self.Config.Version, err
}

func countConsul(_ context.Context, list []server) (counter, error) {
	count := readMetrics("http://"+list[0].addr+"/v1/agent/metrics?format=prometheus", consulMetrics)
	return func(ctx context.Context) (map[string]int64, error) {
		calls, err := count(ctx)
		for name := range calls {
			if strings.Contains(name, "agent_metrics") {
				delete(calls, name) // its own
			}
		}
		return calls, err
	}, nil
}

// consulSession makes a session that outlasts the measurement.
func consulSession(ctx context.Context, client *api.Client) (string, error) {
	id, _, err := client.Session().CreateNoChecks(&api.SessionEntry{
		TTL: time.Hour.String(), Behavior: api.SessionBehaviorDelete, LockDelay: time.Millisecond,
	}, (&api.WriteOptions{}).WithContext(ctx))
	return id, err
}
