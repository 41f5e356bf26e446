package redislock

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/go-dlm/dlm/driver"
)

const (
	// askPatience is how long a server may take to answer a question of a
	// check, and replicaPatience the same for replicas, whose addresses may be
	// of no use here.
	askPatience     = 3 * time.Second
	replicaPatience = time.Second
	// clockTolerance is by how much the clocks of servers may differ.
	clockTolerance = 500 * time.Millisecond
	// memoryTight is the used share of the allowed memory that is too much.
	memoryTight = 0.9
)

// What a check looks at, see [driver.Finding].
const (
	checkConnection  = "connection"
	checkAuth        = "authentication"
	checkTLS         = "TLS"
	checkProduct     = "product"
	checkDatabase    = "database"
	checkVersion     = "version"
	checkRole        = "role"
	checkEviction    = "eviction"
	checkMemory      = "memory"
	checkPersistence = "persistence"
	checkReplicas    = "replicas"
	checkClock       = "clock"
	checkRights      = "rights"
	checkChannels    = "channels"
	checkCluster     = "cluster"
)

// Check implements [driver.Checker]. In a cluster it looks at all primaries. It
// needs no rights beyond those that locks need; what it may not ask (INFO,
// CONFIG GET) is [driver.SeverityUnknown].
func (b *Backend) Check(ctx context.Context) ([]driver.Finding, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if b.ended.Load() {
		return nil, driver.ErrClosed
	}
	findings := checkServer(ctx, b.client, "", &b.opts)
	// A deadline that has passed is a server that was too slow.
	if err := ctx.Err(); errors.Is(err, context.Canceled) {
		return nil, err
	}
	return findings, nil
}

// checkServer checks what a client leads to: a server, or the primaries of a
// cluster. An empty name means that findings name the server's address.
func checkServer(ctx context.Context, client redis.UniversalClient, name string, opts *Options) []driver.Finding {
	if cluster, ok := client.(*redis.ClusterClient); ok {
		return checkNodes(ctx, cluster, name, opts)
	}
	c := newCheck(client, name, opts)
	c.run(ctx)
	return append(c.findings, compareClocks(name, c.clocks)...)
}

// checkNodes checks the primaries of a cluster, side by side.
func checkNodes(ctx context.Context, cluster *redis.ClusterClient, name string, opts *Options) []driver.Finding {
	nodes, err := primaries(ctx, cluster)
	if err != nil {
		c := newCheck(cluster, name, opts)
		if says, ok := serverSays(err); ok && strings.Contains(says, "cluster support disabled") {
			c.add(checkCluster, driver.SeverityCritical, "the client is one for a cluster, and the server is not part of any",
				"use redis.NewClient, or redis:// in a URL")
		} else {
			c.failed(err)
		}
		return c.findings
	}
	tags := nodeTags(ctx, cluster, nodes)
	checks := make([]*check, len(nodes))
	var wg sync.WaitGroup
	for i, node := range nodes {
		c := newCheck(node, "", opts)
		if name != "" {
			c.server = name + " " + c.server
		}
		c.nodes, c.tag = true, tags[node]
		checks[i] = c
		wg.Go(func() { c.run(ctx) })
	}
	wg.Wait()
	slices.SortFunc(checks, func(a, b *check) int { return strings.Compare(a.server, b.server) })
	var findings []driver.Finding
	var clocks []clockReading
	for _, c := range checks {
		findings = append(findings, c.findings...)
		clocks = append(clocks, c.clocks...)
	}
	return append(findings, compareClocks(name, clocks)...)
}

// primaries returns the clients of a cluster's primaries.
func primaries(ctx context.Context, cluster *redis.ClusterClient) ([]*redis.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	var mu sync.Mutex
	var nodes []*redis.Client
	err := await(ctx, func() error {
		return cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
			mu.Lock()
			defer mu.Unlock()
			nodes = append(nodes, node)
			return nil
		})
	})
	if err != nil {
		return nil, err // the other goroutine may still be busy
	}
	if len(nodes) == 0 {
		return nil, errors.New("the cluster has no primary that serves a slot")
	}
	return nodes, nil
}

// nodeTags finds for each primary a text between braces whose slot it serves.
// As with the probe's, no lock has such a record.
func nodeTags(ctx context.Context, cluster *redis.ClusterClient, nodes []*redis.Client) map[*redis.Client]string {
	tags := make(map[*redis.Client]string)
	for i := 0; i < 8*slots && len(tags) < len(nodes) && ctx.Err() == nil; i++ {
		tag := "%:" + strconv.Itoa(i)
		node, err := cluster.MasterForKey(ctx, "{"+tag+"}")
		if err == nil && tags[node] == "" && slices.Contains(nodes, node) {
			tags[node] = tag
		}
	}
	return tags
}

// check is the check of one server.
type check struct {
	client redis.UniversalClient
	calls  *dispatcher
	server string
	opts   *Options
	nodes  bool   // the client is that of a node of a cluster
	quorum bool   // the client is that of a node of a quorum
	tag    string // between the braces of the probe's keys

	info     serverInfo
	told     bool // INFO was answered
	noConfig bool // CONFIG GET was refused
	findings []driver.Finding
	clocks   []clockReading
}

func newCheck(client redis.UniversalClient, name string, opts *Options) *check {
	c := &check{client: client, calls: newDispatcher(client, 0, 0), server: name, opts: opts, tag: probeTag}
	if single, ok := client.(*redis.Client); ok && name == "" && !isFailover(single) {
		c.server = single.Options().Addr
	}
	return c
}

// isFailover says that a client finds its server through Sentinel.
func isFailover(client *redis.Client) bool { return client.Options().Addr == "FailoverClient" }

func (c *check) add(name string, severity driver.Severity, detail, fix string) {
	c.findings = append(c.findings, driver.Finding{
		Check: name, Severity: severity, Server: c.server, Detail: detail, Fix: fix,
	})
}

func (c *check) ok(name, format string, args ...any) {
	c.add(name, driver.SeverityOK, fmt.Sprintf(format, args...), "")
}

// ask sends a command.
func (c *check) ask(ctx context.Context, args ...any) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	cmd := newCommand(ctx, args...)
	if err := c.calls.process(ctx, cmd); err != nil {
		return nil, err
	}
	return cmd.Val(), nil
}

func (c *check) run(ctx context.Context) {
	began := time.Now()
	_, err := c.ask(ctx, "time")
	if err != nil && !is(classify(err), ProblemPermission) {
		if c.mistakesTLS(ctx, err) {
			return
		}
		c.failed(err)
		return
	}
	took := time.Since(began)
	if err == nil {
		if r, err := readClock(ctx, c); err == nil {
			c.clocks = append(c.clocks, r)
			took = 2 * r.within
		}
	}
	infoCtx, cancel := context.WithTimeout(ctx, askPatience)
	c.info, err = c.calls.info(infoCtx)
	cancel()
	if err != nil {
		c.failed(err)
		return
	}
	c.told = len(c.info) > 0
	if c.server == "" {
		c.server = c.address(ctx)
	}
	for i := range c.clocks {
		c.clocks[i].server = c.server
	}
	how := "without TLS"
	if c.encrypted() {
		how = "over TLS"
	}
	c.ok(checkConnection, "answers within %v, %s", short(took), how)
	c.version()
	if !c.role() {
		return
	}
	c.eviction(ctx)
	c.memory()
	c.persistence(ctx)
	c.replicas(ctx)
	if c.cluster(ctx) && c.rights(ctx) {
		c.channels(ctx)
	}
	for _, r := range c.clocks[:min(1, len(c.clocks))] {
		c.ok(checkClock, "%s this machine's, give or take %v, which locks do not depend on", ahead(r.offset), short(r.within))
	}
	c.followers(ctx)
}

// failed adds the finding for a server that does not serve us.
func (c *check) failed(err error) {
	err = classify(err)
	var problem Problem
	if e, ok := errors.AsType[*ServerError](err); ok {
		problem = e.Problem
	}
	says, spoke := serverSays(err)
	cause := reason(err)
	hint := ""
	if single, ok := c.client.(*redis.Client); ok && isFailover(single) {
		hint = "; it is found through Sentinel, so check that the sentinels run and know the name of the primary"
	}
	switch {
	case problem == ProblemAuth:
		c.add(checkAuth, driver.SeverityCritical, "the server does not accept user and password: "+cause,
			"give the client the name and the password of a user of the server (ACL LIST), or a password alone where requirepass is set")
	case problem == ProblemTLS:
		c.add(checkTLS, driver.SeverityCritical, "client and server do not agree on TLS: "+cause, fixTLS)
	case problem == ProblemNotRedis:
		c.add(checkProduct, driver.SeverityCritical, "what answers is no Redis server: "+cause,
			"check host and port; locks need Redis "+oldest+" or later, or Valkey")
	case problem == ProblemDatabase:
		c.add(checkDatabase, driver.SeverityCritical, "the server has no such database: "+cause,
			"use database 0, or raise databases in redis.conf")
	case problem == ProblemPermission:
		c.add(checkRights, driver.SeverityCritical, "the user lacks a right: "+cause, c.aclFix())
	case spoke && strings.HasPrefix(says, "DENIED"):
		c.add(checkConnection, driver.SeverityCritical, "the server is in protected mode and serves its own machine only",
			"set a password (CONFIG SET requirepass), or protected-mode no in redis.conf where the network is safe")
	case spoke:
		c.add(checkConnection, driver.SeverityCritical, "the server refuses to serve: "+cause,
			"see the log of the server; if it is starting or busy, try again")
	case errors.Is(err, errNoReply), isTimeout(err):
		c.add(checkConnection, driver.SeverityCritical, "no answer in time: "+cause,
			"check that the server runs and is not stopped, and that no firewall is between"+hint)
	case errors.Is(err, io.EOF), strings.Contains(err.Error(), "connection reset"):
		c.add(checkConnection, driver.SeverityCritical, "the server ends the connection at once: "+cause,
			"check host and port, and what the log of the server says")
	default:
		c.add(checkConnection, driver.SeverityCritical, "the server cannot be reached: "+cause,
			"check that the server runs and that host and port are right"+hint)
	}
}

const fixTLS = "set TLSConfig (rediss:// in a URL) exactly if the server's port is a tls-port, " +
	"and trust the authority that has signed its certificate"

// mistakesTLS tries whether it would work with TLS where the client uses none,
// or without, and adds a finding if so. Either mistake shows as a connection
// that ends or is silent. Nothing secret is sent.
func (c *check) mistakesTLS(ctx context.Context, err error) bool {
	single, ok := c.client.(*redis.Client)
	if _, spoke := serverSays(err); !ok || spoke || isFailover(single) || notConnected(err) && !isTimeout(err) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, replicaPatience)
	defer cancel()
	o := single.Options()
	conn, err := new(net.Dialer).DialContext(ctx, o.Network, o.Addr)
	if err != nil {
		return false
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if o.TLSConfig == nil {
		if err := tls.Client(conn, &tls.Config{InsecureSkipVerify: true}).HandshakeContext(ctx); err != nil {
			return false
		}
		c.add(checkTLS, driver.SeverityCritical, "the server's port speaks TLS, and the client does not", fixTLS)
		return true
	}
	answer := make([]byte, 1)
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return false
	}
	if _, err := conn.Read(answer); err != nil || answer[0] != '+' && answer[0] != '-' {
		return false
	}
	c.add(checkTLS, driver.SeverityCritical, "the client speaks TLS, and the server's port does not", fixTLS)
	return true
}

// reason is the innermost text of an error that still says all.
func reason(err error) string {
	if e, ok := errors.AsType[*ServerError](err); ok && e.Err != nil {
		err = e.Err
	}
	s := err.Error()
	for _, prefix := range []string{driver.ErrNotApplied.Error() + ": ", driver.ErrInvalid.Error() + ": ", "redislock: ", "redis: "} {
		s = strings.TrimPrefix(s, prefix)
	}
	// The server's text is not ours to trust.
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

func (c *check) encrypted() bool {
	single, ok := c.client.(*redis.Client)
	return ok && single.Options().TLSConfig != nil
}

// address asks the server for the address at which it was reached.
func (c *check) address(ctx context.Context) string {
	if reply, err := c.ask(ctx, "client", "info"); err == nil {
		for field := range strings.FieldsSeq(fmt.Sprint(reply)) {
			if addr, ok := strings.CutPrefix(field, "laddr="); ok {
				return addr
			}
		}
	}
	return ""
}

// config asks for a setting. It returns false if it may not, or if there is no
// such setting.
func (c *check) config(ctx context.Context, name string) (string, bool) {
	if c.noConfig {
		return "", false
	}
	reply, err := c.ask(ctx, "config", "get", name)
	if err != nil {
		c.noConfig = true
		return "", false
	}
	switch r := reply.(type) {
	case map[any]any:
		v, ok := r[name].(string)
		return v, ok
	case []any:
		if len(r) == 2 {
			v, ok := r[1].(string)
			return v, ok
		}
	}
	return "", false
}

// number returns a number of INFO.
func (c *check) number(name string) (int64, bool) {
	n, err := strconv.ParseInt(c.info[name], 10, 64)
	return n, err == nil
}

const hidden = "INFO and CONFIG GET are refused"

func (c *check) version() {
	v, product := c.info["redis_version"], "Redis"
	if own := c.info["valkey_version"]; own != "" {
		product, v = "Valkey", own
	}
	switch {
	case v == "" && c.told:
		c.add(checkVersion, driver.SeverityUnknown, "the server does not say its version", "")
	case v == "":
		c.add(checkVersion, driver.SeverityUnknown, "the version cannot be found out: INFO is refused", "ACL SETUSER "+c.user()+" +info")
	case product == "Redis" && older(v, oldest):
		c.add(checkVersion, driver.SeverityCritical, fmt.Sprintf("Redis %s, must be %s or later", v, oldest),
			"update the server to Redis "+oldest+" or later, or to Valkey")
	default:
		c.ok(checkVersion, "%s %s", product, v)
	}
}

// role returns false for a replica, of which nothing else matters.
func (c *check) role() bool {
	switch c.info["role"] {
	case "":
		c.add(checkRole, driver.SeverityUnknown, "whether it is a primary cannot be found out: INFO is refused",
			"ACL SETUSER "+c.user()+" +info")
	case "slave":
		primary := net.JoinHostPort(c.info["master_host"], c.info["master_port"])
		detail := "a replica of " + primary + ": locks cannot be taken here"
		if c.info["slave_read_only"] == "0" {
			detail = "a replica of " + primary + " that takes writes: it would grant locks that others do not see, and forget them"
		}
		c.add(checkRole, driver.SeverityCritical, detail,
			"use the address of the primary, "+primary+", or let Sentinel name it (redis.NewFailoverClient, redis+sentinel:// in a URL)")
		return false
	default:
		c.ok(checkRole, "a primary")
	}
	return true
}

func (c *check) eviction(ctx context.Context) {
	policy := c.info["maxmemory_policy"]
	if policy == "" {
		policy, _ = c.config(ctx, "maxmemory-policy")
	}
	limit, known := c.number("maxmemory")
	if text, ok := "", false; !known {
		if text, ok = c.config(ctx, "maxmemory"); ok {
			n, err := strconv.ParseInt(text, 10, 64)
			limit, known = n, err == nil
		}
	}
	c.add(evictionFinding(policy, limit, known))
}

// evictionFinding is what a policy means for locks, as arguments of add.
func evictionFinding(policy string, limit int64, known bool) (name string, severity driver.Severity, detail, fix string) {
	const remedy = "CONFIG SET maxmemory-policy noeviction, and maxmemory-policy noeviction in redis.conf; " +
		"if a cache shares the server and needs eviction, give locks a server of their own"
	var why string
	switch {
	case policy == "":
		return checkEviction, driver.SeverityUnknown, "whether the server evicts locks cannot be found out: " + hidden,
			"see to it that maxmemory-policy is noeviction in the settings of whoever runs the server, or allow INFO"
	case policy == "noeviction":
		return checkEviction, driver.SeverityOK, "maxmemory-policy is noeviction", ""
	case strings.HasPrefix(policy, "volatile"):
		why = "maxmemory-policy is " + policy + ", and all locks have a time to live: "
	default:
		why = "maxmemory-policy is " + policy + ": "
	}
	if known && limit == 0 {
		return checkEviction, driver.SeverityWarning, why + "nothing is evicted only because maxmemory is 0", remedy
	}
	size := "used up"
	if known {
		size = "full (" + bytesText(limit) + ")"
	}
	return checkEviction, driver.SeverityCritical, why + "when memory is " + size + ", locks that are held are deleted", remedy
}

func (c *check) memory() {
	used, known := c.number("used_memory")
	limit, limited := c.number("maxmemory")
	if !known || !limited {
		c.add(checkMemory, driver.SeverityUnknown, "the use of memory cannot be found out: INFO is refused or does not say", "")
		return
	}
	share := float64(used) / float64(limit)
	detail := fmt.Sprintf("%s of %s are used (%.0f %%)", bytesText(used), bytesText(limit), 100*share)
	const fix = "raise maxmemory (CONFIG SET maxmemory, and redis.conf), or find out what fills the server (redis-cli --bigkeys)"
	switch {
	case limit == 0:
		c.ok(checkMemory, "%s are used, maxmemory is 0", bytesText(used))
	case share >= 1:
		c.add(checkMemory, driver.SeverityCritical, detail+": no new lock can be had, those that are held can be renewed", fix)
	case share >= memoryTight:
		c.add(checkMemory, driver.SeverityWarning, detail+": when all are used, no new lock can be had", fix)
	default:
		c.ok(checkMemory, "%s", detail)
	}
}

func (c *check) persistence(ctx context.Context) {
	if !c.told || c.info["aof_enabled"] == "" {
		c.add(checkPersistence, driver.SeverityUnknown, "what a restart forgets cannot be found out: INFO is refused or does not say", "")
		return
	}
	const keep = "CONFIG SET appendonly yes, and appendonly yes in redis.conf"
	points, pointsKnown := c.config(ctx, "save")
	if c.info["aof_enabled"] != "0" {
		c.appendOnly(ctx)
	} else if pointsKnown && points == "" {
		c.add(checkPersistence, driver.SeverityWarning,
			"nothing is kept on disk: a restart forgets all locks, and grants them again while their holders still work", keep)
	} else {
		c.add(checkPersistence, driver.SeverityWarning,
			"AOF is off: a crash forgets the locks since the last snapshot (RDB), and grants them again while their holders still work", keep)
	}
	if c.info["aof_last_write_status"] == "err" {
		c.add(checkPersistence, driver.SeverityCritical, "the last write to the AOF failed: the server refuses all locks (MISCONF)",
			"make room on the disk of the server, and see its log")
	}
	if c.info["rdb_last_bgsave_status"] != "err" || pointsKnown && points == "" {
		return
	}
	severity, effect := driver.SeverityCritical, "the server refuses all locks (MISCONF)"
	switch stop, ok := c.config(ctx, "stop-writes-on-bgsave-error"); {
	case !ok:
		effect = "unless stop-writes-on-bgsave-error is no, " + effect
	case stop == "no":
		severity, effect = driver.SeverityWarning, "a restart forgets all locks since the last good one"
	}
	c.add(checkPersistence, severity, "the last snapshot (RDB) failed: "+effect,
		"see the server's log, mend the cause (often a full disk, or its rights on dir), then BGSAVE")
}

func (c *check) appendOnly(ctx context.Context) {
	sync, ok := c.config(ctx, "appendfsync")
	switch {
	case !ok:
		c.add(checkPersistence, driver.SeverityUnknown,
			"AOF is on; how much a crash of the machine forgets cannot be found out: CONFIG GET is refused", "")
	case sync == "always":
		c.ok(checkPersistence, "AOF is on and written before each answer (appendfsync always)")
	case sync == "everysec":
		c.ok(checkPersistence, "AOF is on, with appendfsync everysec: a restart forgets nothing, "+
			"a crash of the whole machine the last one or two seconds")
	default:
		c.add(checkPersistence, driver.SeverityWarning,
			"AOF is on, with appendfsync "+sync+": a crash of the machine forgets locks of the last half minute or so",
			"CONFIG SET appendfsync everysec (or always), and the same in redis.conf")
	}
}

// follower is a replica as its primary sees it.
type follower struct {
	addr   string
	online bool
}

// listed returns the replicas.
func (c *check) listed() []follower {
	var list []follower
	for i := 0; ; i++ {
		line, ok := c.info["slave"+strconv.Itoa(i)]
		if !ok {
			return list
		}
		field := map[string]string{}
		for f := range strings.SplitSeq(line, ",") {
			name, value, _ := strings.Cut(f, "=")
			field[name] = value
		}
		list = append(list, follower{net.JoinHostPort(field["ip"], field["port"]), field["state"] == "online"})
	}
}

func (c *check) replicas(ctx context.Context) {
	text, known := c.info["connected_slaves"]
	if !known {
		c.add(checkReplicas, driver.SeverityUnknown, "whether there are replicas cannot be found out: INFO is refused or does not say", "")
		return
	}
	online := 0
	for _, f := range c.listed() {
		if f.online {
			online++
		}
	}
	if n, err := strconv.Atoi(text); err == nil && len(c.listed()) == 0 {
		online = n // it does not list them
	}
	least := 0
	if text, ok := c.config(ctx, "min-replicas-to-write"); ok {
		least, _ = strconv.Atoi(text)
	}
	good, counted := c.number("min_slaves_good_slaves")
	switch wanted := c.opts.Replicas; {
	case counted && int(good) < least:
		c.add(checkReplicas, driver.SeverityCritical,
			fmt.Sprintf("%d replicas are in step, and min-replicas-to-write is %d: the server refuses all locks (NOREPLICAS)", good, least),
			fmt.Sprintf("connect more replicas, or CONFIG SET min-replicas-to-write %d", good))
	case wanted > online:
		c.add(checkReplicas, driver.SeverityCritical,
			fmt.Sprintf("%d replicas are connected, and Options.Replicas is %d: no lock can be had", online, wanted),
			fmt.Sprintf("connect more replicas, or set Options.Replicas (replicas= in a URL) to %d", online))
	case wanted > 0:
		c.ok(checkReplicas, "%d replicas are connected, and %d must acknowledge each lock", online, wanted)
	case online > 0:
		fix := "set Options.Replicas (replicas= in a URL) to 1 or more"
		if least == 0 {
			fix += "; CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 10, and the same in redis.conf, " +
				"so that a primary that is cut off stops granting"
		}
		c.add(checkReplicas, driver.SeverityWarning,
			fmt.Sprintf("%d replicas are connected, and no lock waits for them (Options.Replicas is 0): "+
				"a failover forgets the last locks, and grants them again while their holders still work", online), fix)
	default:
		c.ok(checkReplicas, "none are connected, and none are asked for")
	}
}

// rights tries all commands of the scripts. It returns false if they cannot be
// run at all.
func (c *check) rights(ctx context.Context) bool {
	if c.tag == "" {
		c.add(checkRights, driver.SeverityUnknown, "no key was found that this node serves", "")
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	refused, err := probe(ctx, c.calls, c.opts.Prefix, c.tag, c.quorum)
	if err == nil && c.opts.Replicas > 0 {
		if _, err := c.ask(ctx, "wait", 0, 1); err != nil {
			refused = append(refused, "WAIT: "+reason(err))
		}
	}
	switch {
	case is(err, ProblemPermission):
		c.add(checkRights, driver.SeverityCritical, "user "+c.userName(ctx)+" may not run the scripts: "+reason(err), c.aclFix())
		return false
	case err != nil:
		c.failed(err)
		return false
	case len(refused) > 0:
		c.add(checkRights, driver.SeverityCritical,
			"user "+c.userName(ctx)+" may not run all commands of the scripts: "+strings.Join(refused, "; "), c.aclFix())
		return false
	}
	c.ok(checkRights, "user %s may run all commands of the scripts", c.userName(ctx))
	return true
}

// channels tries whether news arrive.
func (c *check) channels(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	manager := "check-" + strconv.FormatUint(rand.Uint64(), 36)
	up, heard, ended := make(chan struct{}, 1), make(chan struct{}, 1), make(chan error, 1)
	go func() {
		ended <- listen(ctx, nil, c.client, c.opts.Prefix, manager, func(e driver.Event) {
			news := heard
			if e.Kind == driver.EventUp {
				news = up
			}
			select {
			case news <- struct{}{}:
			default:
			}
		})
	}()
	defer func() {
		cancel()
		<-ended
	}()
	const effect = ": waiters are not told of their turn, and look for themselves, up to a quarter of the liveness window late"
	silent := func(err error) {
		ended <- nil
		fix := ""
		if err = classify(err); is(err, ProblemPermission) {
			fix = c.aclFix()
		}
		c.add(checkChannels, driver.SeverityWarning, "the subscription fails ("+reason(err)+")"+effect, fix)
	}
	select {
	case <-up:
	case err := <-ended:
		silent(err)
		return
	}
	began := time.Now()
	message := "w 0 0 0 x1 1 a" + recordKey(c.opts.Prefix, "check")
	if _, err := c.ask(ctx, "publish", channel(c.opts.Prefix, manager), message); err != nil {
		c.add(checkChannels, driver.SeverityWarning, "nothing can be published ("+reason(err)+")"+effect, c.aclFix())
		return
	}
	select {
	case <-heard:
		c.ok(checkChannels, "a message arrives within %v", short(time.Since(began)))
	case err := <-ended:
		if ctx.Err() != nil {
			err = errors.New("a message did not arrive in time")
		}
		silent(err)
	}
}

// cluster looks at the state of the cluster as this node sees it. It returns
// false if the client cannot reach all of it.
func (c *check) cluster(ctx context.Context) bool {
	if c.info["cluster_enabled"] == "0" || !c.nodes && c.info["cluster_enabled"] == "" {
		return true
	}
	reply, err := c.ask(ctx, "cluster", "info")
	if err != nil {
		c.add(checkCluster, driver.SeverityUnknown, "the state of the cluster cannot be found out: "+reason(err),
			"ACL SETUSER "+c.user()+" +cluster|info")
		return c.nodes
	}
	state := parseInfo(reply)
	if !c.nodes {
		severity := driver.SeverityCritical
		if state["cluster_size"] == "1" {
			severity = driver.SeverityWarning // all slots are here, for now
		}
		c.add(checkCluster, severity, "the server is one of a cluster with "+state["cluster_size"]+
			" primaries, and the client does not know: locks that others serve are refused (MOVED)",
			"use redis.NewClusterClient, or redis+cluster:// in a URL")
		return severity != driver.SeverityCritical
	}
	served := state["cluster_slots_ok"]
	full, ok := c.config(ctx, "cluster-require-full-coverage")
	effect := ""
	switch {
	case !ok:
	case full == "yes":
		effect = "; while one is not, all locks stop (cluster-require-full-coverage yes)"
	default:
		effect = "; while one is not, only its locks stop (cluster-require-full-coverage no)"
	}
	all := strconv.Itoa(slots)
	detail := fmt.Sprintf("cluster_state is %s, and %s of %s slots are served%s", state["cluster_state"], served, all, effect)
	if state["cluster_state"] != "ok" || served != all {
		c.add(checkCluster, driver.SeverityCritical, detail,
			"bring back the primaries that are missing, or give their slots to others (redis-cli --cluster check, then --cluster fix)")
		return true
	}
	c.ok(checkCluster, "%s", detail)
	return true
}

// followers looks at the replicas, which a failover makes primaries.
func (c *check) followers(ctx context.Context) {
	single, ok := c.client.(*redis.Client)
	if !ok {
		return
	}
	list := c.listed()
	checks := make([]*check, len(list))
	var wg sync.WaitGroup
	for i, f := range list {
		client := beside(single, f.addr)
		checks[i] = newCheck(client, f.addr, c.opts)
		wg.Go(func() {
			defer client.Close()
			checks[i].follower(ctx)
		})
	}
	wg.Wait()
	for _, f := range checks {
		c.findings = append(c.findings, f.findings...)
		c.clocks = append(c.clocks, f.clocks...)
	}
}

func (c *check) follower(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, replicaPatience)
	defer cancel()
	r, err := readClock(ctx, c)
	if err != nil {
		c.add(checkReplicas, driver.SeverityUnknown, "this replica cannot be looked at from here: "+reason(classify(err)), "")
		return
	}
	c.clocks = append(c.clocks, r)
	if c.info, err = c.calls.info(ctx); err != nil {
		return
	}
	policy := c.info["maxmemory_policy"]
	if policy == "" || policy == "noeviction" {
		return
	}
	limit, known := c.number("maxmemory")
	name, severity, detail, fix := evictionFinding(policy, limit, known)
	c.add(name, min(severity, driver.SeverityWarning), "after a failover to this replica: "+detail, fix)
}

// beside returns a client like another one, for another server.
func beside(client *redis.Client, addr string) *redis.Client {
	o := *client.Options()
	if isFailover(client) {
		o.Dialer = nil // it leads to the primary
	}
	o.Addr, o.NodeAddress = addr, ""
	o.PoolSize, o.MinIdleConns, o.MaxIdleConns, o.MaxActiveConns, o.MaxConcurrentDials = 2, 0, 0, 0, 0
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.DialerRetries = replicaPatience, replicaPatience, replicaPatience, 1
	o.Limiter, o.PushNotificationProcessor = nil, nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(&o)
}

// clockReading is by how much the clock of a server is ahead of this machine's.
type clockReading struct {
	server         string
	offset, within time.Duration
}

// readClock asks for the time until an answer is quick.
func readClock(ctx context.Context, c *check) (clockReading, error) {
	best := clockReading{server: c.server, within: math.MaxInt64}
	for range 3 {
		began := time.Now()
		reply, err := c.ask(ctx, "time")
		took := time.Since(began)
		if err != nil {
			return best, err
		}
		f := fields{list: asList(reply)}
		if seconds, micros := f.int(), f.int(); f.err != nil {
			return best, f.err
		} else if took/2 < best.within {
			best.offset = time.Unix(seconds, micros*1000).Sub(began.Add(took / 2).Round(0))
			best.within = took / 2
		}
	}
	return best, nil
}

// compareClocks says how far the clocks of servers are apart. Each lock ends by
// the clock of the server that has it; after a failover that is another one.
func compareClocks(server string, clocks []clockReading) []driver.Finding {
	if len(clocks) < 2 {
		return nil
	}
	compare := func(a, b clockReading) int { return int(a.offset - b.offset) }
	last, first := slices.MinFunc(clocks, compare), slices.MaxFunc(clocks, compare)
	apart, within := first.offset-last.offset, first.within+last.within
	f := driver.Finding{
		Check: checkClock, Server: server,
		Detail: fmt.Sprintf("the clocks of the %d servers are at most %v apart, give or take %v", len(clocks), short(apart), short(within)),
	}
	if apart-within > clockTolerance {
		f.Severity = driver.SeverityWarning
		f.Detail = fmt.Sprintf("the clock of %s is %v ahead of that of %s, give or take %v: "+
			"after a failover or a move between them locks end that much too early or too late",
			first.server, short(apart), last.server, short(within))
		f.Fix = "run chrony or another NTP service on both, and see that it is in step (chronyc tracking)"
	}
	return []driver.Finding{f}
}

func ahead(d time.Duration) string {
	if d < 0 {
		return short(-d).String() + " behind"
	}
	return short(d).String() + " ahead of"
}

// short rounds to three digits or so.
func short(d time.Duration) time.Duration {
	for unit := time.Duration(1); unit < time.Minute; unit *= 10 {
		if d.Abs() < 1000*unit {
			return d.Round(unit)
		}
	}
	return d.Round(time.Second)
}

func bytesText(n int64) string {
	f, unit := float64(n), "B"
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if f < 1024 {
			break
		}
		f, unit = f/1024, u
	}
	return strconv.FormatFloat(f, 'g', 4, 64) + " " + unit
}

// user is the name that the client gives.
func (c *check) user() string {
	if single, ok := c.client.(*redis.Client); ok && single.Options().Username != "" {
		return single.Options().Username
	}
	return "default"
}

// userName is the name by which the server knows us.
func (c *check) userName(ctx context.Context) string {
	if reply, err := c.ask(ctx, "acl", "whoami"); err == nil {
		return fmt.Sprint(reply)
	}
	return c.user()
}

// aclCommands are what a user needs who may do nothing else: the commands of the
// scripts, those of this package and of the client, and what a check asks.
var aclCommands = []string{
	"eval", "evalsha", "time", "hget", "hmget", "hset", "hdel", "pexpire", "pttl",
	"zadd", "zcard", "zrange", "zrangebyscore", "zrank", "zrem", "zremrangebyrank", "zscore",
	"publish", "subscribe", "ping", "scan", "info", "config|get", "client|info", "acl|whoami",
}

// aclFix is a line that makes a user with the rights for all of this.
func (c *check) aclFix() string {
	commands := slices.Clone(aclCommands)
	if c.opts.Replicas > 0 {
		commands = append(commands, "wait")
	}
	if c.quorum {
		commands = append(commands, "get", "set", "lastsave")
	}
	_, cluster := c.client.(*redis.ClusterClient)
	if cluster || c.nodes {
		commands = append(commands, "command", "asking", "readonly", "cluster|info", "cluster|slots")
	}
	if single, ok := c.client.(*redis.Client); ok && single.Options().DB != 0 {
		commands = append(commands, "select")
	}
	prefix := globEscaper.Replace(c.opts.Prefix)
	return "give locks a user of their own, on every server: ACL SETUSER dlm reset on >PASSWORD " +
		aclWord("~"+prefix+"*") + " " + aclWord("&"+prefix+"!*") + " +" + strings.Join(commands, " +")
}

// aclWord is a word as redis-cli takes it.
func aclWord(s string) string {
	if strings.ContainsAny(s, " '\"\\") || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' }) {
		return strconv.Quote(s)
	}
	return s
}
