package consullock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

const defaultListLimit = 1000

// Inspect implements [driver.Inspector]. Held and Waiting compare the clock of
// the machine that asked for the lock with that of this one, as Consul keeps no
// times; nothing is decided by them. Remaining is not told, as Consul does not
// tell it.
func (b *Backend) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return driver.KeyInfo{}, err
	}
	st, err := b.read(ctx, key)
	if err != nil {
		return driver.KeyInfo{}, err
	}
	return describe(key, st.list), nil
}

// describe describes a lock by its tickets.
func describe(key string, list []ticket) driver.KeyInfo {
	info := driver.KeyInfo{Key: key}
	now := time.Now()
	n := holders(list)
	for i, t := range list {
		info.Limit = list[0].limit
		v, err := parseValue(t.value)
		age := max(now.Sub(v.made), 0)
		if err != nil {
			age = 0
		}
		if i < n {
			info.Holders = append(info.Holders, driver.HolderInfo{Owner: t.owner, Token: int64(t.create), Mode: t.mode, TTL: v.ttl, Held: age})
		} else {
			info.Waiters = append(info.Waiters, driver.WaiterInfo{Owner: t.owner, Mode: t.mode, Waiting: age})
		}
	}
	return info
}

// List implements [driver.Inspector]. Consul has no pages: all names of keys that
// begin with the prefix are read at once. Remaining is not told.
func (b *Backend) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = defaultListLimit
	}
	var names []string
	err := b.call(ctx, func(ctx context.Context) (err error) {
		names, _, err = b.client.KV().Keys(b.opts.Prefix+escape(prefix), "", consistent(ctx))
		return err
	})
	if err != nil {
		return nil, err
	}
	var keys []string
	for _, name := range names {
		rest, ok := strings.CutPrefix(name, b.opts.Prefix)
		escaped, rest, _ := strings.Cut(rest, "/")
		key, plain := unescape(escaped)
		if !ok || !plain || key == "" || rest != lockName && !strings.HasPrefix(rest, waitSection) ||
			!strings.HasPrefix(key, prefix) || key <= after && after != "" {
			continue
		}
		keys = append(keys, key)
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	var found []driver.KeyInfo
	for len(keys) > 0 && len(found) < limit {
		n := min(len(keys), maxReads, limit-len(found))
		some, err := b.describeAll(ctx, keys[:n])
		if err != nil {
			return nil, err
		}
		found = append(found, some...)
		keys = keys[n:]
	}
	return found, nil
}

// describeAll describes some locks, with one question for all.
func (b *Backend) describeAll(ctx context.Context, keys []string) ([]driver.KeyInfo, error) {
	ops := make(api.TxnOps, len(keys))
	for i, key := range keys {
		ops[i] = &api.TxnOp{KV: &api.KVTxnOp{Verb: api.KVGetTree, Key: lockBase(b.opts.Prefix, key)}}
	}
	var results api.TxnResults
	err := b.call(ctx, func(ctx context.Context) error {
		ok, resp, _, err := b.client.Txn().Txn(ops, consistent(ctx))
		if err != nil {
			return err
		}
		if !ok {
			return refusedRead(resp)
		}
		results = resp.Results
		return nil
	})
	if err != nil {
		return nil, err
	}
	groups := make(map[string][]*api.KVPair)
	for _, r := range results {
		name, _, _ := strings.Cut(strings.TrimPrefix(r.KV.Key, b.opts.Prefix), "/")
		groups[name] = append(groups[name], r.KV)
	}
	var found []driver.KeyInfo
	for _, key := range keys {
		// A foreign key among those of a lock is none of this one's business.
		st, err := parseState(lockBase(b.opts.Prefix, key), groups[escape(key)])
		if err == nil && len(st.list) > 0 {
			found = append(found, describe(key, st.list))
		}
	}
	return found, nil
}

func refusedRead(resp *api.TxnResponse) error {
	if len(resp.Errors) > 0 {
		return fmt.Errorf("the server says: %s", resp.Errors[0].What)
	}
	return errors.New("the server refused a question and gave no reason")
}

// ForceRelease implements [driver.Forcer].
func (b *Backend) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	st, err := b.read(ctx, key)
	if err != nil {
		return nil, err
	}
	var removed []driver.HolderInfo
	for _, h := range describe(key, st.list).Holders {
		if token != 0 && h.Token != token {
			continue
		}
		lease := driver.Lease{Key: key, Owner: h.Owner, Token: h.Token}
		gone, err := b.force(ctx, &lease)
		if err != nil {
			return removed, err
		}
		if gone {
			removed = append(removed, h)
		}
	}
	return removed, nil
}

// force removes a grant, and says whether it was there.
func (b *Backend) force(ctx context.Context, lease *driver.Lease) (bool, error) {
	b.mu.Lock()
	e := b.entry(lease.Key, lease.Owner)
	if e != nil && int64(e.create) != lease.Token {
		e = nil
	}
	granted := e != nil && e.granted
	b.mu.Unlock()
	err := b.delete(ctx, lease)
	if errors.Is(err, driver.ErrLost) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if granted {
		// It is one of ours, which is to be told.
		b.mu.Lock()
		defer b.mu.Unlock()
		if l := b.listeners[e.manager]; l != nil {
			l.tell(driver.Event{
				Kind: driver.EventLost, Lease: driver.Lease{Key: e.key, Owner: e.owner},
				Err: &driver.LostError{Key: lease.Key, Token: lease.Token, Reason: driver.ReasonGone},
			})
		}
	}
	return true, nil
}
