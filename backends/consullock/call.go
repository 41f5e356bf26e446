package consullock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// maxCalls is how many requests a backend has under way, but for those that wait
// for a change. An agent allows 200 connections from one address by default.
const maxCalls = 32

// call runs a request when there is room for it. A panic of the client is its
// error.
func (b *Backend) call(ctx context.Context, f func(context.Context) error) error {
	select {
	case b.slots <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%w: consullock: %w", driver.ErrNotApplied, ctx.Err())
	}
	defer func() { <-b.slots }()
	return b.classify(ctx, guard(ctx, f))
}

func guard(ctx context.Context, f func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the client panicked: %v", p)
		}
	}()
	return f(ctx)
}

// refused is a transaction that had no effect because one of its operations
// failed, with the number of that and what the server says.
type refused struct {
	op   int
	says string
}

// txn runs a transaction that writes. An error, or refused, says that it did
// not take place, as far as errors say so.
func (b *Backend) txn(ctx context.Context, ops []*api.KVTxnOp) (api.TxnResults, *refused, error) {
	list := make(api.TxnOps, len(ops))
	for i, op := range ops {
		list[i] = &api.TxnOp{KV: op}
	}
	var resp api.TxnResponse
	err := b.call(ctx, func(ctx context.Context) error {
		// Other than the client's method this one tells the status.
		q := (&api.WriteOptions{}).WithContext(ctx)
		_, err := b.client.Raw().Write("/v1/txn", list, &resp, q)
		status, ok := errors.AsType[api.StatusError](err)
		if !ok || status.Code != http.StatusConflict {
			return err
		}
		if err := json.Unmarshal([]byte(status.Body), &resp); err != nil || len(resp.Errors) == 0 {
			return status
		}
		for _, e := range resp.Errors {
			if strings.Contains(e.What, "Permission denied") {
				return errors.New(e.What)
			}
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	if len(resp.Errors) > 0 {
		return nil, &refused{op: resp.Errors[0].OpIndex, says: resp.Errors[0].What}, nil
	}
	return resp.Results, nil, nil
}

// pairs are the keys in the results of a transaction that begin with base.
func pairs(results api.TxnResults, base string) []*api.KVPair {
	var kvs []*api.KVPair
	for _, r := range results {
		if r.KV != nil && strings.HasPrefix(r.KV.Key, base) {
			kvs = append(kvs, r.KV)
		}
	}
	return kvs
}

// consistent has the leader make sure that it is still the leader.
func consistent(ctx context.Context) *api.QueryOptions {
	return (&api.QueryOptions{RequireConsistent: true}).WithContext(ctx)
}

// reading is a question for what there is of a lock that several calls share.
type reading struct {
	done chan struct{}
	st   state // not to be changed
	err  error
	next *reading // for those who came after it was sent; guarded by Backend.mu
}

// readPatience bounds a question that is shared: callers have contexts of their
// own.
const readPatience = 10 * time.Second

// readShared is read for many callers at the same time: those that come while a
// question is under way share the next one.
func (b *Backend) readShared(ctx context.Context, key string) (state, error) {
	b.mu.Lock()
	r := b.readings[key]
	switch {
	case b.ended:
		b.mu.Unlock()
		return state{}, driver.ErrClosed
	case r == nil:
		r = &reading{done: make(chan struct{})}
		b.readings[key] = r
		b.task(func() { b.readAll(key, r) })
	default:
		if r.next == nil {
			r.next = &reading{done: make(chan struct{})}
		}
		r = r.next
	}
	b.mu.Unlock()
	select {
	case <-r.done:
		return r.st, r.err
	case <-ctx.Done():
		return state{}, fmt.Errorf("consullock: no reply yet: %w", ctx.Err())
	}
}

// readAll asks for as long as there is somebody to share the next answer.
func (b *Backend) readAll(key string, r *reading) {
	for r != nil {
		ctx, cancel := context.WithTimeout(b.ctx, readPatience)
		r.st, r.err = b.read(ctx, key)
		cancel()
		close(r.done)
		b.mu.Lock()
		if r = r.next; r == nil {
			delete(b.readings, key)
		} else {
			b.readings[key] = r
		}
		b.mu.Unlock()
	}
}

// read reads what there is of a lock.
func (b *Backend) read(ctx context.Context, key string) (state, error) {
	base := lockBase(b.opts.Prefix, key)
	var kvs api.KVPairs
	var meta *api.QueryMeta
	err := b.call(ctx, func(ctx context.Context) (err error) {
		kvs, meta, err = b.client.KV().List(base, consistent(ctx))
		return err
	})
	if err != nil {
		return state{}, err
	}
	st, err := parseState(base, kvs)
	st.index = meta.LastIndex
	return st, err
}
