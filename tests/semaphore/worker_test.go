package semaphore_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/backends/redislock"
)

// The semaphore of the tests.
const (
	name    = "permits"
	permits = 10
)

// workerEnv has a job in the environment of a process that works.
const workerEnv = "DLM_TEST_SEMAPHORE_WORKER"

// job is what one process is to do.
type job struct {
	Store, Addr string
	Workers     int
	TTL         time.Duration
}

// The times after which the dead are forgotten, chosen so that it happens several times in a run.
const (
	redisTTL    = 1500 * time.Millisecond
	redisWindow = time.Second
	etcdTTL     = 2 * time.Second
	etcdWaiter  = time.Second
)

// options are those of the backends.
type options struct {
	redis *redislock.Options
	etcd  *etcdlock.Options
}

// soon has those who died while they waited forgotten soon.
var soon = options{&redislock.Options{LivenessWindow: redisWindow}, &etcdlock.Options{WaiterTTL: etcdWaiter}}

// open returns a manager, and what closes it with its client.
func open(store, addr string, opts options) (*dlm.Manager, func() error, error) {
	var (
		m      *dlm.Manager
		client io.Closer
		err    error
	)
	switch store {
	case "redis":
		c := redis.NewClient(&redis.Options{Addr: addr})
		client = c
		m, err = redislock.NewLockManager(c, nil, opts.redis)
	case "etcd":
		var c *clientv3.Client
		c, err = clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
		if err != nil {
			return nil, nil, err
		}
		client = c
		m, err = etcdlock.NewLockManager(c, nil, opts.etcd)
	default:
		return nil, nil, fmt.Errorf("there is no store %q", store)
	}
	if err != nil {
		return nil, nil, errors.Join(err, client.Close())
	}
	return m, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return errors.Join(m.Close(ctx), client.Close())
	}, nil
}

// reporter sends reports to the judge.
type reporter struct {
	mu  sync.Mutex
	enc *json.Encoder // one write for each report, short enough to be whole or not there
}

func (r *reporter) send(rep report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.enc.Encode(rep); err != nil {
		os.Exit(1) // the test is gone
	}
}

func (r *reporter) fault(worker int, err error) {
	r.send(report{Kind: fault, Worker: worker, Text: err.Error()})
}

// work is a process of workers, which ends when its standard input does.
func work(text string) int {
	out := &reporter{enc: json.NewEncoder(os.Stdout)}
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		out.fault(-1, err)
		return 1
	}
	m, closeAll, err := open(j.Store, j.Addr, soon)
	if err != nil {
		out.fault(-1, err)
		return 1
	}
	sem, err := dlm.NewDistributedSemaphore(m, name, permits)
	if err != nil {
		out.fault(-1, err)
		return 1
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // however it ends
		cancel()
	}()
	var wg sync.WaitGroup
	for i := range j.Workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := turn(ctx, out, sem, i, j.TTL); err != nil && ctx.Err() == nil {
					out.fault(i, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := closeAll(); err != nil {
		out.fault(-1, err)
		return 1
	}
	return 0
}

// turn takes a permit, keeps it for a while and releases it.
func turn(ctx context.Context, out *reporter, sem *dlm.Semaphore, worker int, ttl time.Duration) error {
	asked := now()
	l, err := sem.Acquire(ctx, ttl)
	if err != nil {
		return err
	}
	at := now()
	out.send(report{Kind: entered, Worker: worker, Asked: asked, At: at, Until: ahead(l.Deadline()), Token: l.Token})

	// A few stay beyond their time to live.
	d := rand.N(100 * time.Millisecond)
	if rand.IntN(50) == 0 {
		d = ttl * 3 / 2
	}
	over := time.NewTimer(d)
	defer over.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for in := true; in; {
		select {
		case <-tick.C:
			out.send(report{Kind: stays, Worker: worker, Until: ahead(l.Deadline())})
			continue
		case <-over.C:
		case <-l.Done():
		case <-ctx.Done():
		}
		in = false
	}

	// In this order: it may be lost in between.
	until := ahead(l.Deadline())
	out.send(report{Kind: leaves, Worker: worker, At: now(), Until: until})
	err = l.Release(context.WithoutCancel(ctx))
	if errors.Is(err, dlm.ErrLost) {
		out.send(report{Kind: lost, Worker: worker, Text: err.Error()})
		return nil
	}
	if err != nil {
		out.fault(worker, err)
	}
	return nil
}
