package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/zklock"
	"github.com/go-dlm/dlm/tests/servers"
)

func init() {
	stores["zookeeper"] = &store{
		name:    "zookeeper",
		rows:    zooKeeperRows,
		unit:    "packets",
		extra:   "with those of the server",
		floors:  map[workload]string{w1: "create-floor", w2: "create-floor", w3: "zk-lock", w4: "zk-lock", w5: "zk-lock"},
		targets: zooKeeperTargets,
		start:   startZooKeeper,
		sent:    sentToZooKeeper,
		flush:   flushZooKeeper,
		version: zooKeeperVersion,
		count:   countZooKeeper,
	}
}

// zooKeeperRows are in the order in which they are shown. All goroutines of a row
// share one session.
var zooKeeperRows = []row{
	{
		name: "exists", workloads: []workload{w1, w2},
		settings: "floor: Exists; one round trip and no write, no release",
		open:     openZooKeeperExists,
	},
	{
		name: "create-floor", workloads: []workload{w1, w2, w3, w4},
		settings: "floor: Create of an ephemeral node with the key's name, and Delete; watches the node while it waits, and all waiters try again",
		open:     openZooKeeperCreate,
	},
	{
		name: "zk-lock", workloads: []workload{w1, w2, w3, w4, w5},
		settings: "zk.Lock; it cannot try, and waits in W2",
		open:     openZooKeeperLock,
	},
	{
		name: "dlm-zookeeper", workloads: []workload{w1, w2, w3, w4, w5},
		settings: "one manager for the whole process, session time-out of 20s",
		open:     openDLM(1, newZooKeeperManager),
	},
	{
		name: "dlm-zookeeper-x16", workloads: []workload{w3, w4},
		settings: "16 managers with a session each, as in 16 processes: goroutine i uses manager i%16",
		open:     openDLM(16, newZooKeeperManager),
	},
}

var zooKeeperTargets = slices.Concat(
	[]target{
		{w1, "dlm-zookeeper", "pairP50", "zk-lock", atMost(0.65)},
		{w1, "dlm-zookeeper", "sameP50", "zk-lock", atMost(1)},
		{w2, "dlm-zookeeper", "rate", "zk-lock", atLeast(1.2)},
	},
	zooKeeperHandOverTargets("dlm-zookeeper"),
	zooKeeperHandOverTargets("dlm-zookeeper-x16"),
	[]target{
		{w4, "dlm-zookeeper", "unserved", "", atMost(0)},
		{w4, "dlm-zookeeper", "violations", "", atMost(0)},
		{w4, "dlm-zookeeper", "drain", "", atMost(1000)},
		{w5, "dlm-zookeeper", "lost", "", atMost(0)},
		{w5, "dlm-zookeeper", "goroutines", "", bound{}},
		{w5, "dlm-zookeeper", "grown", "", bound{}},
		{w5, "dlm-zookeeper", "rate", "", bound{}},
	},
)

// zooKeeperHandOverTargets are those of W3.
func zooKeeperHandOverTargets(row string) []target {
	return []target{
		{w3, row, "gapP50", "zk-lock", atMost(1)},
		{w3, row, "sent", "", atMost(4)},
		{w3, row, "violations", "", atMost(0)},
	}
}

// startZooKeeper starts a server as it is by default, which waits for the disk.
func startZooKeeper(tb servers.TB) map[string][]server {
	z := servers.StartZooKeeper(tb, &servers.ZooKeeperConfig{
		Sync:     true,
		Settings: []string{"tickTime=2000", "minSessionTimeout=4000"},
	})[0]
	return map[string][]server{"": {{addr: z.Addr(), pid: z.Pid()}}}
}

type noZooKeeperLog struct{}

func (noZooKeeperLog) Printf(string, ...any) {}

// newZooKeeperConn returns a connection with a session.
func newZooKeeperConn(ctx context.Context, addr string, timeout time.Duration) (*zk.Conn, error) {
	conn, events, err := zk.Connect([]string{addr}, timeout, zk.WithLogger(noZooKeeperLog{}))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		select {
		case e := <-events:
			if e.State == zk.StateHasSession {
				return conn, nil // further events are dropped
			}
		case <-ctx.Done():
			conn.Close()
			return nil, fmt.Errorf("no session: %w", ctx.Err())
		}
	}
}

func newZooKeeperManager(_ context.Context, cfg openConfig) (*dlm.Manager, error) {
	return zklock.NewLockManager(cfg.addrs, nil, nil)
}

// flushZooKeeper removes all nodes but those of the server itself, whoever's they
// are.
func flushZooKeeper(ctx context.Context, list []server) error {
	conn, err := newZooKeeperConn(ctx, list[0].addr, 10*time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	level := []string{"/"}
	var all []string
	for len(level) > 0 {
		below := make([][]string, len(level))
		err := each(len(level), 64, func(i int) error {
			names, _, err := conn.Children(level[i])
			if errors.Is(err, zk.ErrNoNode) {
				return nil // its session has timed out
			}
			for _, name := range names {
				if p := path.Join(level[i], name); p != "/zookeeper" {
					below[i] = append(below[i], p)
				}
			}
			return err
		})
		if err != nil {
			return err
		}
		level = slices.Concat(below...)
		all = append(all, level...)
	}
	// The deepest ones stand last.
	slices.Reverse(all)
	for len(all) > 0 {
		depth := strings.Count(all[0], "/")
		n := slices.IndexFunc(all, func(p string) bool { return strings.Count(p, "/") != depth })
		if n < 0 {
			n = len(all)
		}
		err := each(n, 64, func(i int) error {
			err := conn.Delete(all[i], -1)
			if errors.Is(err, zk.ErrNoNode) {
				return nil
			}
			return err
		})
		if err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}

// askZooKeeper sends one of the server's four-letter words.
func askZooKeeper(ctx context.Context, addr, word string) (text string, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, word); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	return string(answer), err
}

func zooKeeperVersion(ctx context.Context, list []server) (string, error) {
	text, err := askZooKeeper(ctx, list[0].addr, "srvr")
	if err != nil {
		return "", err
	}
	_, rest, ok := strings.Cut(text, "Zookeeper version: ")
	if !ok {
		return "", fmt.Errorf("srvr says %q", text)
	}
	version, _, _ := strings.Cut(rest, "-")
	return "ZooKeeper " + version, nil
}

// The counters of packets in the answer to mntr; pings are packets, too.
const (
	zooKeeperReceived = "zk_packets_received"
	zooKeeperSent     = "zk_packets_sent"
)

func sentToZooKeeper(name string) bool { return name == zooKeeperReceived }

// countZooKeeper asks by mntr, which the server counts as a packet.
func countZooKeeper(_ context.Context, list []server) (counter, error) {
	var own int64 // questions that the server has counted
	return func(ctx context.Context) (map[string]int64, error) {
		text, err := askZooKeeper(ctx, list[0].addr, "mntr")
		if err != nil {
			return nil, err
		}
		own++
		calls, err := zooKeeperPackets(text)
		if err != nil {
			return nil, err
		}
		calls[zooKeeperReceived] -= own
		return calls, nil
	}, nil
}

// zooKeeperPackets finds the counters of packets in lines of a name, a tab and a
// number.
func zooKeeperPackets(text string) (map[string]int64, error) {
	calls := map[string]int64{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if name != zooKeeperReceived && name != zooKeeperSent {
			continue
		}
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("mntr: %w", err)
		}
		calls[name] = n
	}
	if len(calls) != 2 {
		return nil, fmt.Errorf("mntr names no packets: %.200q", text)
	}
	return calls, nil
}
