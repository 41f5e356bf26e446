package redislock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// QuorumOptions configures a quorum. Nil means the defaults, and so does the
// zero value of each field.
type QuorumOptions struct {
	// Prefix begins all keys and channels. Locks of a quorum and locks of a
	// single Redis do not exclude each other, and must not share a prefix. Up to
	// 128 bytes of UTF-8 without braces. Defaults to "dlmq:".
	Prefix string
	// LivenessWindow bounds how long a waiter that has died can hold up those
	// behind it. It must be between 100ms and 1h. Defaults to 20s.
	LivenessWindow time.Duration
	// KeepTokens is how long the last token of a key is remembered after its
	// last lock has ended, see [Options.KeepTokens]. Defaults to 24h.
	KeepTokens time.Duration
	// NodeTimeout bounds the wait for one node in one step of a call. A node
	// that is slower does not count in that step; a majority of faster ones is
	// never kept waiting for it. It must be between 1ms and 1m. Defaults to
	// 250ms; half the TTL if that is less.
	NodeTimeout time.Duration
	// MaxTTL bounds the TTL of all locks. A node that comes back without its
	// data does not vote for this long, so that nothing which it had granted
	// is granted again. All clients must use the same. It must be between 1s
	// and 366 days. Defaults to 1m.
	MaxTTL time.Duration
}

const (
	defaultQuorumPrefix = "dlmq:"
	defaultNodeTimeout  = 250 * time.Millisecond
	defaultMaxTTL       = time.Minute
)

func (o *QuorumOptions) withDefaults() (QuorumOptions, error) {
	var opts QuorumOptions
	if o != nil {
		opts = *o
	}
	if opts.Prefix == "" {
		opts.Prefix = defaultQuorumPrefix
	}
	if err := checkPrefix("QuorumOptions", opts.Prefix); err != nil {
		return opts, err
	}
	return opts, checkDurations("QuorumOptions",
		durationField{"LivenessWindow", &opts.LivenessWindow, defaultLivenessWindow, 100 * time.Millisecond, time.Hour},
		durationField{"KeepTokens", &opts.KeepTokens, defaultKeepTokens, time.Minute, 366 * 24 * time.Hour},
		durationField{"NodeTimeout", &opts.NodeTimeout, defaultNodeTimeout, time.Millisecond, time.Minute},
		durationField{"MaxTTL", &opts.MaxTTL, defaultMaxTTL, time.Second, dlm.MaxTTL},
	)
}

// Quorum keeps locks in an odd number of Redis primaries that know nothing of
// each other, as the algorithm Redlock does: a lock is held by whoever holds it
// on a majority of them. It goes on while a minority is down, slow or cut off.
// It is safe for concurrent use.
type Quorum struct {
	nodes    []*node
	majority int
	opts     QuorumOptions
	clock    nodeClock

	setupMu sync.Mutex
	ids     map[string]int // run ids of the nodes, to tell a server given twice
	twice   error          // one was
	settled atomic.Bool    // all nodes have been looked at

	mu   sync.Mutex
	late map[string]*straggle // by owner

	attempts atomic.Int64 // numbers the votes

	ended  atomic.Bool
	closed chan struct{}
	rounds sync.WaitGroup // goroutines that ask a node
}

var (
	_ driver.Backend   = (*Quorum)(nil)
	_ driver.Notifier  = (*Quorum)(nil)
	_ driver.Inspector = (*Quorum)(nil)
	_ driver.Forcer    = (*Quorum)(nil)
	_ driver.Checker   = (*Quorum)(nil)
)

// node is one of the servers.
type node struct {
	index  int
	client redis.UniversalClient
	calls  *dispatcher
	setup  nodeSetup
}

// straggle watches over a lock that was granted by a majority before all nodes
// had answered.
type straggle struct {
	released bool // it was given up meanwhile
}

// minNodes is the smallest number of nodes of which one may fail.
const minNodes = 3

// NewQuorum returns a backend over clients, each of which leads to another
// primary. The clients remain the caller's to close. Their number must be odd,
// and three at least: with an even number, the last one makes the quorum less
// available and no safer. Nothing is asked yet; that two clients lead to the
// same server is found out by the first calls, which then fail with
// [ProblemSameServer].
//
// A cluster, a Ring and clients of Sentinel are no nodes of a quorum: only the
// first kind is told apart and refused.
func NewQuorum(clients []redis.UniversalClient, opts *QuorumOptions) (*Quorum, error) {
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	if n := len(clients); n < minNodes || n%2 == 0 {
		return nil, invalidf("a quorum of %d clients, must be an odd number and at least %d", n, minNodes)
	}
	q := &Quorum{
		majority: len(clients)/2 + 1, opts: o,
		ids: make(map[string]int), late: make(map[string]*straggle), closed: make(chan struct{}),
	}
	for i, client := range clients {
		if err := checkClient(client); err != nil {
			return nil, fmt.Errorf("client %d: %w", i, err)
		}
		if _, ok := client.(*redis.ClusterClient); ok {
			return nil, fmt.Errorf("redislock: client %d is a cluster, must be one primary: %w", i, errors.ErrUnsupported)
		}
		for j, other := range clients[:i] {
			if other == client {
				return nil, invalidf("clients %d and %d are the same", j, i)
			}
		}
		q.nodes = append(q.nodes, &node{index: i, client: client, calls: newDispatcher(client, 0, 0)})
	}
	return q, nil
}

// NewQuorumLockManager returns a manager over a new quorum of clients, which
// remain the caller's to close. A nil cfg or nil opts mean the defaults.
func NewQuorumLockManager(clients []redis.UniversalClient, cfg *dlm.LockConfig, opts *QuorumOptions) (*dlm.Manager, error) {
	q, err := NewQuorum(clients, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(q, cfg)
}

// Properties implements [driver.Backend].
func (q *Quorum) Properties() driver.Properties {
	return driver.Properties{
		Name:           "redis-quorum",
		Tokens:         driver.TokensClock,
		LivenessWindow: q.opts.LivenessWindow,
	}
}

// Close implements [driver.Backend]. The clients stay open.
func (q *Quorum) Close() error {
	if !q.ended.Swap(true) {
		close(q.closed)
	}
	q.rounds.Wait()
	return nil
}

// enter begins a call.
func (q *Quorum) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	if q.ended.Load() {
		return driver.ErrClosed
	}
	return q.ready(ctx)
}

// nodeTimeout bounds one step of a call about a lock with this TTL.
func (q *Quorum) nodeTimeout(ttl time.Duration) time.Duration {
	return max(min(q.opts.NodeTimeout, ttl/2), time.Millisecond)
}

func (q *Quorum) kept(ttl time.Duration) int64 { return q.opts.KeepTokens.Milliseconds() + millis(ttl) }

// keys are the keys of a lock on a node.
func (q *Quorum) keys(key string) []string {
	record := recordKey(q.opts.Prefix, key)
	return []string{record, record + queueSuffix}
}

// markKey names the key that says since when a node has its data.
func (q *Quorum) markKey() string { return q.opts.Prefix + "!node" }

// quarantine is for how long a node without data does not vote: as long as any
// grant can last that it has forgotten, by clocks that differ in their rate.
func (q *Quorum) quarantine() int64 { return micros(q.opts.MaxTTL + q.opts.MaxTTL/50) }

// nodeClock guesses what the nodes' clocks show. It serves to propose numbers
// that all nodes can accept, so that they agree without a second round; nothing
// but that rests on it.
type nodeClock struct {
	mu     sync.Mutex
	micros int64
	at     time.Time
}

// heard notes what a node's clock showed a moment ago.
func (c *nodeClock) heard(us int64) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.micros == 0 || us > c.micros+now.Sub(c.at).Microseconds() {
		c.micros, c.at = us, now
	}
}

// guess returns what the fastest clock shows about now, or 0.
func (c *nodeClock) guess() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.micros == 0 {
		return 0
	}
	return c.micros + time.Since(c.at).Microseconds()
}

// round is one question to several nodes.
type round struct {
	answers chan answer // has room for all
	left    int
	timeout context.Context
}

// answer is what a node answered.
type answer struct {
	node  *node
	reply any
	err   error
}

// ask puts a question to nodes side by side. The caller's context does not end
// it, as what was granted must become known.
func (q *Quorum) ask(
	ctx context.Context, timeout time.Duration, nodes []*node, question func(context.Context, *node) (any, error),
) *round {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	r := &round{answers: make(chan answer, len(nodes)), left: len(nodes), timeout: ctx}
	var left atomic.Int64
	left.Store(int64(len(nodes)) + 1)
	done := func() {
		if left.Add(-1) == 0 {
			cancel()
		}
	}
	for _, n := range nodes {
		q.rounds.Add(1)
		go func() {
			defer q.rounds.Done()
			reply, err := question(ctx, n)
			r.answers <- answer{n, reply, err}
			done()
		}()
	}
	done()
	return r
}

// next waits for the next answer. It returns false when there are none left,
// when time is up, or when the context ends.
func (r *round) next(ctx context.Context) (answer, bool) {
	if r.left == 0 {
		return answer{}, false
	}
	select {
	case a := <-r.answers:
		r.left--
		return a, true
	default:
	}
	select {
	case a := <-r.answers:
		r.left--
		return a, true
	case <-r.timeout.Done():
		// The last answers and the end of the time can come together.
		select {
		case a := <-r.answers:
			r.left--
			return a, true
		default:
		}
	case <-ctx.Done():
	}
	return answer{}, false
}

// rest has the answers that come late dealt with.
func (q *Quorum) rest(r *round, deal func(answer), end func()) {
	if r.left == 0 {
		return
	}
	left := r.left
	r.left = 0
	q.rounds.Go(func() {
		for range left {
			deal(<-r.answers)
		}
		if end != nil {
			end()
		}
	})
}

// run makes one script call on a node that is ready.
func (n *node) run(ctx context.Context, c call) (any, error) {
	if err := n.setup.state(); err != nil {
		return nil, err
	}
	c.ctx = ctx
	reply, _, err := n.calls.do(&c)
	return reply, err
}

// Acquire implements [driver.Backend].
func (q *Quorum) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	switch {
	case req.Mode != driver.Exclusive || req.Limit != 1:
		return driver.Lease{}, fmt.Errorf("redislock: shared locks and permits on a quorum: %w", errors.ErrUnsupported)
	case req.TTL > q.opts.MaxTTL:
		return driver.Lease{}, invalidf("ttl is %v, must be at most QuorumOptions.MaxTTL, %v", req.TTL, q.opts.MaxTTL)
	}
	if err := q.enter(ctx); err != nil {
		return driver.Lease{}, err
	}
	for attempt := 1; ; attempt++ {
		v, err := q.vote(ctx, &req)
		if err != nil || v.won {
			return driver.Lease{Key: req.Key, Owner: req.Owner, Token: v.token, TTL: req.TTL, Mode: req.Mode}, err
		}
		if !v.again || attempt == maxVotes {
			return driver.Lease{}, v.held(q)
		}
		// Others have stood in our way who are gone, or stand behind us now.
		pause(ctx, rand.N(time.Duration(attempt)*votePause))
	}
}

const (
	// maxVotes is how often an acquisition votes in one call, while nobody has
	// a majority.
	maxVotes = 4
	// votePause bounds the pause before the second vote, and by how much each
	// later one may be longer.
	votePause = 2 * time.Millisecond
)

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// vote is what an acquisition has heard from the nodes.
type vote struct {
	granted []grantOn
	refused []refusal
	// doubtful are the nodes of which it is not known what they did.
	doubtful []*node
	errs     []error

	won   bool
	token int64
	// again says that it is worth voting again at once.
	again bool
}

type grantOn struct {
	node  *node
	token int64
}

type refusal struct {
	node      *node
	holder    string
	token     int64
	remaining time.Duration
	position  int
	place     int64
}

func (q *Quorum) ticketLife() time.Duration { return q.opts.LivenessWindow / 4 * 3 }

// acquire asks one node for the key.
func (q *Quorum) acquire(ctx context.Context, n *node, req *driver.Request, wanted, attempt int64) (any, error) {
	var life time.Duration
	if req.Enqueue {
		life = q.ticketLife()
	}
	return n.run(ctx, call{
		script: quorumAcquireScript,
		keys:   append(q.keys(req.Key), q.markKey()),
		args: []any{
			req.Owner, micros(req.TTL), channel(q.opts.Prefix, req.Manager), q.kept(max(req.TTL, 2*life)), micros(life),
			wanted, attempt, q.quarantine(),
		},
		owner: req.Owner,
	})
}

// vote asks all nodes for the key, and leaves no grant behind unless a majority
// has granted it.
func (q *Quorum) vote(ctx context.Context, req *driver.Request) (*vote, error) {
	timeout, wanted, attempt := q.nodeTimeout(req.TTL), q.clock.guess(), q.attempts.Add(1)
	r := q.ask(ctx, timeout, q.nodes, func(ctx context.Context, n *node) (any, error) {
		return q.acquire(ctx, n, req, wanted, attempt)
	})
	v := &vote{}
	for len(v.granted) < q.majority && len(v.granted)+r.left >= q.majority {
		a, ok := r.next(ctx)
		if !ok {
			break
		}
		q.count(v, a)
	}
	v.won = len(v.granted) >= q.majority && q.agree(ctx, timeout, v, req)
	if v.won {
		q.afterWin(r, v, req, attempt)
		return v, nil
	}
	return v, q.afterLoss(ctx, r, v, req, wanted, attempt)
}

// count takes a node's answer to the question for the key.
func (q *Quorum) count(v *vote, a answer) {
	if a.err != nil {
		v.errs = append(v.errs, fmt.Errorf("node %d: %w", a.node.index, a.err))
		if !errors.Is(a.err, driver.ErrNotApplied) && !errors.Is(a.err, driver.ErrInvalid) {
			v.doubtful = append(v.doubtful, a.node)
		}
		return
	}
	f := fields{list: asList(a.reply)}
	what, now := f.int(), f.int()
	switch what {
	case 1:
		v.granted = append(v.granted, grantOn{a.node, f.int()})
	case 0:
		v.refused = append(v.refused, refusal{
			node: a.node, holder: f.string(), token: f.int(), remaining: f.micros(), position: int(f.int()), place: f.int(),
		})
	case 2:
		// It may have granted the key to somebody and have forgotten it.
		v.refused = append(v.refused, refusal{node: a.node, remaining: f.micros()})
	}
	if f.err != nil {
		v.errs = append(v.errs, fmt.Errorf("node %d: %w", a.node.index, f.err))
		return
	}
	q.clock.heard(now)
}

// agree makes a majority remember the largest of its tokens before anybody is
// given it: then every later majority has a node that gives a larger one.
func (q *Quorum) agree(ctx context.Context, timeout time.Duration, v *vote, req *driver.Request) bool {
	for _, g := range v.granted {
		v.token = max(v.token, g.token)
	}
	var differ []*node
	for _, g := range v.granted {
		if g.token != v.token {
			differ = append(differ, g.node)
		}
	}
	if len(differ) == 0 {
		return true
	}
	agreed := len(v.granted) - len(differ)
	r := q.ask(ctx, timeout, differ, func(ctx context.Context, n *node) (any, error) {
		return q.setToken(ctx, n, req, v.token)
	})
	for agreed < q.majority {
		a, ok := r.next(ctx)
		if !ok {
			return false
		}
		if n, _ := a.reply.(int64); a.err == nil && n == 1 {
			agreed++
		}
	}
	return true
}

func (q *Quorum) setToken(ctx context.Context, n *node, req *driver.Request, token int64) (any, error) {
	return n.run(ctx, call{script: quorumTokenScript, keys: q.keys(req.Key), args: []any{req.Owner, token}, owner: req.Owner})
}

// afterWin deals with the nodes that have not granted the key to the winner:
// one that refused forgets the ticket, and one that answers late is brought in
// line.
func (q *Quorum) afterWin(r *round, v *vote, req *driver.Request, attempt int64) {
	ctx, timeout := context.Background(), q.nodeTimeout(req.TTL)
	forget := func(v *vote) {
		for _, refusal := range v.refused {
			if refusal.place != 0 {
				q.settle(ctx, timeout, []*node{refusal.node}, req, attempt, 0)
			}
		}
	}
	if slices.ContainsFunc(v.refused, func(r refusal) bool { return r.place != 0 }) {
		q.rounds.Go(func() { forget(v) })
	}
	if r.left == 0 {
		return
	}
	s := &straggle{}
	q.mu.Lock()
	q.late[req.Owner] = s
	q.mu.Unlock()
	q.rest(r, func(a answer) {
		var late vote
		q.count(&late, a)
		forget(&late)
		for _, g := range late.granted {
			if g.token != v.token {
				ctx, cancel := context.WithTimeout(ctx, timeout)
				_, _ = q.setToken(ctx, g.node, req, v.token)
				cancel()
			}
			q.mu.Lock()
			released := s.released
			q.mu.Unlock()
			if released {
				// The release may have come to this node before the grant.
				ctx, cancel := context.WithTimeout(ctx, timeout)
				_, _ = q.releaseOn(ctx, g.node, driver.Lease{Key: req.Key, Owner: req.Owner, Token: v.token})
				cancel()
			}
		}
	}, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.late[req.Owner] == s {
			delete(q.late, req.Owner)
		}
	})
}

// afterLoss gives back what some nodes have granted though a majority has not.
func (q *Quorum) afterLoss(ctx context.Context, r *round, v *vote, req *driver.Request, wanted, attempt int64) error {
	timeout := q.nodeTimeout(req.TTL)
	giveBack := func(v *vote) {
		for _, n := range v.doubtful {
			q.settle(context.Background(), timeout, []*node{n}, req, attempt, asItIs)
		}
	}
	q.rest(r, func(a answer) {
		var late vote
		q.count(&late, a)
		for _, g := range late.granted {
			late.doubtful = append(late.doubtful, g.node)
		}
		giveBack(&late)
	}, nil)
	if len(v.doubtful) > 0 {
		q.rounds.Go(func() { giveBack(v) })
	}
	place := int64(0)
	if req.Enqueue {
		place = v.place(wanted)
	}
	if nodes := v.unsettled(place); len(nodes) > 0 {
		v.again = q.settle(ctx, timeout, nodes, req, attempt, place) >= q.majority || v.split(q.majority)
	}
	switch {
	case len(v.granted)+len(v.refused) < q.majority:
		err := fmt.Errorf("redislock: %d of %d nodes voted: %w", len(v.granted)+len(v.refused), len(q.nodes), cmp.Or(errors.Join(v.errs...), errNoReply))
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("redislock: %w: %w", errNoReply, ctx.Err())
	}
	return nil
}

// asItIs leaves a waiter's place in the queue alone.
const asItIs = -1

// place is where a waiter stands on all nodes from now on: at the largest of its
// places, so that those who came later stand behind it everywhere.
func (v *vote) place(wanted int64) int64 {
	place := int64(0)
	for _, r := range v.refused {
		place = max(place, r.place)
	}
	if place == 0 {
		place = wanted
	}
	for _, g := range v.granted {
		if place == 0 {
			place = g.token
		}
	}
	return max(place, 1)
}

// unsettled are the nodes that have granted the key, and those on which the
// waiter stands at another place.
func (v *vote) unsettled(place int64) []*node {
	var nodes []*node
	for _, g := range v.granted {
		nodes = append(nodes, g.node)
	}
	for _, r := range v.refused {
		if r.place != 0 && r.place != place {
			nodes = append(nodes, r.node)
		}
	}
	return nodes
}

// split says that the key was refused though nobody has a majority either, as
// when several ask at the same time.
func (v *vote) split(majority int) bool {
	by := make(map[string]int)
	for _, r := range v.refused {
		if r.holder != "" {
			by[r.holder]++
		}
		if by[r.holder] >= majority {
			return false
		}
	}
	return len(v.granted) > 0
}

// settle gives back what nodes have granted in this or an earlier attempt, and
// gives the waiter its place. It returns how many of the nodes would grant the
// key now.
func (q *Quorum) settle(
	ctx context.Context, timeout time.Duration, nodes []*node, req *driver.Request, attempt, place int64,
) int {
	r := q.ask(ctx, timeout, nodes, func(ctx context.Context, n *node) (any, error) {
		if err := n.calls.await(ctx, req.Owner); err != nil {
			return nil, err
		}
		return n.run(ctx, call{
			script: quorumSettleScript,
			keys:   q.keys(req.Key),
			args: []any{
				req.Owner, attempt, place, micros(q.ticketLife()), channel(q.opts.Prefix, req.Manager), q.kept(2 * q.ticketLife()),
			},
			owner: req.Owner,
		})
	})
	free := 0
	for {
		a, ok := r.next(ctx)
		if !ok {
			return free
		}
		if n, _ := a.reply.(int64); a.err == nil && n == 1 {
			free++
		}
	}
}

// held is the refusal of the majority.
func (v *vote) held(q *Quorum) error {
	held := &driver.HeldError{}
	by := make(map[string]int)
	remaining := make([]time.Duration, 0, len(v.refused))
	var positions []int
	for _, r := range v.refused {
		if r.holder != "" {
			if by[r.holder]++; by[r.holder] > by[held.Holder] || held.Holder == "" {
				held.Holder, held.Token = r.holder, r.token
			}
		}
		remaining = append(remaining, r.remaining)
		if r.position > 0 {
			positions = append(positions, r.position)
		}
	}
	for range v.granted {
		remaining = append(remaining, 0)
		positions = append(positions, 1)
	}
	slices.Sort(remaining)
	slices.Sort(positions)
	if len(remaining) >= q.majority {
		held.Remaining = remaining[q.majority-1]
	}
	if len(positions) > 0 {
		held.Position = positions[len(positions)/2]
	}
	return held
}
