package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// A waiter that asks again writes nothing, whether its first call was answered
// or not.
func TestWaiterWritesOnce(t *testing.T) {
	versions(t, func(t *testing.T, start func(testing.TB) []*servers.Etcd) {
		r := newRig(t, start(t))
		cut := newCuts(t)
		b := r.backend(cut)
		holder := exclusive("k", 20*time.Second)
		if _, err := b.Acquire(r.within(), holder); err != nil {
			t.Fatal(err)
		}
		p, err := cut.to(r.members[0].Addr())
		if err != nil {
			t.Fatal(err)
		}
		for i, answered := range []bool{true, false} {
			req := holder
			req.Owner, req.Enqueue = fmt.Sprint("waiter", i), true
			if !answered {
				p.Hold(servers.Down)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				done := make(chan error, 1)
				go func() {
					_, err := b.Acquire(ctx, req)
					done <- err
				}()
				r.until("the ticket is made", func() bool { return len(r.keys("k")) == i+2 })
				cancel()
				if err := <-done; err == nil {
					t.Fatal("it was answered")
				}
				p.Resume()
			}
			for range 30 {
				wantHeld(t, b, req)
			}
			name := r.keys("k")[i+1]
			resp, err := r.admin.Get(r.within(), name)
			if err != nil || len(resp.Kvs) != 1 {
				t.Fatalf("%v, %v", resp, err)
			}
			if n := resp.Kvs[0].Version; n != 1 {
				t.Errorf("answered %v: the ticket was written %d times", answered, n)
			}
		}
	})
}

func wantHeld(t *testing.T, b driver.Backend, req driver.Request) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := b.Acquire(ctx, req)
	if _, ok := errors.AsType[*driver.HeldError](err); !ok {
		t.Errorf("%s: %v", req.Owner, err)
	}
}

// underWay tells how many calls of a client are under way whenever one begins.
func underWay(tell func(int64)) func(*clientv3.Config) {
	var now atomic.Int64
	return func(cfg *clientv3.Config) {
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
		) error {
			tell(now.Add(1))
			defer now.Add(-1)
			return invoke(ctx, method, req, reply, cc, opts...)
		}))
	}
}

// However many ask for one lock, few of their questions are on the way.
func TestFewAskAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, single(t))
	var most atomic.Int64
	b := r.backend(nil, underWay(func(n int64) {
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
	}))
	if _, err := b.Acquire(r.within(), exclusive("k", 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	const callers = 400
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			req := exclusive("k", 20*time.Second)
			req.Owner, req.Enqueue = fmt.Sprint("waiter", i), true
			for range 2 {
				wantHeld(t, b, req)
			}
		})
	}
	wg.Wait()
	t.Logf("at most %d at once", most.Load())
	if most.Load() > callers/4 {
		t.Errorf("%d at once", most.Load())
	}
}
