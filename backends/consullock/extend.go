package consullock

import (
	"context"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// maxReads bounds what is put into one transaction. A server allows 128
// operations.
const maxReads = 100

// Extend implements [driver.Backend]. It renews the sessions that the grants
// belong to, and asks whether their keys are still there.
func (b *Backend) Extend(ctx context.Context, batch []driver.Renewal) {
	if err := b.enter(ctx); err != nil {
		fail(batch, err)
		return
	}
	start := time.Now()
	b.mu.Lock()
	old := make(map[*session]struct{})
	for i := range batch {
		if e := b.entry(batch[i].Lease.Key, batch[i].Lease.Owner); e != nil && e.session != nil {
			old[e.session] = struct{}{}
		}
	}
	b.mu.Unlock()
	for s := range old {
		b.fresh(ctx, s)
	}
	for len(batch) > 0 {
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
	ops := make(api.TxnOps, len(batch))
	names := make([]string, len(batch))
	b.mu.Lock()
	for i := range batch {
		l := &batch[i].Lease
		batch[i].Err = nil
		names[i] = lockBase(b.opts.Prefix, l.Key)
		if e := b.entry(l.Key, l.Owner); e != nil && int64(e.create) == l.Token && e.granted {
			names[i] = e.name
		}
		ops[i] = &api.TxnOp{KV: &api.KVTxnOp{Verb: api.KVGetTree, Key: names[i]}}
	}
	b.mu.Unlock()
	var kvs map[string]*api.KVPair
	err := b.call(ctx, func(ctx context.Context) error {
		ok, resp, _, err := b.client.Txn().Txn(ops, consistent(ctx))
		if err != nil {
			return err
		}
		if !ok {
			return refusedRead(resp)
		}
		kvs = make(map[string]*api.KVPair, len(resp.Results))
		for _, r := range resp.Results {
			kvs[r.KV.Key] = r.KV
		}
		return nil
	})
	if err != nil {
		fail(batch, err)
		return
	}
	for i := range batch {
		batch[i].Err = b.extendOne(ctx, &batch[i].Lease, names[i], kvs, start)
	}
}

// extendOne renews a grant by what there is of its lock.
func (b *Backend) extendOne(ctx context.Context, l *driver.Lease, name string, kvs map[string]*api.KVPair, start time.Time) error {
	b.mu.Lock()
	e := b.entry(l.Key, l.Owner)
	known := e != nil && int64(e.create) == l.Token && e.granted && e.name == name
	if known {
		if kv := kvs[name]; kv == nil || int64(kv.CreateIndex) != l.Token || kv.Session == "" {
			b.drop(e)
			b.mu.Unlock()
			return b.explain(ctx, l)
		}
	}
	b.mu.Unlock()
	if !known {
		var err error
		if e, err = b.adopt(ctx, l); err != nil {
			return err
		}
	}
	b.mu.Lock()
	fits := good(e.session, l.TTL)
	e.ttl = max(e.ttl, l.TTL)
	b.mu.Unlock()
	if !fits {
		moved, err := b.move(ctx, e, uint64(l.Token), l.TTL)
		if err != nil {
			return err
		}
		if !moved {
			return lostError(l, false)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if int64(e.create) != l.Token || e.session == nil {
		return &driver.LostError{Key: l.Key, Token: l.Token, Reason: driver.ReasonSession}
	}
	l.Age = e.session.lacks(start, l.TTL)
	return nil
}

// adopt makes an entry for a grant that this backend has not made, or does not
// know to be granted.
func (b *Backend) adopt(ctx context.Context, l *driver.Lease) (*entry, error) {
	st, err := b.read(ctx, l.Key)
	if err != nil {
		return nil, err
	}
	i := find(st.list, l.Owner)
	if i < 0 || int64(st.list[i].create) != l.Token || !holds(st.list, i) {
		return nil, lostError(l, len(st.list) > 0)
	}
	t := st.list[i]
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.entry(l.Key, l.Owner)
	if e == nil || e.mode != t.mode || e.limit != t.limit {
		e = b.add(&entry{key: l.Key, owner: l.Owner, mode: t.mode, limit: t.limit, ttl: l.TTL, made: time.Now()})
	}
	e.name, e.create, e.mod, e.granted = t.name, t.create, t.mod, true
	b.attach(e, b.byID[t.session])
	return e, nil
}

// explain finds out whether somebody else has a lock that is lost.
func (b *Backend) explain(ctx context.Context, l *driver.Lease) error {
	st, err := b.read(ctx, l.Key)
	return lostError(l, err == nil && len(st.list) > 0)
}
