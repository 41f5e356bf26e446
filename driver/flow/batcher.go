// Package flow is for backends whose store suffers from calls that are made at the
// same time. A [Batcher] has those about many keys share requests; [Turns] has those
// about one key wait for each other.
package flow

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// stalled is when a request is not counted any more among those that are on
	// their way: what was sent to a server that hangs does not hold up the rest.
	stalled = 20 * time.Millisecond
	// crowd is for how long calls are expected to meet again.
	crowd = 2 * time.Millisecond
)

// Batcher decides which calls of one kind go to the store together, where a request
// of many calls costs little more than one of one. A lone call is sent at once;
// calls that are made while others are on their way wait for those, and then go in
// one request. It is safe for concurrent use; [NewBatcher] makes one. What a call is, how it is sent and what becomes of it are the
// backend's; all that a Batcher knows is which key a call is about.
type Batcher[C comparable] struct {
	most, underWayMost int
	send               func(take func() []C)
	tasks              sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	queue    []queued[C]
	keys     map[string]struct{} // of the calls in the queue
	underWay []*request
	starting bool // a goroutine has been started that will take from the queue
	timer    *time.Timer
	crowded  time.Time // when calls last went together
}

// queued is a call that waits to be sent.
type queued[C comparable] struct {
	key  string
	call C
}

// request is one that is on its way.
type request struct{ since time.Time }

// NewBatcher returns a Batcher that has send make each request of calls that have
// met, in a goroutine of its own. Send gets ready, which it must do soon, as
// all other calls wait for it; calls take once, which returns up to most calls of
// different keys, or none if all were withdrawn meanwhile; and returns when the
// request is over. It must not panic. Calls wait to go together when underWay
// requests are on their way.
func NewBatcher[C comparable](most, underWay int, send func(take func() []C)) *Batcher[C] {
	return &Batcher[C]{most: most, underWayMost: underWay, send: send, keys: make(map[string]struct{})}
}

// Enter begins a call about a key. If it returns a function, the caller is to send
// the call alone, at once, and to call the function when that is over. Otherwise
// the call will be among those that are taken, unless [Batcher.Withdraw] or
// [Batcher.Close] return it before. The error is [driver.ErrClosed] or nil.
func (b *Batcher[C]) Enter(key string, call C) (end func(), err error) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, driver.ErrClosed
	}
	b.prune(now)
	if _, waits := b.keys[key]; waits {
		// It would have to wait for the request after the next.
		return func() {}, nil
	}
	if len(b.queue) == 0 && len(b.underWay) < b.underWayMost && !b.starting && now.Sub(b.crowded) > crowd {
		r := b.begin(now)
		return func() { b.end(r) }, nil
	}
	b.queue = append(b.queue, queued[C]{key, call})
	b.keys[key] = struct{}{}
	b.start(now)
	return nil, nil
}

// Withdraw takes a call back. It returns false if the call is not in the queue any
// more: then it was sent, or is about to be.
func (b *Batcher[C]) Withdraw(call C) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.IndexFunc(b.queue, func(q queued[C]) bool { return q.call == call })
	if i < 0 {
		return false
	}
	delete(b.keys, b.queue[i].key)
	b.queue = slices.Delete(b.queue, i, i+1)
	return true
}

// prune forgets requests that do not get on. The mutex is held.
func (b *Batcher[C]) prune(now time.Time) {
	b.underWay = slices.DeleteFunc(b.underWay, func(r *request) bool { return now.Sub(r.since) >= stalled })
}

// begin notes a request. The mutex is held.
func (b *Batcher[C]) begin(now time.Time) *request {
	r := &request{since: now}
	b.underWay = append(b.underWay, r)
	return r
}

func (b *Batcher[C]) end(r *request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.underWay = slices.DeleteFunc(b.underWay, func(other *request) bool { return other == r })
	b.start(time.Now())
}

// start makes sure that what is in the queue is sent. The mutex is held.
func (b *Batcher[C]) start(now time.Time) {
	if len(b.queue) == 0 || b.starting || b.closed {
		return
	}
	b.prune(now)
	if len(b.underWay) < b.underWayMost {
		b.starting = true
		r := b.begin(now)
		b.tasks.Go(func() { b.carry(r) })
		return
	}
	if b.timer == nil {
		b.timer = time.AfterFunc(b.underWay[0].since.Add(stalled).Sub(now), func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.timer = nil
			b.start(time.Now())
		})
	}
}

// carry sends what is in the queue.
func (b *Batcher[C]) carry(r *request) {
	defer b.end(r)
	// Let those who were answered a moment ago make their next calls.
	runtime.Gosched()
	b.send(func() []C { return b.take(r) })
}

// take takes calls from the queue, for a request that is about to be sent.
func (b *Batcher[C]) take(r *request) []C {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	n := min(len(b.queue), b.most)
	batch := make([]C, n)
	for i, q := range b.queue[:n] {
		batch[i] = q.call
		delete(b.keys, q.key)
	}
	b.queue = slices.Delete(b.queue, 0, n)
	b.starting = false
	r.since = now
	if n > 1 {
		b.crowded = now
	}
	b.start(now)
	return batch
}

// Close ends the Batcher, and returns the calls that were not taken. Requests that
// are on their way go on; [Batcher.Wait] waits for them.
func (b *Batcher[C]) Close() []C {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	left := make([]C, len(b.queue))
	for i, q := range b.queue {
		left[i] = q.call
	}
	b.queue = nil
	clear(b.keys)
	if b.timer != nil {
		b.timer.Stop()
	}
	return left
}

// Wait waits until nothing goes on any more, after Close.
func (b *Batcher[C]) Wait() { b.tasks.Wait() }
