package redislock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// tasks counts goroutines. Unlike a [sync.WaitGroup] it may be added to while
// somebody waits.
type tasks struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when there are none, or nil
}

// start runs f in a goroutine.
func (t *tasks) start(f func()) {
	t.mu.Lock()
	t.n++
	t.mu.Unlock()
	go func() {
		defer t.end()
		f()
	}()
}

func (t *tasks) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n--; t.n == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// wait waits for a moment at which there are none.
func (t *tasks) wait() {
	t.mu.Lock()
	if t.n == 0 {
		t.mu.Unlock()
		return
	}
	if t.idle == nil {
		t.idle = make(chan struct{})
	}
	idle := t.idle
	t.mu.Unlock()
	<-idle
}

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
		q.rounds.start(func() {
			reply, err := question(ctx, n)
			r.answers <- answer{n, reply, err}
			done()
		})
	}
	done()
	return r
}

// askFor puts a question to nodes that may leave something there for the owner
// of an acquisition. It must not arrive behind the owner's withdrawal: it is not
// sent when over says so, and undone if the withdrawal may not have waited for it.
func (q *Quorum) askFor(
	ctx context.Context, timeout time.Duration, nodes []*node, req *driver.Request, attempt int64,
	question func(ctx context.Context, n *node, over func() bool) (any, error),
) *round {
	s := q.watchAll(req.Owner, len(nodes))
	over := func() bool { return q.left(s) }
	start := time.Now()
	return q.ask(ctx, timeout, nodes, func(ctx context.Context, n *node) (any, error) {
		defer q.unwatch(req.Owner, s)
		reply, err := question(ctx, n, over)
		if over() && (err != nil && !errors.Is(err, driver.ErrNotApplied) || time.Since(start) > timeout/2) {
			q.undo(s, n)
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			_, _ = q.settleOn(ctx, n, req, attempt, 0, nil)
		}
		return reply, err
	})
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
	q.rounds.start(func() {
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
