package secure_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

func TestPolicyFaults(t *testing.T) {
	t.Parallel()
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close(context.Background()) })
	for _, tt := range []struct {
		policy secure.Policy
		words  []string
	}{
		{secure.Policy{Anonymous: "a\nb"}, []string{"Policy.Anonymous", "control"}},
		{secure.Policy{Anonymous: strings.Repeat("x", 257)}, []string{"Policy.Anonymous", "256"}},
		{secure.Policy{KeyPattern: "a)|(b"}, []string{"Policy.KeyPattern"}},
		{secure.Policy{MaxClients: -1}, []string{"Policy.MaxClients is -1", "between 1 and"}},
		{secure.Policy{MaxKeyLen: 513}, []string{"Policy.MaxKeyLen is 513", "512"}},
		{secure.Policy{MaxPermits: 1<<30 + 1}, []string{"Policy.MaxPermits", "1073741824"}},
		{secure.Policy{MinTTL: time.Microsecond}, []string{"Policy.MinTTL is 1µs", "1ms"}},
		{secure.Policy{MinTTL: -1}, []string{"Policy.MinTTL is -1ns"}},
		{secure.Policy{MaxTTL: dlm.MaxTTL + 1}, []string{"Policy.MaxTTL", dlm.MaxTTL.String()}},
		{secure.Policy{MaxTTL: 500 * time.Millisecond}, []string{"Policy.MinTTL is 1s", "Policy.MaxTTL, which is 500ms"}},
		{secure.Policy{MaxWait: -2}, []string{"Policy.MaxWait is -2ns", "Unlimited"}},
		{secure.Policy{MaxHold: -1}, []string{"Policy.MaxHold is -1ns", "1ms"}},
		{secure.Policy{PerClient: secure.Limits{Rate: -2}}, []string{"Policy.PerClient.Rate is -2"}},
		{secure.Policy{PerClient: secure.Limits{Rate: math.NaN()}}, []string{"Policy.PerClient.Rate is NaN"}},
		{secure.Policy{Total: secure.Limits{Rate: math.Inf(1)}}, []string{"Policy.Total.Rate is +Inf"}},
		{secure.Policy{PerClient: secure.Limits{Burst: -1}}, []string{"Policy.PerClient.Burst is -1"}},
		{secure.Policy{Total: secure.Limits{Rate: secure.Unlimited, Burst: 5}}, []string{"Policy.Total.Burst is 5", "Unlimited"}},
		{secure.Policy{Total: secure.Limits{Held: -2}}, []string{"Policy.Total.Held is -2", "Unlimited"}},
		{secure.Policy{PerClient: secure.Limits{Waiting: 1<<30 + 1}}, []string{"Policy.PerClient.Waiting"}},
	} {
		_, err := secure.New(m, &tt.policy)
		if !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("New(%+v): %v, want an error that matches ErrInvalid", tt.policy, err)
			continue
		}
		for _, w := range tt.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("error %q does not say %q", err, w)
			}
		}
	}
	if _, err := secure.New(nil, nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("without a manager: %v", err)
	}
	if _, err := secure.NewBasic(nil, nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("without a manager: %v", err)
	}
	if _, err := secure.NewBasic(m, &secure.Policy{MaxHold: time.Minute}); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("a longest hold that cannot be passed on: %v", err)
	}
}

func TestPolicyIsCopied(t *testing.T) {
	t.Parallel()
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close(context.Background()) })
	policy := &secure.Policy{}
	s, err := secure.New(m, policy)
	if err != nil {
		t.Fatal(err)
	}
	policy.MaxTTL = time.Millisecond
	policy.Client = nil
	l, err := s.TryLock(as(t, "a"), "key", ttl)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.ReleaseLock(as(t, "a"), l); err != nil {
		t.Error(err)
	}
}

// extremes are policies that look odd and are fine.
func TestPolicyExtremes(t *testing.T) {
	t.Parallel()
	none := secure.Limits{Rate: secure.Unlimited, Held: secure.Unlimited, Waiting: secure.Unlimited}
	for _, policy := range []*secure.Policy{
		nil,
		{MaxWait: secure.Unlimited, PerClient: none, Total: none},
		{PerClient: secure.Limits{Rate: 1e-300}, Total: secure.Limits{Rate: 1 << 30, Burst: 1 << 30}},
		{KeyPattern: "(?i)KEY|other", MinTTL: ttl, MaxTTL: ttl},
	} {
		s := open(t, memlock.NewStore(), policy, nil)
		l := s.lock(t, "a", "key")
		if err := s.ReleaseLock(as(t, "a"), l); err != nil {
			t.Error(err)
		}
	}
}

func TestOwnPrefix(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		separator, client, prefix string
		ok                        bool
	}{
		{":", "a", "a:", true},
		{"//", "a/b", "a/b//", true},
		{":", "a:b", "", false},
		{"", "a", "", false},
	} {
		prefix, ok := secure.OwnPrefix(tt.separator)(tt.client)
		if ok != tt.ok || ok && prefix != tt.prefix {
			t.Errorf("OwnPrefix(%q)(%q) is %q, %t", tt.separator, tt.client, prefix, ok)
		}
	}
}
