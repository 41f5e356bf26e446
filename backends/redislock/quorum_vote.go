package redislock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/go-dlm/dlm/driver"
)

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
	start := time.Now()
	for attempt := 1; ; attempt++ {
		v, err := q.voteInTurn(ctx, &req)
		if err != nil {
			return driver.Lease{}, err
		}
		if v.won {
			lease := driver.Lease{Key: req.Key, Owner: req.Owner, Token: v.token, TTL: req.TTL, Mode: req.Mode}
			q.handedOut(&lease)
			return lease, nil
		}
		if !v.again || ctx.Err() != nil {
			return driver.Lease{}, v.held(q)
		}
		// Others have stood in our way who are gone, or stand behind us now.
		longest, enough := time.Duration(attempt)*votePause, attempt == maxVotes
		if !req.Enqueue {
			// Nobody will tell this caller that they are gone: a release may still be
			// on its way to a node that is slow.
			longest = min(votePause<<(2*min(attempt-1, 8)), maxVotePause)
			enough = attempt >= maxVotes && time.Since(start) > q.nodeTimeout(req.TTL)
		}
		if enough {
			return driver.Lease{}, v.held(q)
		}
		pause(ctx, rand.N(longest))
	}
}

const (
	// maxVotes is how often an acquisition votes in one call, while nobody has
	// a majority. One that does not wait goes on for as long as a node may take.
	maxVotes = 5
	// votePause bounds the pause before the second vote. Each later one may be
	// longer by as much, or four times as long, up to maxVotePause, for a caller
	// who does not wait.
	votePause    = 2 * time.Millisecond
	maxVotePause = 64 * time.Millisecond
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

	won bool
	// token is the one that was handed out to the owner before, or 0, and then
	// the one to hand out. had counts the nodes on which the owner had the key
	// already, and known says that one of them has that token.
	token int64
	had   int
	known bool
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
func (q *Quorum) acquire(
	ctx context.Context, n *node, req *driver.Request, wanted, attempt int64, over func() bool,
) (any, error) {
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
		owner: req.Owner, tracked: true, over: over,
	})
}

// voteInTurn is vote for one of many.
func (q *Quorum) voteInTurn(ctx context.Context, req *driver.Request) (v *vote, err error) {
	if err := q.voting.enter(ctx); err != nil {
		return nil, err
	}
	start, timeout := time.Now(), q.nodeTimeout(req.TTL)
	defer func() { q.voting.leave(ctx.Err() == nil && (err != nil || time.Since(start) > timeout), timeout) }()
	return q.vote(ctx, req)
}

// vote asks all nodes for the key, and leaves no grant behind unless a majority
// has granted it.
func (q *Quorum) vote(ctx context.Context, req *driver.Request) (*vote, error) {
	start, timeout, wanted, attempt := time.Now(), q.nodeTimeout(req.TTL), q.clock.guess(), q.attempts.Add(1)
	r := q.askFor(ctx, timeout, q.nodes, req, attempt, func(ctx context.Context, n *node, over func() bool) (any, error) {
		return q.acquire(ctx, n, req, wanted, attempt, over)
	})
	v := &vote{token: q.tokenOf(req.Owner, req.Key)}
	for !v.decided(q.majority, r.left) {
		a, ok := r.next(ctx)
		if !ok {
			break
		}
		q.count(v, a)
	}
	if req.Enqueue && len(v.granted) < q.majority {
		q.hearOut(ctx, r, v, max(time.Since(start), hearing))
	}
	v.won = len(v.granted) >= q.majority && q.agree(ctx, timeout, v, req, attempt)
	if v.won {
		q.afterWin(r, v, req, attempt)
		return v, nil
	}
	return v, q.afterLoss(ctx, r, v, req, wanted, attempt)
}

// hearing is for how long at least a waiter hears out the nodes.
const hearing = 5 * time.Millisecond

// hearOut takes further answers to a waiter that was refused, for some time. A
// node that others asked in another order has given it another place, and the
// queues are the same only if that is known.
func (q *Quorum) hearOut(ctx context.Context, r *round, v *vote, patience time.Duration) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for r.left > 0 {
		select {
		case a := <-r.answers:
			r.left--
			q.count(v, a)
		case <-timer.C:
			return
		case <-r.timeout.Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// decided says that the key was granted by a majority, or refused by so many
// that it cannot be, or that no answer is left.
func (v *vote) decided(majority, left int) bool {
	granted, refused := len(v.granted), len(v.refused)
	if v.token != 0 && granted >= majority && v.had < majority {
		return left == 0 // a repetition is to find what there was
	}
	return left == 0 || granted >= majority || granted+left < majority && granted+refused >= majority
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
		g := grantOn{a.node, f.int()}
		v.granted = append(v.granted, g)
		if f.int() == 1 {
			v.had++
			v.known = v.known || g.token == v.token
		}
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
func (q *Quorum) agree(ctx context.Context, timeout time.Duration, v *vote, req *driver.Request, attempt int64) bool {
	// If a majority had granted the key before, nobody else was granted it since,
	// and the token that was handed out then remains. If none of them knows it, it
	// is of an earlier grant, which was released past us.
	if v.token == 0 || v.had < q.majority || !v.known {
		for _, g := range v.granted {
			v.token = max(v.token, g.token)
		}
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
		return q.setToken(ctx, n, req, v.token, attempt)
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

func (q *Quorum) setToken(ctx context.Context, n *node, req *driver.Request, token, attempt int64) (any, error) {
	return n.run(ctx, call{
		script: quorumTokenScript, keys: q.keys(req.Key), args: []any{req.Owner, token, attempt},
		// The release names the token, and must not overtake this.
		owner: req.Owner, tracked: true,
	})
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
		q.rounds.start(func() { forget(v) })
	}
	if r.left == 0 {
		return
	}
	s := q.watch(req.Owner)
	q.rest(r, func(a answer) {
		var late vote
		q.count(&late, a)
		forget(&late)
		for _, g := range late.granted {
			if g.token == v.token {
				continue // the release waits for the acquisition, see askFor
			}
			ctx, cancel := context.WithTimeout(ctx, timeout)
			_, _ = q.setToken(ctx, g.node, req, v.token, attempt)
			cancel()
			// A release that came before has not found the token.
			q.tidy(s, g.node, driver.Lease{Key: req.Key, Owner: req.Owner, Token: v.token})
		}
	}, func() { q.unwatch(req.Owner, s) })
}

// tooFewError says that less than a majority of the nodes answered.
type tooFewError struct {
	answered, nodes int
	errs            []error
}

func (e *tooFewError) Error() string {
	var s strings.Builder
	s.WriteString(fmt.Sprintf("redislock: %d of %d nodes answered", e.answered, e.nodes))
	for _, err := range e.errs {
		s.WriteString("; " + err.Error())
	}
	if e.answered+len(e.errs) < e.nodes {
		s.WriteString("; no reply from the others yet")
	}
	return s.String()
}

// Unwrap returns the errors of the nodes if no other node is left that could do
// what these cannot. What one node says is not what the quorum says.
func (e *tooFewError) Unwrap() []error {
	late := func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
	if e.answered+len(e.errs) < e.nodes || slices.ContainsFunc(e.errs, late) {
		return []error{context.DeadlineExceeded} // that of the step
	}
	if len(e.errs) == e.nodes {
		for _, kind := range []error{driver.ErrInvalid, driver.ErrNotApplied, driver.ErrClosed} {
			if !slices.ContainsFunc(e.errs, func(err error) bool { return !errors.Is(err, kind) }) {
				return e.errs
			}
		}
	}
	return nil
}

func (q *Quorum) tooFew(answered int, errs []error) error {
	return &tooFewError{answered: answered, nodes: len(q.nodes), errs: errs}
}

// afterLoss gives back what some nodes have granted though a majority has not.
func (q *Quorum) afterLoss(ctx context.Context, r *round, v *vote, req *driver.Request, wanted, attempt int64) error {
	timeout := q.nodeTimeout(req.TTL)
	if v.known && len(v.refused) < q.majority {
		// It was a repetition, and as far as is known a majority still has the
		// grant: the lock lasts for as long as it did before.
		q.rest(r, func(answer) {}, nil)
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("redislock: %w: %w", errNoReply, err)
		}
		return q.tooFew(len(v.granted)+len(v.refused), v.errs)
	}
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
		q.rounds.start(func() { giveBack(v) })
	}
	place := int64(asItIs)
	if req.Enqueue {
		place = v.place(wanted)
	}
	if nodes := v.unsettled(place); len(nodes) > 0 {
		v.again = q.settle(ctx, timeout, nodes, req, attempt, place) >= q.majority || v.split(q.majority)
	}
	if len(v.granted)+len(v.refused) < q.majority {
		err := q.tooFew(len(v.granted)+len(v.refused), v.errs)
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return err
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
// waiter stands at another place than this, if it is one.
func (v *vote) unsettled(place int64) []*node {
	var nodes []*node
	for _, g := range v.granted {
		nodes = append(nodes, g.node)
	}
	for _, r := range v.refused {
		if r.place != 0 && place != asItIs && r.place != place {
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
	r := q.askFor(ctx, timeout, nodes, req, attempt, func(ctx context.Context, n *node, over func() bool) (any, error) {
		if place <= 0 {
			over = nil // it only removes
		}
		return q.settleOn(ctx, n, req, attempt, place, over)
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

// settleOn is settle for one node.
func (q *Quorum) settleOn(
	ctx context.Context, n *node, req *driver.Request, attempt, place int64, over func() bool,
) (any, error) {
	if err := n.calls.await(ctx, req.Owner); err != nil {
		return nil, err
	}
	return n.run(ctx, call{
		script: quorumSettleScript,
		keys:   q.keys(req.Key),
		args: []any{
			req.Owner, attempt, place, micros(q.ticketLife()), channel(q.opts.Prefix, req.Manager), q.kept(2 * q.ticketLife()),
		},
		owner: req.Owner, tracked: true, over: over,
	})
}

// held is the refusal of the majority.
func (v *vote) held(q *Quorum) error {
	held := &driver.HeldError{}
	by := make(map[string]int)
	remaining := make([]time.Duration, 0, len(v.refused))
	var positions []int
	unheard := len(q.nodes) - len(v.refused) - len(v.granted)
	for _, r := range v.refused {
		// What cannot be a majority may be what a release has not reached yet.
		by[r.holder]++
		if r.holder != "" && by[r.holder]+unheard >= q.majority && (held.Holder == "" || by[r.holder] > by[held.Holder]) {
			held.Holder, held.Token = r.holder, r.token
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
