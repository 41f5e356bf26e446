package secure_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

func TestRateOfAClient(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{PerClient: secure.Limits{Rate: 3, Burst: 2}}, nil)
		l := s.lock(t, "a", "a1")
		if _, err := s.GetLock(as(t, "a"), "a1"); err != nil {
			t.Fatal(err)
		}
		calls := s.faults.AllCalls()
		for name, call := range map[string]func() error{
			"try":     func() error { _, err := s.TryLock(as(t, "a"), "a2", ttl); return err },
			"acquire": func() error { _, err := s.AcquireLock(as(t, "a"), "a2", ttl); return err },
			"get":     func() error { _, err := s.GetLock(as(t, "a"), "a1"); return err },
			"extend":  func() error { return s.ExtendLock(as(t, "a"), l, ttl) },
			"bad key": func() error { _, err := s.TryLock(as(t, "a"), " ", ttl); return err },
		} {
			err := call()
			denied := wantDenied(t, err, secure.ReasonRate, "more than 3 calls", "burst of 2", "Policy.PerClient.Rate", "retry after")
			if !errors.Is(err, secure.ErrRateLimited) || denied.RetryAfter <= 0 || denied.RetryAfter > time.Second/3 {
				t.Errorf("%s: retry after %v: %v", name, denied.RetryAfter, err)
			}
		}
		if n := s.faults.AllCalls() - calls; n != 0 {
			t.Errorf("the store was asked %d times by calls that were refused", n)
		}
		// Nothing is wrong with other clients, nor with a release.
		if err := s.ReleaseLock(as(t, "b"), s.lock(t, "b", "b1")); err != nil {
			t.Error(err)
		}
		if err := s.ReleaseLock(as(t, "a"), l); err != nil {
			t.Error(err)
		}
		// Who waits for as long as was said is admitted, once.
		for range 20 {
			_, err := s.GetLock(as(t, "a"), "a1")
			denied := wantDenied(t, err, secure.ReasonRate)
			time.Sleep(denied.RetryAfter / 2)
			_, err = s.GetLock(as(t, "a"), "a1")
			denied = wantDenied(t, err, secure.ReasonRate)
			time.Sleep(denied.RetryAfter)
			if _, err := s.GetLock(as(t, "a"), "a1"); err != nil {
				t.Errorf("after the pause of %v: %v", denied.RetryAfter, err)
			}
		}
		// A pause fills the bucket to its brim and no further.
		time.Sleep(time.Hour)
		for range 2 {
			if _, err := s.GetLock(as(t, "a"), "a1"); err != nil {
				t.Error(err)
			}
		}
		_, err := s.GetLock(as(t, "a"), "a1")
		wantDenied(t, err, secure.ReasonRate)
	})
}

func TestRateOfAll(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{
			PerClient: secure.Limits{Rate: 1, Burst: 2},
			Total:     secure.Limits{Rate: 1, Burst: 2},
		}, nil)
		l := s.lock(t, "a", "a1")
		if _, err := s.GetLock(as(t, "b"), "b1"); err != nil {
			t.Fatal(err)
		}
		_, err := s.GetLock(as(t, "a"), "a1")
		if denied := wantDenied(t, err, secure.ReasonTotalRate, "more than 1 calls", "all clients", "Policy.Total.Rate"); denied.RetryAfter != time.Second {
			t.Errorf("retry after %v", denied.RetryAfter)
		}
		// No client can keep another from holding on to its locks.
		if err := s.ExtendLock(as(t, "a"), l, ttl); err != nil {
			t.Errorf("ExtendLock: %v", err)
		}
		// That was its second call, and the one refused for all did not count.
		wantDenied(t, s.ExtendLock(as(t, "a"), l, ttl), secure.ReasonRate)
		// A client that was refused for all is not remembered for it.
		for i := range 100 {
			_, err := s.GetLock(as(t, fmt.Sprint("new", i)), "key")
			wantDenied(t, err, secure.ReasonTotalRate)
		}
		if n := s.Stats().Clients; n != 2 {
			t.Errorf("%d clients are remembered, want 2", n)
		}
		// What a client is refused for does not count for all.
		time.Sleep(time.Second)
		if _, err := s.GetLock(as(t, "a"), "a1"); err != nil {
			t.Error(err)
		}
		if err := s.ReleaseLock(as(t, "a"), l); err != nil {
			t.Error(err)
		}
	})
}

func TestClientsAreForgotten(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{
			MaxClients: 3, PerClient: secure.Limits{Rate: 1, Burst: 2}, Total: secure.Limits{Rate: secure.Unlimited},
		}, nil)
		l := s.lock(t, "holder", "key")
		for i := range 10_000 {
			if _, err := s.GetLock(as(t, fmt.Sprint(i)), "key"); err != nil {
				t.Fatal(err)
			}
			if n := s.Stats().Clients; n > 3 {
				t.Fatalf("%d clients are remembered, want 3 at most", n)
			}
		}
		// Who was there last is remembered, with its rate, and the holder is.
		_, _ = s.GetLock(as(t, "9999"), "key")
		_, err := s.GetLock(as(t, "9999"), "key")
		wantDenied(t, err, secure.ReasonRate)
		_, _ = s.GetLock(as(t, "holder"), "key")
		_, err = s.GetLock(as(t, "holder"), "key")
		wantDenied(t, err, secure.ReasonRate)

		// If all have locks, there is no room for one more.
		l2, l3 := s.lock(t, "b", "b"), s.lock(t, "c", "c")
		_, err = s.TryLock(as(t, "d"), "d", ttl)
		if denied := wantDenied(t, err, secure.ReasonClients, "3 clients", "Policy.MaxClients"); denied.RetryAfter <= 0 || !errors.Is(err, secure.ErrQuota) {
			t.Errorf("retry after %v: %v", denied.RetryAfter, err)
		}
		for client, lock := range map[string]*dlm.Lock{"holder": l, "b": l2, "c": l3} {
			if err := s.ReleaseLock(as(t, client), lock); err != nil {
				t.Error(err)
			}
		}
		// Nor is a client kept whose acquisition has failed.
		l = s.lock(t, "x", "key")
		if _, err := s.TryLock(as(t, "late"), "key", ttl); !errors.Is(err, dlm.ErrHeld) {
			t.Error(err)
		}
		if err := s.ReleaseLock(as(t, "x"), l); err != nil {
			t.Error(err)
		}
		// After a while nothing is known of clients that could be new ones.
		time.Sleep(2 * time.Second)
		for range 3 {
			_, _ = s.GetLock(as(t, "e"), "key")
		}
		if n := s.Stats().Clients; n != 1 {
			t.Errorf("%d clients are remembered, want 1", n)
		}
	})
}

func TestUnlimitedRate(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		none := secure.Limits{Rate: secure.Unlimited}
		s := open(t, memlock.NewStore(), &secure.Policy{PerClient: none, Total: none}, nil)
		for range 1000 {
			if _, err := s.GetLock(as(t, "a"), "key"); err != nil {
				t.Fatal(err)
			}
		}
	})
}
