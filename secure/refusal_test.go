package secure_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

var sentinels = []error{secure.ErrUnknownClient, secure.ErrForbidden, secure.ErrRateLimited, secure.ErrQuota, dlm.ErrInvalid}

func TestRefusals(t *testing.T) {
	t.Parallel()
	errBanned := errors.New("banned")
	own := secure.Policy{Prefix: secure.OwnPrefix(":")}
	for _, tt := range []struct {
		name     string
		policy   secure.Policy
		client   string
		key      string
		ttl      time.Duration
		opts     dlm.AcquireOptions
		reason   secure.Reason
		sentinel error
		words    []string
	}{
		{"no client", secure.Policy{}, "", "key", ttl, dlm.AcquireOptions{}, secure.ReasonClient, secure.ErrUnknownClient, []string{"names no client"}},
		{"client too long", secure.Policy{}, strings.Repeat("x", 257), "key", ttl, dlm.AcquireOptions{}, secure.ReasonClient, secure.ErrUnknownClient, []string{"256"}},
		{"client with a null", secure.Policy{}, "a\x00b", "key", ttl, dlm.AcquireOptions{}, secure.ReasonClient, secure.ErrUnknownClient, []string{"control"}},
		{"client not UTF-8", secure.Policy{}, "a\xff", "key", ttl, dlm.AcquireOptions{}, secure.ReasonClient, secure.ErrUnknownClient, []string{"UTF-8"}},
		{
			"client not accepted",
			secure.Policy{Client: func(context.Context) (string, error) { return "", errBanned }},
			"a", "key", ttl,
			dlm.AcquireOptions{},
			secure.ReasonClient, secure.ErrUnknownClient,
			[]string{"banned"},
		},
		{"no key", secure.Policy{}, "a", "", ttl, dlm.AcquireOptions{}, secure.ReasonKey, dlm.ErrInvalid, []string{"empty"}},
		{"key with a space", secure.Policy{}, "a", "a b", ttl, dlm.AcquireOptions{}, secure.ReasonKey, dlm.ErrInvalid, []string{"Policy.KeyPattern"}},
		{"key with a line end", secure.Policy{}, "a", "ab\n", ttl, dlm.AcquireOptions{}, secure.ReasonKey, dlm.ErrInvalid, nil},
		{"key not UTF-8", secure.Policy{}, "a", "a\xff", ttl, dlm.AcquireOptions{}, secure.ReasonKey, dlm.ErrInvalid, []string{"UTF-8"}},
		{"key matches in part", secure.Policy{KeyPattern: "a|b"}, "a", "ab", ttl, dlm.AcquireOptions{}, secure.ReasonKey, dlm.ErrInvalid, []string{"a|b"}},
		{"pattern of lines", secure.Policy{KeyPattern: "(?m)^a$"}, "a", "a\nb", ttl, dlm.AcquireOptions{}, secure.ReasonKey, dlm.ErrInvalid, nil},
		{"key too long", secure.Policy{MaxKeyLen: 3}, "a", "abcd", ttl, dlm.AcquireOptions{}, secure.ReasonKey, dlm.ErrInvalid, []string{"4 bytes", "at most 3", "Policy.MaxKeyLen"}},
		{"key of another", own, "a", "b:x", ttl, dlm.AcquireOptions{}, secure.ReasonPrefix, secure.ErrForbidden, []string{`"a:"`, "Policy.Prefix"}},
		{"key of a longer name", own, "a", "ab:x", ttl, dlm.AcquireOptions{}, secure.ReasonPrefix, secure.ErrForbidden, nil},
		{"client without keys", own, "a:b", "a:b:x", ttl, dlm.AcquireOptions{}, secure.ReasonPrefix, secure.ErrForbidden, []string{"no keys"}},
		{"ttl too short", secure.Policy{}, "a", "key", time.Second - 1, dlm.AcquireOptions{}, secure.ReasonTTL, dlm.ErrInvalid, []string{"999.999999ms", "1s", "5m0s"}},
		{"ttl too long", secure.Policy{MaxTTL: time.Minute}, "a", "key", time.Minute + 1, dlm.AcquireOptions{}, secure.ReasonTTL, dlm.ErrInvalid, []string{"1m0s", "Policy.MinTTL, MaxTTL"}},
		{"ttl negative", secure.Policy{}, "a", "key", -ttl, dlm.AcquireOptions{}, secure.ReasonTTL, dlm.ErrInvalid, nil},
		{"too many permits", secure.Policy{MaxPermits: 5}, "a", "key", ttl, dlm.AcquireOptions{Limit: 6}, secure.ReasonPermits, dlm.ErrInvalid, []string{"6", "at most 5", "Policy.MaxPermits"}},
		{"hold too long", secure.Policy{MaxHold: time.Minute}, "a", "key", ttl, dlm.AcquireOptions{MaxHold: time.Hour}, secure.ReasonHold, dlm.ErrInvalid, []string{"1h0m0s", "1m0s", "Policy.MaxHold"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := open(t, memlock.NewStore(), &tt.policy, nil)
			for range 2 {
				_, err := s.Acquire(as(t, tt.client), tt.key, tt.ttl, &tt.opts)
				denied := wantDenied(t, err, tt.reason, tt.words...)
				for _, sentinel := range sentinels {
					if got := errors.Is(err, sentinel); got != errors.Is(sentinel, tt.sentinel) {
						t.Errorf("error %q: it matches %v: %t", err, sentinel, got)
					}
				}
				if denied.Op != "acquire" || denied.RetryAfter != 0 {
					t.Errorf("op is %q, to be tried again after %v", denied.Op, denied.RetryAfter)
				}
			}
			if n := s.faults.AllCalls(); n != 0 {
				t.Errorf("the store was asked %d times", n)
			}
			if n := s.events.denied(tt.reason); n != 2 {
				t.Errorf("the observer was told of %d refusals, want 2", n)
			}
		})
	}
}

// The rules hold for every call that has a key.
func TestEveryCallIsChecked(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), &secure.Policy{Prefix: secure.OwnPrefix(":")}, nil)
	basic, err := secure.NewBasic(s.inner, &secure.Policy{Prefix: secure.OwnPrefix(":")})
	if err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(ctx context.Context, key string) error{
		"acquire":       func(ctx context.Context, key string) error { _, err := s.AcquireLock(ctx, key, ttl); return err },
		"try":           func(ctx context.Context, key string) error { _, err := s.TryLock(ctx, key, ttl); return err },
		"get":           func(ctx context.Context, key string) error { _, err := s.GetLock(ctx, key); return err },
		"basic acquire": func(ctx context.Context, key string) error { _, err := basic.AcquireLock(ctx, key, ttl); return err },
		"basic try":     func(ctx context.Context, key string) error { _, err := basic.TryLock(ctx, key, ttl); return err },
	} {
		if denied := wantDenied(t, call(as(t, "a"), "b:x"), secure.ReasonPrefix); denied.Op != strings.TrimPrefix(name, "basic ") {
			t.Errorf("%s: op is %q", name, denied.Op)
		}
		wantDenied(t, call(as(t, "a"), "a: "), secure.ReasonKey)
		wantDenied(t, call(t.Context(), "a:x"), secure.ReasonClient)
		if err := call(nil, "a:x"); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("%s without a context: %v", name, err)
		}
	}
	if n := s.faults.AllCalls(); n != 0 {
		t.Errorf("the store was asked %d times", n)
	}
	if _, err := s.GetLock(as(t, "a"), "a:x"); err != nil {
		t.Errorf("GetLock: %v", err)
	}
}

func TestErrorsStaySmall(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), nil, nil)
	huge := strings.Repeat("x", 1<<20)
	_, err := s.TryLock(as(t, "a"), huge, ttl)
	if n := len(wantDenied(t, err, secure.ReasonKey).Error()); n > 2000 {
		t.Errorf("the error has %d bytes", n)
	}
	_, err = s.TryLock(as(t, huge), "key", ttl)
	if n := len(wantDenied(t, err, secure.ReasonClient).Error()); n > 2000 {
		t.Errorf("the error has %d bytes", n)
	}
}

func TestClientOfTheContext(t *testing.T) {
	t.Parallel()
	type user struct{}
	policy := &secure.Policy{
		Anonymous: "nobody",
		Prefix:    secure.OwnPrefix(":"),
		Client: func(ctx context.Context) (string, error) {
			id, _ := ctx.Value(user{}).(string)
			return id, ctx.Err()
		},
	}
	s := open(t, memlock.NewStore(), policy, nil)
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), user{}, "a"))
	l, err := s.AcquireLock(ctx, "a:x", ttl)
	if err != nil {
		t.Fatal(err)
	}
	// A function that looks at the context's end does not keep the lock from
	// being released.
	cancel()
	if err := s.ReleaseLock(ctx, l); errors.Is(err, secure.ErrDenied) || l.Err() == nil {
		t.Errorf("after the client has gone: %v, lock: %v", err, l.Err())
	}
	if l, err = s.AcquireLock(t.Context(), "nobody:x", ttl); err != nil {
		t.Fatal(err)
	}
	if err := s.ReleaseLock(t.Context(), l); err != nil {
		t.Error(err)
	}
}

func TestMaxWait(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{MaxWait: 3 * time.Second}, nil)
		s.lock(t, "a", "key")
		began := time.Now()
		_, err := s.AcquireLock(as(t, "b"), "key", ttl)
		wantDenied(t, err, secure.ReasonWait, "3s", "Policy.MaxWait")
		if took := time.Since(began); took != 3*time.Second || !errors.Is(err, dlm.ErrHeld) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %v: %v", took, err)
		}
		if n := s.events.denied(secure.ReasonWait); n != 1 {
			t.Errorf("the observer was told %d times", n)
		}
		// A nearer end of the caller's own is not the policy's.
		ctx, cancel := context.WithTimeout(as(t, "b"), 2*time.Second)
		defer cancel()
		if _, err = s.AcquireLock(ctx, "key", ttl); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, secure.ErrDenied) {
			t.Errorf("the caller's own deadline: %v", err)
		}
		s.want(t, 1, 0)
	})
}

// A manager may keep the cause of a context's end to itself.
func TestMaxWaitWithoutCause(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s, err := secure.NewBasic(&fake{acquire: func(ctx context.Context) (*dlm.Lock, error) {
			<-ctx.Done()
			return nil, fmt.Errorf("fake: %w", ctx.Err())
		}}, &secure.Policy{MaxWait: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.AcquireLock(as(t, "a"), "key", ttl)
		wantDenied(t, err, secure.ReasonWait, "fake")
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}

func TestMaxHold(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		s := open(t, memlock.NewStore(), &secure.Policy{MaxHold: time.Minute}, nil)
		for _, tt := range []struct {
			opts *dlm.AcquireOptions
			want time.Duration
		}{
			{nil, time.Minute},
			{&dlm.AcquireOptions{NoWait: true}, time.Minute},
			{&dlm.AcquireOptions{MaxHold: time.Second}, time.Second},
		} {
			began := time.Now()
			l, err := s.Acquire(as(t, "a"), "key", ttl, tt.opts)
			if err != nil {
				t.Fatal(err)
			}
			<-l.Done()
			loss, ok := errors.AsType[*dlm.LostError](l.Err())
			if held := time.Since(began); held != tt.want || !ok || loss.Reason != dlm.ReasonMaxHold {
				t.Errorf("held for %v, want %v: %v", held, tt.want, l.Err())
			}
			if tt.opts != nil && tt.opts.MaxHold > time.Second {
				t.Error("the caller's options were changed")
			}
			s.want(t, 0, 0)
			synctest.Wait() // for the release in the background
		}
	})
}

// fake is a manager of which only acquisitions do something.
type fake struct {
	dlm.LockManager
	acquire func(ctx context.Context) (*dlm.Lock, error)
}

func (f *fake) AcquireLock(ctx context.Context, _ string, _ time.Duration) (*dlm.Lock, error) {
	return f.acquire(ctx)
}

func (f *fake) TryLock(ctx context.Context, _ string, _ time.Duration) (*dlm.Lock, error) {
	return f.acquire(ctx)
}
