package redislock

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// maxVoting and minVoting bound how many acquisitions of a quorum vote at the
	// same time.
	maxVoting = 64
	minVoting = 4
)

// throttle lets acquisitions vote a number at a time. Without it, a crowd that
// is more than the nodes or this process can cope with within a node's time-out
// has nobody served: all time out, give back what they were granted, and ask
// again. The number follows the rule of TCP: it is halved when answers are late,
// and grows by one with each so many votes that are not.
type throttle struct {
	mu    sync.Mutex
	limit int
	busy  int
	good  int          // votes in time since the limit has changed
	last  time.Time    // when a vote was last in time
	cut   time.Time    // when the limit was last halved
	queue []chan error // of those who wait for their turn
}

// enter waits for the caller's turn.
func (t *throttle) enter(ctx context.Context) error {
	t.mu.Lock()
	if t.limit == 0 {
		t.limit = maxVoting
	}
	if t.busy < t.limit && len(t.queue) == 0 {
		t.busy++
		t.mu.Unlock()
		return nil
	}
	turn := make(chan error, 1)
	t.queue = append(t.queue, turn)
	t.mu.Unlock()
	select {
	case err := <-turn:
		return err
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.queue, turn); i >= 0 {
		t.queue = slices.Delete(t.queue, i, i+1)
	} else if err := <-turn; err == nil {
		t.busy--
		t.next()
	}
	return fmt.Errorf("%w: redislock: too many acquisitions at the same time: %w", driver.ErrNotApplied, ctx.Err())
}

// leave ends a vote, which answers came late for, or too few. If no vote has been
// in time for a while, the nodes are taken to be out of reach, and those who wait
// for their turn are told so.
func (t *throttle) leave(late bool, timeout time.Duration) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.busy--
	switch {
	case !late:
		t.last = now
		if t.good++; t.good >= t.limit && t.limit < maxVoting {
			t.limit, t.good = t.limit+1, 0
		}
	case now.Sub(t.cut) > timeout:
		t.limit, t.good, t.cut = max(t.limit/2, minVoting), 0, now
	}
	if late && now.Sub(t.last) > 2*timeout {
		for _, turn := range t.queue {
			turn <- fmt.Errorf("%w: redislock: a majority of the nodes does not answer in time", driver.ErrNotApplied)
		}
		t.queue = nil
	}
	t.next()
}

// next lets those vote whose turn it is. The mutex is held.
func (t *throttle) next() {
	for t.busy < t.limit && len(t.queue) > 0 {
		t.busy++
		t.queue[0] <- nil
		t.queue = t.queue[1:]
	}
}
