package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/tests/servers"
)

// The groups of Redis servers: one alone, and five that know nothing of each
// other, for locks that need a majority of them. None writes to disk.
const (
	redisSingle  = "single"
	redisMasters = "masters"
)

// poolSize is how many connections each client has to each server, unless a
// row says otherwise.
const poolSize = 64

func init() {
	stores["redis"] = &store{
		name:    "redis",
		rows:    redisRows,
		unit:    "commands",
		extra:   "with those in scripts",
		floors:  map[workload]string{w1: "setnx-floor", w2: "setnx-floor", w3: "blpop-floor", w4: "blpop-floor", w5: "rueidislock"},
		targets: redisTargets,
		start:   startRedis,
		flush:   flushRedis,
		version: redisVersion,
		count:   countRedis,
	}
}

// redisRows are in the order in which they are shown.
var redisRows = []row{
	{
		name: "ping", workloads: []workload{w1, w2}, servers: redisSingle,
		settings: "floor: PING through go-redis, pool of 64; one round trip, no release",
		open:     openRedisPing,
	},
	{
		name: "setnx-floor", workloads: []workload{w1, w2, w3, w4}, servers: redisSingle,
		settings: "floor: SET NX PX, and a script that compares and deletes; pool of 64; polls every 10ms while it waits",
		sent:     allBut("get", "del", "pexpire"),
		open:     openSetNX,
	},
	{
		name: "blpop-floor", workloads: []workload{w3, w4}, servers: redisSingle,
		settings: "floor of a fair hand-over, but no lock to use, since it has no lease: the key is a list of one token, " +
			"BLPOP takes it and RPUSH gives it back; a connection for each waiter",
		open: openBLPop,
	},
	{
		name: "redsync-default", workloads: []workload{w1, w2, w3, w4}, servers: redisSingle,
		settings: "go-redis pool of 64; 32 tries, 50..250ms apart",
		sent:     allBut("get", "del", "pexpire"),
		open:     openRedsync(false),
	},
	{
		name: "redsync-tuned", workloads: []workload{w3, w4}, servers: redisSingle,
		settings: "the same with 1,000,000 tries, 5..15ms apart",
		sent:     allBut("get", "del", "pexpire"),
		open:     openRedsync(true),
	},
	{
		name: "redsync-5masters", workloads: []workload{w1, w2, w3, w4}, servers: redisMasters,
		settings: "Redlock on 5 masters, go-redis pool of 64 to each; 1,000,000 tries, 5..15ms apart",
		sent:     allBut("get", "del", "pexpire"),
		open:     openRedsync(true),
	},
	{
		name: "bsm-redislock", workloads: []workload{w1, w2, w3, w4}, servers: redisSingle,
		settings: "go-redis pool of 64; LinearBackoff(10ms) without a limit of tries",
		sent:     allBut("set", "get", "del", "getrange", "pexpire"),
		open:     openBSM,
	},
	{
		name: "rueidislock", workloads: []workload{w1, w2, w3, w4, w5}, servers: redisSingle,
		settings:  "KeyMajority 1, NoLoopTracking, one Locker for the whole process",
		sent:      allBut("set", "get", "del", "pexpireat"),
		holdByTry: true, // its Lock never returns if a free key's reply is late
		open:      openRueidis(1),
	},
	{
		name: "rueidislock-x16", workloads: []workload{w3, w4}, servers: redisSingle,
		settings: "the same with 16 Lockers, as in 16 processes: goroutine i uses Locker i%16",
		sent:     allBut("set", "get", "del", "pexpireat"),
		open:     openRueidis(16),
	},
	{
		name: "dlm-redis", workloads: []workload{w1, w2, w3, w4, w5}, servers: redisSingle,
		settings: "one manager for the whole process, go-redis pool of 64",
		sent:     sentByDLM,
		open:     openDLM(1, newRedisManager),
	},
	{
		name: "dlm-redis-x16", workloads: []workload{w3, w4}, servers: redisSingle,
		settings: "16 managers with a client each, as in 16 processes: goroutine i uses manager i%16",
		sent:     sentByDLM,
		open:     openDLM(16, newRedisManager),
	},
	{
		name: "dlm-quorum", workloads: []workload{w1, w2, w3, w4}, servers: redisMasters,
		settings: "one manager for 5 masters, go-redis pool of 64 to each",
		sent:     sentByDLM,
		open:     openDLM(1, newQuorumManager),
	},
}

// sentByDLM accepts what a connection begins with, and the calls of the
// backend; everything else runs within its scripts. (Each manager of a quorum
// begins with a GET and a script that calls INFO, which count the wrong way:
// once for each server.)
var sentByDLM = only(
	"auth", "hello", "select", "client|setname", "client|setinfo", "client|maint_notifications",
	"evalsha", "eval", "script|load", "script|exists", "function|load", "fcall",
	"subscribe", "unsubscribe", "ssubscribe", "sunsubscribe", "psubscribe", "punsubscribe",
	"ping", "info", "wait", "multi", "exec",
)

var redisTargets = slices.Concat(
	[]target{
		{w1, "dlm-redis", "pairP50", "setnx-floor", atMost(1.15)},
		{w2, "dlm-redis", "rate", "rueidislock", atLeast(0.95)},
		{w2, "dlm-redis", "rate", "redsync-default", atLeast(1.5)},
		{w2, "dlm-redis", "rate", "bsm-redislock", atLeast(1.5)},
	},
	handOverTargets("dlm-redis", "blpop-floor"),
	handOverTargets("dlm-redis-x16", "blpop-floor"),
	[]target{
		{w4, "dlm-redis", "unserved", "", atMost(0)},
		{w4, "dlm-redis", "violations", "", atMost(0)},
		{w4, "dlm-redis", "drain", "blpop-floor", atMost(1.6)},
		{w4, "dlm-redis", "sent", "", atMost(2500)},
		{w4, "dlm-redis", "idleSent", "", bound{}},
		{w5, "dlm-redis", "goroutines", "", bound{}},
		{w5, "dlm-redis", "grown", "", atMost(40)},
		{w5, "dlm-redis", "round", "", atMost(500)},
		{w5, "dlm-redis", "lost", "", atMost(0)},
		{w1, "dlm-quorum", "pairP50", "redsync-5masters", atMost(1.3)},
		{w4, "dlm-quorum", "unserved", "", atMost(0)},
	},
)

// handOverTargets are those of W3, for a row and the floor of a fair
// hand-over.
func handOverTargets(row, floor string) []target {
	return []target{
		{w3, row, "gapP50", floor, atMost(1.4)},
		{w3, row, "jain", "", atLeast(0.99)},
		{w3, row, "longest", "", atMost(40)},
		{w3, row, "sent", "", atMost(3)},
		{w3, row, "violations", "", atMost(0)},
	}
}

// only accepts commands of the names given, and allBut all others.
func only(names ...string) func(string) bool {
	return func(command string) bool { return slices.Contains(names, command) }
}

func allBut(names ...string) func(string) bool {
	return func(command string) bool { return !slices.Contains(names, command) }
}

func startRedis(tb servers.TB) map[string][]server {
	cfg := &servers.RedisConfig{Args: []string{"--maxclients", "5000"}} // blpop-floor has one for each waiter
	groups := map[string][]*servers.Redis{
		redisSingle:  {servers.StartRedis(tb, cfg)},
		redisMasters: servers.StartMasters(tb, 5, cfg),
	}
	started := map[string][]server{}
	for name, group := range groups {
		for _, r := range group {
			started[name] = append(started[name], server{addr: r.Addr(), pid: r.Pid()})
		}
	}
	return started
}

// newRedisClient returns a client as every row uses it.
func newRedisClient(addr string, pool int) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: addr, PoolSize: pool, PoolTimeout: 30 * time.Second})
}

func newRedisClients(addrs []string) []redis.UniversalClient {
	var list []redis.UniversalClient
	for _, addr := range addrs {
		list = append(list, newRedisClient(addr, poolSize))
	}
	return list
}

func newRedisManager(_ context.Context, cfg openConfig) (*dlm.Manager, error) {
	return redislock.NewLockManager(newRedisClient(cfg.addrs[0], poolSize), nil, nil)
}

// newQuorumManager returns a manager that needs a majority of the servers.
func newQuorumManager(_ context.Context, cfg openConfig) (*dlm.Manager, error) {
	return redislock.NewQuorumLockManager(newRedisClients(cfg.addrs), nil, nil)
}

func flushRedis(ctx context.Context, list []server) error {
	for _, s := range list {
		c := newRedisClient(s.addr, 1)
		err := c.FlushAll(ctx).Err()
		if err := errors.Join(err, c.Close()); err != nil {
			return err
		}
	}
	return nil
}

func redisVersion(ctx context.Context, list []server) (string, error) {
	c := newRedisClient(list[0].addr, 1)
	text, err := c.Info(ctx, "server").Result()
	if err := errors.Join(err, c.Close()); err != nil {
		return "", err
	}
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, "redis_version:"); ok {
			return "redis-server " + strings.TrimSpace(v), nil
		}
	}
	return "", errors.New("INFO names no redis_version")
}

// countRedis sums INFO commandstats over the servers.
func countRedis(_ context.Context, list []server) (counter, error) {
	var clients []*redis.Client
	for _, s := range list {
		clients = append(clients, newRedisClient(s.addr, 1))
	}
	var own int64 // calls of INFO below that the servers have counted
	return func(ctx context.Context) (map[string]int64, error) {
		calls := map[string]int64{}
		for _, c := range clients {
			text, err := c.Info(ctx, "commandstats").Result()
			if err != nil {
				return nil, err
			}
			if err := addCommandStats(calls, text); err != nil {
				return nil, err
			}
		}
		calls["info"] -= own
		own += int64(len(clients))
		return calls, nil
	}, nil
}

// addCommandStats adds the calls of each command in the text of INFO
// commandstats, which has lines such as
//
//	cmdstat_client|setinfo:calls=2,usec=5,usec_per_call=2.50,rejected_calls=0,failed_calls=0
func addCommandStats(to map[string]int64, text string) error {
	for line := range strings.Lines(text) {
		line, ok := strings.CutPrefix(line, "cmdstat_")
		if !ok {
			continue
		}
		name, rest, ok := strings.Cut(line, ":calls=")
		if !ok {
			return fmt.Errorf("commandstats: no calls in %q", line)
		}
		digits, _, _ := strings.Cut(rest, ",")
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil {
			return fmt.Errorf("commandstats: %w", err)
		}
		to[name] += n
	}
	return nil
}
