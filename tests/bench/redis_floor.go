package main

import (
	"context"
	"crypto/rand"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

func openRedisPing(_ context.Context, cfg openConfig) (locker, error) {
	client := newRedisClient(cfg.addrs[0], poolSize)
	return pingFloor(func(ctx context.Context, _ int) error { return client.Ping(ctx).Err() }), nil
}

// setNXFloor is the lock that everybody writes first: the least that a lock
// with a lease on Redis can do.
type setNXFloor struct{ client *redis.Client }

type setNXLock struct {
	client     *redis.Client
	key, token string
}

var (
	compareDelete = redis.NewScript(`return redis.call("get", KEYS[1]) == ARGV[1] and redis.call("del", KEYS[1]) or 0`)
	compareExpire = redis.NewScript(`return redis.call("get", KEYS[1]) == ARGV[1] and redis.call("pexpire", KEYS[1], ARGV[2]) or 0`)
)

func openSetNX(_ context.Context, cfg openConfig) (locker, error) {
	return setNXFloor{newRedisClient(cfg.addrs[0], poolSize)}, nil
}

func (p setNXFloor) TryLock(ctx context.Context, _ int, key string, ttl time.Duration) (held, error) {
	token := rand.Text()
	// go-redis sends whole seconds as EX, anything else as PX.
	ok, err := p.client.SetNX(ctx, key, token, ttl+time.Millisecond).Result()
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errConflict
	}
	return &setNXLock{p.client, key, token}, nil
}

func (p setNXFloor) Lock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	return poll(ctx, 10*time.Millisecond, func() (held, error) { return p.TryLock(ctx, worker, key, ttl) })
}

func (l *setNXLock) Unlock(ctx context.Context) error {
	return wantOne(compareDelete.Run(ctx, l.client, []string{l.key}, l.token))
}

func (l *setNXLock) Extend(ctx context.Context, ttl time.Duration) error {
	return wantOne(compareExpire.Run(ctx, l.client, []string{l.key}, l.token, ttl.Milliseconds()))
}

func wantOne(c *redis.Cmd) error {
	n, err := c.Int()
	if err == nil && n != 1 {
		err = errNotHeld
	}
	return err
}

// blpopFloor is a queue that Redis keeps: the fewest commands for a fair
// hand-over. Whoever dies with the token has taken it along for ever.
type blpopFloor struct {
	client *redis.Client
	keys   sync.Map // those that have had their token
}

type blpopLock struct {
	client *redis.Client
	key    string
}

func openBLPop(_ context.Context, cfg openConfig) (locker, error) {
	return &blpopFloor{client: newRedisClient(cfg.addrs[0], cfg.workers+4)}, nil
}

func (p *blpopFloor) TryLock(context.Context, int, string, time.Duration) (held, error) {
	return nil, errUnfit
}

func (p *blpopFloor) Lock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	if _, known := p.keys.LoadOrStore(key, true); !known {
		if err := p.client.RPush(ctx, key, "token").Err(); err != nil {
			return nil, err
		}
	}
	if err := p.client.BLPop(ctx, 0, key).Err(); err != nil {
		return nil, err
	}
	return &blpopLock{p.client, key}, nil
}

func (l *blpopLock) Unlock(ctx context.Context) error {
	return l.client.RPush(ctx, l.key, "token").Err()
}
