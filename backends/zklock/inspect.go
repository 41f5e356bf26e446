package zklock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/driver"
)

const (
	// defaultListLimit is how many keys List describes unless it is told.
	defaultListLimit = 1000
	// listTogether is how many keys it looks at together.
	listTogether = 32
)

// Inspect implements [driver.Inspector]. TTL and Remaining of holders are not
// known and zero: they last as long as their sessions. Held and Waiting rest on
// the leader's clock, and are zero if it cannot be read.
func (b *Backend) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	return onSession(ctx, b, func(s *session) (driver.KeyInfo, error) {
		if err := s.sync(); err != nil {
			return driver.KeyInfo{}, err
		}
		b.readClock(s)
		return b.inspect(ctx, s, key)
	})
}

// onSession runs f with a session that is connected.
func onSession[T any](ctx context.Context, b *Backend, f func(s *session) (T, error)) (T, error) {
	var none T
	if err := b.enter(ctx); err != nil {
		return none, err
	}
	s, err := b.ready(ctx)
	if err != nil {
		return none, err
	}
	return detached(ctx, b, func() (T, error) { return f(s) })
}

// entry is a node with its stat.
type entry struct {
	contender
	stat *zk.Stat
}

// entries returns the nodes of a key in order. Those that go meanwhile are left
// out.
func (b *Backend) entries(ctx context.Context, s *session, key string) ([]entry, error) {
	snap, err := s.look(key, false)
	if err != nil {
		return nil, err
	}
	list := snap.list
	all := make([]entry, len(list))
	err = inFlight(len(list), func(i int) error {
		if err := alive(ctx); err != nil {
			return err
		}
		stat, ok, err := s.stat(b.path(key, list[i].name))
		if ok && err == nil {
			all[i] = entry{list[i], stat}
		}
		return err
	})
	return slices.DeleteFunc(all, func(e entry) bool { return e.stat == nil }), err
}

func contenders(list []entry) []contender {
	out := make([]contender, len(list))
	for i, e := range list {
		out[i] = e.contender
	}
	return out
}

func (b *Backend) inspect(ctx context.Context, s *session, key string) (driver.KeyInfo, error) {
	if err := alive(ctx); err != nil {
		return driver.KeyInfo{}, err
	}
	info := driver.KeyInfo{Key: key}
	list, err := b.entries(ctx, s, key)
	if err != nil || len(list) == 0 {
		return info, err
	}
	info.Limit = list[0].limit
	n := holders(contenders(list))
	for i := range list {
		if i < n {
			info.Holders = append(info.Holders, b.holder(&list[i]))
		} else {
			e := &list[i]
			info.Waiters = append(info.Waiters, driver.WaiterInfo{Owner: e.owner, Mode: e.mode, Waiting: b.since(e.stat.Ctime)})
		}
	}
	return info, nil
}

func (b *Backend) holder(e *entry) driver.HolderInfo {
	return driver.HolderInfo{Owner: e.owner, Token: e.stat.Czxid, Mode: e.mode, Held: b.since(e.stat.Ctime)}
}

// since is how long ago a time of the leader's clock was, or 0 if not known.
func (b *Backend) since(ms int64) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.serverSeen.IsZero() {
		return 0
	}
	return max(0, b.serverTime.Add(time.Since(b.serverSeen)).Sub(time.UnixMilli(ms)))
}

// clockKept is for how long a reading of the leader's clock is good.
const clockKept = time.Minute

// readClock reads the leader's clock, unless that was done a short time ago: by a
// node of our session's own that is written to.
func (b *Backend) readClock(s *session) {
	b.mu.Lock()
	known := !b.serverSeen.IsZero() && time.Since(b.serverSeen) < clockKept
	path := fmt.Sprintf("%s/!clock-%016x", b.root, uint64(s.id))
	b.mu.Unlock()
	if known {
		return
	}
	began := time.Now()
	stat, err := s.conn.Set(path, nil, -1)
	if errors.Is(err, zk.ErrNoNode) {
		if _, err = s.conn.Create(path, nil, zk.FlagEphemeral, b.opts.ACL); err == nil {
			began = time.Now()
			stat, err = s.conn.Set(path, nil, -1)
		}
	}
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.serverTime, b.serverSeen = time.UnixMilli(stat.Mtime), began.Add(time.Since(began)/2)
}

// List implements [driver.Inspector]. It reads the names of all keys at once.
func (b *Backend) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if limit <= 0 {
		limit = defaultListLimit
	}
	return onSession(ctx, b, func(s *session) ([]driver.KeyInfo, error) {
		if err := s.sync(); err != nil {
			return nil, err
		}
		b.readClock(s)
		names, _, err := s.conn.Children(b.root)
		if errors.Is(err, zk.ErrNoNode) {
			return nil, nil
		}
		if err != nil {
			return nil, classify(err, b.root)
		}
		var keys []string
		for _, name := range names {
			if key, ok := unescape(name); ok && name == escape(key, true) && strings.HasPrefix(key, prefix) && key > after {
				keys = append(keys, key)
			}
		}
		slices.Sort(keys)
		var list []driver.KeyInfo
		for len(keys) > 0 && len(list) < limit {
			infos := make([]driver.KeyInfo, min(len(keys), limit-len(list), listTogether))
			err := inFlight(len(infos), func(i int) (err error) {
				infos[i], err = b.inspect(ctx, s, keys[i])
				return err
			})
			if err != nil {
				return nil, err
			}
			for _, info := range infos {
				if info.Limit != 0 {
					list = append(list, info)
				}
			}
			keys = keys[len(infos):]
		}
		return list, nil
	})
}

// ForceRelease implements [driver.Forcer].
func (b *Backend) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	return onSession(ctx, b, func(s *session) ([]driver.HolderInfo, error) {
		if err := s.beat(); err != nil {
			return nil, err
		}
		b.readClock(s)
		list, err := b.entries(ctx, s, key)
		if err != nil {
			return nil, err
		}
		var removed []driver.HolderInfo
		for i := range list[:holders(contenders(list))] {
			e := &list[i]
			if token != 0 && e.stat.Czxid != token {
				continue
			}
			if err := alive(ctx); err != nil {
				return removed, err
			}
			switch err := b.remove(s, key, b.path(key, e.name), len(list) == 1); {
			case err == nil:
				removed = append(removed, b.holder(e))
			case !errors.Is(err, zk.ErrNoNode):
				return removed, classify(err, b.path(key, e.name))
			}
		}
		return removed, nil
	})
}
