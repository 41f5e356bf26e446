package redislock

import (
	"context"
	"sync/atomic"
	"time"
)

// round is one question to several nodes.
type round struct {
	answers chan answer // has room for all
	left    int
	timeout context.Context
}

// answer is what a node answered.
type answer struct {
	node  *node
	reply any
	err   error
}

// ask puts a question to nodes side by side. The caller's context does not end
// it, as what was granted must become known.
func (q *Quorum) ask(
	ctx context.Context, timeout time.Duration, nodes []*node, question func(context.Context, *node) (any, error),
) *round {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	r := &round{answers: make(chan answer, len(nodes)), left: len(nodes), timeout: ctx}
	var left atomic.Int64
	left.Store(int64(len(nodes)) + 1)
	done := func() {
		if left.Add(-1) == 0 {
			cancel()
		}
	}
	for _, n := range nodes {
		q.rounds.Add(1)
		go func() {
			defer q.rounds.Done()
			reply, err := question(ctx, n)
			r.answers <- answer{n, reply, err}
			done()
		}()
	}
	done()
	return r
}

// next waits for the next answer. It returns false when there are none left,
// when time is up, or when the context ends.
func (r *round) next(ctx context.Context) (answer, bool) {
	if r.left == 0 {
		return answer{}, false
	}
	select {
	case a := <-r.answers:
		r.left--
		return a, true
	default:
	}
	select {
	case a := <-r.answers:
		r.left--
		return a, true
	case <-r.timeout.Done():
		// The last answers and the end of the time can come together.
		select {
		case a := <-r.answers:
			r.left--
			return a, true
		default:
		}
	case <-ctx.Done():
	}
	return answer{}, false
}

// rest has the answers that come late dealt with.
func (q *Quorum) rest(r *round, deal func(answer), end func()) {
	if r.left == 0 {
		return
	}
	left := r.left
	r.left = 0
	q.rounds.Go(func() {
		for range left {
			deal(<-r.answers)
		}
		if end != nil {
			end()
		}
	})
}

// run makes one script call on a node that is ready.
func (n *node) run(ctx context.Context, c call) (any, error) {
	if err := n.setup.state(); err != nil {
		return nil, err
	}
	c.ctx = ctx
	reply, _, err := n.calls.do(&c)
	return reply, err
}
