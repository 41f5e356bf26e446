package pglock

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/go-dlm/dlm/driver"
)

// turns lets the acquisitions of one backend ask for a key one after another, in
// the order in which they come. All of them would lock the key's row, and the
// server would have the holder's release wait among them: each that waits there for
// a second has the server look for deadlocks, which takes the longer the more there
// are. Releases and renewals do not wait for a turn.
type turns struct {
	mu sync.Mutex
	// waiting are those who wait for their turn on a key; a key of which somebody
	// has the turn is there.
	waiting map[string][]chan struct{}
}

// enter waits for the turn on a key. Unless it fails, leave must follow.
func (t *turns) enter(ctx context.Context, key string) error {
	t.mu.Lock()
	others, taken := t.waiting[key]
	if !taken {
		if t.waiting == nil {
			t.waiting = make(map[string][]chan struct{})
		}
		t.waiting[key] = nil
		t.mu.Unlock()
		return nil
	}
	mine := make(chan struct{})
	t.waiting[key] = append(others, mine)
	t.mu.Unlock()
	select {
	case <-mine:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	i := slices.Index(t.waiting[key], mine)
	if i >= 0 {
		t.waiting[key] = slices.Delete(t.waiting[key], i, i+1)
	}
	t.mu.Unlock()
	if i < 0 { // it came all the same
		t.leave(key)
	}
	return fmt.Errorf("%w: pglock: other requests for the key are not answered: %w", driver.ErrNotApplied, ctx.Err())
}

// leave gives the turn on a key to the next one.
func (t *turns) leave(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	others := t.waiting[key]
	if len(others) == 0 {
		delete(t.waiting, key)
		return
	}
	close(others[0])
	t.waiting[key] = others[1:]
}
