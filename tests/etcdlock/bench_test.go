package etcdlock_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/etcdlock"
)

// BenchmarkPair takes and gives back locks on different keys.
func BenchmarkPair(b *testing.B) {
	for _, n := range []int{1, 64} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m := benchManager(b)
			var next atomic.Int64
			b.SetParallelism(n)
			if n == 1 {
				for b.Loop() {
					l, err := m.AcquireLock(b.Context(), "k", 10*time.Second)
					if err != nil {
						b.Fatal(err)
					}
					if err := l.Release(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				return
			}
			b.RunParallel(func(p *testing.PB) {
				key := fmt.Sprint("k", next.Add(1))
				for p.Next() {
					l, err := m.AcquireLock(b.Context(), key, 10*time.Second)
					if err != nil {
						b.Fatal(err)
					}
					if err := l.Release(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

func benchManager(b *testing.B) *dlm.Manager {
	m, err := etcdlock.NewLockManager(connect(b, single(b), nil), nil, &etcdlock.Options{Prefix: newPrefix()})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = m.Close(context.Background()) })
	return m
}
