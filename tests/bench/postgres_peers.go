package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	cirello "cirello.io/pglock"
	allisson "github.com/allisson/go-pglock/v3"
)

// cirelloPeer is cirello.io/pglock.
type cirelloPeer struct{ client *cirello.Client }

type cirelloLock struct {
	client *cirello.Client
	lock   *cirello.Lock
}

// openCirello returns a function that opens it with a lease of its own, or with
// that of the workload if it is zero.
func openCirello(lease time.Duration) opener {
	return func(ctx context.Context, cfg openConfig) (locker, error) {
		db, err := newPostgresDB(ctx, cfg.addrs[0], postgresPool)
		if err != nil {
			return nil, err
		}
		length := lease
		if length == 0 {
			length = cfg.ttl
		}
		client, err := cirello.New(db, cirello.WithLeaseDuration(length), cirello.WithHeartbeatFrequency(length*3/10))
		if err != nil {
			return nil, err
		}
		return cirelloPeer{client}, client.TryCreateTable()
	}
}

func (p cirelloPeer) TryLock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	return p.acquire(ctx, key, cirello.FailIfLocked())
}

func (p cirelloPeer) Lock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	return p.acquire(ctx, key)
}

func (p cirelloPeer) acquire(ctx context.Context, key string, options ...cirello.LockOption) (held, error) {
	// By default the heartbeat ends with the context of the acquisition.
	options = append(options, cirello.WithCustomHeartbeatContext(context.WithoutCancel(ctx)))
	l, err := p.client.AcquireContext(ctx, key, options...)
	if errors.Is(err, cirello.ErrNotAcquired) {
		return nil, errConflict
	}
	if err != nil {
		return nil, err
	}
	return cirelloLock{p.client, l}, nil
}

func (l cirelloLock) Unlock(ctx context.Context) error { return l.client.ReleaseContext(ctx, l.lock) }

// allissonPeer is github.com/allisson/go-pglock.
type allissonPeer struct{ db *sql.DB }

type allissonLock struct{ lock allisson.Lock }

func openAllisson(ctx context.Context, cfg openConfig) (locker, error) {
	db, err := newPostgresDB(ctx, cfg.addrs[0], cfg.workers)
	return allissonPeer{db}, err
}

func (p allissonPeer) TryLock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	return p.lock(ctx, key, func(l *allisson.Lock) error {
		ok, err := l.Lock(ctx)
		if err == nil && !ok {
			err = errConflict
		}
		return err
	})
}

func (p allissonPeer) Lock(ctx context.Context, _ int, key string, _ time.Duration) (held, error) {
	return p.lock(ctx, key, func(l *allisson.Lock) error { return l.WaitAndLock(ctx) })
}

func (p allissonPeer) lock(ctx context.Context, key string, call func(*allisson.Lock) error) (held, error) {
	lock, err := allisson.NewLock(ctx, advisoryID(key), p.db)
	if err != nil {
		return nil, err
	}
	l := &allissonLock{lock}
	if err := call(&l.lock); err != nil {
		return nil, errors.Join(err, l.lock.Close())
	}
	return l, nil
}

// Unlock gives the connection back after the lock.
func (l *allissonLock) Unlock(ctx context.Context) error {
	return errors.Join(l.lock.Unlock(ctx), l.lock.Close())
}
