package etcdlock

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

const (
	defaultListLimit = 1000
	// pageSize is how many keys are read at once.
	pageSize = 1000
	// maxLeases is how many leases are asked for the time that they have left.
	maxLeases = 16
)

// Inspect implements [driver.Inspector]. Held and Waiting compare the clock of
// the machine that asked for the lock with that of this one, as etcd keeps no
// times; nothing is decided by them. Remaining is in full seconds.
func (b *Backend) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return driver.KeyInfo{}, err
	}
	base := lockBase(b.opts.Prefix, key)
	resp, err := b.client.Get(ctx, base, clientv3.WithRange(lockEnd(b.opts.Prefix, key)), byCreation)
	if err != nil {
		return driver.KeyInfo{}, classify(ctx, err, base)
	}
	info, leases := b.describe(key, ticketsAmong(b.opts.Prefix, resp.Kvs))
	left := make(map[clientv3.LeaseID]time.Duration)
	for i, id := range leases {
		if _, ok := left[id]; !ok && len(left) < maxLeases {
			// Without an answer it is not known, which is no reason to fail.
			left[id] = b.remaining(ctx, id)
		}
		info.Holders[i].Remaining = left[id]
	}
	if err := ctx.Err(); err != nil {
		return driver.KeyInfo{}, fmt.Errorf("etcdlock: no reply yet: %w", err)
	}
	return info, nil
}

func (b *Backend) remaining(ctx context.Context, id clientv3.LeaseID) time.Duration {
	resp, err := b.client.TimeToLive(ctx, id)
	if err != nil || resp.TTL < 0 {
		return 0
	}
	return time.Duration(resp.TTL) * time.Second
}

// describe describes a lock by its tickets, and returns the leases of its
// holders.
func (b *Backend) describe(key string, list []ticket) (driver.KeyInfo, []clientv3.LeaseID) {
	info := driver.KeyInfo{Key: key}
	var leases []clientv3.LeaseID
	now := time.Now()
	n := holders(list)
	for i, t := range list {
		info.Limit = list[0].limit
		v, err := parseValue(t.name, t.value)
		age := max(now.Sub(v.made), 0)
		if err != nil {
			age = 0
		}
		if i < n {
			info.Holders = append(info.Holders, driver.HolderInfo{Owner: t.owner, Token: t.rev, Mode: t.mode, TTL: v.ttl, Held: age})
			leases = append(leases, t.lease)
		} else {
			info.Waiters = append(info.Waiters, driver.WaiterInfo{Owner: t.owner, Mode: t.mode, Waiting: age})
		}
	}
	return info, leases
}

// List implements [driver.Inspector]. Remaining is not told.
func (b *Backend) List(ctx context.Context, prefix, afterKey string, limit int) ([]driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = defaultListLimit
	}
	// What begins with NUL and is none of a lock comes before this.
	from := b.opts.Prefix + escapedNUL
	end := after(b.opts.Prefix + escape(prefix))
	from = max(from, b.opts.Prefix+escape(prefix))
	if afterKey != "" {
		from = max(from, lockEnd(b.opts.Prefix, afterKey))
	}
	var found []driver.KeyInfo
	var group []*mvccpb.KeyValue
	key := ""
	flush := func() {
		if key == "" {
			return
		}
		list := ticketsAmong(b.opts.Prefix, group)
		sortByCreation(list)
		info, _ := b.describe(key, list)
		found = append(found, info)
		key, group = "", nil
	}
	for from < end {
		resp, err := b.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize))
		if err != nil {
			return nil, classify(ctx, err, b.opts.Prefix)
		}
		for _, kv := range resp.Kvs {
			t, ok := parseTicket(b.opts.Prefix, kv)
			if !ok || !strings.HasPrefix(t.key, prefix) {
				continue
			}
			if t.key != key {
				flush()
				if len(found) == limit {
					return found, nil
				}
				key = t.key
			}
			group = append(group, kv)
		}
		if !resp.More || len(resp.Kvs) == 0 {
			break
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
	flush()
	return found, nil
}

// ForceRelease implements [driver.Forcer].
func (b *Backend) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	base := lockBase(b.opts.Prefix, key)
	for range maxLooks {
		resp, err := b.client.Get(ctx, base, clientv3.WithRange(lockEnd(b.opts.Prefix, key)), byCreation)
		if err != nil {
			return nil, classify(ctx, err, base)
		}
		list := ticketsAmong(b.opts.Prefix, resp.Kvs)
		info, _ := b.describe(key, list)
		var removed []driver.HolderInfo
		var conds []clientv3.Cmp
		var ops []clientv3.Op
		for i, h := range info.Holders {
			if token != 0 && h.Token != token {
				continue
			}
			removed = append(removed, h)
			conds = append(conds, clientv3.Compare(clientv3.CreateRevision(list[i].name), "=", h.Token))
			ops = append(ops, clientv3.OpDelete(list[i].name))
			if len(ops) == maxMoves {
				break // the rest comes with the next call
			}
		}
		if len(removed) == 0 {
			return nil, nil
		}
		answer, _, err := b.txn(ctx, conds, ops, nil)
		if err != nil {
			return nil, classify(ctx, err, base)
		}
		if answer.Succeeded {
			return removed, nil
		}
	}
	return nil, fmt.Errorf("%w: etcdlock: key %q did not hold still", driver.ErrNotApplied, key)
}
