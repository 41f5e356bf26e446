package consullock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/backends/consullock"
	"github.com/go-dlm/dlm/tests/servers"
)

// BenchmarkPair takes and gives back a lock that nobody else wants, with dlm and
// with the lock of Consul's own client, that with a session of its own for each
// lock and with one for all.
func BenchmarkPair(b *testing.B) {
	for _, n := range []int{1, 3} {
		list := servers.StartConsulCluster(b, n, nil)
		b.Run(fmt.Sprintf("dlm/%d", n), func(b *testing.B) {
			m, err := consullock.OpenLockManager(config(list, nil), nil, &consullock.Options{Prefix: newPrefix()})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = m.Close(context.Background()) }()
			for b.Loop() {
				l, err := m.AcquireLock(b.Context(), "k", 10*time.Second)
				if err != nil {
					b.Fatal(err)
				}
				if err := l.Release(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
		client, err := api.NewClient(&api.Config{Address: list[0].Addr()})
		if err != nil {
			b.Fatal(err)
		}
		pair := func(b *testing.B, opts api.LockOptions) {
			lock, err := client.LockOpts(&opts)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := lock.Lock(nil); err != nil {
				b.Fatal(err)
			}
			if err := lock.Unlock(); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(fmt.Sprintf("api/%d", n), func(b *testing.B) {
			for b.Loop() {
				pair(b, api.LockOptions{Key: "api", SessionTTL: "10s"})
			}
		})
		b.Run(fmt.Sprintf("api-session/%d", n), func(b *testing.B) {
			id, _, err := client.Session().CreateNoChecks(&api.SessionEntry{TTL: "1h"}, nil)
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				pair(b, api.LockOptions{Key: "api2", Session: id})
			}
		})
	}
}
