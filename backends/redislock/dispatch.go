package redislock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

const (
	// maxFlushes is how many batches are on their way at once. If none of them has
	// got on for as long as stalled, there can be one more, so that connections
	// which hang do not hold up the rest; and up to maxExtra, each after twice the
	// time, as a server that is only slow is not helped by more of them.
	maxFlushes = 3
	stalled    = 20 * time.Millisecond
	maxExtra   = 8
	// maxApart bounds the parts of batches that are on their way to the nodes of
	// a cluster.
	maxApart = 64
	// maxBatch bounds the calls in one batch.
	maxBatch = 128

	// crowd is for how long after that calls are expected to meet again.
	crowd = 2 * time.Millisecond

	// directTimeout bounds a call that is made by the caller's own goroutine,
	// and so how late it may notice that its context has ended.
	directTimeout = 250 * time.Millisecond
	// slowness is for how long the callers' goroutines are spared after one had
	// to wait for so long. It doubles each time in a row up to maxSlowness.
	slowness    = time.Second
	maxSlowness = time.Minute
)

// errNoReply says that a call was given up after it had been sent.
var errNoReply = errors.New("no reply yet")

// dispatcher sends script calls to Redis. Calls that are made while others are
// on their way go out together, as one pipeline; a lone call does not wait.
//
// A call ends with its context whatever the client does with contexts, as other
// goroutines than the caller's wait for the network. They cost a lone call a
// good part of a round trip, though. So if the client can be given a short
// time-out, a lone call is tried by its own goroutine first.
type dispatcher struct {
	client redis.UniversalClient
	// cluster is the client if it is one of a cluster, or nil; apart has room
	// for the parts of batches that are on their way to its nodes.
	cluster *redis.ClusterClient
	apart   chan struct{}
	// direct is the client with a short time-out, or nil.
	direct *redis.Client
	// replicas is how many replicas must acknowledge what a call has written,
	// within timeout.
	replicas int
	timeout  time.Duration

	mu      sync.Mutex
	queue   []*call
	flushes map[*flush]struct{}
	crowded time.Time // when calls last went together
	slow    time.Time // until then no call is made directly
	slowFor time.Duration
	// adrift are the calls with an owner that were given up after they had been
	// sent, and all tracked ones, until they are answered or have failed.
	adrift map[string][]*call
}

// flush is a goroutine that sends batches.
type flush struct {
	since time.Time // when the batch under way was sent
}

// call is one call of a script.
type call struct {
	ctx    context.Context
	script *script
	keys   []string
	args   []any
	// ack says that the replicas have to acknowledge it.
	ack bool
	// owner is set for acquisitions and what else must not arrive behind the
	// withdrawal: that waits for those that were given up, and with tracked for
	// all that are on their way.
	owner   string
	tracked bool
	// over says of a tracked call that its owner has given up, so that it must
	// not be sent any more. It may be nil.
	over func() bool
	// repeated says that the call was made before and not answered, so that its
	// answer may be to what it did then.
	repeated bool

	queued bool // guarded by dispatcher.mu
	cmd    command
	acked  int // how many replicas have acknowledged it
	err    error
	done   chan struct{}
}

// command is a Redis command that the client must not repeat by itself: only
// then does a failure to connect mean that nothing was sent.
type command struct{ *redis.Cmd }

func (command) NoRetry() bool { return true }

func newCommand(ctx context.Context, args ...any) command {
	return command{redis.NewCmd(ctx, args...)}
}

func newDispatcher(client redis.UniversalClient, replicas int, timeout time.Duration) *dispatcher {
	d := &dispatcher{
		client: client, replicas: replicas, timeout: timeout,
		flushes: make(map[*flush]struct{}), adrift: make(map[string][]*call),
	}
	if cluster, ok := client.(*redis.ClusterClient); ok {
		d.cluster, d.apart = cluster, make(chan struct{}, maxApart)
	}
	if c, ok := client.(*redis.Client); ok {
		d.direct = withTimeout(c, min(positive(c.Options().ReadTimeout), positive(c.Options().WriteTimeout), directTimeout))
	}
	return d
}

// positive returns a time-out of go-redis, which is without bound if it is not
// positive.
func positive(d time.Duration) time.Duration {
	if d <= 0 {
		return math.MaxInt64
	}
	return d
}

// run makes a call and returns the reply of the script.
func (d *dispatcher) run(ctx context.Context, s *script, keys []string, args ...any) (any, error) {
	reply, _, err := d.do(&call{ctx: ctx, script: s, keys: keys, args: args})
	return reply, err
}

// do makes a call. It returns the reply of the script and how many replicas
// have acknowledged it.
func (d *dispatcher) do(c *call) (reply any, acked int, err error) {
	if err := c.ctx.Err(); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	c.ack = c.ack && d.replicas > 0
	d.mu.Lock()
	if c.tracked {
		c.done = make(chan struct{})
		d.adrift[c.owner] = append(d.adrift[c.owner], c)
		// Asked only now: who gives up either sees the call, or is seen here.
		if c.over != nil && c.over() {
			d.landed(c)
			d.mu.Unlock()
			return nil, 0, fmt.Errorf("%w: redislock: given up", driver.ErrNotApplied)
		}
	}
	if d.direct != nil && len(d.flushes) == 0 && len(d.queue) == 0 && !c.ack && !d.isSlow() && d.isCalm() {
		if d.doDirectly(c) {
			if c.tracked {
				close(c.done)
				d.landed(c)
			}
			d.mu.Unlock()
			return d.result(c)
		}
	}
	c.queued = true
	if c.done == nil {
		c.done = make(chan struct{})
	}
	d.queue = append(d.queue, c)
	d.start()
	d.mu.Unlock()
	select {
	case <-c.done:
	case <-c.ctx.Done():
		if err := d.giveUp(c); err != nil {
			return nil, 0, err
		}
	}
	return d.result(c)
}

func (d *dispatcher) result(c *call) (reply any, acked int, err error) {
	if addr, moved := redis.IsMovedError(c.err); moved && d.cluster == nil && !c.repeated {
		return nil, 0, problem(ProblemCluster, c.err, "%s has the key", addr)
	}
	if c.err != nil {
		err := classify(c.err)
		_, said := serverSays(c.err)
		switch {
		case !said && is(err, ProblemNotRedis):
			// The server was looked at before, so this is a reply that was spoilt on
			// its way: the call may have been carried out.
			err = fmt.Errorf("redislock: %w", c.err)
		case d.cluster != nil && errors.Is(c.err, redis.ErrClosed):
			// A node that has left the cluster; the client asks another one next.
			err = fmt.Errorf("%w: redislock: %w", driver.ErrNotApplied, c.err)
		}
		if c.repeated && (errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid)) {
			// That holds for the second time only.
			err = fmt.Errorf("redislock: %w: %v", errNoReply, c.err)
		}
		return nil, 0, err
	}
	return c.cmd.Val(), c.acked, nil
}

// isCalm says that no calls went together a moment ago, so that this is likely to
// be a lone one. The mutex is held.
func (d *dispatcher) isCalm() bool { return d.crowded.IsZero() || time.Since(d.crowded) > crowd }

// isSlow says that the server was slow a short time ago. The mutex is held.
func (d *dispatcher) isSlow() bool { return !d.slow.IsZero() && time.Now().Before(d.slow) }

// doDirectly makes a call with the caller's goroutine. It returns false if the
// call has to be made again, because the server was too slow. The mutex is
// held, but not during the call.
func (d *dispatcher) doDirectly(c *call) bool {
	f := &flush{since: time.Now()}
	d.flushes[f] = struct{}{}
	d.mu.Unlock()
	d.tryDirectly(c, false)
	if c.unknownScript() {
		d.tryDirectly(c, true)
	}
	timeout, ok := errors.AsType[net.Error](c.err)
	slow := ok && timeout.Timeout() && c.ctx.Err() == nil
	d.mu.Lock()
	delete(d.flushes, f)
	if len(d.queue) > 0 {
		d.start()
	}
	switch {
	case slow:
		d.slowFor = min(max(2*d.slowFor, slowness), maxSlowness)
		d.slow = time.Now().Add(d.slowFor)
	case c.err == nil && d.slowFor != 0:
		d.slowFor, d.slow = 0, time.Time{}
	}
	c.repeated = slow
	return !slow
}

// tryDirectly sends the call's command with the short time-out.
func (d *dispatcher) tryDirectly(c *call, full bool) {
	c.prepare(c.ctx, full)
	c.err = guarded(func() error { return d.client.Process(c.ctx, directCommand{c.cmd, d.direct}) })
}

// unknownScript says that the server does not know the script yet, and so has
// done nothing. It learns it by heart when it is told in full.
func (c *call) unknownScript() bool {
	return c.err != nil && redis.HasErrorPrefix(c.err, "NOSCRIPT")
}

// giveUp takes back a call whose context has ended. It returns nil if the
// answer has come all the same.
func (d *dispatcher) giveUp(c *call) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-c.done:
		return nil
	default:
	}
	if c.queued {
		d.queue = slices.DeleteFunc(d.queue, func(other *call) bool { return other == c })
		if c.tracked {
			close(c.done)
			d.landed(c)
		}
		if !c.repeated {
			return fmt.Errorf("%w: redislock: %w", driver.ErrNotApplied, c.ctx.Err())
		}
	} else if c.owner != "" && !c.tracked {
		d.adrift[c.owner] = append(d.adrift[c.owner], c)
	}
	return fmt.Errorf("redislock: %w: %w", errNoReply, c.ctx.Err())
}

// await waits until no acquisition of this owner is on its way any more, so
// that none arrives behind the withdrawal.
func (d *dispatcher) await(ctx context.Context, owner string) error {
	for {
		d.mu.Lock()
		var ahead *call
		if calls := d.adrift[owner]; len(calls) > 0 {
			ahead = calls[0]
		}
		d.mu.Unlock()
		if ahead == nil {
			return nil
		}
		select {
		case <-ahead.done:
			d.mu.Lock()
			d.landed(ahead)
			d.mu.Unlock()
		case <-ctx.Done():
			return fmt.Errorf("%w: redislock: an earlier request is not answered: %w", driver.ErrNotApplied, ctx.Err())
		}
	}
}

// landed forgets a call that was given up. The mutex is held.
func (d *dispatcher) landed(c *call) {
	left := slices.DeleteFunc(d.adrift[c.owner], func(other *call) bool { return other == c })
	if len(left) == 0 {
		delete(d.adrift, c.owner)
	} else {
		d.adrift[c.owner] = left
	}
}

// start makes sure that somebody sends what is in the queue. The mutex is held.
func (d *dispatcher) start() {
	if n := len(d.flushes); n >= maxFlushes {
		var newest time.Time
		for f := range d.flushes {
			if f.since.After(newest) {
				newest = f.since
			}
		}
		if n >= maxFlushes+maxExtra || time.Since(newest) < stalled<<(n-maxFlushes) {
			return
		}
	}
	f := &flush{since: time.Now()}
	d.flushes[f] = struct{}{}
	go d.flush(f)
}

// flush sends batches until the queue is empty.
func (d *dispatcher) flush(f *flush) {
	for {
		d.mu.Lock()
		n := min(len(d.queue), maxBatch)
		if n == 0 {
			delete(d.flushes, f)
			d.mu.Unlock()
			return
		}
		batch := make([]*call, n)
		copy(batch, d.queue)
		clear(d.queue[:n])
		d.queue = d.queue[:copy(d.queue, d.queue[n:])]
		for _, c := range batch {
			c.queued = false
		}
		f.since = time.Now()
		if n > 1 {
			d.crowded = f.since
		}
		d.mu.Unlock()
		if d.cluster != nil {
			d.sendApart(batch)
		} else {
			d.send(batch)
		}
		if n > 1 {
			// Let those who were answered make their next calls, which then go
			// together.
			runtime.Gosched()
		}
	}
}

// send sends a batch and answers its calls.
func (d *dispatcher) send(batch []*call) {
	err := guarded(func() error {
		d.carry(batch)
		return nil
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range batch {
		if err != nil && c.err == nil && (c.cmd.Cmd == nil || c.cmd.Val() == nil) {
			c.err = err
		}
		close(c.done)
		if len(d.adrift) > 0 && c.owner != "" {
			d.landed(c)
		}
	}
}

// carry makes the calls of a batch.
func (d *dispatcher) carry(batch []*call) {
	ctx, cancel := batchContext(batch)
	defer cancel()
	d.exchange(ctx, batch, false)

	var again []*call
	for _, c := range batch {
		if c.unknownScript() {
			again = append(again, c)
		}
	}
	if len(again) > 0 {
		d.exchange(ctx, again, true)
	}
	if slices.ContainsFunc(batch, func(c *call) bool { return unreached(c.err) }) {
		d.reload()
	}
}

// batchContext returns a context that ends when no call of the batch has any
// use for it.
func batchContext(batch []*call) (context.Context, context.CancelFunc) {
	if len(batch) == 1 {
		return batch[0].ctx, func() {}
	}
	var latest time.Time
	for _, c := range batch {
		deadline, ok := c.ctx.Deadline()
		if !ok {
			return context.WithCancel(context.WithoutCancel(batch[0].ctx))
		}
		if deadline.After(latest) {
			latest = deadline
		}
	}
	return context.WithDeadline(context.WithoutCancel(batch[0].ctx), latest)
}

// prepare makes the command of a call.
func (c *call) prepare(ctx context.Context, full bool) {
	args := make([]any, 0, 3+len(c.keys)+len(c.args))
	if full {
		args = append(args, "eval", c.script.source)
	} else {
		args = append(args, "evalsha", c.script.sha)
	}
	args = append(args, len(c.keys))
	for _, key := range c.keys {
		args = append(args, key)
	}
	c.cmd = newCommand(ctx, append(args, c.args...)...)
	c.err, c.acked = nil, 0
}

// exchange sends the commands of the calls and takes their answers.
func (d *dispatcher) exchange(ctx context.Context, batch []*call, full bool) {
	ack := slices.ContainsFunc(batch, func(c *call) bool { return c.ack })
	if len(batch) == 1 && !ack {
		c := batch[0]
		c.prepare(ctx, full)
		c.err = guarded(func() error { return d.client.Process(ctx, c.cmd) })
		return
	}
	for _, c := range batch {
		c.prepare(ctx, full)
	}
	switch {
	case ack && d.cluster != nil:
		d.askCluster(ctx, batch)
		return
	case ack:
		d.ask(ctx, route{}, batch)
		return
	}
	pipe := d.client.Pipeline()
	for _, c := range batch {
		_ = pipe.Process(ctx, c.cmd)
	}
	settle(batch, exec(ctx, pipe))
}

func exec(ctx context.Context, pipe redis.Pipeliner) error {
	return guarded(func() error {
		_, err := pipe.Exec(ctx)
		return err
	})
}

// settle takes the answers of a pipeline.
func settle(batch []*call, err error) {
	for _, c := range batch {
		c.err = c.cmd.Err()
		if c.err == nil && err != nil && c.cmd.Val() == nil {
			c.err = err // the command was not reached
		}
	}
}

// ask sends calls through one connection, and behind them the question how many
// replicas have what they wrote.
func (d *dispatcher) ask(ctx context.Context, to route, batch []*call) {
	pipe := d.client.Pipeline()
	if to.node != nil {
		pipe = to.node.Pipeline()
	}
	for _, c := range batch {
		if to.asking {
			_ = pipe.Process(ctx, newCommand(ctx, "asking"))
		}
		_ = pipe.Process(ctx, c.cmd)
	}
	wait := newCommand(ctx, "wait", d.replicas, d.timeout.Milliseconds())
	_ = pipe.Process(ctx, wait)
	settle(batch, exec(ctx, pipe))
	acked, _ := wait.Int()
	for _, c := range batch {
		c.acked = acked
	}
}
