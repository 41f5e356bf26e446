package redislock

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

// hanging is how long a node may take to answer before the client looks anew
// who has its slots.
const hanging = 500 * time.Millisecond

// sendApart sends a batch to the nodes of a cluster, to each its part. It
// returns when all have answered, or after a short time, so that a node which
// hangs does not hold up the calls to the others.
func (d *dispatcher) sendApart(batch []*call) {
	ctx := context.WithoutCancel(batch[0].ctx)
	parts := make(map[*redis.Client][]*call)
	for _, c := range batch {
		// Without an answer the call itself finds out what is wrong.
		var node *redis.Client
		_ = guarded(func() (err error) {
			node, err = d.cluster.MasterForKey(ctx, c.keys[0])
			return err
		})
		parts[node] = append(parts[node], c)
	}
	answered := make(chan struct{}, len(parts))
	for _, part := range parts {
		d.apart <- struct{}{}
		go func() {
			// Another node may have taken its place.
			late := time.AfterFunc(hanging, d.reload)
			d.send(part)
			late.Stop()
			<-d.apart
			answered <- struct{}{}
		}()
	}
	timer := time.NewTimer(stalled)
	defer timer.Stop()
	for range parts {
		select {
		case <-answered:
		case <-timer.C:
			return
		}
	}
}

// reload makes the client look anew which node has which slots. It does so by
// itself only once a minute, or when a node that is alive tells it to.
func (d *dispatcher) reload() {
	if d.cluster != nil {
		d.cluster.ReloadState(context.Background())
	}
}

// unreached says that a node did not answer, or not for its slots.
func unreached(err error) bool {
	if err == nil {
		return false
	}
	_, answered := serverSays(err)
	return !answered || redis.IsClusterDownError(err) || redis.IsLoadingError(err)
}

// route is where a call is sent.
type route struct {
	node *redis.Client
	// asking says that the slot is on its way to the node.
	asking bool
}

// maxMoves is how often a call follows slots that move.
const maxMoves = 3

// askCluster sends the calls to their nodes. A replica's acknowledgement counts
// for one connection, so each node is asked for itself.
func (d *dispatcher) askCluster(ctx context.Context, batch []*call) {
	routes := make(map[route][]*call)
	for _, c := range batch {
		node, err := d.cluster.MasterForKey(ctx, c.keys[0])
		if err != nil {
			c.err = fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
			continue
		}
		routes[route{node: node}] = append(routes[route{node: node}], c)
	}
	for move := 0; len(routes) > 0; move++ {
		var wg sync.WaitGroup
		for r, calls := range routes {
			wg.Go(func() { d.ask(ctx, r, calls) })
		}
		wg.Wait()
		if move == maxMoves {
			return
		}
		routes = d.redirected(ctx, routes)
	}
}

// redirected returns where the calls are to be sent that are to be sent
// elsewhere.
func (d *dispatcher) redirected(ctx context.Context, routes map[route][]*call) map[route][]*call {
	var nodes map[string]*redis.Client
	again := make(map[route][]*call)
	for _, calls := range routes {
		for _, c := range calls {
			addr, moved := redis.IsMovedError(c.err)
			asking := false
			if !moved {
				if addr, asking = redis.IsAskError(c.err); !asking {
					continue
				}
			}
			if nodes == nil {
				nodes = d.nodes(ctx)
			}
			if node := nodes[addr]; node != nil {
				c.cmd, c.err = newCommand(ctx, c.cmd.Args()...), nil
				again[route{node, asking}] = append(again[route{node, asking}], c)
			}
		}
	}
	return again
}

// nodes returns the nodes of the cluster by address, as it is now.
func (d *dispatcher) nodes(ctx context.Context) map[string]*redis.Client {
	var mu sync.Mutex
	nodes := make(map[string]*redis.Client)
	// It fails if no node can be asked. Then there are none.
	_ = d.cluster.ForEachShard(ctx, func(_ context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		nodes[node.Options().Addr] = node
		return nil
	})
	return nodes
}
