package fence

import (
	"context"
	"errors"
	"sync"
)

// ErrFull says that a [Memory] guard has no room for one more resource. Nothing
// was written.
var ErrFull = errors.New("dlm: too many fenced resources")

// MemoryOptions are options of [NewMemory].
type MemoryOptions struct {
	// MaxResources is how many resources the guard knows at most. A further one
	// is refused with [ErrFull], as to forget another one would accept its stale
	// holders again. Defaults to no bound.
	MaxResources int
}

// Memory is a guard for what lives in this process. It is safe for concurrent
// use.
//
// It forgets everything with the process. That is right if the resource does so,
// too; if the resource lasts longer, or other processes write to it, then the
// check belongs where the data are. While the process lives, it never forgets a
// resource (about 200 bytes each, and the name) unless told to, see
// [Memory.Forget].
type Memory struct {
	most int

	mu        sync.Mutex
	resources map[string]*memoryResource
}

// memoryResource is a resource whose token was asked about.
type memoryResource struct {
	// turn holds a value while a function runs; a channel, since a mutex could
	// not be given up when a context ends.
	turn chan struct{}

	// The rest is guarded by Memory.mu.
	highest int64
	users   int // calls that wait or run
}

var _ Guard = (*Memory)(nil)

// NewMemory returns a guard that has seen nothing. Nil options mean the
// defaults. It returns an error that matches [dlm.ErrInvalid] if MaxResources is
// negative.
func NewMemory(opts *MemoryOptions) (*Memory, error) {
	g := &Memory{resources: make(map[string]*memoryResource)}
	if opts != nil {
		g.most = opts.MaxResources
	}
	if g.most < 0 {
		return nil, invalidf("MaxResources is %d, must not be negative", g.most)
	}
	return g, nil
}

// Do implements [Guard]. One function at a time runs for a resource, also for
// the same token. So a higher token waits for the function of a lower one that
// was accepted before: were it let in, the lower one's write could come last. A
// function that never returns therefore bars its resource; it should end with
// its context. A token that is known to be stale is refused without waiting.
//
// A function must not call Do for the same resource: that waits for itself until
// its context ends. If fn panics, its turn ends, and the panic goes on.
//
// The error can also match [ErrFull].
func (g *Memory) Do(ctx context.Context, resource string, token int64, fn func(ctx context.Context) error) error {
	if err := Validate(resource, token); err != nil {
		return err
	}
	switch {
	case ctx == nil:
		return invalidf("context is nil")
	case fn == nil:
		return invalidf("function is nil")
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	r, err := g.enter(resource, token)
	if err != nil {
		return err
	}
	defer g.leave(resource, r)
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-r.turn }()
	if ctx.Err() != nil { // both came at the same time
		return context.Cause(ctx)
	}
	if err := g.admit(resource, r, token); err != nil {
		return err
	}
	return fn(ctx)
}

// enter finds or makes a resource, and refuses early what would be refused in
// the end.
func (g *Memory) enter(resource string, token int64) (*memoryResource, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.resources[resource]
	if r == nil {
		if g.most > 0 && len(g.resources) >= g.most {
			return nil, ErrFull
		}
		r = &memoryResource{turn: make(chan struct{}, 1)}
		g.resources[resource] = r
	}
	if token < r.highest {
		return nil, &StaleError{Resource: resource, Token: token, Highest: r.highest}
	}
	r.users++
	return r, nil
}

// admit checks the token of whoever has the turn.
func (g *Memory) admit(resource string, r *memoryResource, token int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if token < r.highest {
		return &StaleError{Resource: resource, Token: token, Highest: r.highest}
	}
	r.highest = token
	return nil
}

func (g *Memory) leave(resource string, r *memoryResource) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r.users--
	if r.users == 0 && r.highest == 0 {
		delete(g.resources, resource) // nobody got in
	}
}

// Highest returns the highest token that was accepted for a resource, or 0. It
// is for looking, not for deciding: it can be out of date when it is returned.
func (g *Memory) Highest(resource string) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r := g.resources[resource]; r != nil {
		return r.highest
	}
	return 0
}

// Forget forgets a resource, and says whether it did: not while a call for it
// waits or runs. After that any token is accepted, so forget only what nobody
// can write to again, as it has been removed for good and its name will not be
// used anew.
func (g *Memory) Forget(resource string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.resources[resource]
	if r == nil || r.users > 0 {
		return false
	}
	delete(g.resources, resource)
	return true
}
