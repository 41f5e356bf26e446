package redislock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

// Extend implements [driver.Backend]. A node that has no grant on the key, since
// it was restarted without its data or was away when the key was granted, is
// given the grant of the majority.
func (q *Quorum) Extend(ctx context.Context, batch []driver.Renewal) {
	if len(batch) == 0 {
		return
	}
	if err := q.enter(ctx); err != nil {
		fail(batch, err)
		return
	}
	ttl := batch[0].Lease.TTL
	for i := range batch {
		l := &batch[i].Lease
		if l.TTL > q.opts.MaxTTL {
			fail(batch, invalidf("ttl is %v, must be at most QuorumOptions.MaxTTL, %v", l.TTL, q.opts.MaxTTL))
			return
		}
		ttl = min(ttl, l.TTL)
	}
	leases := make([]driver.Lease, len(batch))
	for i := range batch {
		leases[i] = batch[i].Lease
	}
	timeout := q.nodeTimeout(ttl)
	r := q.ask(ctx, timeout, q.nodes, func(ctx context.Context, n *node) (any, error) {
		return q.extendOn(ctx, n, leases, "")
	})
	t := newTally(len(leases), len(q.nodes))
	for !t.decided(q.majority) {
		a, ok := r.next(ctx)
		if !ok {
			break
		}
		t.add(a)
	}
	for i := range batch {
		batch[i].Err = ended(ctx, t.outcome(q.majority, i, &leases[i]))
		batch[i].Lease.Age = 0
	}
	var kept []int // by a majority
	for i := range leases {
		if batch[i].Err == nil {
			kept = append(kept, i)
		}
	}
	if len(kept) == 0 {
		return
	}
	watched := make([]*straggle, len(leases))
	for _, i := range kept {
		q.handedOut(&leases[i])
		watched[i] = q.watch(leases[i].Owner)
	}
	lacking := t.lacking
	q.rounds.start(func() {
		for n, places := range lacking {
			q.refill(n, timeout, leases, places, watched)
		}
		for range r.left {
			a := <-r.answers
			late := newTally(len(leases), len(q.nodes))
			late.add(a)
			q.refill(a.node, timeout, leases, late.lacking[a.node], watched)
		}
		for _, i := range kept {
			q.unwatch(leases[i].Owner, watched[i])
		}
	})
}

// extendOn renews leases on one node.
func (q *Quorum) extendOn(ctx context.Context, n *node, leases []driver.Lease, refill string) (any, error) {
	keys := make([]string, len(leases))
	args := make([]any, 0, 2+4*len(leases))
	args = append(args, q.kept(0), refill)
	for i := range leases {
		keys[i] = recordKey(q.opts.Prefix, leases[i].Key)
		certain := 0
		if q.tokenOf(leases[i].Owner, leases[i].Key) == leases[i].Token {
			certain = 1
		}
		args = append(args, leases[i].Owner, leases[i].Token, micros(leases[i].TTL), certain)
	}
	reply, err := n.run(ctx, call{script: quorumExtendScript, keys: keys, args: args})
	if err != nil {
		return nil, err
	}
	if list := asList(reply); len(list) != len(leases) {
		return nil, fmt.Errorf("redislock: strange reply: %v", reply)
	}
	return reply, nil
}

// refill gives a node those grants that it lacks and a majority has.
func (q *Quorum) refill(n *node, timeout time.Duration, leases []driver.Lease, places []int, watched []*straggle) {
	var lacking []driver.Lease
	for _, i := range places {
		if watched[i] != nil {
			lacking = append(lacking, leases[i])
		}
	}
	if len(lacking) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	_, _ = q.extendOn(ctx, n, lacking, "refill")
	for _, i := range places {
		if watched[i] != nil {
			q.tidy(watched[i], n, leases[i])
		}
	}
}

// tally counts what nodes say about several leases.
type tally struct {
	nodes       int
	kept, gone  []int
	taken       []bool
	lacking     map[*node][]int // who has which leases not
	errs        []error
	unheardFrom int
}

func newTally(leases, nodes int) *tally {
	return &tally{
		nodes: nodes, unheardFrom: nodes,
		kept: make([]int, leases), gone: make([]int, leases), taken: make([]bool, leases), lacking: make(map[*node][]int),
	}
}

func (t *tally) add(a answer) {
	t.unheardFrom--
	if a.err != nil {
		t.errs = append(t.errs, fmt.Errorf("node %d: %w", a.node.index, a.err))
		return
	}
	for i, v := range asList(a.reply) {
		switch n, _ := v.(int64); n {
		case 1:
			t.kept[i]++
		case 2:
			t.gone[i]++
			t.taken[i] = true
		default:
			t.gone[i]++
			t.lacking[a.node] = append(t.lacking[a.node], i)
		}
	}
}

// decided says that no further answer can change anything.
func (t *tally) decided(majority int) bool {
	for i := range t.kept {
		if t.kept[i] < majority && t.gone[i] <= t.nodes-majority {
			return t.unheardFrom == 0
		}
	}
	return true
}

// outcome is the answer for one lease.
func (t *tally) outcome(majority, i int, l *driver.Lease) error {
	switch {
	case t.kept[i] >= majority:
		return nil
	case t.gone[i] <= t.nodes-majority:
		return &tooFewError{answered: t.kept[i] + t.gone[i], nodes: t.nodes, errs: t.errs}
	case t.taken[i]:
		return gone(l, 2)
	}
	return gone(l, 0)
}

// Release implements [driver.Backend].
func (q *Quorum) Release(ctx context.Context, lease driver.Lease) error {
	if err := q.enter(ctx); err != nil {
		return err
	}
	left := q.leave(lease.Owner)
	timeout := q.opts.NodeTimeout
	r := q.ask(ctx, timeout, q.nodes, func(ctx context.Context, n *node) (any, error) {
		if err := n.calls.await(ctx, lease.Owner); err != nil {
			return nil, err
		}
		reply, err := q.releaseOn(ctx, n, lease)
		if err == nil && reply != any(int64(1)) && q.wasUndone(left, n) {
			return nil, fmt.Errorf("redislock: %w: it was undone at the same time", errNoReply)
		}
		return reply, err
	})
	t := newTally(1, len(q.nodes))
	for !t.decided(q.majority) {
		a, ok := r.next(ctx)
		if !ok {
			break
		}
		a.reply = []any{a.reply}
		t.add(a)
	}
	return ended(ctx, t.outcome(q.majority, 0, &lease))
}

// ended adds that the context has ended to an error that comes of it.
func ended(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil || errors.Is(err, driver.ErrLost) {
		return err
	}
	return fmt.Errorf("%w: %w", ctx.Err(), err)
}

// releaseOn gives up a lease on one node.
func (q *Quorum) releaseOn(ctx context.Context, n *node, lease driver.Lease, more ...any) (any, error) {
	if err := n.setup.state(); err != nil {
		return nil, err
	}
	c := &call{
		ctx: ctx, script: quorumReleaseScript, keys: q.keys(lease.Key),
		args: append([]any{lease.Owner, lease.Token, q.kept(0)}, more...),
	}
	reply, _, err := n.calls.do(c)
	if answer, ok := reply.(int64); ok && answer != 1 && c.repeated {
		return nil, released(c, &lease, answer)
	}
	return reply, err
}

// Inspect implements [driver.Inspector]. It shows what a majority says.
func (q *Quorum) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	if err := q.enter(ctx); err != nil {
		return driver.KeyInfo{}, err
	}
	r := q.ask(ctx, q.opts.NodeTimeout, q.nodes, func(ctx context.Context, n *node) (any, error) {
		return n.run(ctx, call{script: quorumInspectScript, keys: q.keys(key)})
	})
	var views []nodeView
	var errs []error
	for {
		a, ok := r.next(ctx)
		if !ok {
			break
		}
		view, err := parseView(a)
		if err != nil {
			errs = append(errs, fmt.Errorf("node %d: %w", a.node.index, err))
			continue
		}
		views = append(views, view)
	}
	if len(views) < q.majority {
		return driver.KeyInfo{}, cmp.Or(ctx.Err(), q.tooFew(len(views), errs))
	}
	return q.combine(key, views), nil
}

// nodeView is what one node knows of a key.
type nodeView struct {
	holder  driver.HolderInfo
	waiters []driver.WaiterInfo
}

func parseView(a answer) (v nodeView, err error) {
	if a.err != nil {
		return v, a.err
	}
	f := fields{list: asList(a.reply)}
	if h := f.array(); len(h) > 0 {
		g := fields{list: h}
		v.holder = driver.HolderInfo{
			Owner: g.string(), Token: g.int(), TTL: g.micros(), Held: g.micros(), Remaining: g.micros(),
		}
		if g.err != nil {
			return v, g.err
		}
	}
	for _, w := range f.array() {
		g := fields{list: asList(w)}
		v.waiters = append(v.waiters, driver.WaiterInfo{Owner: g.string(), Waiting: g.micros()})
		if g.err != nil {
			return v, g.err
		}
	}
	return v, f.err
}

// combine puts together what a majority of the nodes agree on.
func (q *Quorum) combine(key string, views []nodeView) driver.KeyInfo {
	info := driver.KeyInfo{Key: key}
	type grant struct {
		owner string
		token int64
	}
	held := make(map[grant][]driver.HolderInfo)
	waits := make(map[string]int)
	var order []driver.WaiterInfo
	for _, v := range views {
		if v.holder.Owner != "" {
			g := grant{v.holder.Owner, v.holder.Token}
			held[g] = append(held[g], v.holder)
		}
		for _, w := range v.waiters {
			if waits[w.Owner]++; waits[w.Owner] == 1 {
				order = append(order, w)
			}
		}
	}
	for _, list := range held {
		if len(list) < q.majority {
			continue
		}
		// It lasts for as long as it does on a majority.
		slices.SortFunc(list, func(a, b driver.HolderInfo) int { return cmp.Compare(b.Remaining, a.Remaining) })
		h := list[q.majority-1]
		info.Holders, info.Limit = append(info.Holders, h), 1
	}
	for _, w := range order {
		if waits[w.Owner]*2 > len(views) {
			info.Waiters, info.Limit = append(info.Waiters, w), 1
		}
	}
	return info
}

// List implements [driver.Inspector].
func (q *Quorum) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if err := q.enter(ctx); err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = defaultListLimit
	}
	// To go through all keys can take longer than a node has otherwise.
	r := q.ask(ctx, listTimeout, q.nodes, func(ctx context.Context, n *node) (any, error) {
		if err := n.setup.state(); err != nil {
			return nil, err
		}
		return scanKeys(ctx, []redis.Cmdable{n.client}, q.opts.Prefix, prefix, after)
	})
	found := make(map[string]struct{})
	var errs []error
	answered := 0
	for answered < len(q.nodes) {
		a, ok := r.next(ctx)
		if !ok {
			break
		}
		if a.err != nil {
			errs = append(errs, fmt.Errorf("node %d: %w", a.node.index, a.err))
			continue
		}
		answered++
		for _, key := range a.reply.([]string) {
			found[key] = struct{}{}
		}
	}
	if answered < q.majority {
		return nil, cmp.Or(ctx.Err(), q.tooFew(answered, errs))
	}
	var list []driver.KeyInfo
	for _, key := range slices.Sorted(maps.Keys(found)) {
		if len(list) == limit {
			break
		}
		info, err := q.Inspect(ctx, key)
		switch {
		case is(err, ProblemForeign):
		case err != nil:
			return nil, err
		case info.Limit != 0:
			list = append(list, info)
		}
	}
	return list, nil
}

// listTimeout bounds the search of a node for keys.
const listTimeout = 5 * time.Second

// ForceRelease implements [driver.Forcer]. It removes only what a majority shows
// as held, and what of it lies on the other nodes.
func (q *Quorum) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	info, err := q.Inspect(ctx, key)
	if err != nil {
		return nil, err
	}
	var removed []driver.HolderInfo
	for _, h := range info.Holders {
		if token != 0 && h.Token != token {
			continue
		}
		lease := driver.Lease{Key: key, Owner: h.Owner, Token: h.Token}
		r := q.ask(ctx, q.opts.NodeTimeout, q.nodes, func(ctx context.Context, n *node) (any, error) {
			return q.releaseOn(ctx, n, lease, "lost")
		})
		t := newTally(1, len(q.nodes))
		for {
			a, ok := r.next(ctx)
			if !ok {
				break
			}
			a.reply = []any{a.reply}
			t.add(a)
		}
		err := t.outcome(q.majority, 0, &lease)
		if errors.Is(err, driver.ErrLost) && t.kept[0] == 0 {
			continue
		}
		if err != nil && !errors.Is(err, driver.ErrLost) {
			return removed, err
		}
		removed = append(removed, h)
	}
	return removed, nil
}
