package main

import (
	"context"
	"errors"
	"time"

	"github.com/go-dlm/dlm"
)

// dlmRow is this project, on any store: goroutine i uses manager i%n.
type dlmRow struct{ managers []*dlm.Manager }

// openDLM returns a function that opens n managers, each with a client of its
// own, as in n processes.
func openDLM(n int, newManager func(context.Context, openConfig) (*dlm.Manager, error)) opener {
	return func(ctx context.Context, cfg openConfig) (locker, error) {
		var d dlmRow
		for range n {
			m, err := newManager(ctx, cfg)
			if err != nil {
				return nil, err
			}
			d.managers = append(d.managers, m)
		}
		return d, nil
	}
}

type dlmLock struct{ lock *dlm.Lock }

func (d dlmRow) manager(worker int) *dlm.Manager { return d.managers[worker%len(d.managers)] }

func (d dlmRow) TryLock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	l, err := d.manager(worker).TryLock(ctx, key, ttl)
	if errors.Is(err, dlm.ErrHeld) {
		return nil, errConflict
	}
	if err != nil {
		return nil, err
	}
	return dlmLock{l}, nil
}

func (d dlmRow) Lock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	l, err := d.manager(worker).AcquireLock(ctx, key, ttl)
	if err != nil {
		return nil, err
	}
	return dlmLock{l}, nil
}

func (l dlmLock) Unlock(ctx context.Context) error { return l.lock.Release(ctx) }

func (l dlmLock) Extend(ctx context.Context, ttl time.Duration) error {
	return l.lock.Extend(ctx, ttl)
}
