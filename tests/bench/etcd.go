package main

import (
	"context"
	"errors"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/tests/servers"
)

func init() {
	stores["etcd"] = &store{
		name:    "etcd",
		rows:    etcdRows,
		unit:    "messages",
		extra:   "with those of the server",
		floors:  map[workload]string{w1: "txn-floor", w2: "txn-floor", w3: "mutex", w4: "mutex", w5: "mutex"},
		targets: etcdTargets,
		start:   startEtcd,
		sent:    sentToEtcd,
		flush:   flushEtcd,
		version: etcdVersion,
		count:   countEtcd,
	}
}

// etcdRows are in the order in which they are shown. All goroutines of a row
// share one client.
var etcdRows = []row{
	{
		name: "put", workloads: []workload{w1, w2},
		settings: "floor: Put of one key for each goroutine; one round trip and one entry of the log, no release",
		open:     openEtcdPut,
	},
	{
		name: "txn-floor", workloads: []workload{w1, w2, w3, w4},
		settings: "floor: a transaction that puts the key if it is not there, with a lease that all share, and a Delete; " +
			"watches the key while it waits, and all waiters try again",
		open: openEtcdTxn,
	},
	{
		name: "mutex", workloads: []workload{w1, w2, w3, w4, w5},
		settings: "concurrency.Mutex, a long-lived Session for each goroutine, opened beforehand",
		open:     openEtcdMutex(true),
	},
	{
		name: "mutex-per-lock", workloads: []workload{w1, w2, w3, w4, w5},
		settings: "concurrency.Mutex, a new Session for each lock, closed at its release",
		open:     openEtcdMutex(false),
	},
	{
		name: "dlm-etcd", workloads: []workload{w1, w2, w3, w4, w5},
		settings: "one manager for the whole process",
		open:     openDLM(1, newEtcdManager),
	},
	{
		name: "dlm-etcd-x16", workloads: []workload{w3, w4},
		settings: "16 managers with a client each, as in 16 processes: goroutine i uses manager i%16",
		open:     openDLM(16, newEtcdManager),
	},
}

var etcdTargets = []target{
	{w1, "dlm-etcd", "pairP50", "txn-floor", atMost(1.1)},
	{w1, "dlm-etcd", "pairP50", "mutex-per-lock", atMost(0.55)},
	{w2, "dlm-etcd", "rate", "mutex", atLeast(2.5)},
	{w2, "dlm-etcd", "rate", "", atLeast(10_000)},
	{w3, "dlm-etcd", "gapP50", "", atMost(1300)},
	{w3, "dlm-etcd", "gapP99", "", atMost(10_000)},
	{w3, "dlm-etcd", "sent", "", atMost(5)},
	{w3, "dlm-etcd", "violations", "", atMost(0)},
	{w3, "dlm-etcd-x16", "gapP50", "", atMost(1300)},
	{w3, "dlm-etcd-x16", "gapP99", "", atMost(10_000)},
	{w3, "dlm-etcd-x16", "sent", "", atMost(5)},
	{w3, "dlm-etcd-x16", "violations", "", atMost(0)},
	{w4, "dlm-etcd", "unserved", "", atMost(0)},
	{w4, "dlm-etcd", "violations", "", atMost(0)},
	{w4, "dlm-etcd", "drain", "", atMost(2000)},
	{w5, "dlm-etcd", "lost", "", atMost(0)},
	{w5, "dlm-etcd", "goroutines", "", bound{}},
	{w5, "dlm-etcd", "grown", "", bound{}},
	{w5, "dlm-etcd", "rate", "", bound{}},
}

// startEtcd starts a server as it is outside of tests: it waits for the disk.
func startEtcd(tb servers.TB) map[string][]server {
	e := servers.StartEtcd(tb, &servers.EtcdConfig{
		Sync: true,
		Args: []string{"--heartbeat-interval", "100", "--election-timeout", "1000"},
	})
	return map[string][]server{"": {{addr: e.Addr(), pid: e.Pid()}}}
}

func newEtcdClient(addr string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
}

func newEtcdManager(_ context.Context, cfg openConfig) (*dlm.Manager, error) {
	client, err := newEtcdClient(cfg.addrs[0])
	if err != nil {
		return nil, err
	}
	return etcdlock.NewLockManager(client, nil, nil)
}

// flushEtcd also ends the leases that the last client has left behind, whose end
// would otherwise fall into the next measurement.
func flushEtcd(ctx context.Context, list []server) (err error) {
	client, err := newEtcdClient(list[0].addr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	leases, err := client.Leases(ctx)
	if err != nil {
		return err
	}
	err = each(len(leases.Leases), 64, func(i int) error {
		_, err := client.Revoke(ctx, leases.Leases[i].ID)
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return nil // it has run out
		}
		return err
	})
	if err != nil {
		return err
	}
	gone, err := client.Delete(ctx, "\x00", clientv3.WithFromKey())
	if err != nil {
		return err
	}
	_, err = client.Compact(ctx, gone.Header.Revision, clientv3.WithCompactPhysical())
	if errors.Is(err, rpctypes.ErrCompacted) {
		return nil // nothing has happened since the last time
	}
	return err
}

func etcdVersion(ctx context.Context, list []server) (version string, err error) {
	client, err := newEtcdClient(list[0].addr)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	status, err := client.Status(ctx, list[0].addr)
	if err != nil {
		return "", err
	}
	return "etcd " + status.Version, nil
}

// The counters of gRPC messages among the server's metrics, both directions of
// streams included.
const (
	etcdReceived = "grpc_server_msg_received_total"
	etcdSent     = "grpc_server_msg_sent_total"
)

func sentToEtcd(name string) bool { return strings.HasPrefix(name, etcdReceived) }

// countEtcd reads the server's metrics, which is no message itself.
func countEtcd(_ context.Context, list []server) (counter, error) {
	return readMetrics("http://"+list[0].addr+"/metrics", etcdReceived, etcdSent), nil
}
