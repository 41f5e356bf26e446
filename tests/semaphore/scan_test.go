package semaphore_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	random "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/tests/servers"
)

// benchTTL is that of all permits of the benchmark.
const benchTTL = 10 * time.Second

// taker waits for a permit and returns what gives it back.
type taker func(context.Context) (release func(context.Context) error, err error)

// slots are what a semaphore is without a store's help: a key for each permit.
// Whoever wants one tries them all in random order, and if none is free, again
// after a pause. Its requests do not end with a context: a slot that
// was taken by one of them would not be given back.
type slots struct {
	// set sets a slot to a value if it is free, clear frees it if it has that value.
	set, clear func(ctx context.Context, slot, value string) (bool, error)
	pause      time.Duration // mean
}

func (s slots) take(ctx context.Context) (func(context.Context) error, error) {
	whole := context.WithoutCancel(ctx)
	owner := rand.Text()
	for {
		for _, i := range random.Perm(permits) {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			slot := fmt.Sprint("slot", i)
			release := func(ctx context.Context) error {
				ok, err := s.clear(ctx, slot, owner)
				if err == nil && !ok {
					err = errNotHeld
				}
				return err
			}
			ok, err := s.set(whole, slot, owner)
			if ok {
				return release, nil
			}
			if err != nil {
				return nil, errors.Join(err, release(whole)) // nobody knows whether it was set
			}
		}
		select {
		case <-time.After(s.pause/3 + random.N(s.pause*4/3)):
		case <-ctx.Done():
		}
	}
}

var errNotHeld = errors.New("no longer held")

// redisSlots are slots on Redis. The client puts the requests of all goroutines
// into pipelines by itself.
func redisSlots(b *testing.B, addr string, pause time.Duration) taker {
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(client.Close)
	compareDelete := rueidis.NewLuaScript(`return redis.call("get", KEYS[1]) == ARGV[1] and redis.call("del", KEYS[1]) or 0`)
	return slots{
		set: func(ctx context.Context, slot, value string) (bool, error) {
			err := client.Do(ctx, client.B().Set().Key(slot).Value(value).Nx().PxMilliseconds(benchTTL.Milliseconds()).Build()).Error()
			if rueidis.IsRedisNil(err) {
				return false, nil
			}
			return err == nil, err
		},
		clear: func(ctx context.Context, slot, value string) (bool, error) {
			n, err := compareDelete.Exec(ctx, client, []string{slot}, []string{value}).AsInt64()
			return n == 1, err
		},
		pause: pause,
	}.take
}

// etcdSlots are slots on etcd, with a lease that all share.
func etcdSlots(b *testing.B, addr string, pause time.Duration) taker {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { client.Close() })
	session, err := concurrency.NewSession(client, concurrency.WithTTL(int(benchTTL/time.Second)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { session.Close() })
	write := func(ctx context.Context, cond clientv3.Cmp, op clientv3.Op) (bool, error) {
		resp, err := client.Txn(ctx).If(cond).Then(op).Commit()
		return err == nil && resp.Succeeded, err
	}
	return slots{
		set: func(ctx context.Context, slot, value string) (bool, error) {
			return write(ctx, clientv3.Compare(clientv3.CreateRevision(slot), "=", 0),
				clientv3.OpPut(slot, value, clientv3.WithLease(session.Lease())))
		},
		clear: func(ctx context.Context, slot, value string) (bool, error) {
			return write(ctx, clientv3.Compare(clientv3.Value(slot), "=", value), clientv3.OpDelete(slot))
		},
		pause: pause,
	}.take
}

// semaphore is that of this project.
func semaphore(b *testing.B, store, addr string) taker {
	m, closeAll, err := open(store, addr, options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := closeAll(); err != nil {
			b.Error(err)
		}
	})
	sem, err := dlm.NewDistributedSemaphore(m, "bench", permits)
	if err != nil {
		b.Fatal(err)
	}
	return func(ctx context.Context) (func(context.Context) error, error) {
		l, err := sem.Acquire(ctx, benchTTL)
		if err != nil {
			return nil, err
		}
		return l.Release, nil
	}
}

// round is what was measured in a while.
type round struct {
	rate    float64 // acquisitions a second
	longest time.Duration
}

// measure has goroutines take, hold and release permits for a second.
func measure(b *testing.B, takers []taker, workers int, hold time.Duration) round {
	ctx, cancel := context.WithTimeout(b.Context(), time.Second)
	defer cancel()
	var (
		group   sync.WaitGroup
		inside  atomic.Int32
		count   atomic.Int64
		failed  atomic.Int64
		longest = make([]time.Duration, workers)
	)
	began := time.Now()
	for i := range workers {
		take := takers[i%len(takers)]
		group.Go(func() {
			for asked := time.Now(); ; asked = time.Now() {
				release, err := take(ctx)
				longest[i] = max(longest[i], time.Since(asked))
				if ctx.Err() != nil {
					if err == nil {
						err = release(context.WithoutCancel(ctx))
					}
					if err != nil && !errors.Is(err, ctx.Err()) {
						failed.Add(1)
					}
					return
				}
				if err != nil {
					failed.Add(1)
					continue
				}
				if inside.Add(1) > permits {
					b.Error("too many are inside")
				}
				if hold > 0 {
					time.Sleep(hold)
				}
				inside.Add(-1)
				if err := release(context.WithoutCancel(ctx)); err != nil {
					failed.Add(1)
				}
				if ctx.Err() == nil {
					count.Add(1)
				}
			}
		})
	}
	<-ctx.Done()
	n, took := count.Load(), time.Since(began)
	group.Wait()
	if failed.Load() > 0 {
		b.Logf("%d calls failed", failed.Load())
	}
	return round{rate: float64(n) / took.Seconds(), longest: slices.Max(longest)}
}

// BenchmarkScan compares the semaphore with a scan over slots: acquisitions a
// second when many goroutines want 10 permits, in turns of one second each. NxM are
// N clients with M goroutines each; retry is the mean pause of the scan: a few
// milliseconds, or redsync's default of 50 to 250. The figures are medians over the
// turns (-benchtime 5x), and the longest wait of all, also of one that was
// cut short by the end of its turn.
func BenchmarkScan(b *testing.B) {
	for _, store := range []struct {
		name  string
		start func(*testing.B) string
		scan  func(b *testing.B, addr string, pause time.Duration) taker
	}{
		{"redis", func(b *testing.B) string { return servers.StartRedis(b, nil).Addr() }, redisSlots},
		// It waits for the disk, as it does outside of tests.
		{"etcd", func(b *testing.B) string { return servers.StartEtcd(b, &servers.EtcdConfig{Sync: true}).Addr() }, etcdSlots},
	} {
		b.Run(store.name, func(b *testing.B) {
			addr := store.start(b)
			for _, crowd := range []struct{ clients, each int }{{1, 64}, {10, 20}} {
				for _, hold := range []time.Duration{0, time.Millisecond} {
					for _, pause := range []time.Duration{4 * time.Millisecond, 150 * time.Millisecond} {
						b.Run(fmt.Sprintf("%dx%d/hold=%v/retry=%v", crowd.clients, crowd.each, hold, pause), func(b *testing.B) {
							var ours, theirs []taker
							for range crowd.clients {
								ours = append(ours, semaphore(b, store.name, addr))
								theirs = append(theirs, store.scan(b, addr, pause))
							}
							compare(b, ours, theirs, crowd.clients*crowd.each, hold)
						})
					}
				}
			}
		})
	}
}

func compare(b *testing.B, ours, theirs []taker, workers int, hold time.Duration) {
	var dlm, scan []round
	for b.Loop() {
		if len(dlm)%2 == 0 {
			dlm = append(dlm, measure(b, ours, workers, hold))
			scan = append(scan, measure(b, theirs, workers, hold))
		} else {
			scan = append(scan, measure(b, theirs, workers, hold))
			dlm = append(dlm, measure(b, ours, workers, hold))
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(dlm), "dlm/s")
	b.ReportMetric(median(scan), "scan/s")
	b.ReportMetric(median(dlm)/median(scan), "ratio")
	b.ReportMetric(longest(dlm), "dlm-longest-ms")
	b.ReportMetric(longest(scan), "scan-longest-ms")
}

func median(list []round) float64 {
	slices.SortFunc(list, func(a, b round) int { return cmp.Compare(a.rate, b.rate) })
	return list[len(list)/2].rate
}

func longest(list []round) float64 {
	return slices.MaxFunc(list, func(a, b round) int { return cmp.Compare(a.longest, b.longest) }).longest.Seconds() * 1000
}
