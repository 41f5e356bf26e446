package redislock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

// setupPause is how long a node is left alone that could not be looked at.
const setupPause = time.Second

// nodeSetup is what is known of a node: nothing asks it before it was looked at.
type nodeSetup struct {
	mu    sync.Mutex
	done  bool
	err   error // why not
	tried time.Time
	busy  bool
}

// state returns nil if the node can be asked.
func (s *nodeSetup) state() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done {
		return nil
	}
	if s.err == nil {
		return fmt.Errorf("%w: redislock: not looked at yet", driver.ErrNotApplied)
	}
	return s.err
}

// due says that somebody should look at the node now, and that it is the caller.
func (s *nodeSetup) due() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done || s.busy || !s.tried.IsZero() && time.Since(s.tried) < setupPause {
		return false
	}
	s.busy = true
	return true
}

func (s *nodeSetup) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy, s.tried, s.err, s.done = false, time.Now(), err, err == nil
}

// ready looks at the nodes that were not looked at yet. It waits for a majority
// the first time, and for nobody later on.
func (q *Quorum) ready(ctx context.Context) error {
	if q.settled.Load() {
		return nil
	}
	if q.opened.Load() {
		return q.open(ctx)
	}
	// Whoever asks nodes that are to begin before they have begun makes them wait
	// as if they had lost their data. So all wait for the first look, and it goes
	// on when the one who started it gives up.
	late := func() error {
		return fmt.Errorf("%w: redislock: looking at the nodes: %w", driver.ErrNotApplied, ctx.Err())
	}
	select {
	case q.opening <- struct{}{}:
	case <-ctx.Done():
		return late()
	}
	done := make(chan error, 1)
	q.rounds.start(func() {
		err := q.open(context.WithoutCancel(ctx))
		if slices.ContainsFunc(q.nodes, func(n *node) bool { return n.setup.state() == nil }) {
			q.opened.Store(true)
		}
		<-q.opening
		done <- err
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return late()
	}
}

// open is ready without regard to others who do the same.
func (q *Quorum) open(ctx context.Context) error {
	var due []*node
	done := 0
	for _, n := range q.nodes {
		if n.setup.due() {
			due = append(due, n)
		}
		if n.setup.state() == nil {
			done++
		}
	}
	if len(due) == 0 {
		if done == len(q.nodes) {
			q.settled.Store(true)
		}
		return q.sameServer()
	}
	r := q.ask(ctx, setupTimeout, due, func(ctx context.Context, n *node) (any, error) {
		info, err := q.look(ctx, n)
		n.setup.end(err)
		return info, err
	})
	fresh := done == 0 && len(due) == len(q.nodes)
	if !fresh && done >= q.majority {
		return q.sameServer()
	}
	views := make(map[*node]nodeInfo)
	for {
		a, ok := r.next(ctx)
		if !ok {
			break
		}
		if info, ok := a.reply.(nodeInfo); ok && a.err == nil {
			views[a.node] = info
		}
	}
	if err := q.sameServer(); err != nil {
		return err
	}
	if fresh && len(views) == len(q.nodes) {
		return q.begin(ctx, views)
	}
	return nil
}

// setupTimeout bounds the first look at a node.
const setupTimeout = 5 * time.Second

// nodeInfo is what the first look at a node has shown.
type nodeInfo struct {
	runID  string
	marked bool // it has been used, and has its data
	begun  bool // it was known to be new
}

// look finds out whether a node can be used.
func (q *Quorum) look(ctx context.Context, n *node) (nodeInfo, error) {
	info, err := n.calls.info(ctx)
	if err != nil {
		return nodeInfo{}, err
	}
	if err := info.usable(); err != nil {
		return nodeInfo{}, err
	}
	// So that already the first crowd stands in the same order everywhere.
	if us, err := strconv.ParseInt(info["server_time_usec"], 10, 64); err == nil {
		q.clock.heard(us)
	}
	refused, err := probe(ctx, n.calls, q.opts.Prefix, probeTag, true)
	if err != nil {
		return nodeInfo{}, err
	}
	if len(refused) > 0 {
		return nodeInfo{}, refusedError(refused)
	}
	id := info["run_id"]
	if err := q.meet(n, id); err != nil {
		return nodeInfo{}, err
	}
	mark, err := q.mark(ctx, n)
	return nodeInfo{runID: id, marked: mark != "", begun: strings.HasPrefix(mark, "0 ")}, err
}

// meet notes the run id of a node's server, which no other may have.
func (q *Quorum) meet(n *node, id string) error {
	q.setupMu.Lock()
	defer q.setupMu.Unlock()
	if id == "" {
		return nil // the user may not ask for it
	}
	if other, ok := q.ids[id]; ok && other != n.index {
		q.twice = problem(ProblemSameServer, nil, "clients %d and %d lead to the server with run id %s",
			min(other, n.index), max(other, n.index), id)
		return q.twice
	}
	q.ids[id] = n.index
	return nil
}

// sameServer returns an error if two clients have turned out to lead to the same
// server.
func (q *Quorum) sameServer() error {
	q.setupMu.Lock()
	defer q.setupMu.Unlock()
	return q.twice
}

// mark reads since when a node has its data, and which run of it had it last:
// empty if it has none.
func (q *Quorum) mark(ctx context.Context, n *node) (string, error) {
	cmd := newCommand(ctx, "get", q.markKey())
	if err := n.calls.process(ctx, cmd); err != nil {
		if errors.Is(err, redis.Nil) {
			return "", nil
		}
		return "", classify(err)
	}
	return fmt.Sprint(cmd.Val()), nil
}

// begin has the nodes vote at once if all of them are without data: then they
// are new, and have nothing to remember. Otherwise those without data have lost
// it.
func (q *Quorum) begin(ctx context.Context, views map[*node]nodeInfo) error {
	for range beginTries {
		marked := 0
		for _, info := range views {
			if info.marked && !info.begun || info.runID == "" {
				return nil
			}
			if info.marked {
				marked++
			}
		}
		switch marked {
		case len(views):
			return nil
		case 0:
			r := q.ask(ctx, setupTimeout, q.nodes, func(ctx context.Context, n *node) (any, error) {
				return n.run(ctx, call{script: quorumBeginScript, keys: []string{q.markKey()}, args: []any{views[n].runID}})
			})
			for {
				if _, ok := r.next(ctx); !ok {
					return ctx.Err()
				}
			}
		}
		// Somebody else is about to do the same.
		pause(ctx, beginPause)
		r := q.ask(ctx, setupTimeout, q.nodes, func(ctx context.Context, n *node) (any, error) { return q.mark(ctx, n) })
		for {
			a, ok := r.next(ctx)
			if !ok {
				break
			}
			if mark, ok := a.reply.(string); ok && a.err == nil {
				views[a.node] = nodeInfo{runID: views[a.node].runID, marked: mark != "", begun: strings.HasPrefix(mark, "0 ")}
			}
		}
	}
	return nil
}

const (
	// beginTries is how often one looks whether somebody else has finished
	// beginning, and beginPause how long one waits in between.
	beginTries = 10
	beginPause = 20 * time.Millisecond
)
