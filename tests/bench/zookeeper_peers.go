package main

import (
	"context"
	"errors"
	"time"

	"github.com/go-zookeeper/zk"
)

// zkLockPeer is zk.Lock, the lock that comes with the client. Nothing ends its
// waiting.
type zkLockPeer struct{ conn *zk.Conn }

type zkLock struct{ lock *zk.Lock }

const zkLockRoot = "/locks/"

func openZooKeeperLock(ctx context.Context, cfg openConfig) (locker, error) {
	conn, err := newZooKeeperConn(ctx, cfg.addrs[0], cfg.ttl)
	return zkLockPeer{conn}, err
}

// TryLock waits all the same.
func (p zkLockPeer) TryLock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	return p.Lock(ctx, worker, key, ttl)
}

func (p zkLockPeer) Lock(_ context.Context, _ int, key string, _ time.Duration) (held, error) {
	l := zk.NewLock(p.conn, zkLockRoot+key, zk.WorldACL(zk.PermAll))
	if err := l.Lock(); err != nil {
		return nil, err
	}
	return zkLock{l}, nil
}

// Held implements looker.
func (p zkLockPeer) Held(_ context.Context, key string) (bool, error) {
	children, _, err := p.conn.Children(zkLockRoot + key)
	if errors.Is(err, zk.ErrNoNode) {
		return false, nil
	}
	return len(children) > 0, err
}

func (l zkLock) Unlock(context.Context) error { return l.lock.Unlock() }
