package main

import (
	"context"
	"time"

	"github.com/hashicorp/consul/api"
)

func openConsulLeader(_ context.Context, cfg openConfig) (locker, error) {
	client, err := newConsulClient(cfg.addrs[0])
	if err != nil {
		return nil, err
	}
	return pingFloor(func(ctx context.Context, _ int) error {
		_, err := client.Status().LeaderWithQueryOptions((&api.QueryOptions{}).WithContext(ctx))
		return err
	}), nil
}

// consulKVFloor is the least that a lock on Consul can do.
type consulKVFloor struct {
	kv      *api.KV
	session string
}

type consulKey struct {
	kv  *api.KV
	key string
}

func openConsulKV(ctx context.Context, cfg openConfig) (locker, error) {
	client, err := newConsulClient(cfg.addrs[0])
	if err != nil {
		return nil, err
	}
	// A session may have a key twice, but the keys of a goroutine are its own.
	session, err := consulSession(ctx, client)
	return consulKVFloor{client.KV(), session}, err
}

func (p consulKVFloor) TryLock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	k := consulKey{p.kv, "floor/" + key}
	ok, _, err := p.kv.Acquire(&api.KVPair{Key: k.key, Session: p.session}, (&api.WriteOptions{}).WithContext(ctx))
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errConflict
	}
	return k, nil
}

func (consulKVFloor) Lock(context.Context, int, string, time.Duration) (held, error) {
	return nil, errUnfit
}

func (k consulKey) Unlock(ctx context.Context) error {
	_, err := k.kv.Delete(k.key, (&api.WriteOptions{}).WithContext(ctx))
	return err
}
