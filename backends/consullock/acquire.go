package consullock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// Acquire implements [driver.Backend].
func (b *Backend) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	if err := b.enter(ctx); err != nil {
		return driver.Lease{}, err
	}
	a := acquisition{b: b, ctx: ctx, req: &req, start: time.Now(), base: lockBase(b.opts.Prefix, req.Key)}
	var err error
	for n := range maxLooks {
		if n > 5 {
			sleep(ctx, backoff(n-5))
		}
		var lease driver.Lease
		var again bool
		if lease, again, err = a.look(); !again {
			a.leave(err)
			return lease, err
		}
	}
	err = fmt.Errorf("%w: consullock: key %q did not hold still", driver.ErrNotApplied, req.Key)
	if a.has() {
		err = fmt.Errorf("consullock: key %q did not hold still", req.Key)
	}
	a.leave(err)
	return driver.Lease{}, err
}

// acquisition is one call of Acquire.
type acquisition struct {
	b     *Backend
	ctx   context.Context
	req   *driver.Request
	base  string // of the lock's keys
	start time.Time
	e     *entry
}

// has says whether the owner may have something in the store.
func (a *acquisition) has() bool {
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	return a.e != nil && (a.e.create != 0 || len(a.e.unsure) > 0)
}

// leave forgets the entry if nothing is left of it.
func (a *acquisition) leave(err error) {
	if err == nil || a.e == nil {
		return
	}
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	if a.e.create == 0 && len(a.e.unsure) == 0 {
		a.b.forget(a.e)
	}
}

// enter finds the owner's entry, or makes it. It fails if the owner uses the key
// in another way.
func (a *acquisition) enter() (create uint64, unsure bool, err error) {
	b, req := a.b, a.req
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.entry(req.Key, req.Owner)
	if e != nil && (e.mode != req.Mode || e.limit != req.Limit) {
		if e.create != 0 || len(e.unsure) > 0 {
			return 0, false, otherKind(req)
		}
		b.forget(e)
		e = nil
	}
	if e == nil {
		e = b.add(&entry{key: req.Key, owner: req.Owner, mode: req.Mode, limit: req.Limit, made: a.start})
	}
	e.ttl, e.asked, e.manager, e.release = req.TTL, a.start, req.Manager, false
	a.e = e
	return e.create, len(e.unsure) > 0, nil
}

func otherKind(req *driver.Request) error {
	return invalidf("owner holds or awaits key %q in another mode or with another limit", req.Key)
}

// look asks the store once. It says whether to look again.
func (a *acquisition) look() (driver.Lease, bool, error) {
	create, unsure, err := a.enter()
	switch {
	case err != nil:
		return driver.Lease{}, false, err
	case create != 0:
		return a.lookAgain(create)
	case unsure:
		return a.recover()
	}
	b := a.b
	b.mu.Lock()
	l := b.lock(a.req.Key)
	busy, place := l.busy(time.Now()), l.placeBehind(a.req)
	b.mu.Unlock()
	if place != nil && a.req.Enqueue {
		return a.queueUp(place)
	}
	if busy && a.req.Enqueue {
		return a.enqueue()
	}
	if !busy {
		lease, free, err := a.takeFree()
		if free || err != nil {
			return lease, free && err == nil && lease.Token == 0, err
		}
	}
	st, err := b.readShared(a.ctx, a.req.Key)
	if err != nil {
		return driver.Lease{}, false, a.readFailed(err)
	}
	return a.join(st)
}

// readFailed is the error for a question, which had no effect, but on a ticket
// that may be there.
func (a *acquisition) readFailed(err error) error {
	if a.has() {
		return unconfirmed(a.ctx, err)
	}
	if certain(err) {
		return err
	}
	return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
}

// unconfirmed makes an error that says "had no effect" one that does not: the
// ticket is there.
func unconfirmed(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("consullock: no reply yet: %w", ctx.Err())
	case certain(err):
		return fmt.Errorf("consullock: the ticket is there, but not confirmed: %v", err)
	}
	return err
}

// lookAgain looks at the ticket that the owner has, which needs no write.
func (a *acquisition) lookAgain(create uint64) (driver.Lease, bool, error) {
	b := a.b
	b.mu.Lock()
	place, known := b.placeOf(a.e)
	first := a.e.first && a.e.create == create && a.e.session != nil
	b.mu.Unlock()
	switch {
	case first:
		return a.confirm()
	case known && a.req.Enqueue:
		return driver.Lease{}, false, &place
	}
	st, err := b.readShared(a.ctx, a.req.Key)
	if err != nil {
		return driver.Lease{}, false, a.readFailed(err)
	}
	if i := find(st.list, a.req.Owner); i >= 0 && st.list[i].create == create {
		return a.decide(st, i)
	}
	// It was deleted, or its session has ended.
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.e.create == create {
		b.attach(a.e, nil)
		a.e.create, a.e.granted = 0, false
	}
	return driver.Lease{}, true, nil
}

// recover finds out what became of a request that was not answered. What is still
// on its way comes too late for anything.
func (a *acquisition) recover() (driver.Lease, bool, error) {
	st, err := a.b.refence(a.ctx, a.e)
	if err != nil {
		return driver.Lease{}, false, unconfirmed(a.ctx, err)
	}
	return a.join(st)
}

// takeFree takes the lock if nobody has it or waits for it, and says whether that
// was so.
func (a *acquisition) takeFree() (driver.Lease, bool, error) {
	b, req := a.b, a.req
	s, err := b.session(a.ctx, class(req.TTL, b.opts.MinSessionTTL))
	if err != nil {
		return driver.Lease{}, false, err
	}
	name := a.base + lockName
	ops := []*api.KVTxnOp{
		b.fence(s),
		{Verb: api.KVCheckNotExists, Key: a.base + queueName},
		{Verb: api.KVCheckNotExists, Key: name},
		a.put(name, s),
	}
	delays := b.delays(a.e)
	if delays {
		ops = append(ops, b.claimOps(a.e, s)...)
	}
	ops = append(ops, &api.KVTxnOp{Verb: api.KVGetTree, Key: a.base + waitSection})
	results, no, err := b.txn(a.ctx, ops)
	switch {
	case err != nil:
		return driver.Lease{}, false, a.failed(err, s)
	case no == nil && len(pairs(results, a.base+waitSection)) > 0:
		// The queue's key was deleted by hand, with tickets in the queue.
		a.undo(name, modOf(results, name))
		b.mu.Lock()
		b.lock(req.Key).hot = time.Now()
		b.mu.Unlock()
		return driver.Lease{}, true, nil
	case no == nil:
		return a.took(results, name, s, delays)
	case strings.Contains(no.says, lockDelayed) && !req.Enqueue:
		return driver.Lease{}, false, &driver.HeldError{}
	case strings.Contains(no.says, lockDelayed):
		return driver.Lease{}, false, nil
	case no.op == 0 || no.op >= 3:
		if err := b.fenced(a.ctx, s); err != nil {
			return driver.Lease{}, false, err
		}
		return driver.Lease{}, true, nil
	}
	return driver.Lease{}, false, nil
}

// delays says whether a lock is to stay free for some time if its holder dies.
func (b *Backend) delays(e *entry) bool {
	return b.opts.LockDelay > 0 && e.mode == driver.Exclusive && e.limit == 1
}

// claimOps lock the key that Consul keeps from others for some time after the
// session has ended. Who holds the lock may take it from whoever forgot it.
func (b *Backend) claimOps(e *entry, s *session) []*api.KVTxnOp {
	name := lockBase(b.opts.Prefix, e.key) + delayName
	return []*api.KVTxnOp{{Verb: api.KVDelete, Key: name}, {Verb: api.KVLock, Key: name, Session: s.id}}
}

// claim claims the key that is delayed. It returns false if it is too early.
func (a *acquisition) claim(s *session) (claimed, again bool, err error) {
	b, e := a.b, a.e
	b.mu.Lock()
	create := e.create
	ops := []*api.KVTxnOp{{Verb: api.KVCheckIndex, Key: e.name, Index: e.mod}}
	b.mu.Unlock()
	_, no, err := b.txn(a.ctx, append(ops, b.claimOps(e, s)...))
	switch {
	case err != nil:
		return false, false, unconfirmed(a.ctx, err)
	case no != nil && strings.Contains(no.says, lockDelayed):
		return false, false, nil
	case no != nil && no.op == 0:
		return false, true, nil
	case no != nil:
		return false, true, b.fenced(a.ctx, s)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	e.claimed = e.create == create
	return true, false, nil
}

// fence makes sure that a request does not come behind the withdrawal of its
// owner, and that the session is alive. The mutex is not held.
func (b *Backend) fence(s *session) *api.KVTxnOp {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &api.KVTxnOp{Verb: api.KVCheckIndex, Key: s.name, Index: s.fence}
}

// put makes a ticket.
func (a *acquisition) put(name string, s *session) *api.KVTxnOp {
	return a.b.putOp(a.e, name, s)
}

func (b *Backend) putOp(e *entry, name string, s *session) *api.KVTxnOp {
	b.mu.Lock()
	v := value{ttl: e.ttl, made: e.made, owner: e.owner, manager: e.manager}
	b.mu.Unlock()
	return &api.KVTxnOp{Verb: api.KVLock, Key: name, Flags: flagsOf(e.mode, e.limit), Session: s.id, Value: []byte(v.String())}
}

// failed notes that the ticket may be there, or may still come, if the error does
// not say that it will not.
func (a *acquisition) failed(err error, s *session) error {
	a.b.doubt(a.e, err, s)
	return err
}

// doubt notes that a request in the name of a session may still come into effect,
// if the error does not say that it will not.
func (b *Backend) doubt(e *entry, err error, s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if certain(err) || s.ended {
		return
	}
	if e.unsure == nil {
		e.unsure = make(map[*session]struct{})
	}
	e.unsure[s] = struct{}{}
}

// took notes that the lock was free and has been taken.
func (a *acquisition) took(results api.TxnResults, name string, s *session, claimed bool) (driver.Lease, bool, error) {
	b, e := a.b, a.e
	kvs := pairs(results, name)
	if len(kvs) == 0 {
		// The server hides it from us, but it is there.
		return driver.Lease{}, false, a.failed(unconfirmed(a.ctx, b.hidden()), s)
	}
	b.mu.Lock()
	alive := b.made(e, name, kvs[0], s)
	e.claimed = claimed
	b.mu.Unlock()
	if !alive {
		return driver.Lease{}, true, nil
	}
	lease, again, err := a.confirm()
	if again {
		return driver.Lease{}, true, nil
	}
	return lease, true, err
}

// made notes that a ticket is there, and says whether its session still is. The
// mutex is held.
func (b *Backend) made(e *entry, name string, kv *api.KVPair, s *session) bool {
	e.name, e.create, e.mod, e.granted = name, kv.CreateIndex, kv.ModifyIndex, false
	e.first, e.claimed = false, false
	b.attach(e, s)
	if !s.ended {
		if b.entry(e.key, e.owner) == nil {
			b.add(e) // it was withdrawn meanwhile, and will be again
		}
		return true
	}
	// It came to its end meanwhile, with all that belongs to it.
	b.attach(e, nil)
	e.create = 0
	return false
}

// join looks for the owner's ticket among those of the lock, and makes one if
// there is none and one can be had.
func (a *acquisition) join(st state) (driver.Lease, bool, error) {
	b, req, e := a.b, a.req, a.e
	if i := find(st.list, req.Owner); i >= 0 {
		// It is there since a call that was not answered, or made by another
		// client.
		t := st.list[i]
		if t.mode != req.Mode || t.limit != req.Limit {
			return driver.Lease{}, false, otherKind(req)
		}
		b.mu.Lock()
		e.name, e.create, e.mod, e.granted, e.first = t.name, t.create, t.mod, false, false
		b.attach(e, b.byID[t.session])
		b.mu.Unlock()
		return a.decide(st, i)
	}
	if len(st.list) > 0 && st.list[0].limit != req.Limit {
		return driver.Lease{}, false, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: st.list[0].limit}
	}
	if req.Enqueue {
		return a.enqueue()
	}
	return a.try(st)
}

// try takes the lock if it may be held together with all that there is, and if
// nothing has been added to that meanwhile.
func (a *acquisition) try(st state) (driver.Lease, bool, error) {
	b, req := a.b, a.req
	probe := append(slices.Clip(st.list), ticket{owner: req.Owner, mode: req.Mode, limit: req.Limit})
	if !holds(probe, len(st.list)) {
		return driver.Lease{}, false, &driver.HeldError{Holder: st.list[0].owner, Token: int64(st.list[0].create)}
	}
	s, err := b.session(a.ctx, class(req.TTL, b.opts.MinSessionTTL))
	if err != nil {
		return driver.Lease{}, false, err
	}
	name := a.base + waitSection + escape(req.Owner)
	ops := []*api.KVTxnOp{
		b.fence(s),
		{Verb: api.KVCAS, Key: a.base + queueName, Index: st.queue, Value: stamp()},
		{Verb: api.KVCheckNotExists, Key: name},
		{Verb: api.KVCheckNotExists, Key: a.base + lockName},
		a.put(name, s),
	}
	if st.lock != 0 {
		ops[3] = &api.KVTxnOp{Verb: api.KVCheckIndex, Key: a.base + lockName, Index: st.lock}
	}
	results, no, err := b.txn(a.ctx, ops)
	switch {
	case err != nil:
		return driver.Lease{}, false, a.failed(err, s)
	case no == nil:
		lease, _, err := a.took(results, name, s, false)
		return lease, err == nil && lease.Token == 0, err
	case no.op == 0 || no.op == len(ops)-1:
		if err := b.fenced(a.ctx, s); err != nil {
			return driver.Lease{}, false, err
		}
	}
	return driver.Lease{}, true, nil
}

// ticket makes a ticket behind all others. Without results it has not been made.
func (a *acquisition) ticket(name string, more ...*api.KVTxnOp) (api.TxnResults, *session, driver.Lease, bool, error) {
	b, req := a.b, a.req
	s, err := b.session(a.ctx, class(min(req.TTL, b.opts.WaiterTTL), b.opts.MinSessionTTL))
	if err != nil {
		return nil, nil, driver.Lease{}, false, err
	}
	ops := append([]*api.KVTxnOp{
		b.fence(s),
		{Verb: api.KVCheckNotExists, Key: name},
		{Verb: api.KVSet, Key: a.base + queueName, Value: stamp()},
		a.put(name, s),
	}, more...)
	results, no, err := b.txn(a.ctx, ops)
	switch {
	case err != nil:
		return nil, nil, driver.Lease{}, false, a.failed(err, s)
	case no != nil && no.op == 1:
		// It is there, since a call by another client.
		st, err := b.read(a.ctx, req.Key)
		if err != nil {
			return nil, nil, driver.Lease{}, false, a.readFailed(err)
		}
		if find(st.list, req.Owner) < 0 {
			return nil, nil, driver.Lease{}, true, nil
		}
		lease, again, err := a.join(st)
		return nil, nil, lease, again, err
	case no != nil:
		err := b.fenced(a.ctx, s)
		return nil, nil, driver.Lease{}, err == nil, err
	}
	return results, s, driver.Lease{}, false, nil
}

// queueUp makes a ticket behind all others, of which a watch tells who they are.
func (a *acquisition) queueUp(place *driver.HeldError) (driver.Lease, bool, error) {
	b := a.b
	name := a.base + waitSection + escape(a.req.Owner)
	results, s, lease, again, err := a.ticket(name)
	if results == nil {
		return lease, again, err
	}
	kvs := pairs(results, name)
	if len(kvs) == 0 {
		a.undo(name, 0)
		return driver.Lease{}, false, b.hidden()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.made(a.e, name, kvs[0], s) {
		return driver.Lease{}, true, nil
	}
	place.Ticket = int64(a.e.create)
	a.e.place = *place
	l := b.lock(a.e.key)
	l.hot = time.Now()
	b.watch(l)
	return driver.Lease{}, false, place
}

// hidden is the error if the server does not show what it has just written.
func (b *Backend) hidden() error {
	return problem(ProblemPermission, nil, "the token may not read what it writes; it needs %s", rules(b.opts.Prefix))
}

// enqueue makes a ticket behind all others, and sees who they are.
func (a *acquisition) enqueue() (driver.Lease, bool, error) {
	b, req := a.b, a.req
	name := a.base + waitSection + escape(req.Owner)
	results, s, lease, again, err := a.ticket(name, &api.KVTxnOp{Verb: api.KVGetTree, Key: a.base})
	if results == nil {
		return lease, again, err
	}
	st, err := parseState(a.base, pairs(results[min(3, len(results)):], a.base))
	last := len(st.list) - 1
	if err == nil && (last < 0 || st.list[last].name != name) {
		err = b.hidden()
	}
	if err != nil {
		a.undo(name, modOf(results, name))
		return driver.Lease{}, false, err
	}
	own := st.list[last]
	st.index = own.create
	b.mu.Lock()
	alive := b.made(a.e, name, &api.KVPair{CreateIndex: own.create, ModifyIndex: own.mod}, s)
	b.mu.Unlock()
	if !alive {
		return driver.Lease{}, true, nil
	}
	// Mostly that was looked at before, but somebody may have come meanwhile.
	if i := find(st.list, req.Owner); i < last {
		t := st.list[i]
		a.undo(name, own.mod)
		if t.mode != req.Mode || t.limit != req.Limit {
			return driver.Lease{}, false, otherKind(req)
		}
		return driver.Lease{}, true, nil
	}
	if st.list[0].limit != req.Limit {
		a.undo(name, own.mod)
		return driver.Lease{}, false, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: st.list[0].limit}
	}
	return a.decide(st, last)
}

// modOf is the index of the last change of a key that a transaction has written, or
// 0 if the server does not show it.
func modOf(results api.TxnResults, name string) uint64 {
	for _, kv := range pairs(results, name) {
		if kv.Key == name {
			return kv.ModifyIndex
		}
	}
	return 0
}

// undo removes a ticket that should not have been made, known by the index of its
// last change, unless that is hidden. If it cannot be done now, it is done later, or
// the ticket ends with its session.
func (a *acquisition) undo(name string, mod uint64) {
	b, e := a.b, a.e
	op := &api.KVTxnOp{Verb: api.KVDeleteCAS, Key: name, Index: mod}
	if mod == 0 {
		op = &api.KVTxnOp{Verb: api.KVDelete, Key: name}
	}
	b.mu.Lock()
	b.attach(e, nil)
	e.create, e.granted = 0, false
	b.lock(e.key).hot = time.Time{}
	b.mu.Unlock()
	remove := func(ctx context.Context) error {
		_, _, err := b.txn(ctx, []*api.KVTxnOp{op}) // refused: it is gone, or another one
		return err
	}
	if remove(a.ctx) == nil {
		b.mu.Lock()
		b.task(func() { b.tidy(e.key) })
		b.mu.Unlock()
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.task(func() {
		for n := 1; b.ctx.Err() == nil; n++ {
			ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
			err := remove(ctx)
			cancel()
			if err == nil {
				return
			}
			sleep(b.ctx, backoff(n))
		}
	})
}

// decide says whether the owner's ticket, at a place of the list, holds the lock.
func (a *acquisition) decide(st state, i int) (driver.Lease, bool, error) {
	b, e := a.b, a.e
	own := st.list[i]
	b.mu.Lock()
	if e.create != own.create {
		b.mu.Unlock()
		return driver.Lease{}, true, nil
	}
	e.mod = own.mod
	if s := b.byID[own.session]; s != e.session {
		b.attach(e, s)
	}
	if holds(st.list, i) {
		b.mu.Unlock()
		return a.confirm()
	}
	defer b.mu.Unlock()
	held := placeAt(st.list, i)
	if p := &e.place; p.Ticket != held.Ticket || p.Position > held.Position {
		e.place = held // or the watch has seen more
	}
	l := b.lock(e.key)
	l.hot = time.Now()
	b.watch(l)
	if l.stop != nil && st.index > l.index {
		l.list, l.index = st.list, st.index
	}
	return driver.Lease{}, false, &held
}

// placeAt describes the place of a ticket that does not hold the lock.
func placeAt(list []ticket, i int) driver.HeldError {
	return driver.HeldError{
		Holder: list[0].owner, Token: int64(list[0].create), Position: max(i-holders(list)+1, 1), Ticket: int64(list[i].create),
	}
}

// confirm puts a ticket that holds the lock on a session that is long enough.
func (a *acquisition) confirm() (driver.Lease, bool, error) {
	b, req, e := a.b, a.req, a.e
	b.mu.Lock()
	s, create := e.session, e.create
	fits := good(s, req.TTL)
	b.mu.Unlock()
	if !fits {
		moved, err := b.move(a.ctx, e, create, req.TTL)
		if err != nil {
			return driver.Lease{}, false, unconfirmed(a.ctx, err)
		}
		if !moved {
			return driver.Lease{}, true, nil
		}
	} else if s.lacks(a.start, req.TTL) > req.TTL/10 {
		b.fresh(a.ctx, s)
	}
	b.mu.Lock()
	s = e.session
	early, name, mod := b.delays(e) && !e.claimed && s != nil, e.name, e.mod
	b.mu.Unlock()
	if early {
		claimed, again, err := a.claim(s)
		switch {
		case err != nil || again:
			return driver.Lease{}, again, err
		case !claimed && !req.Enqueue:
			a.undo(name, mod)
			return driver.Lease{}, false, &driver.HeldError{}
		case !claimed:
			return driver.Lease{}, false, &driver.HeldError{Position: 1, Ticket: int64(create)}
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s = e.session
	if create == 0 || e.create != create || s == nil || s.ended {
		return driver.Lease{}, true, nil
	}
	e.granted, e.first = true, false
	return b.leaseOf(e, req.TTL, a.start), false, nil
}

// leaseOf is the grant of an entry, counted from a moment. The mutex is held.
func (b *Backend) leaseOf(e *entry, ttl time.Duration, from time.Time) driver.Lease {
	return driver.Lease{
		Key: e.key, Owner: e.owner, Token: int64(e.create), TTL: ttl, Mode: e.mode, Age: e.session.lacks(from, ttl),
	}
}

// move puts a ticket on a session for a TTL; it keeps its create index. It
// returns false if the ticket is gone.
func (b *Backend) move(ctx context.Context, e *entry, create uint64, ttl time.Duration) (bool, error) {
	b.mu.Lock()
	var own ticket
	if e.create == create && e.session != nil {
		own = ticket{name: e.name, create: create, mod: e.mod, session: e.session.id}
	}
	b.mu.Unlock()
	for range maxLooks {
		s, err := b.session(ctx, class(ttl, b.opts.MinSessionTTL))
		if err != nil {
			return false, err
		}
		if own.name == "" {
			st, err := b.read(ctx, e.key)
			if err != nil {
				return false, err
			}
			i := find(st.list, e.owner)
			if i < 0 || st.list[i].create != create {
				b.mu.Lock()
				if e.create == create {
					b.attach(e, nil)
					e.create, e.granted = 0, false
				}
				b.mu.Unlock()
				return false, nil
			}
			own = st.list[i]
		}
		if own.session == s.id {
			b.mu.Lock()
			e.mod = own.mod
			b.attach(e, s)
			b.mu.Unlock()
			return true, nil
		}
		put := b.putOp(e, own.name, s)
		free := *put
		free.Verb, free.Session = api.KVUnlock, own.session
		ops := []*api.KVTxnOp{b.fence(s), {Verb: api.KVCheckIndex, Key: own.name, Index: own.mod}, &free, put}
		b.mu.Lock()
		claimed := e.claimed
		b.mu.Unlock()
		if claimed {
			ops = append(ops, b.claimOps(e, s)...)
		}
		results, no, err := b.txn(ctx, ops)
		if err != nil {
			b.doubt(e, err, s)
			return false, err
		}
		if no != nil {
			own = ticket{}
			if no.op != 1 {
				if err := b.fenced(ctx, s); err != nil {
					return false, err
				}
			}
			continue
		}
		kvs := pairs(results, own.name)
		b.mu.Lock()
		if e.create != create || e.release || s.ended || len(kvs) == 0 {
			// It was given up as lost meanwhile, so nobody would ever release it.
			if e.create != create {
				b.task(func() { b.remove(e.key, e.owner, create) })
			}
			b.mu.Unlock()
			return false, nil
		}
		e.mod = kvs[len(kvs)-1].ModifyIndex
		b.attach(e, s)
		b.mu.Unlock()
		return true, nil
	}
	return false, fmt.Errorf("consullock: key %q did not hold still", e.key)
}

// remove deletes what nobody knows of any more.
func (b *Backend) remove(key, owner string, create uint64) {
	for n := 1; b.ctx.Err() == nil; n++ {
		ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
		err := b.delete(ctx, &driver.Lease{Key: key, Owner: owner, Token: int64(create)})
		cancel()
		if err == nil || errors.Is(err, driver.ErrLost) {
			return
		}
		sleep(b.ctx, backoff(n))
	}
}
