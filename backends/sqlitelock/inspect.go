package sqlitelock

import (
	"context"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// defaultListLimit is how many keys List returns if no limit is given.
const defaultListLimit = 1000

// Inspect implements [driver.Inspector].
func (b *Backend) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	return read(ctx, b, func(t *tx) (driver.KeyInfo, error) { return t.inspect([]byte(key)) })
}

// List implements [driver.Inspector].
func (b *Backend) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if limit <= 0 {
		limit = defaultListLimit
	}
	return read(ctx, b, func(t *tx) ([]driver.KeyInfo, error) {
		keys, err := t.keys(prefix, after, limit)
		if err != nil {
			return nil, err
		}
		list := make([]driver.KeyInfo, 0, len(keys))
		for _, key := range keys {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			info, err := t.inspect(key)
			if err != nil {
				return nil, err
			}
			list = append(list, info)
		}
		return list, nil
	})
}

// keys returns the keys that somebody holds or waits for, in byte order. The
// byte 0xff is in no key, as keys are UTF-8, so it ends those with the prefix.
func (t *tx) keys(prefix, after string, limit int) (keys [][]byte, err error) {
	err = t.s.rows(`SELECT key FROM holds WHERE key >= ?1 AND key < ?2 AND key > ?3 AND expires > ?4
			UNION SELECT key FROM tickets WHERE key >= ?1 AND key < ?2 AND key > ?3 AND expires > ?4
			ORDER BY key LIMIT ?5`,
		[]any{[]byte(prefix), append([]byte(prefix), 0xff), []byte(after), t.now, limit},
		func(scan func(...any) error) error {
			var key []byte
			err := scan(&key)
			keys = append(keys, key)
			return err
		})
	return keys, err
}

// inspect describes a key.
func (t *tx) inspect(key []byte) (driver.KeyInfo, error) {
	info := driver.KeyInfo{Key: string(key)}
	holders, err := t.holders(key, &info.Limit)
	if err != nil {
		return info, err
	}
	info.Holders = holders
	err = t.s.rows("SELECT owner, mode, permits, since FROM tickets WHERE key = ? AND expires > ? ORDER BY ticket",
		[]any{key, t.now}, func(scan func(...any) error) error {
			var w driver.WaiterInfo
			var permits int
			var since int64
			if err := scan(&w.Owner, &w.Mode, &permits, &since); err != nil {
				return err
			}
			w.Waiting = time.Duration(t.now - since)
			info.Waiters = append(info.Waiters, w)
			if info.Limit == 0 {
				info.Limit = permits
			}
			return nil
		})
	return info, err
}

// holders describes the unexpired grants of a key and sets the limit that they
// agree on.
func (t *tx) holders(key []byte, limit *int) (list []driver.HolderInfo, err error) {
	err = t.s.rows(`SELECT owner, token, mode, permits, ttl, since, expires FROM holds
			WHERE key = ? AND expires > ? ORDER BY token`,
		[]any{key, t.now}, func(scan func(...any) error) error {
			var h driver.HolderInfo
			var since, expires int64
			if err := scan(&h.Owner, &h.Token, &h.Mode, limit, &h.TTL, &since, &expires); err != nil {
				return err
			}
			h.Held, h.Remaining = time.Duration(t.now-since), time.Duration(expires-t.now)
			list = append(list, h)
			return nil
		})
	return list, err
}

// force is one call of [Backend.ForceRelease].
func (t *tx) force(name string, token int64) ([]driver.HolderInfo, error) {
	key := []byte(name)
	if err := t.sweep(); err != nil {
		return nil, err
	}
	if err := t.dropExpired(key); err != nil {
		return nil, err
	}
	var limit int
	holders, err := t.holders(key, &limit)
	if err != nil {
		return nil, err
	}
	var removed []driver.HolderInfo
	for _, h := range holders {
		if token != 0 && h.Token != token {
			continue
		}
		if _, err := t.s.exec("DELETE FROM holds WHERE key = ? AND owner = ?", key, []byte(h.Owner)); err != nil {
			return nil, err
		}
		removed = append(removed, h)
	}
	_, _, err = t.serve(key, nil, nil)
	return removed, err
}
