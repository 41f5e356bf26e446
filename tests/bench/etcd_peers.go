package main

import (
	"context"
	"errors"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// etcdMutexPeer is package concurrency of etcd's client. A Mutex excludes only
// those of other sessions, so goroutines that share a key cannot share a session.
type etcdMutexPeer struct {
	client   *clientv3.Client
	sessions []*concurrency.Session // one for each goroutine; none if each lock has its own
}

type etcdMutexLock struct {
	mutex *concurrency.Mutex
	own   *concurrency.Session // closed with the lock, if not nil
}

// openEtcdMutex returns a function that opens it, with sessions that last or with
// one for each lock.
func openEtcdMutex(lasting bool) opener {
	return func(_ context.Context, cfg openConfig) (locker, error) {
		client, err := newEtcdClient(cfg.addrs[0])
		if err != nil {
			return nil, err
		}
		p := &etcdMutexPeer{client: client}
		if !lasting {
			return p, nil
		}
		p.sessions = make([]*concurrency.Session, cfg.workers)
		return p, each(cfg.workers, 64, func(i int) (err error) {
			p.sessions[i], err = newEtcdSession(client, cfg.ttl)
			return err
		})
	}
}

func (p *etcdMutexPeer) lock(
	ctx context.Context,
	worker int, key string, ttl time.Duration,
	call func(*concurrency.Mutex, context.Context) error,
) (held, error) {
	var session, own *concurrency.Session
	if p.sessions != nil {
		session = p.sessions[worker%len(p.sessions)]
	} else {
		var err error
		if own, err = newEtcdSession(p.client, ttl); err != nil {
			return nil, err
		}
		session = own
	}
	l := &etcdMutexLock{concurrency.NewMutex(session, "mutex/"+key), own}
	err := call(l.mutex, ctx)
	if err == nil {
		return l, nil
	}
	if own != nil {
		err = errors.Join(err, own.Close())
	}
	if errors.Is(err, concurrency.ErrLocked) {
		return nil, errConflict
	}
	return nil, err
}

func (p *etcdMutexPeer) TryLock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	return p.lock(ctx, worker, key, ttl, (*concurrency.Mutex).TryLock)
}

func (p *etcdMutexPeer) Lock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	return p.lock(ctx, worker, key, ttl, (*concurrency.Mutex).Lock)
}

func (l *etcdMutexLock) Unlock(ctx context.Context) error {
	err := l.mutex.Unlock(ctx)
	if l.own != nil {
		err = errors.Join(err, l.own.Close())
	}
	return err
}
