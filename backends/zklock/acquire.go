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

	// These come with the creation of the node.
	made bool
	stat *zk.Stat    // of the parent
	list []contender // what was there, if it is known, up to the node itself
}

// outcome makes an error that says "had no effect" one that does not, if the call
// has made the owner's node and failed later: nobody would remove it otherwise.
func (a *acquisition) outcome(err error) error {
	if !errors.Is(err, driver.ErrNotApplied) && !errors.Is(err, driver.ErrInvalid) {
		return err
	}
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	if !a.made || a.r.s != a.s || a.r.name == "" {
		return err
	}
	return fmt.Errorf("zklock: %w about the node that was made: %v", errNoReply, err)
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
		if a.r.s == a.s && a.r.name != "" {
			name := a.r.name
			a.r.clear()
			a.s.departed(a.req.Key, name)
		}
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
func (a *acquisition) enter() (driver.Lease, error) {
	b := a.b
	b.mu.Lock()
	k := b.keys[a.req.Key]
	b.mu.Unlock()
	select {
	case k.gate <- struct{}{}:
	case <-a.ctx.Done():
		return driver.Lease{}, fmt.Errorf("%w: zklock: given up: %w", driver.ErrNotApplied, a.ctx.Err())
	}
	leave := sync.OnceFunc(func() { <-k.gate })
	defer leave()
	b.mu.Lock()
	busy := k.records > 1
	if _, left := b.tidy[a.req.Key]; left && a.req.Enqueue {
		busy = true // we have been there a moment ago, and so were others
	}
	b.mu.Unlock()
	if !busy {
		// Most keys are free, and have no parent then.
		if lease, err := a.first(); !errors.Is(err, errState) {
			return lease, err
		}
	}
	if a.req.Enqueue {
		return a.enqueue(busy, leave)
	}
	if busy {
		if err := a.s.sync(); err != nil {
			return driver.Lease{}, err
		}
	}
	return a.try()
}

// try makes the owner's node if it holds the key then, and nothing otherwise.
//
// A creation that names the version that came with the list of nodes succeeds only
// if no node has come since, and what the list says of the new one's place is true.
func (a *acquisition) try() (driver.Lease, error) {
	b, s := a.b, a.s
	parent := b.parent(a.req.Key)
	for range maxTries {
		if err := alive(a.ctx); err != nil {
			return driver.Lease{}, fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
		}
		snap, err := s.look(a.req.Key, true)
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
		if holders(after) != len(after) {
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
		if snap.total == 0 {
			// Left behind by a process that died. The parent may be deleted and made
			// again at any moment, with the same version: if this one is still
			// without children, that makes no difference.
			ops = []any{
				&zk.DeleteRequest{Path: parent, Version: version},
				&zk.CreateRequest{Path: parent, Acl: b.opts.ACL},
				&zk.SetDataRequest{Path: parent, Version: 0},
			}
		} else {
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
		defer b.mu.Unlock()
		a.r.alone = snap.total == 0
		return a.granted()
	}
	return driver.Lease{}, fmt.Errorf("%w: zklock: key %q changes too fast", driver.ErrNotApplied, a.req.Key)
}

// enqueue makes the owner's node whatever is there, and finds out its place then.
// That cannot fail for what others do meanwhile, so there is nothing to be up to
// date with. Where we know of all nodes before, the answer to the creation says so,
// and nothing has to be read.
func (a *acquisition) enqueue(busy bool, leave func()) (driver.Lease, error) {
	b, s := a.b, a.s
	parent := b.parent(a.req.Key)
	b.mu.Lock()
	v := s.views[a.req.Key]
	look := v == nil && !busy || v != nil && a.disagrees(v.list) != nil
	b.mu.Unlock()
	if look {
		// A limit that differs is to be refused before anything is written, unless
		// we come again that soon.
		if err := alive(a.ctx); err != nil {
			return driver.Lease{}, fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
		}
		if busy {
			if err := s.sync(); err != nil {
				return driver.Lease{}, err
			}
		}
		snap, err := s.look(a.req.Key, false)
		if err == nil {
			err = a.disagrees(snap.list)
		}
		if err != nil {
			return driver.Lease{}, err
		}
	}
	err := errState
	for try := 0; errors.Is(err, errState); try++ {
		if try == maxTries {
			return driver.Lease{}, fmt.Errorf("%w: zklock: key %q changes too fast", driver.ErrNotApplied, a.req.Key)
		}
		err = a.create([]any{&zk.SetDataRequest{Path: parent, Version: -1}})
		if errors.Is(err, errState) {
			lease, err := a.first()
			if !errors.Is(err, errState) {
				return lease, err
			}
		}
	}
	if err != nil {
		return driver.Lease{}, err
	}
	b.mu.Lock()
	if a.stat.NumChildren == 0 {
		defer b.mu.Unlock()
		a.r.alone = true
		return a.granted()
	}
	list, name := a.list, a.r.name
	b.mu.Unlock()
	if list == nil {
		// A server that has answered a write of ours knows all that came before.
		snap, err := s.look(a.req.Key, false)
		if err != nil {
			return driver.Lease{}, err
		}
		list = snap.list
		b.mu.Lock()
		a.r.alone = snap.total == 1
		b.mu.Unlock()
	}
	leave()
	i := find(list, name)
	if i < 0 {
		return driver.Lease{}, errGone
	}
	disagreement := a.disagrees(list[:i])
	if disagreement == nil {
		return a.look(list)
	}
	path := b.path(a.req.Key, name)
	b.mu.Lock()
	a.r.leaving = true
	b.mu.Unlock()
	if err := b.remove(s, a.req.Key, path, false); err != nil && !errors.Is(err, zk.ErrNoNode) {
		b.mu.Lock()
		defer b.mu.Unlock()
		a.r.leaving = false
		return driver.Lease{}, fmt.Errorf("zklock: %w: %w", errNoReply, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	a.r.clear()
	return driver.Lease{}, disagreement
}

// disagrees says whether the key is in use with another limit: that of the first
// node. Those behind it that have another one are about to leave.
func (a *acquisition) disagrees(list []contender) error {
	if len(list) > 0 && list[0].limit != a.req.Limit {
		return &driver.LimitError{Key: a.req.Key, Want: a.req.Limit, Have: list[0].limit}
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
	return a.granted()
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
	b.mu.Lock()
	epoch := s.epoch
	b.mu.Unlock()
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
	a.made, a.stat = true, stat
	b.serverTime, b.serverSeen = time.UnixMilli(stat.Mtime), began.Add(time.Since(began)/2)
	r := a.r
	r.s, r.name, r.mode, r.limit, r.token, r.unsure = s, path[strings.LastIndexByte(path, '/')+1:], a.req.Mode, a.req.Limit, stat.Mzxid, false
	r.since = time.Now()
	me, _ := parseName(r.name)
	a.list = nil
	if s.created(a.req.Key, me, stat, epoch) {
		a.list = slices.Clone(s.views[a.req.Key].list)
	}
	return nil
}

// granted takes note that the owner holds the key, unless its node or its session
// went since the answer that said so came. The mutex is held.
func (a *acquisition) granted() (driver.Lease, error) {
	if a.r.s != a.s || a.r.name == "" {
		return driver.Lease{}, errGone
	}
	a.r.unwatch()
	a.r.held, a.r.woken = true, false
	return a.s.lease(a.req.Key, a.req.Owner, a.r.mode, a.r.token, a.req.TTL, a.start), nil
}

// known finds out what is known of the owner's place: that it holds the key; or
// else the list, if that is up to date enough to wait by it.
//
// That what stood before the node has gone is not all: the node itself must be
// there, and somebody may have deleted it. It is proven if the release that made it
// the first has found it. It has a watch, which would have told of its end before
// the answer or the event that made it the first, on the same connection. Or it is
// asked for, which sets the watch. That its session lives is for confirmed to say.
func (a *acquisition) known(woken bool) (holds bool, list []contender, err error) {
	b, s, r := a.b, a.s, a.r
	b.mu.Lock()
	defer b.mu.Unlock()
	v := s.views[a.req.Key]
	if v == nil || r.held {
		return false, nil, nil
	}
	i := find(v.list, r.name)
	if i < 0 {
		return false, nil, nil
	}
	if i < holders(v.list) {
		if r.proven || s.watched(r) {
			return true, nil, nil
		}
		token := r.token
		b.mu.Unlock()
		err := b.watchOwn(s, r, token)
		b.mu.Lock()
		if err == nil && r.name == "" {
			err = errGone
		}
		return r.watched, nil, err
	}
	if !woken {
		return false, nil, nil
	}
	// Of our own nodes we hear. Of others we may have missed that they went.
	for _, c := range ahead(v.list, i) {
		if b.ours(s, a.req.Key, &c) == nil {
			return false, nil, nil
		}
	}
	return false, slices.Clone(v.list), nil
}

// ours returns the record of a node of this session, or nil. The mutex is held.
func (b *Backend) ours(s *session, key string, c *contender) *record {
	if c.session != s.id {
		return nil
	}
	if r := b.records[recordID{key, c.owner}]; r != nil && r.s == s && r.name == c.name {
		return r
	}
	return nil
}

// look finds out whether the owner's node holds the key by now, and otherwise makes
// sure that we are told when it may. The list, if there is one, is up to date.
func (a *acquisition) look(list []contender) (driver.Lease, error) {
	b, s, r := a.b, a.s, a.r
	b.mu.Lock()
	name, woken := r.name, r.woken && !r.held
	r.woken = false
	b.mu.Unlock()
	if list == nil {
		var holds bool
		var err error
		switch holds, list, err = a.known(woken); {
		case err != nil:
			return driver.Lease{}, err
		case holds:
			return a.confirmed()
		}
	}
	// A server that has told us that somebody went knows it. What it does not know
	// yet can only be that more have gone.
	fresh := woken
	current := list != nil
	for range maxLooks {
		if err := alive(a.ctx); err != nil {
			return driver.Lease{}, err
		}
		if list == nil {
			current = !fresh
			var snap *snapshot
			var err error
			if fresh {
				snap, err = s.look(a.req.Key, false)
			} else {
				snap, err = s.lookNow(a.req.Key)
			}
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
		if v := s.views[a.req.Key]; v != nil {
			v.exact = false
		}
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
	return a.granted()
}

// refused makes the answer for a key that is taken. The node me, if there is one,
// is set to watch. It returns false if the state has changed meanwhile.
func (a *acquisition) refused(list []contender, me *contender) (*driver.HeldError, bool, error) {
	b, s := a.b, a.s
	if me != nil {
		b.mu.Lock()
		a.r.unwatch()
		b.mu.Unlock()
		for _, c := range ahead(list, find(list, me.name)) {
			b.mu.Lock()
			if b.ours(s, a.req.Key, &c) != nil {
				// Whoever removes it here will tell. In case that others do, the minder
				// sets a watch if it stays.
				s.watchOf(a.req.Key, c.name).add(a.r)
				b.mu.Unlock()
				continue
			}
			b.mu.Unlock()
			czxid, err := s.watchFor(a.req.Key, c.name, nil, a.r)
			if err != nil || czxid == 0 {
				return nil, false, err
			}
		}
	}
	for {
		held := &driver.HeldError{}
		n := holders(list)
		if me != nil {
			if held.Position = find(list, me.name) - n + 1; held.Position < 1 {
				return nil, false, nil
			}
		}
		if n == 0 {
			return held, true, nil
		}
		token, err := a.tokenOf(&list[0])
		switch {
		case err != nil:
			return nil, false, err
		case token != 0:
			held.Holder, held.Token = list[0].owner, token
			return held, true, nil
		case me == nil:
			return nil, false, nil
		}
		// It has gone meanwhile, and the ticket is the closer to the head. That it is
		// not to be woken by this one has not changed.
		list = list[1:]
		if err := alive(a.ctx); err != nil {
			return nil, false, err
		}
	}
}

// tokenOf returns the token of a node, or 0 if that is gone.
func (a *acquisition) tokenOf(c *contender) (int64, error) {
	b, s := a.b, a.s
	path := b.path(a.req.Key, c.name)
	var token int64
	b.mu.Lock()
	if r := b.ours(s, a.req.Key, c); r != nil {
		token = r.token
	} else if w := s.watches[path]; w != nil && w.armed {
		token = w.czxid
	}
	b.mu.Unlock()
	if token != 0 {
		return token, nil
	}
	stat, ok, err := s.stat(path)
	if err != nil {
		return 0, err
	}
	if !ok {
		b.mu.Lock()
		defer b.mu.Unlock()
		s.departed(a.req.Key, c.name)
		return 0, nil
	}
	return stat.Czxid, nil
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
