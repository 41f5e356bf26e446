package etcdlock

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

const (
	// maxFlights is how many transactions are on their way at once before calls
	// begin to share. If one has not come back after stalled there may be others,
	// up to maxExtra, so that a member that hangs does not hold up the rest.
	maxFlights = 2
	maxExtra   = 64
	stalled    = 50 * time.Millisecond
	// maxBatch is how many calls share a transaction. It and the operations of one
	// call count together against the 128 that a server allows by default.
	maxBatch = 64
)

// dispatcher sends transactions. Those that are made while others are on their
// way go out together, as nested transactions of one that costs the cluster one
// entry in its log; a lone call does not wait. Comparisons are evaluated before
// anything is written, so no two in one transaction are about the same key.
type dispatcher struct {
	client *clientv3.Client

	mu      sync.Mutex
	queue   []*call
	flights map[*flight]struct{}
}

// flight is a transaction on its way.
type flight struct {
	since  time.Time
	cancel context.CancelFunc
	left   int // how many callers wait for it
}

// call is one transaction about one key.
type call struct {
	ctx context.Context
	key string
	condition

	flight *flight // nil as long as it has not been sent
	done   chan struct{}
	resp   *pb.TxnResponse
	rev    int64
	err    error
}

func newDispatcher(client *clientv3.Client) *dispatcher {
	return &dispatcher{client: client, flights: make(map[*flight]struct{})}
}

// alone runs a transaction by itself: one that writes what others write too.
func (d *dispatcher) alone(ctx context.Context, c condition) (*pb.TxnResponse, int64, error) {
	resp, err := d.client.Txn(ctx).If(c.conds...).Then(c.then...).Else(c.otherwise...).Commit()
	if err != nil {
		return nil, 0, err
	}
	return (*pb.TxnResponse)(resp), resp.Header.Revision, nil
}

// txn runs a transaction about one key, and returns the answer with the revision
// at which it was given.
func (d *dispatcher) txn(
	ctx context.Context, key string, conds []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*pb.TxnResponse, int64, error) {
	c := &call{ctx: ctx, key: key, condition: condition{conds, then, otherwise}}
	d.mu.Lock()
	if len(d.queue) == 0 && d.free() {
		// Nobody is there to share with.
		f := &flight{since: time.Now()}
		d.flights[f] = struct{}{}
		d.mu.Unlock()
		defer d.landed(f)
		return d.alone(ctx, c.condition)
	}
	c.done = make(chan struct{})
	d.queue = append(d.queue, c)
	d.start()
	d.mu.Unlock()

	timer := time.NewTimer(stalled)
	defer timer.Stop()
	for {
		select {
		case <-c.done:
			return c.resp, c.rev, c.err
		case <-timer.C:
			d.mu.Lock()
			d.start()
			d.mu.Unlock()
			timer.Reset(stalled)
		case <-ctx.Done():
			return nil, 0, d.leave(c)
		}
	}
}

// leave gives a call up whose context has ended.
func (d *dispatcher) leave(c *call) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.flight == nil {
		d.queue = slices.DeleteFunc(d.queue, func(other *call) bool { return other == c })
		return fmt.Errorf("%w: etcdlock: %w", driver.ErrNotApplied, c.ctx.Err())
	}
	if c.flight.left--; c.flight.left == 0 {
		c.flight.cancel()
	}
	return c.ctx.Err()
}

// free says whether another transaction may be sent now. The mutex is held.
func (d *dispatcher) free() bool {
	n := len(d.flights)
	if n < maxFlights {
		return true
	}
	if n >= maxFlights+maxExtra {
		return false
	}
	now := time.Now()
	for f := range d.flights {
		if now.Sub(f.since) < stalled {
			return false
		}
	}
	return true
}

// landed takes note that a transaction has come back.
func (d *dispatcher) landed(f *flight) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.flights, f)
	d.start()
}

// start sends what is in the queue. The mutex is held.
func (d *dispatcher) start() {
	for len(d.queue) > 0 && d.free() {
		ctx, cancel := context.WithCancel(context.Background())
		f := &flight{since: time.Now(), cancel: cancel}
		keys := make(map[string]struct{})
		var batch, rest []*call
		for _, c := range d.queue {
			if _, ok := keys[c.key]; ok || len(batch) == maxBatch {
				rest = append(rest, c)
				continue
			}
			keys[c.key] = struct{}{}
			c.flight = f
			batch = append(batch, c)
		}
		d.queue = rest
		f.left = len(batch)
		d.flights[f] = struct{}{}
		go func() {
			defer cancel()
			d.fly(ctx, batch)
			d.landed(f)
		}()
	}
}

// fly sends a batch and hands out the answers.
func (d *dispatcher) fly(ctx context.Context, batch []*call) {
	if len(batch) == 1 {
		c := batch[0]
		c.resp, c.rev, c.err = d.alone(ctx, c.condition)
		close(c.done)
		return
	}
	ops := make([]clientv3.Op, len(batch))
	for i, c := range batch {
		ops[i] = clientv3.OpTxn(c.conds, c.then, c.otherwise)
	}
	resp, err := d.client.Txn(ctx).Then(ops...).Commit()
	if err != nil && (gone(err) || certain(classify(ctx, err, ""))) {
		// One that is refused has all refused: each is to have its own answer.
		var wg sync.WaitGroup
		for _, c := range batch {
			wg.Go(func() {
				c.resp, c.rev, c.err = d.alone(ctx, c.condition)
				close(c.done)
			})
		}
		wg.Wait()
		return
	}
	for i, c := range batch {
		if c.err = err; err == nil {
			c.resp, c.rev = resp.Responses[i].GetResponseTxn(), resp.Header.Revision
		}
		close(c.done)
	}
}
