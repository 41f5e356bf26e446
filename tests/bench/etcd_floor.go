package main

import (
	"context"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

func openEtcdPut(_ context.Context, cfg openConfig) (locker, error) {
	client, err := newEtcdClient(cfg.addrs[0])
	if err != nil {
		return nil, err
	}
	return pingFloor(func(ctx context.Context, worker int) error {
		_, err := client.Put(ctx, fmt.Sprint("put/", worker), "")
		return err
	}), nil
}

// etcdTxnFloor is the least that a lock with a lease on etcd can do.
type etcdTxnFloor struct {
	client *clientv3.Client
	lease  clientv3.LeaseID
}

type etcdTxnLock struct {
	client *clientv3.Client
	key    string
}

func openEtcdTxn(_ context.Context, cfg openConfig) (locker, error) {
	client, err := newEtcdClient(cfg.addrs[0])
	if err != nil {
		return nil, err
	}
	session, err := newEtcdSession(client, cfg.ttl) // keeps the lease alive
	if err != nil {
		return nil, err
	}
	return etcdTxnFloor{client, session.Lease()}, nil
}

func newEtcdSession(client *clientv3.Client, ttl time.Duration) (*concurrency.Session, error) {
	return concurrency.NewSession(client, concurrency.WithTTL(int((ttl+time.Second-1)/time.Second)))
}

func (p etcdTxnFloor) TryLock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	h, _, err := p.try(ctx, key)
	return h, err
}

// try also returns the revision at which somebody else had the key.
func (p etcdTxnFloor) try(ctx context.Context, key string) (held, int64, error) {
	resp, err := p.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, "", clientv3.WithLease(p.lease))).
		Commit()
	switch {
	case err != nil:
		return nil, 0, err
	case !resp.Succeeded:
		return nil, resp.Header.Revision, errConflict
	}
	return &etcdTxnLock{p.client, key}, 0, nil
}

func (p etcdTxnFloor) Lock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	for {
		h, revision, err := p.try(ctx, key)
		if revision == 0 {
			return h, err
		}
		if err := p.awaitDelete(ctx, key, revision); err != nil {
			return nil, err
		}
	}
}

func (p etcdTxnFloor) awaitDelete(ctx context.Context, key string, revision int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for resp := range p.client.Watch(ctx, key, clientv3.WithRev(revision+1), clientv3.WithFilterPut()) {
		if err := resp.Err(); err != nil {
			return err
		}
		if len(resp.Events) > 0 {
			return nil
		}
	}
	return ctx.Err()
}

func (l *etcdTxnLock) Unlock(ctx context.Context) error {
	resp, err := l.client.Delete(ctx, l.key)
	if err == nil && resp.Deleted != 1 {
		err = errNotHeld
	}
	return err
}
