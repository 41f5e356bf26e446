package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// Bench runs the benchmarks that all backends share. Those of single calls
// also report their latency at the 50th and 99th percentile, and those of many
// callers the lock operations in a second, where an acquire and a release are
// two.
func Bench(b *testing.B, open func(b *testing.B) *Harness) {
	for _, bench := range []struct {
		name string
		run  func(*bencher)
	}{
		{"Pair", benchPair},
		{"ManagerPair", benchManagerPair},
		{"TryHeld", benchTryHeld},
		{"HandOver", benchHandOver},
		{"ManagerHandOver", benchManagerHandOver},
		{"Extend100", benchExtend},
		{"Callers64Keys1000", benchCallers},
		{"ManagerCallers64Keys1000", benchManagerCallers},
	} {
		b.Run(bench.name, func(b *testing.B) {
			h := open(b)
			bench.run(&bencher{B: b, h: h})
		})
	}
}

// benchTTL is the TTL of all grants.
const benchTTL = time.Minute

// bencher is one benchmark.
type bencher struct {
	*testing.B
	h *Harness
}

func (b *bencher) open() driver.Backend {
	cl := b.h.Open(b.B)
	b.Cleanup(func() { _ = cl.Close() })
	return cl
}

func (b *bencher) manage() *dlm.Manager {
	m, err := dlm.NewManager(b.h.Open(b.B), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = m.Close(context.Background()) })
	return m
}

func (b *bencher) request(key, owner string) driver.Request {
	return driver.Request{Key: key, Owner: owner, TTL: max(benchTTL, b.h.Unit), Limit: 1}
}

// must ends the benchmark on an error.
func (b *bencher) must(err error) {
	if err != nil {
		b.Helper()
		b.Fatal(err)
	}
}

// each runs f b.N times, one after another, and reports the latency of the
// part that f measures.
func (b *bencher) each(f func(i int) time.Duration) {
	took := make([]time.Duration, 0, b.N)
	b.ResetTimer()
	for i := range b.N {
		took = append(took, f(i))
	}
	b.StopTimer()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
}

// crowd runs f b.N times in all, by a number of callers at once, and reports
// the lock operations in a second.
func (b *bencher) crowd(callers int, f func(caller, i int) error) {
	var (
		next atomic.Int64
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
	)
	b.ResetTimer()
	start := time.Now()
	for caller := range callers {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= b.N {
					return
				}
				if err := f(caller, i); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
					return
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	b.StopTimer()
	b.must(errors.Join(errs...))
	b.ReportMetric(2*float64(b.N)/took.Seconds(), "lockops/s")
}

func benchPair(b *bencher) {
	ctx, cl := context.Background(), b.open()
	b.each(func(i int) time.Duration {
		start := time.Now()
		lease, err := cl.Acquire(ctx, b.request("k", strconv.Itoa(i)))
		took := time.Since(start)
		b.must(err)
		b.must(cl.Release(ctx, lease))
		return took
	})
}

func benchManagerPair(b *bencher) {
	ctx, m := context.Background(), b.manage()
	b.each(func(int) time.Duration {
		start := time.Now()
		l, err := m.AcquireLock(ctx, "k", benchTTL)
		took := time.Since(start)
		b.must(err)
		b.must(l.Release(ctx))
		return took
	})
}

func benchTryHeld(b *bencher) {
	ctx, a, cl := context.Background(), b.open(), b.open()
	lease, err := a.Acquire(ctx, b.request("k", "holder"))
	b.must(err)
	b.each(func(i int) time.Duration {
		start := time.Now()
		_, err := cl.Acquire(ctx, b.request("k", strconv.Itoa(i)))
		took := time.Since(start)
		if !errors.Is(err, driver.ErrHeld) {
			b.Fatalf("a held key: %v, want ErrHeld", err)
		}
		return took
	})
	b.must(a.Release(ctx, lease))
}

// benchHandOver measures a release and the acquisition by the next in the
// queue, who asks at once.
func benchHandOver(b *bencher) {
	ctx, clients := context.Background(), []driver.Backend{b.open(), b.open()}
	lease, err := clients[0].Acquire(ctx, b.request("k", "first"))
	b.must(err)
	b.each(func(i int) time.Duration {
		next := clients[(i+1)%2]
		req := b.request("k", strconv.Itoa(i))
		req.Enqueue = true
		if _, err := next.Acquire(ctx, req); !errors.Is(err, driver.ErrHeld) {
			b.Fatalf("a held key: %v, want ErrHeld", err)
		}
		start := time.Now()
		b.must(clients[i%2].Release(ctx, lease))
		lease, err = next.Acquire(ctx, req)
		for errors.Is(err, driver.ErrHeld) {
			lease, err = next.Acquire(ctx, req)
		}
		b.must(err)
		return time.Since(start)
	})
	b.must(clients[b.N%2].Release(ctx, lease))
}

// benchManagerHandOver measures the time from a release by one manager to the
// return of AcquireLock in another, where a caller has been waiting.
func benchManagerHandOver(b *bencher) {
	ctx := context.Background()
	watch := NewFaults(b.h.Open(b.B)) // tells when a waiter is in the queue
	a := b.manage()
	m, err := dlm.NewManager(watch.Backend(), nil)
	b.must(err)
	b.Cleanup(func() { _ = m.Close(ctx) })
	type won struct {
		l   *dlm.Lock
		err error
		at  time.Time
	}
	got := make(chan won, 1)
	b.each(func(int) time.Duration {
		held, err := a.AcquireLock(ctx, "k", benchTTL)
		b.must(err)
		asked := watch.Inject(Fault{Kind: Delay, Op: OpAcquire})
		go func() {
			l, err := m.AcquireLock(ctx, "k", benchTTL)
			got <- won{l, err, time.Now()}
		}()
		<-asked.Hit()
		asked.Remove()
		b.waiting(a)
		start := time.Now()
		b.must(held.Release(ctx))
		w := <-got
		b.must(w.err)
		b.must(w.l.Release(ctx))
		return w.at.Sub(start)
	})
}

// waiting returns when somebody waits for the key, if the store can tell.
func (b *bencher) waiting(m *dlm.Manager) {
	for {
		info, err := m.GetLock(context.Background(), "k")
		if errors.Is(err, errors.ErrUnsupported) {
			return
		}
		b.must(err)
		if len(info.Waiters) > 0 {
			return
		}
	}
}

func benchExtend(b *bencher) {
	const size = 100
	ctx, cl := context.Background(), b.open()
	batch := make([]driver.Renewal, size)
	for i := range batch {
		lease, err := cl.Acquire(ctx, b.request(fmt.Sprintf("k%d", i), "holder"))
		b.must(err)
		batch[i].Lease = lease
	}
	b.each(func(int) time.Duration {
		start := time.Now()
		cl.Extend(ctx, batch)
		took := time.Since(start)
		for _, r := range batch {
			b.must(r.Err)
		}
		return took
	})
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/size, "ns/lock")
	for _, r := range batch {
		b.must(cl.Release(ctx, r.Lease))
	}
}

const (
	crowdCallers = 64
	crowdKeys    = 1000
)

func benchCallers(b *bencher) {
	ctx, cl := context.Background(), b.open()
	b.crowd(crowdCallers, func(caller, i int) error {
		// Every caller has keys of its own most of the time.
		key := fmt.Sprintf("k%d", (i*crowdCallers+caller)%crowdKeys)
		lease, err := cl.Acquire(ctx, b.request(key, strconv.Itoa(i)))
		for errors.Is(err, driver.ErrHeld) {
			lease, err = cl.Acquire(ctx, b.request(key, strconv.Itoa(i)))
		}
		if err != nil {
			return err
		}
		return cl.Release(ctx, lease)
	})
}

func benchManagerCallers(b *bencher) {
	ctx, m := context.Background(), b.manage()
	b.crowd(crowdCallers, func(caller, i int) error {
		key := fmt.Sprintf("k%d", (i*crowdCallers+caller)%crowdKeys)
		l, err := m.AcquireLock(ctx, key, benchTTL)
		if err != nil {
			return err
		}
		return l.Release(ctx)
	})
}
