package servers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Cluster is a Redis Cluster. All its nodes remember over Kill and Restart what
// they know of the cluster, but not their data.
type Cluster struct {
	Nodes []*Redis // as created: first the primaries, then the replicas

	tb TB
}

// StartCluster starts a cluster whose primaries have equal shares of the slots.
// replicas is the number of replicas in all; replica i follows primary i, from
// the first again if there are more replicas than primaries. It returns when all
// nodes agree and take commands, which takes at least 2 s. Without a primary, a
// majority of the others makes its replica one; there is none with fewer than
// three primaries.
func StartCluster(tb TB, primaries, replicas int) *Cluster {
	tb.Helper()
	c := &Cluster{tb: tb}
	for range primaries + replicas {
		c.Nodes = append(c.Nodes, newNode(tb))
	}
	startAll(tb, c.Nodes)
	if err := c.create(primaries); err != nil {
		tb.Fatalf("servers: creating a cluster: %v", err)
	}
	c.WaitReady()
	return c
}

func newNode(tb TB) *Redis {
	tb.Helper()
	r := newRedis(tb, nil)
	r.withBus = true
	r.prepare = func() ([]string, error) {
		return r.dataArgs(&RedisConfig{Args: []string{
			"--cluster-enabled", "yes",
			"--cluster-config-file", "nodes.conf",
			"--cluster-port", strconv.Itoa(r.bus),
			"--cluster-announce-ip", "127.0.0.1",
			"--cluster-node-timeout", "1000",
			"--cluster-replica-validity-factor", "0",
			"--cluster-require-full-coverage", "no",
			// Replicas stay with their primaries, even with those that have no slots.
			"--cluster-migration-barrier", "1000",
		}})
	}
	return r
}

// create makes one cluster of the nodes.
func (c *Cluster) create(primaries int) error {
	ctx, cancel := context.WithTimeout(context.Background(), startPatience)
	defer cancel()
	for i, r := range c.Nodes {
		id, err := r.ask(ctx, "CLUSTER", "MYID")
		if err != nil {
			return err
		}
		r.id = fmt.Sprint(id)
		if i < primaries {
			s := share(i, primaries)
			if _, err := r.ask(ctx, "CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(s.first), strconv.Itoa(s.last)); err != nil {
				return err
			}
		}
		// Nodes that begin with the same epoch would have to settle that first.
		if _, err := r.ask(ctx, "CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1)); err != nil {
			return err
		}
	}
	for _, r := range c.Nodes[1:] {
		if _, err := c.Nodes[0].ask(ctx, "CLUSTER", "MEET", "127.0.0.1", strconv.Itoa(r.port), strconv.Itoa(r.bus)); err != nil {
			return err
		}
	}
	err := poll(changePatience, func(ctx context.Context) error {
		for _, r := range c.Nodes {
			if v, err := c.view(ctx, r); err != nil {
				return err
			} else if len(v) != len(c.Nodes) {
				return fmt.Errorf("%s knows %d nodes", r.Addr(), len(v))
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i, r := range c.Nodes[primaries:] {
		primary := c.Nodes[i%primaries]
		err := poll(changePatience, func(ctx context.Context) error {
			_, err := r.ask(ctx, "CLUSTER", "REPLICATE", primary.id)
			return err // it may not know the primary's role yet
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Addrs returns the addresses of all nodes.
func (c *Cluster) Addrs() []string { return addrs(c.Nodes) }

// PrimaryOf returns the node that owns a slot. While nodes do not agree, it is the
// one of the latest change. The test fails if no node that runs knows one.
func (c *Cluster) PrimaryOf(slot int) *Redis {
	c.tb.Helper()
	var owner *Redis
	err := poll(changePatience, func(ctx context.Context) error {
		views, errs := c.views(ctx)
		owner = c.owner(views, slot)
		if owner == nil {
			return fmt.Errorf("no node knows the owner of slot %d: %w", slot, errors.Join(errs...))
		}
		return nil
	})
	if err != nil {
		c.tb.Fatalf("servers: %v", err)
	}
	return owner
}

// ReplicaOf returns a replica of a node that runs, nil if there is none.
func (c *Cluster) ReplicaOf(primary *Redis) *Redis {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), changePatience)
	defer cancel()
	for _, r := range c.Nodes {
		if r == primary || !r.running() {
			continue
		}
		// What a replica says itself is what counts.
		info, err := r.info(ctx, "replication")
		if err == nil && info["role"] == "slave" && info["master_port"] == strconv.Itoa(primary.port) {
			return r
		}
	}
	return nil
}

// Failover makes a replica the primary in place of the one that it follows, which
// runs and becomes its replica, without loss of data. It returns when all nodes
// that run agree.
func (c *Cluster) Failover(replica *Redis) {
	c.tb.Helper()
	const attempt = 6 * time.Second // the server gives up after 5 s
	var sent time.Time
	err := poll(changePatience, func(ctx context.Context) error {
		if role, err := replica.role(ctx); err != nil || role == "master" {
			return err
		}
		if time.Since(sent) > attempt {
			if _, err := replica.ask(ctx, "CLUSTER", "FAILOVER"); err != nil {
				return err
			}
			sent = time.Now()
		}
		return fmt.Errorf("%s is still a replica", replica.Addr())
	})
	if err == nil {
		err = poll(changePatience, func(ctx context.Context) error { return c.agreed(ctx) })
	}
	if err != nil {
		c.tb.Fatalf("servers: failover in a cluster: %v", err)
	}
}

// WaitPrimary waits until all nodes that run name one node other than not as the
// owner of a slot, and that node takes commands for it, and returns it. With
// nil it may be any node.
func (c *Cluster) WaitPrimary(slot int, not *Redis) *Redis {
	c.tb.Helper()
	var owner *Redis
	err := poll(changePatience, func(ctx context.Context) error {
		views, errs := c.views(ctx)
		if err := errors.Join(errs...); err != nil {
			return err
		}
		owner = c.owner(views, slot)
		if owner == nil || owner == not || !owner.running() {
			return fmt.Errorf("slot %d has no other owner yet", slot)
		}
		for r, v := range views {
			if c.owner(map[*Redis]clusterView{r: v}, slot) != owner {
				return fmt.Errorf("%s does not know yet that slot %d is %s's", r.Addr(), slot, owner.Addr())
			}
		}
		return stateOK(ctx, owner)
	})
	if err != nil {
		c.tb.Fatalf("servers: waiting for another owner of slot %d: %v", slot, err)
	}
	return owner
}

// WaitReady waits until all nodes run, are linked and of one mind, all slots are
// served and all replicas are in step, so that any node may be lost next.
func (c *Cluster) WaitReady() {
	c.tb.Helper()
	err := poll(changePatience, func(ctx context.Context) error {
		for _, r := range c.Nodes {
			if !r.running() {
				return fmt.Errorf("%s is dead or paused", r.Addr())
			}
			if err := stateOK(ctx, r); err != nil {
				return err
			}
			if err := r.linked(ctx); err != nil {
				return err
			}
		}
		return c.agreed(ctx)
	})
	if err != nil {
		c.tb.Fatalf("servers: waiting for the nodes of a cluster to agree: %v", err)
	}
}

// stateOK checks that a node takes commands.
func stateOK(ctx context.Context, r *Redis) error {
	v, err := r.ask(ctx, "CLUSTER", "INFO")
	if err != nil {
		return err
	}
	info := fields(v)
	if info["cluster_state"] != "ok" || info["cluster_slots_ok"] != strconv.Itoa(slotCount) {
		return fmt.Errorf("%s is in state %q with %s slots served", r.Addr(), info["cluster_state"], info["cluster_slots_ok"])
	}
	return nil
}

// agreed checks that all nodes that run see the same of each other, with the same
// slots.
func (c *Cluster) agreed(ctx context.Context) error {
	views, errs := c.views(ctx)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var first string
	for r, v := range views {
		got, err := v.summary(c)
		if err != nil {
			return fmt.Errorf("%s: %w", r.Addr(), err)
		}
		if first == "" {
			first = got
		}
		if got != first {
			return fmt.Errorf("nodes see the cluster differently:\n%s\n\n%s", first, got)
		}
	}
	return nil
}

// owner returns the node that has a slot according to the latest of views, nil if
// none is known.
func (c *Cluster) owner(views map[*Redis]clusterView, slot int) *Redis {
	var owner *Redis
	epoch := -1
	for _, v := range views {
		for _, n := range v {
			if n.owns(slot) && n.epoch > epoch {
				epoch, owner = n.epoch, c.byID(n.id)
			}
		}
	}
	return owner
}

func (c *Cluster) byID(id string) *Redis {
	i := slices.IndexFunc(c.Nodes, func(r *Redis) bool { return r.id == id })
	if i < 0 {
		return nil
	}
	return c.Nodes[i]
}

// views asks all nodes that run, side by side.
func (c *Cluster) views(ctx context.Context) (views map[*Redis]clusterView, errs []error) {
	views = map[*Redis]clusterView{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, r := range c.Nodes {
		if !r.running() {
			continue
		}
		wg.Go(func() {
			v, err := c.view(ctx, r)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			} else {
				views[r] = v
			}
		})
	}
	wg.Wait()
	return views, errs
}

// view asks one node for all that it knows.
func (c *Cluster) view(ctx context.Context, r *Redis) (clusterView, error) {
	v, err := r.ask(ctx, "CLUSTER", "NODES")
	if err != nil {
		return nil, err
	}
	view, err := parseNodes(fmt.Sprint(v))
	if err != nil {
		return nil, fmt.Errorf("CLUSTER NODES on %s: %w", r.Addr(), err)
	}
	return view, nil
}

// A clusterView is what one node knows of all.
type clusterView []clusterNode

// A clusterNode is a line of CLUSTER NODES.
type clusterNode struct {
	id      string
	flags   []string
	primary string // whom it follows, - for nobody
	epoch   int
	linked  bool // to the node that was asked
	slots   []slotRange
}

func (n clusterNode) owns(slot int) bool {
	return slices.Contains(n.flags, "master") &&
		slices.ContainsFunc(n.slots, func(s slotRange) bool { return s.first <= slot && slot <= s.last })
}

// summary describes what nodes must agree about. It fails if a node that runs
// does not seem so.
func (v clusterView) summary(c *Cluster) (string, error) {
	var lines []string
	for _, n := range v {
		r := c.byID(n.id)
		if r == nil {
			return "", fmt.Errorf("unknown node %s", n.id)
		}
		if !r.running() {
			continue
		}
		flags := slices.DeleteFunc(slices.Clone(n.flags), func(f string) bool { return f == "myself" })
		if len(flags) != 1 || flags[0] != "master" && flags[0] != "slave" || !n.linked {
			return "", fmt.Errorf("node %s is %v, linked: %t", r.Addr(), flags, n.linked)
		}
		lines = append(lines, fmt.Sprint(r.Addr(), flags, n.primary, n.slots))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n"), nil
}

// parseNodes reads the reply to CLUSTER NODES.
func parseNodes(text string) (clusterView, error) {
	var view clusterView
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 8 {
			return nil, fmt.Errorf("malformed line %q", line)
		}
		n := clusterNode{id: f[0], flags: strings.Split(f[2], ","), primary: f[3], linked: f[7] == "connected"}
		var err error
		if n.epoch, err = strconv.Atoi(f[6]); err != nil {
			return nil, fmt.Errorf("malformed line %q: %w", line, err)
		}
		for _, s := range f[8:] {
			if strings.HasPrefix(s, "[") {
				continue // a slot that is being migrated; its owner has it among the others
			}
			first, last, found := strings.Cut(s, "-")
			if !found {
				last = first
			}
			var r slotRange
			var err1, err2 error
			r.first, err1 = strconv.Atoi(first)
			r.last, err2 = strconv.Atoi(last)
			if err := errors.Join(err1, err2); err != nil {
				return nil, fmt.Errorf("malformed line %q: %w", line, err)
			}
			n.slots = append(n.slots, r)
		}
		view = append(view, n)
	}
	return view, nil
}
