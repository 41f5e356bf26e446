package fence_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
)

func newMemory(t *testing.T, opts *fence.MemoryOptions) *fence.Memory {
	t.Helper()
	g, err := fence.NewMemory(opts)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func nothing(context.Context) error { return nil }

func TestMemorySequences(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		tokens  []int64
		refused []bool
	}{
		{"rising", []int64{1, 2, 7}, []bool{false, false, false}},
		{"the same holder writes often", []int64{5, 5, 5}, []bool{false, false, false}},
		{"a lower one is refused", []int64{5, 4, 1}, []bool{false, true, true}},
		{"the same as before a higher one is refused", []int64{5, 6, 5}, []bool{false, false, true}},
		{"a refusal changes nothing", []int64{5, 4, 5, 6}, []bool{false, true, false, false}},
		{"the highest there is", []int64{fence.MaxToken, fence.MaxToken, 1}, []bool{false, false, true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newMemory(t, nil)
			var highest int64
			for i, token := range c.tokens {
				called := false
				err := g.Do(t.Context(), "r", token, func(context.Context) error {
					called = true
					return nil
				})
				if called == c.refused[i] {
					t.Errorf("token %d: called %v", token, called)
				}
				if c.refused[i] {
					isStale(t, err, fence.StaleError{Resource: "r", Token: token, Highest: highest})
				} else if err != nil {
					t.Errorf("token %d: %v", token, err)
				}
				highest = max(highest, token)
				if got := g.Highest("r"); got != highest {
					t.Errorf("highest is %d, want %d", got, highest)
				}
			}
			if err := g.Do(t.Context(), "other", 1, nothing); err != nil {
				t.Errorf("another resource: %v", err)
			}
		})
	}
}

func TestMemoryInvalid(t *testing.T) {
	t.Parallel()
	g := newMemory(t, nil)
	for _, c := range invalids {
		err := g.Do(t.Context(), c.resource, c.token, func(context.Context) error { panic("called") })
		if !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	//lint:ignore SA1012 nil is what is tested
	if err := g.Do(nil, "r", 1, nothing); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("no context: %v", err)
	}
	if err := g.Do(t.Context(), "r", 1, nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("no function: %v", err)
	}
	if _, err := fence.NewMemory(&fence.MemoryOptions{MaxResources: -1}); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("a negative bound: %v", err)
	}
}

// What fn returns, or that it panics, changes nothing about its token.
func TestMemoryFunctionFails(t *testing.T) {
	t.Parallel()
	g := newMemory(t, nil)
	broken := errors.New("broken")
	//lint:ignore errorlint it must be this very error
	if err := g.Do(t.Context(), "r", 5, func(context.Context) error { return broken }); err != broken {
		t.Errorf("%v, want %v", err, broken)
	}
	func() {
		defer func() {
			if recover() != "help" {
				t.Error("the panic did not go on")
			}
		}()
		_ = g.Do(t.Context(), "r", 6, func(context.Context) error { panic("help") }) // it panics
	}()
	isStale(t, g.Do(t.Context(), "r", 5, nothing), fence.StaleError{Resource: "r", Token: 5, Highest: 6})
	if err := g.Do(t.Context(), "r", 6, nothing); err != nil {
		t.Errorf("the turn did not end: %v", err)
	}
}

// A higher token waits for the function of a lower one, which then is not let in
// again; a stale one does not wait.
func TestMemoryHigherWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newMemory(t, nil)
		began, finish := make(chan struct{}), make(chan struct{})
		var order []string
		var wg sync.WaitGroup
		wg.Go(func() {
			err := g.Do(t.Context(), "r", 5, func(context.Context) error {
				close(began)
				<-finish
				order = append(order, "low")
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
		<-began
		isStale(t, g.Do(t.Context(), "r", 4, nothing), fence.StaleError{Resource: "r", Token: 4, Highest: 5})
		if g.Forget("r") {
			t.Error("forgotten while in use")
		}
		if err := g.Do(t.Context(), "other", 1, nothing); err != nil {
			t.Errorf("another resource waits: %v", err)
		}
		wg.Go(func() {
			err := g.Do(t.Context(), "r", 6, func(context.Context) error {
				order = append(order, "high")
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
		// Who gives up while it waits has no effect.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := g.Do(ctx, "r", 7, func(context.Context) error { panic("called") }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want %v", err, context.DeadlineExceeded)
		}
		synctest.Wait()
		if g.Highest("r") != 5 {
			t.Errorf("highest is %d while the first one writes", g.Highest("r"))
		}
		close(finish)
		wg.Wait()
		if len(order) != 2 || order[0] != "low" || order[1] != "high" {
			t.Errorf("order: %q", order)
		}
		isStale(t, g.Do(t.Context(), "r", 5, nothing), fence.StaleError{Resource: "r", Token: 5, Highest: 6})
	})
}

func TestMemoryContextEnded(t *testing.T) {
	t.Parallel()
	g := newMemory(t, &fence.MemoryOptions{MaxResources: 1})
	why := errors.New("why")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if err := g.Do(ctx, "r", 1, func(context.Context) error { panic("called") }); !errors.Is(err, why) {
		t.Errorf("%v, want %v", err, why)
	}
	if err := g.Do(t.Context(), "other", 1, nothing); err != nil {
		t.Errorf("the refused call has left something: %v", err)
	}
}

// A full guard refuses what it does not know, and forgets nothing unless told to.
func TestMemoryFull(t *testing.T) {
	t.Parallel()
	g := newMemory(t, &fence.MemoryOptions{MaxResources: 2})
	for _, c := range []struct {
		resource string
		token    int64
		want     error
	}{
		{"a", 5, nil},
		{"b", 5, nil},
		{"c", 9, fence.ErrFull},
		{"a", 4, fence.ErrStale},
		{"a", 6, nil},
	} {
		if err := g.Do(t.Context(), c.resource, c.token, nothing); !errors.Is(err, c.want) {
			t.Errorf("%s %d: %v, want %v", c.resource, c.token, err, c.want)
		}
	}
	if !g.Forget("b") || g.Forget("b") || g.Forget("c") {
		t.Error("what is known is forgotten once, and nothing else")
	}
	if err := g.Do(t.Context(), "c", 1, nothing); err != nil {
		t.Error(err)
	}
	if err := g.Do(t.Context(), "b", 1, nothing); !errors.Is(err, fence.ErrFull) {
		t.Errorf("%v, want %v", err, fence.ErrFull)
	}
}

// Many writers with random tokens: as the resource sees it, tokens never fall, no
// two functions run at the same time, and nobody is refused without reason.
func TestMemoryConcurrent(t *testing.T) {
	t.Parallel()
	g := newMemory(t, nil)
	resources := []string{"a", "b", "c"}
	seen := make(map[string]*[]int64) // each is guarded by g alone, which the race detector checks
	for _, r := range resources {
		seen[r] = new([]int64)
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 200 {
				r := resources[rand.N(len(resources))]
				token := next.Add(1) + rand.Int64N(50)
				err := g.Do(t.Context(), r, token, func(context.Context) error {
					*seen[r] = append(*seen[r], token)
					return nil
				})
				var stale *fence.StaleError
				if errors.As(err, &stale) && (stale.Token != token || stale.Highest <= token || stale.Resource != r) {
					t.Errorf("refused without reason: %v", err)
				} else if err != nil && stale == nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, r := range resources {
		last := int64(0)
		for _, token := range *seen[r] {
			if token < last {
				t.Fatalf("%s: %d after %d", r, token, last)
			}
			last = token
		}
		if last == 0 || g.Highest(r) != last {
			t.Errorf("%s: highest is %d, last was %d", r, g.Highest(r), last)
		}
	}
}
