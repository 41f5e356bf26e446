package main

import (
	"context"
	"errors"
	mathrand "math/rand/v2"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

// redsyncPeer is github.com/go-redsync/redsync.
type redsyncPeer struct {
	sync    *redsync.Redsync
	options []redsync.Option
}

type redsyncLock struct{ mutex *redsync.Mutex }

// openRedsync returns a function that opens it on all servers, patient or with
// the defaults, which give up after about five seconds.
func openRedsync(patient bool) opener {
	return func(_ context.Context, cfg openConfig) (locker, error) {
		var pools []redsyncredis.Pool
		for _, c := range newRedisClients(cfg.addrs) {
			pools = append(pools, goredis.NewPool(c))
		}
		p := &redsyncPeer{sync: redsync.New(pools...)}
		if patient {
			p.options = []redsync.Option{
				redsync.WithTries(1_000_000),
				redsync.WithRetryDelayFunc(func(int) time.Duration {
					return 5*time.Millisecond + mathrand.N(10*time.Millisecond)
				}),
			}
		}
		return p, nil
	}
}

func (p *redsyncPeer) mutex(key string, ttl time.Duration) *redsync.Mutex {
	return p.sync.NewMutex(key, append([]redsync.Option{redsync.WithExpiry(ttl)}, p.options...)...)
}

func (p *redsyncPeer) TryLock(ctx context.Context, _ int, key string, ttl time.Duration) (held, error) {
	m := p.mutex(key, ttl)
	err := m.TryLockContext(ctx)
	if err == nil {
		return &redsyncLock{m}, nil
	}
	_, taken := errors.AsType[*redsync.ErrTaken](err)
	_, nodeTaken := errors.AsType[*redsync.ErrNodeTaken](err)
	if taken || nodeTaken || errors.Is(err, redsync.ErrFailed) {
		return nil, errConflict
	}
	return nil, err
}

func (p *redsyncPeer) Lock(ctx context.Context, _ int, key string, ttl time.Duration) (held, error) {
	m := p.mutex(key, ttl)
	if err := m.LockContext(ctx); err != nil {
		return nil, err
	}
	return &redsyncLock{m}, nil
}

func (l *redsyncLock) Unlock(ctx context.Context) error {
	return wantHeld(l.mutex.UnlockContext(ctx))
}

func (l *redsyncLock) Extend(ctx context.Context, _ time.Duration) error {
	return wantHeld(l.mutex.ExtendContext(ctx))
}

// bsmPeer is github.com/bsm/redislock.
type bsmPeer struct{ client *redislock.Client }

type bsmLock struct{ lock *redislock.Lock }

func openBSM(_ context.Context, cfg openConfig) (locker, error) {
	return bsmPeer{redislock.New(newRedisClient(cfg.addrs[0], poolSize))}, nil
}

func (p bsmPeer) TryLock(ctx context.Context, _ int, key string, ttl time.Duration) (held, error) {
	return p.obtain(ctx, key, ttl, nil)
}

// Lock needs a context with a deadline: without one, bsm/redislock gives up
// after the lease.
func (p bsmPeer) Lock(ctx context.Context, _ int, key string, ttl time.Duration) (held, error) {
	return p.obtain(ctx, key, ttl, &redislock.Options{RetryStrategy: redislock.LinearBackoff(10 * time.Millisecond)})
}

func (p bsmPeer) obtain(ctx context.Context, key string, ttl time.Duration, o *redislock.Options) (held, error) {
	l, err := p.client.Obtain(ctx, key, ttl, o)
	if errors.Is(err, redislock.ErrNotObtained) {
		return nil, errConflict
	}
	if err != nil {
		return nil, err
	}
	return bsmLock{l}, nil
}

func (l bsmLock) Unlock(ctx context.Context) error { return l.lock.Release(ctx) }

func (l bsmLock) Extend(ctx context.Context, ttl time.Duration) error {
	return l.lock.Refresh(ctx, ttl, nil)
}

// rueidisPeer is rueidislock, a package of github.com/redis/rueidis.
type rueidisPeer struct{ lockers []rueidislock.Locker }

type rueidisLock struct {
	held    context.Context // ends with the lock
	release context.CancelFunc
}

// openRueidis returns a function that opens n Lockers.
func openRueidis(n int) opener {
	return func(_ context.Context, cfg openConfig) (locker, error) {
		p := &rueidisPeer{}
		for range n {
			l, err := rueidislock.NewLocker(rueidislock.LockerOption{
				ClientOption:   rueidis.ClientOption{InitAddress: cfg.addrs},
				KeyMajority:    1,
				NoLoopTracking: true,
				KeyValidity:    cfg.ttl,
			})
			if err != nil {
				return nil, err
			}
			p.lockers = append(p.lockers, l)
		}
		return p, nil
	}
}

func (p *rueidisPeer) TryLock(ctx context.Context, worker int, key string, _ time.Duration) (held, error) {
	return p.lock(context.WithoutCancel(ctx), p.lockers[worker%len(p.lockers)].TryWithContext, key)
}

// Lock's context ends the lock as well as the wait: its deadline must be far
// off.
func (p *rueidisPeer) Lock(ctx context.Context, worker int, key string, _ time.Duration) (held, error) {
	return p.lock(ctx, p.lockers[worker%len(p.lockers)].WithContext, key)
}

func (p *rueidisPeer) lock(
	ctx context.Context,
	call func(context.Context, string) (context.Context, context.CancelFunc, error),
	key string,
) (held, error) {
	lockCtx, release, err := call(ctx, key)
	if errors.Is(err, rueidislock.ErrNotLocked) {
		return nil, errConflict
	}
	if err != nil {
		return nil, err
	}
	return &rueidisLock{lockCtx, release}, nil
}

func (l *rueidisLock) Unlock(context.Context) error {
	err := l.held.Err() // there is no other way to see a loss
	l.release()
	return err
}
