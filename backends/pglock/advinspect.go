package pglock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/go-dlm/dlm/driver"
)

const (
	// forcePatience bounds how long a holder may take to give up its grant.
	forcePatience = 5 * time.Second
	// forcePause is how often it is looked whether it has.
	forcePause = 20 * time.Millisecond
)

// reading begins a call that changes nothing.
func (a *Advisory) reading(ctx context.Context) (*advSession, error) {
	if err := a.enter(ctx); err != nil {
		return nil, err
	}
	return a.ready(ctx)
}

// Inspect implements [driver.Inspector]. TTL and Remaining of holders are not
// known and zero: they last as long as their sessions.
func (a *Advisory) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	s, err := a.reading(ctx)
	if err != nil {
		return driver.KeyInfo{}, err
	}
	list, err := s.list(ctx, a.number(key), bytea(key), nil, nil, 1)
	if err != nil || len(list) == 0 {
		return driver.KeyInfo{Key: key}, err
	}
	return list[0], nil
}

// List implements [driver.Inspector]; see [Advisory.Inspect]. It reads what is
// known of all keys that are in use.
func (a *Advisory) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	s, err := a.reading(ctx)
	if err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = defaultListLimit
	}
	return s.list(ctx, 0, bytea(prefix), behind(prefix), bytea(after), int64(limit))
}

func (s *advSession) list(ctx context.Context, number int64, from, to, after []byte, limit int64) ([]driver.KeyInfo, error) {
	rows, err := s.askWithin(ctx, s.a.st.list, number, from, append([]byte{}, to...), append([]byte{}, after...), limit)
	if err != nil {
		return nil, err
	}
	var list []driver.KeyInfo
	for _, r := range rows {
		f := &scanner{row: r}
		key, what, owner, number, mode, age := f.hex(), f.text(), f.hex(), f.int(), driver.Mode(f.int()), f.micros()
		if f.err != nil {
			return nil, f.err
		}
		if len(list) == 0 || list[len(list)-1].Key != key {
			list = append(list, driver.KeyInfo{Key: key, Limit: 1})
		}
		info := &list[len(list)-1]
		if what == "h" {
			info.Holders = append(info.Holders, driver.HolderInfo{Owner: owner, Token: number, Mode: mode, Held: max(age, 0)})
		} else {
			info.Waiters = append(info.Waiters, driver.WaiterInfo{Owner: owner, Mode: mode, Waiting: max(age, 0)})
		}
	}
	return list, nil
}

// ForceRelease implements [driver.Forcer]. Nobody but the session that has a lock
// can unlock it, so the holder's backend is asked to, which tells its owner first.
// A process that is stopped does not do so: then it fails after some seconds, and
// the error names the number of the session at the server. To end that one
// (pg_terminate_backend) takes all its locks away.
func (a *Advisory) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	s, err := a.reading(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := s.askWithin(ctx, a.st.force, a.number(key), bytea(key), token)
	if err != nil {
		return nil, err
	}
	var removed []driver.HolderInfo
	pids := make(map[int64]int64)
	for _, r := range rows {
		f := &scanner{row: r}
		h := driver.HolderInfo{Owner: f.hex(), Token: f.int(), Mode: driver.Mode(f.int()), Held: max(f.micros(), 0)}
		pids[h.Token] = f.int()
		if f.err != nil {
			return nil, f.err
		}
		removed = append(removed, h)
	}
	timer := time.NewTimer(forcePatience)
	defer timer.Stop()
	for pause := time.Millisecond; len(removed) > 0; pause = min(2*pause, forcePause) {
		list, err := s.list(ctx, a.number(key), bytea(key), nil, nil, 1)
		if err != nil {
			return nil, err
		}
		left := slices.IndexFunc(removed, func(h driver.HolderInfo) bool {
			return len(list) > 0 && slices.ContainsFunc(list[0].Holders, func(other driver.HolderInfo) bool { return other.Token == h.Token })
		})
		if left < 0 {
			break
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, fmt.Errorf("pglock: the holder has not given up yet: %w", ctx.Err())
		case <-timer.C:
			return nil, fmt.Errorf("pglock: the holder %q does not give up; its session is process %d of the server",
				removed[left].Owner, pids[removed[left].Token])
		}
	}
	return removed, nil
}

// Check implements [driver.Checker]. It makes a connection of its own for it, and
// needs no rights beyond those that locks need.
func (a *Advisory) Check(ctx context.Context) ([]driver.Finding, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if a.ctx.Err() != nil {
		return nil, driver.ErrClosed
	}
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			hangUp(conn)
		}
	}()
	c := &check{opts: &a.opts, advisory: a, query: func(ctx context.Context, text string) ([]row, uint32, error) {
		if conn == nil || conn.IsClosed() {
			var err error
			if conn, err = dialAs(ctx, a.pool); err != nil {
				if over := ended(ctx, err); over != nil {
					err = over
				}
				return nil, 0, a.opts.classify(err)
			}
		}
		rows, err := asks(conn)(ctx, text)
		return rows, conn.PgConn().PID(), a.opts.classify(err)
	}}
	return c.findAll(ctx)
}

// session looks whether a session can begin, which tries out a pooler.
func (c *check) session(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, connectPatience)
	defer cancel()
	_, err := c.advisory.ready(ctx)
	e, _ := errors.AsType[*ServerError](err)
	switch {
	case err == nil:
		c.ok(checkPooling, "the session is the backend's own")
	case e != nil && e.Problem == ProblemPooling:
		c.add(checkPooling, driver.SeverityCritical, e.Detail, "connect to the server itself, or to a pool in session mode")
	default:
		c.failed(err)
	}
}
