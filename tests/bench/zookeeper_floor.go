package main

import (
	"context"
	"errors"
	"time"

	"github.com/go-zookeeper/zk"
)

func openZooKeeperExists(ctx context.Context, cfg openConfig) (locker, error) {
	conn, err := newZooKeeperConn(ctx, cfg.addrs[0], cfg.ttl)
	if err != nil {
		return nil, err
	}
	return pingFloor(func(context.Context, int) error {
		_, _, err := conn.Exists("/")
		return err
	}), nil
}

// zooKeeperCreateFloor is the least that a lock on ZooKeeper can do.
type zooKeeperCreateFloor struct{ conn *zk.Conn }

type zooKeeperNode struct {
	conn *zk.Conn
	path string
}

const zooKeeperFloorRoot = "/floor"

func openZooKeeperCreate(ctx context.Context, cfg openConfig) (locker, error) {
	conn, err := newZooKeeperConn(ctx, cfg.addrs[0], cfg.ttl)
	if err != nil {
		return nil, err
	}
	_, err = conn.Create(zooKeeperFloorRoot, nil, zk.FlagPersistent, zk.WorldACL(zk.PermAll))
	if errors.Is(err, zk.ErrNodeExists) {
		err = nil
	}
	return zooKeeperCreateFloor{conn}, err
}

func (p zooKeeperCreateFloor) TryLock(_ context.Context, _ int, key string, _ time.Duration) (held, error) {
	node := &zooKeeperNode{p.conn, zooKeeperFloorRoot + "/" + key}
	_, err := p.conn.Create(node.path, nil, zk.FlagEphemeral, zk.WorldACL(zk.PermAll))
	if errors.Is(err, zk.ErrNodeExists) {
		return nil, errConflict
	}
	if err != nil {
		return nil, err
	}
	return node, nil
}

func (p zooKeeperCreateFloor) Lock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	for {
		h, err := p.TryLock(ctx, worker, key, ttl)
		if !errors.Is(err, errConflict) {
			return h, err
		}
		there, _, events, err := p.conn.ExistsW(zooKeeperFloorRoot + "/" + key)
		if err != nil {
			return nil, err
		}
		if !there {
			continue
		}
		select {
		case <-events:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (n *zooKeeperNode) Unlock(context.Context) error { return n.conn.Delete(n.path, -1) }
