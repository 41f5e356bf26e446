package main

import (
	"context"
	"crypto/rand"
	"hash/fnv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

func openSelect1(ctx context.Context, cfg openConfig) (locker, error) {
	pool, err := newPostgresPool(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return pingFloor(func(ctx context.Context, _ int) error {
		var one int
		return pool.QueryRow(ctx, "select 1").Scan(&one)
	}), nil
}

// rowFloor is the least that a lock with a lease in a table can do.
type rowFloor struct{ pool *pgxpool.Pool }

type rowLock struct {
	pool       *pgxpool.Pool
	key, owner string
}

const (
	makeRows = `create table if not exists locks (key text primary key, owner text not null, ends timestamptz not null)`
	takeRow  = `insert into locks as l values ($1, $2, clock_timestamp() + $3::interval) on conflict (key)
		do update set owner = excluded.owner, ends = excluded.ends where l.ends < clock_timestamp()`
	extendRow = `update locks set ends = clock_timestamp() + $3::interval where key = $1 and owner = $2`
	dropRow   = `delete from locks where key = $1 and owner = $2`
)

func openRowFloor(ctx context.Context, cfg openConfig) (locker, error) {
	pool, err := newPostgresPool(ctx, cfg)
	if err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, makeRows)
	return rowFloor{pool}, err
}

func (p rowFloor) TryLock(ctx context.Context, _ int, key string, ttl time.Duration) (held, error) {
	owner := rand.Text()
	tag, err := p.pool.Exec(ctx, takeRow, key, owner, ttl)
	if err != nil {
		return nil, err
	}
	if tag.RowsAffected() == 0 {
		return nil, errConflict
	}
	return &rowLock{p.pool, key, owner}, nil
}

func (p rowFloor) Lock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error) {
	return poll(ctx, 10*time.Millisecond, func() (held, error) { return p.TryLock(ctx, worker, key, ttl) })
}

func (l *rowLock) Unlock(ctx context.Context) error {
	return wantOneRow(l.pool.Exec(ctx, dropRow, l.key, l.owner))
}

func (l *rowLock) Extend(ctx context.Context, ttl time.Duration) error {
	return wantOneRow(l.pool.Exec(ctx, extendRow, l.key, l.owner, ttl))
}

func wantOneRow(tag pgconn.CommandTag, err error) error {
	if err == nil && tag.RowsAffected() != 1 {
		err = errNotHeld
	}
	return err
}

// advisoryFloor is the queue that PostgreSQL keeps by itself. Waiters take a
// connection each, and there is no lease.
type advisoryFloor struct{ conns []*pgx.Conn }

type advisoryLock struct {
	conn *pgx.Conn
	id   int64
}

func openAdvisoryFloor(ctx context.Context, cfg openConfig) (locker, error) {
	p := advisoryFloor{make([]*pgx.Conn, cfg.workers)}
	return p, each(cfg.workers, 16, func(i int) (err error) {
		p.conns[i], err = pgx.Connect(ctx, postgresURL(cfg.addrs[0], postgresDatabase))
		return err
	})
}

// advisoryID is the number of a key as an advisory lock.
func advisoryID(key string) int64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(key)) // it never fails
	return int64(hash.Sum64())
}

func (p advisoryFloor) TryLock(ctx context.Context, worker int, key string, _ time.Duration) (held, error) {
	l := &advisoryLock{p.conns[worker%len(p.conns)], advisoryID(key)}
	ok, err := l.ask(ctx, "select pg_try_advisory_lock($1)")
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errConflict
	}
	return l, nil
}

func (p advisoryFloor) Lock(ctx context.Context, worker int, key string, _ time.Duration) (held, error) {
	l := &advisoryLock{p.conns[worker%len(p.conns)], advisoryID(key)}
	if _, err := l.conn.Exec(ctx, "select pg_advisory_lock($1)", l.id); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *advisoryLock) Unlock(ctx context.Context) error {
	return wantHeld(l.ask(ctx, "select pg_advisory_unlock($1)"))
}

func (l *advisoryLock) ask(ctx context.Context, query string) (ok bool, err error) {
	err = l.conn.QueryRow(ctx, query, l.id).Scan(&ok)
	return ok, err
}
