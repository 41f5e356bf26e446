package redislock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// wakePatience is how long a wake-up waits for those of other nodes: a
	// waiter that asks before they are free would be refused by them.
	wakePatience = 20 * time.Millisecond
	// lossPatience is for how long the nodes may take to tell of a loss, which
	// is believed only when a majority does.
	lossPatience = time.Second
	// echoes is for how long the same wake-up from other nodes may be the one
	// that was passed on already. As it may also be another one, it is passed on
	// when this time is over: a waiter that has got the lock since does not mind.
	echoes = 100 * time.Millisecond
	// resubscribe is the pause before a node is subscribed to again. It doubles
	// up to maxResubscribe.
	resubscribe    = 50 * time.Millisecond
	maxResubscribe = 2 * time.Second
)

// Listen implements [driver.Notifier]. It subscribes to all nodes and stands
// while a majority of the subscriptions does.
func (q *Quorum) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if q.ended.Load() {
		return driver.ErrClosed
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	e := &ear{q: q, handle: handle, broken: cancel, up: make([]bool, len(q.nodes)), heard: make([]bool, len(q.nodes)), votes: make(map[news]*votes)}
	var wg sync.WaitGroup
	for _, n := range q.nodes {
		wg.Go(func() { e.listenTo(ctx, n, manager) })
	}
	wg.Wait()
	e.close()
	if q.ended.Load() {
		return driver.ErrClosed
	}
	return context.Cause(ctx)
}

// ear puts together what the nodes tell.
type ear struct {
	q      *Quorum
	handle func(driver.Event)
	broken context.CancelCauseFunc

	mu     sync.Mutex // also keeps calls of handle apart
	up     []bool
	heard  []bool // was up before
	stood  bool   // a majority was up
	closed bool
	votes  map[news]*votes
}

// news is what several nodes may tell of.
type news struct {
	kind  driver.EventKind
	owner string
}

// votes are the nodes that have told of it.
type votes struct {
	from  map[int]struct{}
	timer *time.Timer
	told  bool // it was passed on
	again bool // and a node has told of it since
}

// listenTo subscribes to one node, again and again, until the context ends.
func (e *ear) listenTo(ctx context.Context, n *node, manager string) {
	for wait := resubscribe; ctx.Err() == nil && !e.q.ended.Load(); wait = min(2*wait, maxResubscribe) {
		err := listen(ctx, e.q.closed, n.client, e.q.opts.Prefix, manager, func(event driver.Event) {
			if event.Kind == driver.EventUp {
				wait = resubscribe
			}
			e.hear(n.index, event)
		})
		e.down(n.index, err)
		pause(ctx, wait/2+rand.N(wait))
	}
}

// hear takes news from a node.
func (e *ear) hear(from int, event driver.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return
	}
	if event.Kind == driver.EventUp {
		// What a node told while it was away may have been missed. That one comes
		// later than the first majority does not matter.
		again := e.heard[from]
		e.up[from], e.heard[from] = true, true
		if e.count() >= e.q.majority && (again || !e.stood) {
			e.stood = true
			e.handle(event)
		}
		return
	}
	what := news{event.Kind, event.Lease.Owner}
	v := e.votes[what]
	if v != nil && v.told {
		if _, again := v.from[from]; !again || event.Kind == driver.EventLost {
			v.from[from] = struct{}{}
			v.again = event.Kind == driver.EventWake
			return
		}
		v.timer.Stop()
		v = nil // this is another wake-up
	}
	if v == nil {
		v = &votes{from: make(map[int]struct{})}
		e.votes[what] = v
		patience := wakePatience
		if event.Kind == driver.EventLost {
			patience = lossPatience
		}
		v.timer = time.AfterFunc(patience, func() { e.timeUp(what, v, event) })
	}
	v.from[from] = struct{}{}
	if len(v.from) >= e.q.majority {
		e.tell(v, event)
	}
}

// timeUp passes a wake-up on though no majority has told of it, or though it may
// be an echo, and forgets what was passed on long ago or is not to be believed.
func (e *ear) timeUp(what news, v *votes, event driver.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.votes[what] != v || e.closed:
	case event.Kind == driver.EventWake && (!v.told || v.again):
		e.tell(v, event)
	default:
		delete(e.votes, what)
	}
}

// tell passes news on, and waits for the other nodes to tell the same. The mutex
// is held.
func (e *ear) tell(v *votes, event driver.Event) {
	v.told, v.again = true, false
	v.timer.Reset(echoes)
	e.handle(event)
}

// down notes that the subscription to a node has ended. If too few are left, it
// ends all.
func (e *ear) down(from int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.up[from] = false
	if e.stood && e.count() < e.q.majority {
		if err == nil {
			err = errors.New("subscription ended")
		}
		e.broken(fmt.Errorf("redislock: node %d: %w", from, err))
	}
}

func (e *ear) count() int {
	n := 0
	for _, up := range e.up {
		if up {
			n++
		}
	}
	return n
}

// close ends what still waits.
func (e *ear) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	for _, v := range e.votes {
		v.timer.Stop()
	}
}
