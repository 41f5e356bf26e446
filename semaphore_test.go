package dlm_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
)

// lesser returns a manager over memory that can do less.
func lesser(t *testing.T, change func(*driver.Properties)) *dlm.Manager {
	t.Helper()
	b, err := memlock.New(memlock.NewStore(), nil)
	if err != nil {
		t.Fatal(err)
	}
	b2 := drivertest.Intercept(drivertest.Hide(b, drivertest.Hidden{Inspector: true}), drivertest.Hooks{
		Properties: func() driver.Properties {
			p := b.Properties()
			change(&p)
			return p
		},
	})
	m, err := dlm.NewManager(b2, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// wantInvalid checks that an error says what is wrong, and what would be right.
func wantInvalid(t *testing.T, err error, words ...string) {
	t.Helper()
	if !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("error is %v, want ErrInvalid", err)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

// sem returns the semaphore "s" of a client.
func (c *client) sem(t *testing.T, capacity int) *dlm.Semaphore {
	t.Helper()
	s, err := dlm.NewDistributedSemaphore(c, "s", capacity)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSemaphoreArguments(t *testing.T) {
	c := open(t, memlock.NewStore(), nil)
	for _, tt := range []struct {
		name     string
		capacity int
		words    []string
	}{
		{"", 1, []string{"semaphore name", "empty"}},
		{strings.Repeat("x", 513), 1, []string{"semaphore name", "513", "512"}},
		{"\xff", 1, []string{"semaphore name", "UTF-8"}},
		{"s", 0, []string{"capacity is 0", "between 1 and 1073741824"}},
		{"s", -1, []string{"capacity is -1"}},
		{"s", 1<<30 + 1, []string{"capacity is 1073741825"}},
	} {
		_, err := dlm.NewDistributedSemaphore(c, tt.name, tt.capacity)
		wantInvalid(t, err, tt.words...)
	}
	_, err := dlm.NewDistributedSemaphore(nil, "s", 1)
	wantInvalid(t, err, "manager is nil")
	if n := c.AllCalls(); n != 0 {
		t.Errorf("%d calls to the store", n)
	}

	m := lesser(t, func(p *driver.Properties) { p.Permits = false })
	for _, capacity := range []int{1, 2} {
		if _, err := dlm.NewDistributedSemaphore(m, "s", capacity); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("without permits: %v", err)
		}
	}
	m = lesser(t, func(*driver.Properties) {})
	s, err := dlm.NewDistributedSemaphore(m, "s", 2)
	if err != nil || s.Name() != "s" || s.Capacity() != 2 {
		t.Fatal(s, err)
	}
	if _, err := s.Usage(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Usage of a store that cannot be read: %v", err)
	}
}

// The permit of a holder that is cut off from the store comes back after its TTL,
// not before, and the holder is told first.
func TestSemaphoreCrash(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := open(t, store, nil), open(t, store, nil)
		const ttl = 10 * time.Second
		lost, err := a.sem(t, 2).Acquire(t.Context(), ttl)
		if err != nil {
			t.Fatal(err)
		}
		kept, err := b.sem(t, 2).Acquire(t.Context(), ttl)
		if err != nil {
			t.Fatal(err)
		}
		heal := a.Sever()
		began := time.Now()
		next, err := b.sem(t, 2).Acquire(t.Context(), ttl)
		if err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(began); waited < ttl-ttl/3 || waited > ttl+time.Second {
			t.Errorf("the permit came back after %v", waited)
		}
		wantLoss(t, lost.Err(), dlm.ReasonExpired)
		if kept.Err() != nil || next.Token <= lost.Token {
			t.Errorf("kept: %v; token %d after %d", kept.Err(), next.Token, lost.Token)
		}
		heal()
		if err := lost.Release(t.Context()); !errors.Is(err, dlm.ErrLost) {
			t.Errorf("the late release: %v", err)
		}
		if u, err := b.sem(t, 2).Usage(t.Context()); err != nil || u != (dlm.SemaphoreUsage{Capacity: 2, Held: 2}) {
			t.Errorf("after the late release: %+v, %v", u, err)
		}
	})
}

// Resize looks again and again, at a pace that does no harm, and ends with its
// context and its manager.
func TestSemaphoreResize(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := open(t, store, nil), open(t, store, nil)
		held, err := a.sem(t, 3).Acquire(t.Context(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = b.sem(t, 4).Resize(ctx, time.Minute)
		limit, ok := errors.AsType[*dlm.LimitError](err)
		if !ok || limit.Want != 4 || limit.Have != 3 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("at the end of the context: %v", err)
		}
		wantInvalid(t, err, "limit 4", "limit 3")
		if n := b.Calls(drivertest.OpAcquire); n > 200 {
			t.Errorf("asked %d times in a minute", n)
		}

		done := make(chan *dlm.Lock)
		go func() {
			l, err := b.sem(t, 4).Resize(t.Context(), time.Minute)
			if err != nil {
				t.Error(err)
			}
			done <- l
		}()
		time.Sleep(10 * time.Second)
		if err := held.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		released := time.Now()
		first := <-done
		if waited := time.Since(released); waited > time.Second {
			t.Errorf("Resize noticed after %v", waited)
		}
		_, err = a.sem(t, 3).Acquire(t.Context(), time.Minute)
		wantInvalid(t, err, "limit 3", "limit 4")

		closed := make(chan error)
		go func() {
			_, err := a.sem(t, 3).Resize(t.Context(), time.Minute)
			closed <- err
		}()
		synctest.Wait()
		if err := a.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-closed; !errors.Is(err, dlm.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		if err := first.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := b.sem(t, 4).Resize(t.Context(), 0); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("a TTL of 0: %v", err)
		}
	})
}
