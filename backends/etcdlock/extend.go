package etcdlock

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

const (
	// maxReads and maxMoves bound what is put into one transaction. A server
	// allows 128 operations, those of nested transactions counted along their
	// path.
	maxReads = 100
	maxMoves = 60
)

// Extend implements [driver.Backend]. The leases are renewed by a stream of
// their own; what has to be asked is whether the keys are still there.
func (b *Backend) Extend(ctx context.Context, batch []driver.Renewal) {
	if err := b.enter(ctx); err != nil {
		fail(batch, err)
		return
	}
	for start := time.Now(); len(batch) > 0; {
		n := min(len(batch), maxReads)
		b.extend(ctx, batch[:n], start)
		batch = batch[n:]
	}
}

func fail(batch []driver.Renewal, err error) {
	for i := range batch {
		batch[i].Err = err
	}
}

// extend renews some grants, with one question for all.
func (b *Backend) extend(ctx context.Context, batch []driver.Renewal, start time.Time) {
	entries := make([]*entry, len(batch))
	ops := make([]clientv3.Op, len(batch))
	pause := time.Second
	b.mu.Lock()
	now := time.Now()
	for i := range batch {
		l := &batch[i].Lease
		batch[i].Err = nil
		pause = min(pause, l.TTL/12)
		e := b.entries[id{l.Key, l.Owner}]
		if e == nil || e.rev != l.Token || !e.granted {
			ops[i] = clientv3.OpGet(lockBase(b.opts.Prefix, l.Key), clientv3.WithRange(lockEnd(b.opts.Prefix, l.Key)),
				clientv3.WithKeysOnly(), byCreation)
			continue
		}
		entries[i] = e
		ops[i] = clientv3.OpGet(e.name, clientv3.WithKeysOnly())
		if e.session != nil && e.session.age(now) > e.session.ttl/10 {
			b.renew(e.session)
		}
	}
	b.mu.Unlock()
	resp, err := hedged(ctx, len(b.client.Endpoints()), pause, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return b.client.Txn(ctx).Then(ops...).Commit()
	}, nil)
	if err != nil {
		fail(batch, classify(ctx, err, b.opts.Prefix))
		return
	}

	var lost, moving []int
	b.mu.Lock()
	now = time.Now()
	for i := range batch {
		l := &batch[i].Lease
		kvs := resp.Responses[i].GetResponseRange().Kvs
		if entries[i] == nil {
			entries[i] = b.adopt(l, ticketsAmong(b.opts.Prefix, kvs))
			if entries[i] == nil {
				batch[i].Err = lostError(l, len(kvs) > 0)
				continue
			}
		} else if len(kvs) == 0 || kvs[0].CreateRevision != l.Token {
			lost = append(lost, i)
			continue
		}
		e := entries[i]
		switch s := e.session; {
		case e.rev != l.Token:
			lost = append(lost, i)
		case s == nil || !s.usable(now) || s.ttl < l.TTL:
			e.ttl = l.TTL
			moving = append(moving, i)
		default:
			l.TTL, l.Age = s.ttl, s.age(start)
		}
	}
	b.mu.Unlock()
	b.explain(ctx, batch, entries, lost)
	for len(moving) > 0 {
		n := min(len(moving), maxMoves)
		b.extendMoved(ctx, batch, entries, moving[:n], start)
		moving = moving[n:]
	}
}

// adopt makes an entry for a grant that this backend has not made, or does not
// know to be granted. The mutex is held.
func (b *Backend) adopt(l *driver.Lease, list []ticket) *entry {
	for _, t := range list[:holders(list)] {
		if t.owner != l.Owner || t.rev != l.Token {
			continue
		}
		e := b.entries[id{l.Key, l.Owner}]
		if e == nil || e.name != t.name {
			e = &entry{id: id{l.Key, l.Owner}, name: t.name, mode: t.mode, limit: t.limit, ttl: l.TTL, made: time.Now()}
			b.entries[e.id] = e
		}
		if e.rev != t.rev || e.session == nil {
			b.attach(e, b.byLease[t.lease])
		}
		e.rev, e.granted = t.rev, true
		return e
	}
	return nil
}

// explain finds out whether somebody else has the locks that are gone.
func (b *Backend) explain(ctx context.Context, batch []driver.Renewal, entries []*entry, lost []int) {
	if len(lost) == 0 {
		return
	}
	ops := make([]clientv3.Op, len(lost))
	for n, i := range lost {
		ops[n] = b.anybody(batch[i].Lease.Key)
	}
	resp, err := b.client.Txn(ctx).Then(ops...).Commit()
	b.mu.Lock()
	defer b.mu.Unlock()
	for n, i := range lost {
		l := &batch[i].Lease
		batch[i].Err = lostError(l, err == nil && len(resp.Responses[n].GetResponseRange().Kvs) > 0)
		if e := entries[i]; e.rev == l.Token {
			b.drop(e)
		}
	}
}

// extendMoved puts grants on leases with a longer TTL, or on ones that are
// renewed, in one step for each lease.
func (b *Backend) extendMoved(ctx context.Context, batch []driver.Renewal, entries []*entry, moving []int, start time.Time) {
	sessions := make(map[int64]*session)
	var ops []clientv3.Op
	var sent []int
	var targets []*session
	for _, i := range moving {
		b.mu.Lock()
		want := class(batch[i].Lease.TTL)
		if s := entries[i].session; s != nil {
			want = max(want, s.class)
		}
		b.mu.Unlock()
		s := sessions[want]
		if s == nil {
			var err error
			if s, err = b.session(ctx, want); err != nil {
				batch[i].Err = err
				continue
			}
			sessions[want] = s
		}
		b.mu.Lock()
		op := b.moveOp(entries[i], batch[i].Lease.Token, s)
		b.mu.Unlock()
		ops = append(ops, clientv3.OpTxn(op.conds, op.then, op.otherwise))
		sent = append(sent, i)
		batch[i].Lease.TTL = s.ttl
		targets = append(targets, s)
		b.mu.Lock()
		batch[i].Lease.Age = s.age(start)
		b.mu.Unlock()
	}
	if len(ops) == 0 {
		return
	}
	resp, err := b.client.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		if gone(err) {
			for _, s := range sessions {
				b.endDead(ctx, s)
			}
		}
		err = classify(ctx, err, b.opts.Prefix)
		for _, i := range sent {
			batch[i].Err = err
		}
		return
	}
	for n, i := range sent {
		l := &batch[i].Lease
		one := resp.Responses[n].GetResponseTxn()
		if b.moved(entries[i], l.Token, targets[n], one) {
			batch[i].Err = nil
			continue
		}
		batch[i].Err = lostError(l, false)
	}
}
