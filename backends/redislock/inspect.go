package redislock

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

const (
	defaultListLimit = 1000
	// scanCount is how many keys a server looks at in one step of a scan.
	scanCount = 1000
)

// Inspect implements [driver.Inspector].
func (b *Backend) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return driver.KeyInfo{}, err
	}
	return b.inspect(ctx, key)
}

func (b *Backend) inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	reply, err := b.calls.run(ctx, inspectScript, lockKeys(recordKey(b.opts.Prefix, key)))
	if err != nil {
		return driver.KeyInfo{}, err
	}
	return parseInspection(key, reply)
}

func parseInspection(key string, reply any) (driver.KeyInfo, error) {
	info := driver.KeyInfo{Key: key}
	f := fields{list: asList(reply)}
	for _, h := range f.array() {
		g := fields{list: asList(h)}
		holder := driver.HolderInfo{Owner: g.string(), Token: g.int()}
		mode, limit, err := parseKind(g.string())
		holder.Mode, holder.TTL, holder.Held, holder.Remaining = mode, g.micros(), g.micros(), g.micros()
		if err := cmp.Or(g.err, err); err != nil {
			return info, err
		}
		info.Limit = limit
		info.Holders = append(info.Holders, holder)
	}
	for _, w := range f.array() {
		g := fields{list: asList(w)}
		waiter := driver.WaiterInfo{Owner: g.string()}
		mode, limit, err := parseKind(g.string())
		waiter.Mode, waiter.Waiting = mode, g.micros()
		if err := cmp.Or(g.err, err); err != nil {
			return info, err
		}
		if info.Limit == 0 {
			info.Limit = limit
		}
		info.Waiters = append(info.Waiters, waiter)
	}
	slices.SortFunc(info.Holders, func(a, b driver.HolderInfo) int { return cmp.Compare(a.Token, b.Token) })
	return info, f.err
}

func asList(v any) []any {
	list, _ := v.([]any)
	return list
}

// List implements [driver.Inspector]. It goes through all keys of the database,
// a thousand at a time.
func (b *Backend) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = defaultListLimit
	}
	keys, err := b.keys(ctx, prefix, after)
	if err != nil {
		return nil, err
	}
	var list []driver.KeyInfo
	for len(keys) > 0 && len(list) < limit {
		n := min(len(keys), limit-len(list))
		infos, err := b.inspectAll(ctx, keys[:n])
		if err != nil {
			return nil, err
		}
		list = append(list, infos...)
		keys = keys[n:]
	}
	return list, nil
}

// inspectAll describes keys, and leaves out those that are free, and records of
// something else.
func (b *Backend) inspectAll(ctx context.Context, keys []string) ([]driver.KeyInfo, error) {
	infos, errs := make([]driver.KeyInfo, len(keys)), make([]error, len(keys))
	var wg sync.WaitGroup
	for i, key := range keys {
		wg.Go(func() {
			infos[i], errs[i] = b.inspect(ctx, key)
		})
	}
	wg.Wait()
	var list []driver.KeyInfo
	for i := range keys {
		switch {
		case is(errs[i], ProblemForeign):
		case errs[i] != nil:
			return nil, errs[i]
		case infos[i].Limit != 0:
			list = append(list, infos[i])
		}
	}
	return list, nil
}

// keys lists the keys of locks that have a record, in order.
func (b *Backend) keys(ctx context.Context, prefix, after string) ([]string, error) {
	var clients []redis.Cmdable
	if cluster, ok := b.client.(*redis.ClusterClient); ok {
		var mu sync.Mutex
		err := await(ctx, func() error {
			return cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
				mu.Lock()
				defer mu.Unlock()
				clients = append(clients, node)
				return nil
			})
		})
		if err != nil {
			return nil, classify(err)
		}
	} else {
		clients = []redis.Cmdable{b.client}
	}
	return scanKeys(ctx, clients, b.opts.Prefix, prefix, after)
}

// scanKeys lists the keys of locks that begin with a prefix and come after
// another key, on some servers, in order.
func scanKeys(ctx context.Context, clients []redis.Cmdable, prefix, keyPrefix, after string) ([]string, error) {
	found := make(map[string]struct{})
	pattern := recordPattern(prefix, keyPrefix)
	for _, client := range clients {
		for cursor := uint64(0); ; {
			var names []string
			var next uint64
			err := await(ctx, func() (err error) {
				names, next, err = client.Scan(ctx, cursor, pattern, scanCount).Result()
				return err
			})
			if err != nil {
				return nil, classify(err)
			}
			for _, name := range names {
				if key, ok := lockKey(prefix, name); ok && strings.HasPrefix(key, keyPrefix) && key > after {
					found[key] = struct{}{}
				}
			}
			if cursor = next; cursor == 0 {
				break
			}
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// await runs f, which uses the client and may wait for the network longer than
// the context allows. If it returns an error because of that, f goes on and must
// not be relied upon.
func await(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- guarded(f) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("redislock: %w: %w", errNoReply, ctx.Err())
	}
}

// guarded turns a panic of the client, or of what the user has hooked into it,
// into an error.
func guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("redislock: the client panicked: %v", p)
		}
	}()
	return f()
}

// ForceRelease implements [driver.Forcer].
func (b *Backend) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	reply, err := b.calls.run(ctx, forceScript, lockKeys(recordKey(b.opts.Prefix, key)), token, b.kept(0))
	if err != nil {
		return nil, err
	}
	info, err := parseInspection(key, []any{reply, []any{}})
	return info.Holders, err
}
