package redislock

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

// Tasks may begin while somebody waits for their end.
func TestTasksBeginDuringWait(t *testing.T) {
	t.Parallel()
	var tasks tasks
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 1000 {
				tasks.start(func() {})
			}
		})
		wg.Go(func() {
			for range 1000 {
				tasks.wait()
			}
		})
	}
	wg.Wait()
	tasks.wait()
	if tasks.n != 0 || tasks.idle != nil {
		t.Errorf("%d tasks are left", tasks.n)
	}
}

// undialled returns a dispatcher over a client that must not be used.
func undialled(t *testing.T) *dispatcher {
	t.Helper()
	c := redis.NewClient(&redis.Options{Dialer: func(context.Context, string, string) (net.Conn, error) {
		t.Error("the call is sent")
		return nil, errors.New("must not be dialled")
	}})
	t.Cleanup(func() { c.Close() })
	return newDispatcher(c, 0, 0)
}

// A question whose owner has given up is not sent, and is not waited for.
func TestGivenUpIsNotSent(t *testing.T) {
	t.Parallel()
	d := undialled(t)
	_, _, err := d.do(&call{
		ctx: t.Context(), script: quorumAcquireScript, owner: "a", tracked: true, over: func() bool { return true },
	})
	if !errors.Is(err, driver.ErrNotApplied) {
		t.Errorf("%v, want it not applied", err)
	}
	if len(d.adrift) > 0 {
		t.Error("it is waited for")
	}
	if err := d.await(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

// What the server says to a repetition is not said of the first time.
func TestRepetitionRefused(t *testing.T) {
	t.Parallel()
	d := undialled(t)
	for _, text := range []string{"MOVED 1 127.0.0.1:1", "READONLY no", "OOM no", "NOPERM no", "LOADING no"} {
		for _, repeated := range []bool{false, true} {
			_, _, err := d.result(&call{err: nestedError(text), repeated: repeated})
			certain := errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid)
			if certain == repeated {
				t.Errorf("%s, repeated %v: %v", text, repeated, err)
			}
		}
	}
}

// An owner is told the token of its earlier grant only if a node still has it.
func TestTokenOfEarlierGrant(t *testing.T) {
	t.Parallel()
	q := &Quorum{majority: 2}
	for _, tc := range []struct {
		name         string
		before, want int64
		tokens, as   []int64
	}{
		{"new", 0, 7, []int64{7, 7}, []int64{0, 0}},
		{"again", 5, 5, []int64{5, 5}, []int64{1, 1}},
		{"again, and one node by itself", 5, 5, []int64{5, 5}, []int64{1, 0}},
		{"released by another client, and granted anew", 5, 7, []int64{7, 7}, []int64{1, 1}},
	} {
		v := &vote{token: tc.before}
		for i, token := range tc.tokens {
			q.count(v, answer{node: &node{index: i}, reply: []any{int64(1), int64(1), token, tc.as[i]}})
		}
		if !q.agree(t.Context(), 0, v, &driver.Request{}, 1) || v.token != tc.want {
			t.Errorf("%s: token %d, want %d", tc.name, v.token, tc.want)
		}
	}
}

// A reply that cannot be read says nothing about the call: it may have been
// carried out. A node that has left the cluster was not asked.
func TestRepliesThatSayNothing(t *testing.T) {
	t.Parallel()
	single := undialled(t)
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	t.Cleanup(func() { c.Close() })
	cluster := newDispatcher(c, 0, 0)
	for _, tc := range []struct {
		name    string
		d       *dispatcher
		err     error
		certain bool
	}{
		{"spoilt", single, errors.New(`redis: invalid reply: "HTTP/1.1 400 Bad Request"`), false},
		{"node gone from a cluster", cluster, redis.ErrClosed, true},
		{"client closed", single, redis.ErrClosed, false},
	} {
		_, _, err := tc.d.result(&call{err: tc.err})
		if certain := errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid); certain != tc.certain {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// panics is a hook of the user's that is broken.
type panics struct{}

func (panics) DialHook(next redis.DialHook) redis.DialHook { return next }

func (panics) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { panic("broken hook") }
}

func (panics) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { panic("broken hook") }
}

// A panic in the client is an error of the call, in whichever goroutine it is.
func TestClientPanics(t *testing.T) {
	t.Parallel()
	hooked := func(replicas int) *dispatcher {
		c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		t.Cleanup(func() { c.Close() })
		c.AddHook(panics{})
		return newDispatcher(c, replicas, 0)
	}
	d, acked := hooked(0), hooked(1)
	together := func() error {
		batch := []*call{{ctx: t.Context(), script: probeScript}, {ctx: t.Context(), script: probeScript}}
		for _, c := range batch {
			c.done = make(chan struct{})
		}
		d.send(batch)
		return errors.Join(batch[0].err, batch[1].err)
	}
	for name, f := range map[string]func() error{
		"alone":    func() error { _, err := d.run(t.Context(), probeScript, nil); return err },
		"together": together,
		"acknowledged": func() error {
			_, _, err := acked.do(&call{ctx: t.Context(), script: probeScript, ack: true})
			return err
		},
		"info": func() error { _, err := d.info(t.Context()); return err },
		"scan": func() error {
			_, err := scanKeys(t.Context(), []redis.Cmdable{d.client}, "dlm:", "", "")
			return err
		},
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), "panicked: broken hook") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// seen is a hook that counts commands.
type seen struct {
	panics
	n *atomic.Int32
}

func (s seen) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		s.n.Add(1)
		return next(ctx, cmd)
	}
}

// The user's hooks see lone calls, too, each once, and however many backends
// share the client.
func TestHooksSeeLoneCalls(t *testing.T) {
	t.Parallel()
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer c.Close()
	var n atomic.Int32
	c.AddHook(seen{n: &n})
	for range 3 {
		d := newDispatcher(c, 0, 0)
		if _, err := d.run(t.Context(), probeScript, nil); !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%v, want a failure to connect", err)
		}
	}
	if n.Load() != 3 {
		t.Errorf("the hook saw %d of 3 calls", n.Load())
	}
}
