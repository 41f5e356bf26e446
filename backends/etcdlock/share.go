package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

const (
	// maxUnderWay is how many requests of one kind are on their way before others
	// wait to go together. One that has taken as long as stalled is not counted any
	// more: what was sent to a member that hangs does not hold up the rest.
	maxUnderWay = 2
	stalled     = 20 * time.Millisecond
	// maxShared bounds the transactions that go together. A server allows 128
	// operations, those of nested transactions counted along their path; there are
	// two for the rights of each.
	maxShared = 50
	// crowd is for how long after that calls are expected to meet again.
	crowd = 2 * time.Millisecond
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
	ctx    context.Context // of the backend: no request goes on after it
	commit func(context.Context, condition) (*pb.TxnResponse, int64, error)
	tasks  sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	queue    []*call
	underWay []*request
	starting bool // a goroutine has been started that will take from the queue
	timer    *time.Timer
	crowded  time.Time // when calls last went together
}

// request is one that is on its way.
type request struct{ since time.Time }

// call is a transaction that shares a request, or waits to.
type call struct {
	ctx  context.Context
	key  string // of the lock it is about
	t    condition
	with *company // those it has been taken from the queue with, if there are any
	resp *pb.TxnResponse
	rev  int64
	err  error
	done chan struct{}
}

// company is calls that go together. Their request ends when the last of them
// has been given up. Its context takes no values from the callers': what is in
// one, such as a token, need not be good for the others.
type company struct {
	ctx    context.Context
	cancel context.CancelFunc
	left   int // how many have not been given up; guarded by sharer.mu
}

// do carries out a transaction about a lock. It returns the answer with the
// revision at which it was given. With hurry it never waits to be sent.
func (s *sharer) do(ctx context.Context, key string, hurry bool, t condition) (*pb.TxnResponse, int64, error) {
	now := time.Now()
	s.mu.Lock()
	s.prune(now)
	switch {
	case hurry || s.waits(key):
		s.mu.Unlock()
		return s.commit(ctx, t)
	case len(s.queue) == 0 && len(s.underWay) < maxUnderWay && !s.starting && now.Sub(s.crowded) > crowd:
		r := s.begin(now)
		s.mu.Unlock()
		defer s.end(r)
		return s.commit(ctx, t)
	case s.closed:
		s.mu.Unlock()
		return nil, 0, driver.ErrClosed
	}
	c := &call{ctx: ctx, key: key, t: t, done: make(chan struct{})}
	s.queue = append(s.queue, c)
	s.start(now)
	s.mu.Unlock()
	select {
	case <-c.done:
	case <-ctx.Done():
		if err := s.giveUp(c); err != nil {
			return nil, 0, err
		}
	}
	return c.resp, c.rev, c.err
}

// waits says whether a call about this lock is in the queue. Another would have
// to wait for the request after the next, so it is not put there. The mutex is
// held.
func (s *sharer) waits(key string) bool {
	return slices.ContainsFunc(s.queue, func(c *call) bool { return c.key == key })
}

// prune forgets requests that do not get on. The mutex is held.
func (s *sharer) prune(now time.Time) {
	s.underWay = slices.DeleteFunc(s.underWay, func(r *request) bool { return now.Sub(r.since) >= stalled })
}

// begin notes a request. The mutex is held.
func (s *sharer) begin(now time.Time) *request {
	r := &request{since: now}
	s.underWay = append(s.underWay, r)
	return r
}

func (s *sharer) end(r *request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.underWay = slices.DeleteFunc(s.underWay, func(other *request) bool { return other == r })
	s.start(time.Now())
}

// start makes sure that what is in the queue is sent. The mutex is held.
func (s *sharer) start(now time.Time) {
	if len(s.queue) == 0 || s.starting || s.closed {
		return
	}
	s.prune(now)
	if len(s.underWay) < maxUnderWay {
		s.starting = true
		r := s.begin(now)
		s.tasks.Go(func() { s.carry(r) })
		return
	}
	if s.timer == nil {
		s.timer = time.AfterFunc(s.underWay[0].since.Add(stalled).Sub(now), func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.timer = nil
			s.start(time.Now())
		})
	}
}

// carry sends what is in the queue.
func (s *sharer) carry(r *request) {
	// Let those who were answered a moment ago make their next calls.
	runtime.Gosched()
	s.mu.Lock()
	now := time.Now()
	batch := s.take()
	s.starting = false
	r.since = now
	if len(batch) > 1 {
		s.crowded = now
		with := &company{left: len(batch)}
		with.ctx, with.cancel = context.WithCancel(s.ctx)
		defer with.cancel()
		for _, c := range batch {
			c.with = with
		}
	}
	s.start(now)
	s.mu.Unlock()
	defer s.end(r)
	switch len(batch) {
	case 0:
	case 1:
		s.alone(batch[0])
	default:
		s.together(batch)
	}
}

// take takes calls from the queue whose callers still wait. The mutex is held.
func (s *sharer) take() []*call {
	var batch []*call
	n := 0
	for ; n < len(s.queue) && len(batch) < maxShared; n++ {
		c := s.queue[n]
		if c.ctx.Err() != nil {
			c.finish(nil, 0, notSent(c.ctx))
			continue
		}
		batch = append(batch, c)
	}
	s.queue = slices.Delete(s.queue, 0, n)
	return batch
}

func (c *call) finish(resp *pb.TxnResponse, rev int64, err error) {
	c.resp, c.rev, c.err = resp, rev, err
	close(c.done)
}

func notSent(ctx context.Context) error {
	return fmt.Errorf("%w: etcdlock: %w", driver.ErrNotApplied, ctx.Err())
}

// giveUp takes back a call whose context has ended. It returns nil if the
// answer has come all the same.
func (s *sharer) giveUp(c *call) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-c.done:
		return nil
	default:
	}
	if i := slices.Index(s.queue, c); i >= 0 {
		s.queue = slices.Delete(s.queue, i, i+1)
		return notSent(c.ctx)
	}
	if c.with != nil {
		if c.with.left--; c.with.left == 0 {
			c.with.cancel()
		}
	}
	return c.ctx.Err() // it may still be carried out
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
func (s *sharer) together(batch []*call) {
	all := condition{then: make([]clientv3.Op, len(batch))}
	for i, c := range batch {
		all.then[i] = clientv3.OpTxn(c.t.conds, c.t.then, c.t.otherwise)
		// Servers of 3.4 look for rights, and for what takes space, in the outer
		// transaction only. This branch is never taken, but looked at.
		all.otherwise = append(all.otherwise, c.t.rights...)
	}
	resp, rev, err := s.commit(batch[0].with.ctx, all)
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
	s.mu.Lock()
	s.closed = true
	for _, c := range s.queue {
		c.finish(nil, 0, driver.ErrClosed)
	}
	s.queue = nil
	if s.timer != nil {
		s.timer.Stop()
	}
	s.mu.Unlock()
	s.tasks.Wait()
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
