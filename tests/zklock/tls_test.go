package zklock_test

import (
	"context"
	"crypto/tls"
	"errors"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/zklock"
	"github.com/go-dlm/dlm/tests/servers"
)

// Over TLS locks are handed on and losses are told; who does not trust the server,
// or speaks TLS where it does not, gets no further.
func TestOverTLS(t *testing.T) {
	t.Parallel()
	z := servers.StartZooKeeper(t, &servers.ZooKeeperConfig{TLS: true})[0]
	manager := func(addr string, config *tls.Config) *dlm.Manager {
		m, err := zklock.NewLockManager([]string{addr}, nil, &zklock.Options{SessionTimeout: session, TLS: config})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			_ = m.Close(ctx) // the server may be gone
		})
		return m
	}
	within := func(d time.Duration) context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		t.Cleanup(cancel)
		return ctx
	}
	for name, m := range map[string]*dlm.Manager{
		"not trusted": manager(z.SecureAddr(), &tls.Config{MinVersion: tls.VersionTLS12}),
		"no TLS":      manager(z.Addr(), z.TLSConfig()),
	} {
		if l, err := m.AcquireLock(within(2*time.Second), "k", session); err == nil || errors.Is(err, dlm.ErrHeld) {
			t.Errorf("%s: %v, %v", name, l, err)
		}
	}
	a, b := manager(z.SecureAddr(), z.TLSConfig()), manager(z.SecureAddr(), z.TLSConfig())
	first, err := a.AcquireLock(within(patience), "k", session)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan *dlm.Lock, 1)
	go func() {
		defer close(got)
		l, err := b.AcquireLock(within(patience), "k", session)
		if err != nil {
			t.Error(err)
			return
		}
		got <- l
	}()
	for {
		info, err := a.GetLock(within(patience), "k")
		if err != nil {
			t.Fatal(err)
		}
		if len(info.Waiters) == 1 {
			break
		}
	}
	if err := first.Release(within(patience)); err != nil {
		t.Fatal(err)
	}
	second := <-got
	if second == nil {
		t.FailNow()
	}
	if second.Token <= first.Token {
		t.Errorf("token %d after %d", second.Token, first.Token)
	}
	z.Kill()
	select {
	case <-second.Done():
	case <-time.After(session + time.Second):
		t.Error("the loss was not told")
	}
}
