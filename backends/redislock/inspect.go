package redislock

import (
	"cmp"
	"context"
	"fmt"
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
	var mu sync.Mutex
	found := make(map[string]struct{})
	scan := func(ctx context.Context, client redis.Cmdable) error {
		for cursor := uint64(0); ; {
			names, next, err := client.Scan(ctx, cursor, recordPattern(b.opts.Prefix, prefix), scanCount).Result()
			if err != nil {
				return classify(err)
			}
			mu.Lock()
			for _, name := range names {
				if key, ok := lockKey(b.opts.Prefix, name); ok && strings.HasPrefix(key, prefix) && key > after {
					found[key] = struct{}{}
				}
			}
			mu.Unlock()
			if cursor = next; cursor == 0 {
				return nil
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
	}
	done := make(chan error, 1)
	go func() {
		if cluster, ok := b.client.(*redis.ClusterClient); ok {
			done <- cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return scan(ctx, node) })
		} else {
			done <- scan(ctx, b.client)
		}
	}()
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("redislock: %w: %w", errNoReply, ctx.Err())
	}
	mu.Lock()
	defer mu.Unlock()
	keys := make([]string, 0, len(found))
	for key := range found {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys, nil
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
