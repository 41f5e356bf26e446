package secure_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

func TestOnlyTheHolder(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), nil, nil)
	other := open(t, memlock.NewStore(), nil, nil)
	l := s.lock(t, "a", "key")
	direct, err := s.inner.TryLock(t.Context(), "direct", ttl)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		m      *server
		client string
		lock   *dlm.Lock
		reason secure.Reason
		words  string
	}{
		{"another client", s, "b", l, secure.ReasonNotHolder, "another client's"},
		{"no client", s, "", l, secure.ReasonClient, "no client"},
		{"another wrapper", other, "a", l, secure.ReasonNotHolder, "not acquired here"},
		{"past the wrapper", s, "a", direct, secure.ReasonNotHolder, "not acquired here"},
		{"not acquired", s, "a", &dlm.Lock{Key: "key"}, secure.ReasonNotHolder, "not acquired here"},
	} {
		calls := tt.m.faults.AllCalls()
		wantDenied(t, tt.m.ReleaseLock(as(t, tt.client), tt.lock), tt.reason, tt.words)
		wantDenied(t, tt.m.ExtendLock(as(t, tt.client), tt.lock, ttl), tt.reason, tt.words)
		if n := tt.m.faults.AllCalls() - calls; n != 0 {
			t.Errorf("%s: the store was asked %d times", tt.name, n)
		}
	}
	// Those who may not are not remembered.
	if n := s.Stats().Clients; n != 1 {
		t.Errorf("%d clients are remembered, want 1", n)
	}
	for _, err := range []error{
		s.ReleaseLock(as(t, "a"), nil),
		s.ExtendLock(as(t, "a"), nil, ttl),
		//lint:ignore SA1012 nil is what is tested
		s.ReleaseLock(nil, l),
		//lint:ignore SA1012 nil is what is tested
		s.ExtendLock(nil, l, ttl),
	} {
		if !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("nil: %v", err)
		}
	}
	if l.Err() != nil || direct.Err() != nil {
		t.Fatalf("a lock was released: %v, %v", l.Err(), direct.Err())
	}

	wantDenied(t, s.ExtendLock(as(t, "a"), l, time.Hour), secure.ReasonTTL, "5m0s")
	before := l.Deadline()
	if err := s.ExtendLock(as(t, "a"), l, time.Minute); err != nil || !l.Deadline().After(before) {
		t.Errorf("ExtendLock: %v", err)
	}
	if err := s.ReleaseLock(as(t, "a"), l); err != nil {
		t.Error(err)
	}
	if err := s.ExtendLock(as(t, "a"), l, ttl); !errors.Is(err, dlm.ErrReleased) {
		t.Errorf("ExtendLock after the release: %v", err)
	}
	// It stays the client's when it has ended.
	wantDenied(t, s.ReleaseLock(as(t, "b"), l), secure.ReasonNotHolder)
	if err := s.ReleaseLock(as(t, "a"), l); err != nil {
		t.Errorf("the first answer was nil, the second %v", err)
	}
}

func TestReleaseOfALostLock(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), nil, &dlm.LockConfig{AutoRenew: dlm.Off})
		l := s.lock(t, "a", "key")
		<-l.Done()
		for range 2 {
			if err := s.ReleaseLock(as(t, "a"), l); !errors.Is(err, dlm.ErrLost) {
				t.Errorf("release after the loss: %v", err)
			}
		}
	})
}

// As the manager does, the wrapper gives a lock up though the context has ended,
// and lets the release be repeated that had no answer.
func TestReleaseWithEndedContext(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), nil, nil)
		l := s.lock(t, "a", "key")
		hung := s.faults.Inject(drivertest.Fault{Kind: drivertest.Hang, Op: drivertest.OpRelease})
		ctx, cancel := context.WithCancel(as(t, "a"))
		cancel()
		if err := s.ReleaseLock(ctx, l); err == nil || errors.Is(err, secure.ErrDenied) {
			t.Errorf("release with an ended context: %v", err)
		}
		s.want(t, 0, 0)
		hung.Remove()
		if err := s.ReleaseLock(as(t, "a"), l); err != nil {
			t.Errorf("the release, repeated: %v", err)
		}
		if err := s.ReleaseLock(as(t, "b"), s.lock(t, "b", "key")); err != nil {
			t.Error(err)
		}
	})
}

// Locks that nobody can release any more are not remembered.
func TestLocksAreForgotten(t *testing.T) {
	t.Parallel()
	none := secure.Limits{Rate: secure.Unlimited}
	s := open(t, memlock.NewStore(), &secure.Policy{PerClient: none, Total: none}, nil)
	kept := s.lock(t, "a", "kept")
	for i := range 1000 {
		l := s.lock(t, "a", fmt.Sprint(i))
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for end := time.Now().Add(30 * time.Second); s.Holds() > 1; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d locks are known, want 1", s.Holds())
		}
		runtime.GC()
	}
	if err := s.ReleaseLock(as(t, "a"), kept); err != nil {
		t.Error(err)
	}
}
