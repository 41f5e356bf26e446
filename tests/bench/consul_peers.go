package main

import (
	"context"
	"time"

	"github.com/hashicorp/consul/api"
)

// consulLockPeer is api.Lock, the lock that comes with the client. Those that share
// a session do not exclude each other, so goroutines that share a key cannot.
type consulLockPeer struct {
	client   *api.Client
	sessions []string // one for each goroutine; none if each lock has its own
}

type consulLock struct{ lock *api.Lock }

// openConsulLock returns a function that opens it, with sessions that last or with
// one for each lock.
func openConsulLock(lasting bool) opener {
	return func(ctx context.Context, cfg openConfig) (locker, error) {
		client, err := newConsulClient(cfg.addrs[0])
		if err != nil {
			return nil, err
		}
		p := &consulLockPeer{client: client}
		if !lasting {
			return p, nil
		}
		p.sessions = make([]string, cfg.workers)
		return p, each(cfg.workers, 64, func(i int) (err error) {
			p.sessions[i], err = consulSession(ctx, client)
			return err
		})
	}
}

func (p *consulLockPeer) lock(ctx context.Context, worker int, opts api.LockOptions, ttl time.Duration) (held, error) {
	if p.sessions != nil {
		opts.Session = p.sessions[worker%len(p.sessions)]
	} else {
		opts.SessionTTL = max(ttl, 10*time.Second).String()
	}
	l, err := p.client.LockOpts(&opts)
	if err != nil {
		return nil, err
	}
	lost, err := l.Lock(ctx.Done())
	switch {
	case err != nil:
		return nil, err
	case lost != nil:
		return consulLock{l}, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	return nil, errConflict
}

func (p *consulLockPeer) TryLock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	return p.lock(ctx, worker, api.LockOptions{Key: "lock/" + key, LockTryOnce: true, LockWaitTime: time.Millisecond}, ttl)
}

func (p *consulLockPeer) Lock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	return p.lock(ctx, worker, api.LockOptions{Key: "lock/" + key}, ttl)
}

func (l consulLock) Unlock(context.Context) error { return l.lock.Unlock() }
