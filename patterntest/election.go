package patterntest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
)

var electionCases = []testCase{
	{"OneLeaderAfterAnother", leadInTurn},
	{"WorkStopsFirst", leadAfterWork},
	{"LossEndsTerm", leadAfterLoss},
	{"DeadLeaderIsReplaced", leadAfterDeath},
}

func elections(t *testing.T, cfg *Config) { runCases(t, cfg, electionCases) }

// electionKey is what nodes campaign for.
const electionKey = "leader"

// poll compares the terms of all nodes of a case.
type poll struct {
	s *stage
	// forced says that a leader is removed by force, and so may learn of it later
	// than the next.
	forced bool

	mu      sync.Mutex
	last    int64           // term
	leading context.Context // of that term
}

// node is one node of an election.
type node struct {
	*dlm.LeaderElection
	poll    *poll
	client  *client
	index   int
	elected chan won   // the terms that it won
	lost    chan int64 // the terms that OnLost was called for
	// hold, if it is not nil, is how long the work goes on after its context has
	// ended.
	hold chan struct{}
}

// won is a term of a node.
type won struct {
	node *node
	term int64
	ctx  context.Context
}

// node starts a node. Those with the same channel share it.
func (p *poll) node(index int, ttl time.Duration, elected chan won, hold chan struct{}) *node {
	p.s.Helper()
	n := &node{poll: p, client: p.s.open(nil), index: index, elected: elected, lost: make(chan int64, 100), hold: hold}
	e, err := dlm.NewLeaderElection(n.client.Manager, electionKey, fmt.Sprint("node-", index), &dlm.ElectionConfig{TTL: ttl})
	if err != nil {
		p.s.Fatal(err)
	}
	n.LeaderElection = e
	if err := e.Start(p.s.ctx, &dlm.ElectionCallbacks{OnElected: n.lead, OnLost: n.lose}); err != nil {
		p.s.Fatal(err)
	}
	p.s.Cleanup(func() {
		if err := e.Stop(context.Background()); err != nil {
			p.s.Errorf("node %d: %v", index, err)
		}
	})
	return n
}

func (n *node) lead(ctx context.Context, term int64) {
	p := n.poll
	p.mu.Lock()
	if term <= p.last {
		p.s.Errorf("term %d comes after %d", term, p.last)
	}
	if !p.forced && p.leading != nil && p.leading.Err() == nil && ctx.Err() == nil {
		p.s.Errorf("term %d begins while another leads", term)
	}
	p.last, p.leading = term, ctx
	p.mu.Unlock()
	n.elected <- won{n, term, ctx}
	<-ctx.Done()
	if n.IsLeader() || n.Term() != 0 {
		p.s.Error("the context has ended, but the node still leads")
	}
	if n.hold != nil {
		select {
		case <-n.hold:
		case <-p.s.ctx.Done():
		}
	}
}

func (n *node) lose(term int64) {
	if n.IsLeader() {
		n.poll.s.Errorf("OnLost for term %d, but the node still leads", term)
	}
	n.lost <- term
}

// next returns what comes through a channel.
func next[T any](s *stage, what string, from <-chan T) T {
	s.Helper()
	select {
	case v := <-from:
		return v
	case <-s.ctx.Done():
		s.Fatalf("%s: still waiting", what)
		panic("unreachable")
	}
}

// leadInTurn checks that one of many nodes leads, that observers see which, and
// that those who step down are followed at once by the next in the queue and
// queue up behind the others.
func leadInTurn(s *stage) {
	const n = 5
	p := &poll{s: s}
	elected := make(chan won, 100)
	observer := s.open(nil)
	o, err := dlm.NewLeaderElection(observer.Manager, electionKey, "observer", nil)
	if err != nil {
		s.Fatal(err)
	}
	fair := observer.Properties().FairQueue
	var leader won
	for i := range n {
		nd := p.node(i, ttl, elected, nil)
		if i == 0 {
			leader = next(s, "the first election", elected)
		} else {
			next(s, "a place in the queue", nd.client.waits)
		}
	}
	for i := range n + 1 {
		info, err := o.Leader(s.ctx)
		switch {
		case errors.Is(err, errors.ErrUnsupported): // the store cannot be read
		case err != nil:
			s.Fatal(err)
		case info != dlm.LeaderInfo{NodeID: leader.node.NodeID(), Term: leader.term}:
			s.Errorf("observed %+v, want node %d with term %d", info, leader.node.index, leader.term)
		}
		if fair && leader.node.index != i%n {
			s.Errorf("node %d leads, want node %d", leader.node.index, i%n)
		}
		before := leader.node
		began := time.Now()
		if err := before.StepDown(s.ctx); err != nil {
			s.Fatal(err)
		}
		if leader.ctx.Err() == nil {
			s.Error("stepped down, but its context goes on")
		}
		was := leader.term
		leader = next(s, "the next leader", elected)
		s.Logf("handed over in %v", time.Since(began))
		if term := next(s, "OnLost", before.lost); term != was {
			s.Errorf("OnLost for term %d, want %d", term, was)
		}
		if fair {
			next(s, "a place behind the others", before.client.waits)
		}
	}
}

// leadAfterWork checks that the leadership is given up when the work has stopped,
// and not before, by StepDown and by Stop.
func leadAfterWork(s *stage) {
	p := &poll{s: s}
	other := s.open(nil)
	for _, how := range []string{"StepDown", "Stop"} {
		elected, hold := make(chan won, 100), make(chan struct{})
		letGo := sync.OnceFunc(func() { close(hold) })
		defer letGo()
		a := p.node(0, ttl, elected, hold)
		leader := next(s, "an election", elected)
		b := p.node(1, ttl, elected, nil)
		next(s, "a place in the queue", b.client.waits)

		ended := make(chan error, 1)
		s.workers.Go(func() {
			if how == "Stop" {
				ended <- a.Stop(s.ctx)
			} else {
				ended <- a.StepDown(s.ctx)
			}
		})
		s.over("the end of the context", leader.ctx.Done())
		if l, err := other.TryLock(s.ctx, electionKey, ttl); !errors.Is(err, dlm.ErrHeld) {
			s.Fatalf("%s: while the work goes on: %v, %v", how, l, err)
		}
		select {
		case <-elected:
			s.Fatalf("%s: another leads while the work goes on", how)
		case err := <-ended:
			s.Fatalf("%s does not wait for the work: %v", how, err)
		case <-time.After(100 * time.Millisecond): // in which a fault shows
		}
		letGo()
		if err := next(s, how, ended); err != nil {
			s.Error(err)
		}
		if leader := next(s, "the next leader", elected); leader.node != b && other.Properties().FairQueue {
			s.Error("the node that gave up leads again")
		}
		for _, n := range []*node{a, b} {
			if err := n.Stop(s.ctx); err != nil {
				s.Error(err)
			}
		}
	}
}

// leadAfterLoss checks that a leader whose lock was removed is told once, and that
// the next one leads.
func leadAfterLoss(s *stage) {
	const ttl = 6 * time.Second // it may learn of it at its next renewal only
	p := &poll{s: s, forced: true}
	elected := make(chan won, 100)
	a := p.node(0, ttl, elected, nil)
	leader := next(s, "the first election", elected)
	b := p.node(1, ttl, elected, nil)
	next(s, "a place in the queue", b.client.waits)
	if _, err := b.client.ForceRelease(s.ctx, electionKey, leader.term); errors.Is(err, errors.ErrUnsupported) {
		return
	} else if err != nil {
		s.Fatal(err)
	}
	s.over("the end of the context", leader.ctx.Done())
	if cause := context.Cause(leader.ctx); !errors.Is(cause, dlm.ErrLost) {
		s.Errorf("the cause is %v, want a loss", cause)
	}
	if term := next(s, "OnLost", a.lost); term != leader.term {
		s.Errorf("OnLost for term %d, want %d", term, leader.term)
	}
	next(s, "the next leader", elected)
	if err := a.Stop(s.ctx); err != nil {
		s.Error(err)
	}
	for {
		select {
		case term := <-a.lost:
			if term == leader.term {
				s.Error("OnLost twice for one term")
			}
			continue
		default:
		}
		break
	}
}

// leadAfterDeath checks that a leader is replaced that is not heard of any more.
func leadAfterDeath(s *stage) {
	dead := s.open(&dlm.LockConfig{AutoRenew: dlm.Off, Label: "dead"})
	if !s.lapses(dead) {
		return
	}
	l, err := dead.TryLock(s.ctx, electionKey, lapse)
	if err != nil {
		s.Fatal(err)
	}
	elected := make(chan won, 100)
	(&poll{s: s}).node(0, ttl, elected, nil)
	if leader := next(s, "the next leader", elected); leader.term <= l.Token || l.Err() == nil {
		s.Errorf("term %d after %d, whose holder thinks: %v", leader.term, l.Token, l.Err())
	}
}
