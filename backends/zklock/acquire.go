package zklock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/driver"
)

const (
	// maxTries bounds how often a node is to be created against a state of the
	// key that turns out to be old.
	maxTries = 64
	// maxLooks bounds how often a queue is looked at that changes meanwhile.
	maxLooks = 16
	// blindAfter is after how many such tries a ticket is taken without regard to
	// the state, which always succeeds.
	blindAfter = 3
	// maxToken is the first number that a token must not reach.
	maxToken = int64(1) << 53
)

// errGone says that the owner's node is not there any more.
var errGone = errors.New("zklock: the node is gone")

// errState says that the state against which a node was to be created is old.
var errState = errors.New("zklock: the state has changed")

// acquisition is one call of Acquire.
type acquisition struct {
	ctx   context.Context
	b     *Backend
	req   driver.Request
	start time.Time
	s     *session
	r     *record
	stat  *zk.Stat // of the parent, from the creation of the node
}

func (a *acquisition) run() (driver.Lease, error) {
	a.b.mu.Lock()
	if a.req.Enqueue {
		a.r.manager = a.req.Manager
	}
	a.b.mu.Unlock()
	for range 3 {
		if err := a.b.settle(a.ctx, a.s, a.r); err != nil {
			return driver.Lease{}, err
		}
		a.b.mu.Lock()
		known, other := a.r.name != "", a.r.mode != a.req.Mode || a.r.limit != a.req.Limit
		a.b.mu.Unlock()
		if !known {
			lease, err := a.enter()
			if !errors.Is(err, errGone) {
				return lease, err
			}
			continue
		}
		if other {
			return driver.Lease{}, invalidf("owner is on key %q in another mode or with another limit", a.req.Key)
		}
		lease, err := a.look(nil)
		if !errors.Is(err, errGone) {
			return lease, err
		}
		// Somebody has removed it. This is a new request then.
		a.b.mu.Lock()
		a.r.clear()
		a.b.mu.Unlock()
		if err := alive(a.ctx); err != nil {
			return driver.Lease{}, err
		}
	}
	return driver.Lease{}, fmt.Errorf("zklock: nodes for key %q are removed as soon as they are made", a.req.Key)
}

// enter makes the owner's node, which it does not have yet.
//
// Each creation raises the version of the parent's data in the same transaction.
// So one that names the version that came with the list of nodes succeeds only if
// no node has come since, and what the list says of the new one's place is true.
func (a *acquisition) enter() (driver.Lease, error) {
	b, s := a.b, a.s
	parent := b.parent(a.req.Key)
	b.mu.Lock()
	k := b.keys[a.req.Key]
	busy := k.records > 1
	b.mu.Unlock()
	select {
	case k.gate <- struct{}{}:
	case <-a.ctx.Done():
		return driver.Lease{}, fmt.Errorf("%w: zklock: given up: %w", driver.ErrNotApplied, a.ctx.Err())
	}
	leave := sync.OnceFunc(func() { <-k.gate })
	defer leave()
	if busy {
		if err := s.sync(); err != nil {
			return driver.Lease{}, err
		}
	} else {
		// Most keys are free, and have no parent then.
		if lease, err := a.first(); !errors.Is(err, errState) {
			return lease, err
		}
	}
	for try := range maxTries {
		if err := alive(a.ctx); err != nil {
			return driver.Lease{}, fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
		}
		snap, err := s.look(a.req.Key)
		if err != nil {
			return driver.Lease{}, err
		}
		list, version := snap.list, snap.version
		if version == noParent {
			if lease, err := a.first(); !errors.Is(err, errState) {
				return lease, err
			}
			continue
		}
		if err := a.disagrees(list); err != nil {
			return driver.Lease{}, err
		}
		me := contender{mode: a.req.Mode, limit: a.req.Limit, owner: a.req.Owner, session: s.id}
		after := append(slices.Clip(list), me)
		fits := holders(after) == len(after)
		if !fits && !a.req.Enqueue {
			held, ok, err := a.refused(list, nil)
			if err != nil {
				return driver.Lease{}, err
			}
			if !ok {
				continue
			}
			return driver.Lease{}, held
		}
		if err := alive(a.ctx); err != nil {
			return driver.Lease{}, fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
		}
		if version == -1 {
			// To the server that means any version. It comes once in 2^32 times.
			if _, err := s.multi(&zk.SetDataRequest{Path: parent, Version: -1}); err != nil && !refusal(err) {
				return driver.Lease{}, classify(err, parent)
			}
			continue
		}
		var ops []any
		blind := a.req.Enqueue && try >= blindAfter
		switch {
		case blind:
			ops = []any{&zk.SetDataRequest{Path: parent, Version: -1}}
		case snap.total == 0:
			// Left behind by a process that died. The parent may be deleted and made
			// again at any moment, with the same version: if this one is still
			// without children, that makes no difference.
			ops = []any{
				&zk.DeleteRequest{Path: parent, Version: version},
				&zk.CreateRequest{Path: parent, Acl: b.opts.ACL},
				&zk.SetDataRequest{Path: parent, Version: 0},
			}
		default:
			// As long as a child is there, it is the same parent.
			ops = []any{
				&zk.SetDataRequest{Path: parent, Version: version},
				&zk.CheckVersionRequest{Path: parent + "/" + snap.guard, Version: -1},
			}
		}
		err = a.create(ops)
		switch {
		case errors.Is(err, errState):
			continue
		case err != nil:
			return driver.Lease{}, err
		}
		b.mu.Lock()
		a.r.alone = snap.total == 0
		me.name, me.seq = a.r.name, seqOf(a.r.name)
		if !blind && snap.total > 0 && snap.total+1 >= worthKeeping && a.stat.Czxid == snap.czxid && int(a.stat.NumChildren) == snap.total {
			// Nobody has come or gone: the next one need not read the list again.
			s.snapshots[a.req.Key] = &snapshot{
				list: append(slices.Clip(list), me), total: snap.total + 1, guard: me.name,
				version: a.stat.Version, czxid: a.stat.Czxid, pzxid: a.stat.Mzxid,
			}
		}
		if fits && !blind {
			defer b.mu.Unlock()
			return a.granted(), nil
		}
		b.mu.Unlock()
		leave()
		if blind {
			return a.lookBlindly()
		}
		return a.look(append(slices.Clip(list), me))
	}
	return driver.Lease{}, fmt.Errorf("%w: zklock: key %q changes too fast", driver.ErrNotApplied, a.req.Key)
}

// disagrees says whether the key is in use with another limit.
func (a *acquisition) disagrees(list []contender) error {
	for _, c := range list {
		if c.limit != a.req.Limit {
			return &driver.LimitError{Key: a.req.Key, Want: a.req.Limit, Have: c.limit}
		}
	}
	return nil
}

// first makes the owner's node together with its parent, which is to be missing.
func (a *acquisition) first() (driver.Lease, error) {
	b := a.b
	parent := b.parent(a.req.Key)
	ops := []any{
		&zk.CreateRequest{Path: parent, Acl: b.opts.ACL},
		&zk.SetDataRequest{Path: parent, Version: 0},
	}
	err := a.create(ops)
	if errors.Is(err, errNoRoot) {
		if err = b.makeRoot(a.ctx, a.s); err == nil {
			err = a.create(ops)
		}
	}
	if err != nil {
		return driver.Lease{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	a.r.alone = true
	return a.granted(), nil
}

var errNoRoot = errors.New("zklock: the root is missing")

// create makes the owner's node in one transaction with other operations, of which
// one sets the parent's data. That tells the number of the transaction, which is
// the token.
func (a *acquisition) create(ops []any) error {
	b, s := a.b, a.s
	if err := alive(a.ctx); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	parent := b.parent(a.req.Key)
	ops = append(ops, &zk.CreateRequest{
		Path: parent + "/" + namePrefix(a.req.Mode, a.req.Limit, s.id, a.req.Owner), Acl: b.opts.ACL, Flags: zk.FlagEphemeralSequential,
	})
	began := time.Now()
	res, err := s.multi(ops...)
	if err != nil {
		failed := slices.IndexFunc(res, func(r zk.MultiResponse) bool { return r.Error != nil })
		_, newParent := ops[0].(*zk.CreateRequest)
		switch {
		case errors.Is(err, zk.ErrNoNode) && newParent && failed == 0:
			return errNoRoot
		case errors.Is(err, zk.ErrNoNode), errors.Is(err, zk.ErrBadVersion), errors.Is(err, zk.ErrNotEmpty), errors.Is(err, zk.ErrNodeExists):
			return errState
		case refusal(err):
			return classify(err, parent)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if !s.over {
			a.r.s, a.r.unsure = s, true
		}
		return classify(err, parent)
	}
	var stat *zk.Stat
	for _, r := range res {
		if r.Stat != nil && r.Stat.Mzxid != 0 {
			stat = r.Stat
		}
	}
	path := res[len(res)-1].String
	if stat.Mzxid >= maxToken {
		if err := b.remove(s, a.req.Key, path, false); err != nil {
			return fmt.Errorf("zklock: %w: %w", errNoReply, err)
		}
		return problem(ProblemToken, nil, fmt.Sprintf("transaction %#x", stat.Mzxid))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.over {
		return fmt.Errorf("zklock: %w", zk.ErrSessionExpired)
	}
	a.stat = stat
	b.serverTime, b.serverSeen = time.UnixMilli(stat.Mtime), began.Add(time.Since(began)/2)
	r := a.r
	r.s, r.name, r.mode, r.limit, r.token, r.unsure = s, path[strings.LastIndexByte(path, '/')+1:], a.req.Mode, a.req.Limit, stat.Mzxid, false
	r.since = time.Now()
	return nil
}

// granted takes note that the owner holds the key. The mutex is held.
func (a *acquisition) granted() driver.Lease {
	a.r.unwatch()
	if !a.r.held {
		a.r.held, a.r.since = true, time.Now()
	}
	a.r.woken = false
	return a.s.lease(a.req.Key, a.req.Owner, a.r.mode, a.r.token, a.req.TTL, a.start)
}

// look finds out whether the owner's node holds the key by now, and otherwise makes
// sure that we are told when it may. The list, if there is one, is up to date.
func (a *acquisition) look(list []contender) (driver.Lease, error) {
	b, s, r := a.b, a.s, a.r
	b.mu.Lock()
	name, woken := r.name, r.woken && !r.held
	r.woken = false
	b.mu.Unlock()
	// A server that has told us that somebody went knows it. What it does not know
	// yet can only be that more have gone.
	fresh := woken
	current := list != nil
	for range maxLooks {
		if err := alive(a.ctx); err != nil {
			return driver.Lease{}, err
		}
		if list == nil {
			look := s.lookNow
			if fresh {
				look = s.look
			}
			current = !fresh
			snap, err := look(a.req.Key)
			if err != nil {
				return driver.Lease{}, err
			}
			list = snap.list
			b.mu.Lock()
			r.alone = snap.total == 1
			b.mu.Unlock()
		}
		fresh = false
		i := find(list, name)
		if i < 0 {
			return driver.Lease{}, errGone
		}
		if i < holders(list) {
			return a.confirmed()
		}
		if !current {
			list = nil
			continue
		}
		held, ok, err := a.refused(list, &list[i])
		if err != nil {
			return driver.Lease{}, err
		}
		if ok {
			return driver.Lease{}, held
		}
		list = nil
		b.mu.Lock()
		delete(s.snapshots, a.req.Key)
		b.mu.Unlock()
	}
	return driver.Lease{}, fmt.Errorf("zklock: the queue of key %q changes too fast", a.req.Key)
}

// confirmed is granted, after making sure that the session has some time left.
func (a *acquisition) confirmed() (driver.Lease, error) {
	a.b.mu.Lock()
	short := a.s.left(time.Now()) < min(a.req.TTL, a.s.timeout/4)
	a.b.mu.Unlock()
	if short {
		if err := a.s.beat(); err != nil {
			return driver.Lease{}, err
		}
	}
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	if a.r.s != a.s || a.r.name == "" {
		return driver.Lease{}, errGone
	}
	return a.granted(), nil
}

// refused makes the answer for a key that is taken. The node me, if there is one,
// is set to watch. It returns false if the state has changed meanwhile.
func (a *acquisition) refused(list []contender, me *contender) (*driver.HeldError, bool, error) {
	b, s := a.b, a.s
	held := &driver.HeldError{}
	n := holders(list)
	b.mu.Lock()
	if me != nil {
		a.r.unwatch()
	}
	b.mu.Unlock()
	var token int64
	if me != nil {
		i := find(list, me.name)
		held.Position = i - n + 1
		for _, c := range ahead(list, i) {
			czxid, err := s.watchFor(b.path(a.req.Key, c.name), nil, a.r)
			if err != nil || czxid == 0 {
				return nil, false, err
			}
			if c.name == list[0].name {
				token = czxid
			}
		}
	}
	if n > 0 {
		if token == 0 {
			b.mu.Lock()
			if w := s.watches[b.path(a.req.Key, list[0].name)]; w != nil && w.armed {
				token = w.czxid
			}
			b.mu.Unlock()
		}
		if token == 0 {
			stat, ok, err := s.stat(b.path(a.req.Key, list[0].name))
			if err != nil || !ok {
				return nil, false, err
			}
			token = stat.Czxid
		}
		held.Holder, held.Token = list[0].owner, token
	}
	return held, true, nil
}

// lookBlindly looks at a ticket that was taken without regard to the limit in
// force, and gives it back if that is another one.
func (a *acquisition) lookBlindly() (driver.Lease, error) {
	b := a.b
	snap, err := a.s.look(a.req.Key)
	if err != nil {
		return driver.Lease{}, err
	}
	b.mu.Lock()
	name := a.r.name
	b.mu.Unlock()
	list := snap.list
	i := find(list, name)
	if i < 0 {
		return driver.Lease{}, errGone
	}
	disagreement := a.disagrees(list[:i])
	if disagreement == nil {
		return a.look(list)
	}
	path := b.path(a.req.Key, name)
	if err := b.remove(a.s, a.req.Key, path, false); err != nil && !errors.Is(err, zk.ErrNoNode) {
		return driver.Lease{}, fmt.Errorf("zklock: %w: %w", errNoReply, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	a.r.clear()
	return driver.Lease{}, disagreement
}

// makeRoot makes the nodes that all locks are below.
func (b *Backend) makeRoot(ctx context.Context, s *session) error {
	for i := 1; i <= len(b.root); i++ {
		if i < len(b.root) && b.root[i] != '/' {
			continue
		}
		if err := alive(ctx); err != nil {
			return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
		}
		path := b.root[:i]
		// Asked first, as the right to create may be there only further down.
		_, ok, err := s.stat(path)
		if err != nil {
			return err
		}
		if ok {
			continue
		}
		if _, err := s.conn.Create(path, nil, zk.FlagPersistent, b.opts.ACL); err != nil && !errors.Is(err, zk.ErrNodeExists) {
			return classify(err, path)
		}
	}
	return nil
}
