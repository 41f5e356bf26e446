package dlm_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/memlock"
)

// rw returns the read-write lock "k" of a client.
func (c *client) rw(t *testing.T) *dlm.ReadWriteLock {
	t.Helper()
	rw, err := dlm.NewReadWriteLock(c, "k")
	if err != nil {
		t.Fatal(err)
	}
	return rw
}

func TestReadWriteArguments(t *testing.T) {
	c := open(t, memlock.NewStore(), nil)
	_, err := dlm.NewReadWriteLock(c, "")
	wantInvalid(t, err, "key is empty")
	_, err = dlm.NewReadWriteLock(nil, "k")
	wantInvalid(t, err, "manager is nil")
	if key := c.rw(t).Key(); key != "k" {
		t.Errorf("key %q", key)
	}
	m := lesser(t, func(p *driver.Properties) { p.SharedMode = false })
	if _, err := dlm.NewReadWriteLock(m, "k"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without shared locks: %v", err)
	}
}

// Readers are renewed, also one that entered while its owner wrote and stayed: a
// writer waits until the last is out.
func TestReadersAreRenewed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := open(t, store, nil), open(t, store, nil)
		const ttl = 10 * time.Second
		owner := dlm.WithOwner(t.Context(), "o")
		write, err := a.rw(t).AcquireWrite(owner, ttl)
		if err != nil {
			t.Fatal(err)
		}
		read, err := a.rw(t).TryRead(owner, ttl)
		if err != nil {
			t.Fatal(err)
		}
		if err := write.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * ttl)
		if _, err := b.rw(t).TryRead(t.Context(), ttl); !errors.Is(err, dlm.ErrHeld) {
			t.Errorf("beside a reader within a write lock: %v", err)
		}
		if err := read.Release(t.Context()); err != nil {
			t.Error(err)
		}

		var readers []*dlm.Lock
		for range 100 {
			l, err := a.rw(t).AcquireRead(t.Context(), ttl)
			if err != nil {
				t.Fatal(err)
			}
			readers = append(readers, l)
		}
		entered := make(chan *dlm.Lock)
		go func() {
			l, err := b.rw(t).AcquireWrite(t.Context(), ttl)
			if err != nil {
				t.Error(err)
			}
			entered <- l
		}()
		time.Sleep(3 * ttl)
		for _, l := range readers {
			synctest.Wait()
			select {
			case <-entered:
				t.Fatal("a writer entered beside readers")
			default:
			}
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if err := (<-entered).Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// What an owner may have beside what it holds.
func TestReentryInAnotherMode(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := open(t, memlock.NewStore(), nil)
		owner := dlm.WithOwner(t.Context(), "o")
		const ttl = time.Minute
		for _, tt := range []struct {
			name       string
			held, want dlm.AcquireOptions
			check      func(t *testing.T, err error)
		}{
			{"read in read", dlm.AcquireOptions{Shared: true}, dlm.AcquireOptions{Shared: true}, nil},
			{"write in write", dlm.AcquireOptions{}, dlm.AcquireOptions{}, nil},
			{"read in write", dlm.AcquireOptions{}, dlm.AcquireOptions{Shared: true}, nil},
			{"write in read", dlm.AcquireOptions{Shared: true}, dlm.AcquireOptions{}, func(t *testing.T, err error) {
				if up, ok := errors.AsType[*dlm.UpgradeError](err); !ok || up.Key != "k" || up.Token == 0 {
					t.Errorf("%v, want an UpgradeError", err)
				}
				wantInvalid(t, err, `"k"`, "shared", "exclusively")
			}},
			{"permit in write", dlm.AcquireOptions{}, dlm.AcquireOptions{Limit: 2}, wantLimits(2, 1)},
			{"permit in read", dlm.AcquireOptions{Shared: true}, dlm.AcquireOptions{Limit: 2}, wantLimits(2, 1)},
			{"write in permit", dlm.AcquireOptions{Limit: 2}, dlm.AcquireOptions{}, wantLimits(1, 2)},
			{"read in permit", dlm.AcquireOptions{Limit: 2}, dlm.AcquireOptions{Shared: true}, wantLimits(1, 2)},
			{"permit in other permit", dlm.AcquireOptions{Limit: 2}, dlm.AcquireOptions{Limit: 3}, wantLimits(3, 2)},
		} {
			outer, err := c.Acquire(owner, "k", ttl, &tt.held)
			if err != nil {
				t.Fatal(tt.name, err)
			}
			calls := c.AllCalls()
			inner, err := c.Acquire(owner, "k", ttl, &tt.want)
			if c.AllCalls() != calls {
				t.Errorf("%s: the store was asked", tt.name)
			}
			switch {
			case tt.check != nil:
				tt.check(t, err)
			case err != nil:
				t.Errorf("%s: %v", tt.name, err)
			default:
				if inner.Token != outer.Token || inner.Mode != outer.Mode {
					t.Errorf("%s: %v (%v) in %v (%v)", tt.name, inner, inner.Mode, outer, outer.Mode)
				}
				if err := inner.Release(t.Context()); err != nil {
					t.Errorf("%s: %v", tt.name, err)
				}
			}
			if err := outer.Release(t.Context()); err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
		}
		// Whoever counts locks by mode counts each twice in the same.
		modes := make(map[driver.Mode]int)
		for _, e := range c.events.of(dlm.EventAcquired) {
			modes[e.Mode]++
		}
		for _, e := range c.events.of(dlm.EventReleased) {
			modes[e.Mode]--
		}
		if modes[dlm.Shared] != 0 || modes[dlm.Exclusive] != 0 {
			t.Errorf("acquired less released: %v", modes)
		}
	})
}

func wantLimits(want, have int) func(*testing.T, error) {
	return func(t *testing.T, err error) {
		t.Helper()
		if limit, ok := errors.AsType[*dlm.LimitError](err); !ok || limit.Want != want || limit.Have != have {
			t.Errorf("%v, want a LimitError with %d and %d", err, want, have)
		}
	}
}
