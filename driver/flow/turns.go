package flow

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// turnLasts is when a turn is over for the others though it goes on: it may have
// been sent to a server that hangs.
const turnLasts = time.Second

// Turns lets some callers at a time do something about a key. The others follow in
// the order in which they came. It is safe for concurrent use; [NewTurns] makes one.
type Turns struct {
	most int

	mu   sync.Mutex
	keys map[string]*turn
}

// turn is about one key that somebody is busy with.
type turn struct {
	busy    int
	waiting []chan struct{} // each is closed when its turn has come
}

// NewTurns returns Turns for so many callers at a time.
func NewTurns(most int) *Turns { return &Turns{most: most, keys: make(map[string]*turn)} }

// Take waits for a turn at a key, which leave ends. If the context ends before, the
// error matches that of the context and [driver.ErrNotApplied].
func (t *Turns) Take(ctx context.Context, key string) (leave func(), err error) {
	t.mu.Lock()
	k := t.keys[key]
	if k == nil {
		k = &turn{}
		t.keys[key] = k
	}
	if k.busy < t.most {
		k.busy++
		t.mu.Unlock()
		return t.taken(key, k), nil
	}
	mine := make(chan struct{})
	k.waiting = append(k.waiting, mine)
	t.mu.Unlock()
	select {
	case <-mine:
		return t.taken(key, k), nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(k.waiting, mine); i >= 0 {
		k.waiting = slices.Delete(k.waiting, i, i+1)
	} else {
		t.next(key, k)
	}
	return nil, fmt.Errorf("%w: other requests for the key are not answered: %w", driver.ErrNotApplied, ctx.Err())
}

func (t *Turns) taken(key string, k *turn) (leave func()) {
	over := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.next(key, k)
	}
	timer := time.AfterFunc(turnLasts, over)
	return func() {
		if timer.Stop() {
			over()
		}
	}
}

// next passes a turn on. The mutex is held.
func (t *Turns) next(key string, k *turn) {
	if len(k.waiting) > 0 {
		close(k.waiting[0])
		k.waiting = slices.Delete(k.waiting, 0, 1)
		return
	}
	if k.busy--; k.busy == 0 {
		delete(t.keys, key)
	}
}
