package pglock

import (
	"context"

	"github.com/go-dlm/dlm/driver"
)

const defaultListLimit = 1000

// Inspect implements [driver.Inspector].
func (b *backend) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	// No key lies between a key and itself with a zero byte behind it.
	list, err := b.list(ctx, bytea(key), append(bytea(key), 0), nil, 1)
	if err != nil || len(list) == 0 {
		return driver.KeyInfo{Key: key}, err
	}
	return list[0], nil
}

// List implements [driver.Inspector].
func (b *backend) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if limit <= 0 {
		limit = defaultListLimit
	}
	return b.list(ctx, bytea(prefix), behind(prefix), bytea(after), int64(limit))
}

// behind is what sorts just behind all that begins with a prefix, or nil.
func behind(prefix string) []byte {
	end := bytea(prefix)
	for len(end) > 0 {
		if end[len(end)-1]++; end[len(end)-1] != 0 {
			return end
		}
		end = end[:len(end)-1]
	}
	return nil
}

func (b *backend) list(ctx context.Context, from, to, after []byte, limit int64) ([]driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	// An empty value stands for none; NULL would need a type in some drivers.
	rows, err := b.calls.do(ctx, "", b.st.list, from, append([]byte{}, to...), append([]byte{}, after...), limit)
	if err != nil {
		return nil, err
	}
	var list []driver.KeyInfo
	for _, r := range rows {
		f := &scanner{row: r}
		key, what, owner, number := f.hex(), f.text(), f.hex(), f.int()
		mode, permits, ttl, age, remaining := driver.Mode(f.int()), int(f.int()), f.micros(), f.micros(), f.micros()
		if f.err != nil {
			return nil, f.err
		}
		if len(list) == 0 || list[len(list)-1].Key != key {
			list = append(list, driver.KeyInfo{Key: key, Limit: permits})
		}
		info := &list[len(list)-1]
		if what == "h" {
			info.Holders = append(info.Holders, driver.HolderInfo{
				Owner: owner, Token: number, Mode: mode, TTL: ttl, Held: max(age, 0), Remaining: remaining,
			})
		} else {
			info.Waiters = append(info.Waiters, driver.WaiterInfo{Owner: owner, Mode: mode, Waiting: max(age, 0)})
		}
	}
	return list, nil
}

// ForceRelease implements [driver.Forcer].
func (b *backend) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	rows, err := b.calls.do(ctx, "", b.st.force, bytea(key), token, b.opts.kept())
	if err != nil {
		return nil, err
	}
	var list []driver.HolderInfo
	for _, r := range rows {
		f := &scanner{row: r}
		h := driver.HolderInfo{Owner: f.hex(), Token: f.int(), Mode: driver.Mode(f.int()), TTL: f.micros()}
		h.Held, h.Remaining = max(f.micros(), 0), f.micros()
		if f.err != nil {
			return nil, f.err
		}
		list = append(list, h)
	}
	return list, nil
}
