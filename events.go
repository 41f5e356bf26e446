package dlm

import (
	"context"
	"fmt"
	"sync"
)

// observe tells the observer of an event in the caller's own goroutine.
func (m *Manager) observe(e Event) {
	if m.cfg.Observer == nil {
		return
	}
	e.Backend = m.props.Name
	observe(m.cfg.Observer, e)
}

// report tells the observer of an event in the background, in order. It is
// for those who hold the mutex or must not be held up.
func (m *Manager) report(e Event) {
	if m.cfg.Observer == nil {
		return
	}
	e.Backend = m.props.Name
	m.events.put(m.cfg.Observer, e)
}

// eventQueue hands events to an observer one after another. Its goroutine
// lives only while there are some.
type eventQueue struct {
	mu      sync.Mutex
	queue   []Event
	running chan struct{} // closed when the goroutine ends, nil without one
}

func (q *eventQueue) put(o Observer, e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queue = append(q.queue, e)
	if q.running == nil {
		q.running = make(chan struct{})
		go q.run(o)
	}
}

func (q *eventQueue) run(o Observer) {
	for {
		q.mu.Lock()
		batch := q.queue
		q.queue = nil
		if len(batch) == 0 {
			close(q.running)
			q.running = nil
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		for _, e := range batch {
			observe(o, e)
		}
	}
}

// drain waits until the observer has been told of everything.
func (q *eventQueue) drain(ctx context.Context) error {
	q.mu.Lock()
	running := q.running
	q.mu.Unlock()
	if running == nil {
		return nil
	}
	select {
	case <-running:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("dlm: the observer is still busy: %w", ctx.Err())
	}
}
