package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/flow"
)

const (
	// maxUnderWay is how many requests of one kind are on their way before others
	// wait to go together.
	maxUnderWay = 2
	// maxShared bounds the transactions that go together. A server allows 128
	// operations, those of nested transactions counted along their path; there are
	// two for the rights of each.
	maxShared = 50
)

// sharer sends transactions. Those that are made while others are on their way
// go out together, nested in one, and so share an entry of the log; a lone one
// does not wait.
//
// All comparisons of such a request are made before anything of it is written.
// So there must not be two in it of which one changes what the other compares:
// each lock is in it once at most, and what rewrites a fence goes alone.
//
// What a server says about a shared request goes for each of its members as if
// it had been sent alone: it was carried out, or it was not, or nobody knows. A
// member that the caller has given up still carries the fence that it compares,
// so that a withdrawal need not know about it. Only a refusal that may be due to
// one member, before anything was done, has each of them sent alone.
type sharer struct {
	ctx     context.Context // of the backend: no request goes on after it
	commit  func(context.Context, condition) (*pb.TxnResponse, int64, error)
	batches *flow.Batcher[*call]
	mu      sync.Mutex
}

// call is a transaction that shares a request, or waits to.
type call struct {
	ctx  context.Context
	t    condition
	with *company // those that it is sent with, once it is; guarded by sharer.mu
	left bool     // given up before it was sent; guarded by sharer.mu
	resp *pb.TxnResponse
	rev  int64
	err  error
	done chan struct{}
}

// company is calls that go together. Their request ends when the last of them
// has been given up.
type company struct {
	cancel context.CancelFunc
	left   int // how many have not been given up; guarded by sharer.mu
}

// init makes the sharer ready.
func (s *sharer) init(ctx context.Context, commit func(context.Context, condition) (*pb.TxnResponse, int64, error)) {
	s.ctx, s.commit = ctx, commit
	s.batches = flow.NewBatcher(maxShared, maxUnderWay, s.send)
}

// do carries out a transaction about a lock. It returns the answer with the
// revision at which it was given. With hurry it never waits to be sent.
func (s *sharer) do(ctx context.Context, key string, hurry bool, t condition) (*pb.TxnResponse, int64, error) {
	if hurry {
		return s.commit(ctx, t)
	}
	c := &call{ctx: ctx, t: t, done: make(chan struct{})}
	end, err := s.batches.Enter(key, c)
	if err != nil {
		return nil, 0, err
	}
	if end != nil {
		defer end()
		return s.commit(ctx, t)
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		if err := s.giveUp(c); err != nil {
			return nil, 0, err
		}
	}
	return c.resp, c.rev, c.err
}

// giveUp takes back a call whose context has ended. It returns nil if the
// answer has come all the same.
func (s *sharer) giveUp(c *call) error {
	if s.batches.Withdraw(c) {
		return notSent(c.ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-c.done:
		return nil
	default:
	}
	if c.with == nil {
		c.left = true
		return notSent(c.ctx)
	}
	if c.with.left--; c.with.left == 0 {
		c.with.cancel()
	}
	return c.ctx.Err() // it may still be carried out
}

func (c *call) finish(resp *pb.TxnResponse, rev int64, err error) {
	c.resp, c.rev, c.err = resp, rev, err
	close(c.done)
}

func notSent(ctx context.Context) error {
	return fmt.Errorf("%w: etcdlock: %w", driver.ErrNotApplied, ctx.Err())
}

// send sends what is in the queue.
func (s *sharer) send(take func() []*call) {
	batch := take()
	// The context takes no values from those of the callers: what is in one, such
	// as a token, need not be good for the others.
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.mu.Lock()
	batch = slices.DeleteFunc(batch, func(c *call) bool {
		over := c.ctx.Err() != nil
		if over && !c.left {
			c.finish(nil, 0, notSent(c.ctx))
		}
		return over || c.left
	})
	with := &company{cancel: cancel, left: len(batch)}
	for _, c := range batch {
		c.with = with
	}
	s.mu.Unlock()
	switch len(batch) {
	case 0:
	case 1:
		s.alone(batch[0])
	default:
		s.together(ctx, batch)
	}
}

// alone sends a call by itself.
func (s *sharer) alone(c *call) {
	if c.ctx.Err() != nil {
		c.finish(nil, 0, notSent(c.ctx))
		return
	}
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	c.finish(s.commit(ctx, c.t))
}

// together sends calls as one.
func (s *sharer) together(ctx context.Context, batch []*call) {
	all := condition{then: make([]clientv3.Op, len(batch))}
	for i, c := range batch {
		all.then[i] = clientv3.OpTxn(c.t.conds, c.t.then, c.t.otherwise)
		// Servers of 3.4 look for rights, and for what takes space, in the outer
		// transaction only. This branch is never taken, but looked at.
		all.otherwise = append(all.otherwise, c.t.rights...)
	}
	resp, rev, err := s.commit(ctx, all)
	if err != nil && ofOne(err) {
		var wg sync.WaitGroup
		for _, c := range batch {
			wg.Go(func() { s.alone(c) })
		}
		wg.Wait()
		return
	}
	if err == nil && !answers(resp, len(batch)) {
		err = errors.New("etcdlock: the answer is not to what was asked")
	}
	for i, c := range batch {
		if err != nil {
			c.finish(nil, 0, err)
			continue
		}
		c.finish(resp.Responses[i].GetResponseTxn(), rev, nil)
	}
}

// answers says whether a response holds the answers to n nested transactions.
func answers(resp *pb.TxnResponse, n int) bool {
	return len(resp.Responses) == n &&
		!slices.ContainsFunc(resp.Responses, func(r *pb.ResponseOp) bool { return r.GetResponseTxn() == nil })
}

// ofOne says whether a server has refused a request, before it did anything, for
// a reason that may lie in a part of it.
func ofOne(err error) bool {
	return gone(err) || says(err, rpctypes.ErrPermissionDenied) || says(err, rpctypes.ErrRequestTooLarge) ||
		says(err, rpctypes.ErrTooManyOps) || says(err, rpctypes.ErrDuplicateKey) ||
		strings.Contains(err.Error(), "trying to send message larger than max")
}

// close ends the sharer, after its context. Nothing goes on when it returns.
func (s *sharer) close() {
	for _, c := range s.batches.Close() {
		c.finish(nil, 0, driver.ErrClosed)
	}
	s.batches.Wait()
}

var errPanic = errors.New("the client panicked")

// guarded turns a panic of the client, or of what the user has hooked into it,
// into an error.
func guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("etcdlock: %w: %v", errPanic, p)
		}
	}()
	return f()
}
