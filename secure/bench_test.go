package secure_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

func benchOpen(b *testing.B, policy *secure.Policy) (*secure.Manager, *dlm.Manager) {
	b.Helper()
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = m.Close(context.Background()) })
	s, err := secure.New(m, policy)
	if err != nil {
		b.Fatal(err)
	}
	return s, m
}

// BenchmarkRefusal is what a call costs that is refused.
func BenchmarkRefusal(b *testing.B) {
	none := secure.Limits{Rate: secure.Unlimited}
	held := none
	held.Held = 1
	for _, bb := range []struct {
		name   string
		policy *secure.Policy
		key    string
	}{
		{"rate", &secure.Policy{PerClient: secure.Limits{Rate: 1e-9}}, "payment:42"},
		{"held", &secure.Policy{PerClient: held, Total: none}, "payment:42"},
		{"key", &secure.Policy{PerClient: none, Total: none}, "payment 42"},
		{"prefix", &secure.Policy{PerClient: none, Total: none, Prefix: secure.OwnPrefix(":")}, "payment:42"},
	} {
		b.Run(bb.name, func(b *testing.B) {
			s, _ := benchOpen(b, bb.policy)
			ctx := secure.WithClient(b.Context(), "client")
			_, _ = s.TryLock(ctx, "client:1", ttl)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.TryLock(ctx, bb.key, ttl); err == nil {
					b.Fatal("it was not refused")
				}
			}
		})
	}
	b.Run("made-up clients", func(b *testing.B) {
		s, _ := benchOpen(b, &secure.Policy{Total: secure.Limits{Rate: 1e-9}})
		_, _ = s.GetLock(secure.WithClient(b.Context(), "first"), "key")
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if _, err := s.TryLock(secure.WithClient(b.Context(), fmt.Sprint(i)), "key", ttl); err == nil {
				b.Fatal("it was not refused")
			}
		}
	})
}

// BenchmarkTryAndRelease is what the wrapper adds to a lock in memory.
func BenchmarkTryAndRelease(b *testing.B) {
	none := secure.Limits{Rate: 1 << 30}
	s, m := benchOpen(b, &secure.Policy{PerClient: none, Total: none})
	for _, bb := range []struct {
		name string
		m    dlm.LockManager
	}{{"without", m}, {"with", s}} {
		b.Run(bb.name, func(b *testing.B) {
			ctx := secure.WithClient(b.Context(), "client")
			b.ReportAllocs()
			for b.Loop() {
				l, err := bb.m.TryLock(ctx, "key", ttl)
				if err != nil {
					b.Fatal(err)
				}
				if err := bb.m.ReleaseLock(ctx, l); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
