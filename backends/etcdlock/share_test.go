package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

// delay is how long the server of these tests takes.
const delay = 5 * time.Millisecond

// fakeStore answers transactions, and notes what it was sent: the keys that each
// request deletes, with one of them as it is and several in parentheses.
type fakeStore struct {
	sharer
	cancel context.CancelFunc
	sent   []string // guarded by sharer.mu
	// fail says what becomes of a request.
	fail func(ctx context.Context, names []string) error
	// change makes another answer of the right one.
	change func(*pb.TxnResponse)
}

func newFakeStore() *fakeStore {
	f := &fakeStore{}
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	f.init(ctx, f.answer)
	return f
}

func (f *fakeStore) answer(ctx context.Context, t condition) (resp *pb.TxnResponse, rev int64, err error) {
	err = guarded(func() error {
		resp, rev, err = f.carryOut(ctx, t)
		return err
	})
	return resp, rev, err
}

func (f *fakeStore) carryOut(ctx context.Context, t condition) (*pb.TxnResponse, int64, error) {
	resp := &pb.TxnResponse{Succeeded: true}
	var names []string
	for _, op := range t.then {
		if !op.IsTxn() {
			names = append(names, string(op.KeyBytes()))
			continue
		}
		_, then, _ := op.Txn()
		names = append(names, string(then[0].KeyBytes()))
		resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: &pb.TxnResponse{Succeeded: true}}})
	}
	slices.Sort(names)
	note := strings.Join(names, " ")
	if len(names) > 1 {
		note = "(" + note + ")"
	}
	f.mu.Lock()
	f.sent = append(f.sent, note)
	rev := int64(len(f.sent))
	f.mu.Unlock()
	if f.fail != nil {
		if err := f.fail(ctx, names); err != nil {
			return nil, 0, err
		}
	}
	select {
	case <-time.After(delay):
		if f.change != nil {
			f.change(resp)
		}
		return resp, rev, nil
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
}

// delete begins a transaction about a key, and returns its error when it is over.
func (f *fakeStore) delete(ctx context.Context, key string, hurry ...bool) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, rev, err := f.do(ctx, key, len(hurry) > 0, condition{then: []clientv3.Op{clientv3.OpDelete(key)}})
		if err == nil && rev == 0 {
			err = errors.New("no revision")
		}
		done <- err
	}()
	synctest.Wait()
	return done
}

// busy fills the places of requests that are on their way.
func (f *fakeStore) busy() {
	for i := range maxUnderWay {
		f.delete(f.ctx, fmt.Sprint("busy", i))
	}
	f.mu.Lock()
	f.sent = nil
	f.mu.Unlock()
}

func (f *fakeStore) want(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Equal(f.sent, want) {
		t.Errorf("sent %q, want %q", f.sent, want)
	}
}

func ok(t *testing.T, done ...<-chan error) {
	t.Helper()
	for _, d := range done {
		if err := <-d; err != nil {
			t.Error(err)
		}
	}
}

func TestShare(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		run  func(t *testing.T, f *fakeStore)
	}{
		{"calls that meet share a request", func(t *testing.T, f *fakeStore) {
			f.busy()
			a, b, c := f.delete(f.ctx, "a"), f.delete(f.ctx, "b"), f.delete(f.ctx, "c")
			f.want(t)
			ok(t, a, b, c)
			f.want(t, "(a b c)")
		}},
		{"what is in a hurry does not wait", func(t *testing.T, f *fakeStore) {
			f.busy()
			ok(t, f.delete(f.ctx, "a", true))
			f.want(t, "a")
		}},
		{"a request is bounded", func(t *testing.T, f *fakeStore) {
			f.busy()
			var all []<-chan error
			for i := range 2*maxShared + 1 {
				all = append(all, f.delete(f.ctx, fmt.Sprint(i)))
			}
			ok(t, all...)
			f.mu.Lock()
			defer f.mu.Unlock()
			if len(f.sent) != 3 {
				t.Errorf("%d requests, want 3", len(f.sent))
			}
			for _, s := range f.sent {
				if n := len(strings.Fields(s)); n > maxShared {
					t.Errorf("%d in one request", n)
				}
			}
		}},
		{"a canceled call that was not sent", func(t *testing.T, f *fakeStore) {
			f.busy()
			ctx, cancel := context.WithCancel(f.ctx)
			a, b := f.delete(ctx, "a"), f.delete(f.ctx, "b")
			cancel()
			synctest.Wait()
			if err := <-a; !errors.Is(err, driver.ErrNotApplied) || !errors.Is(err, context.Canceled) {
				t.Errorf("%v", err)
			}
			ok(t, b)
			f.want(t, "b")
		}},
		{"a canceled call that was sent", func(t *testing.T, f *fakeStore) {
			f.busy()
			ctx, cancel := context.WithCancel(f.ctx)
			a, b := f.delete(ctx, "a"), f.delete(f.ctx, "b")
			time.Sleep(delay + time.Millisecond)
			cancel()
			synctest.Wait()
			select {
			case err := <-a:
				if !errors.Is(err, context.Canceled) || certain(classify(ctx, err, "")) {
					t.Errorf("%v", err)
				}
			default:
				t.Error("it does not come back")
			}
			ok(t, b)
			f.want(t, "(a b)")
		}},
		{"the request goes on for the last of its callers", func(t *testing.T, f *fakeStore) {
			f.fail = func(ctx context.Context, names []string) error {
				if len(names) == 1 {
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			}
			f.busy()
			short, cancel := context.WithTimeout(f.ctx, time.Second)
			defer cancel()
			long, cancel := context.WithTimeout(f.ctx, 2*time.Second)
			defer cancel()
			start := time.Now()
			a, b := f.delete(short, "a"), f.delete(long, "b")
			if err := <-a; !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Second {
				t.Errorf("%v after %v", err, time.Since(start))
			}
			if err := <-b; !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 2*time.Second {
				t.Errorf("%v after %v", err, time.Since(start))
			}
			f.want(t, "(a b)")
		}},
		{"a request that nobody waits for any more ends", func(t *testing.T, f *fakeStore) {
			ended := false
			f.fail = func(ctx context.Context, names []string) error {
				if len(names) == 1 {
					return nil
				}
				<-ctx.Done()
				f.mu.Lock()
				defer f.mu.Unlock()
				ended = true
				return ctx.Err()
			}
			f.busy()
			one, cancelOne := context.WithCancel(f.ctx)
			two, cancelTwo := context.WithCancel(f.ctx)
			a, b := f.delete(one, "a"), f.delete(two, "b")
			time.Sleep(delay + time.Millisecond)
			f.want(t, "(a b)")
			for i, cancel := range []func(){cancelOne, cancelTwo} {
				cancel()
				synctest.Wait()
				f.mu.Lock()
				if ended != (i == 1) {
					t.Errorf("after %d have left: ended is %v", i+1, ended)
				}
				f.mu.Unlock()
			}
			for _, done := range []<-chan error{a, b} {
				if err := <-done; !errors.Is(err, context.Canceled) || certain(classify(one, err, "")) {
					t.Errorf("%v", err)
				}
			}
		}},
		{"an answer to something else", func(t *testing.T, f *fakeStore) {
			f.change = func(resp *pb.TxnResponse) {
				if len(resp.Responses) == 2 {
					resp.Responses[1] = &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{}}
				}
			}
			f.busy()
			a, b := f.delete(f.ctx, "a"), f.delete(f.ctx, "b")
			for _, done := range []<-chan error{a, b} {
				if err := <-done; err == nil || certain(classify(f.ctx, err, "")) {
					t.Errorf("%v", err)
				}
			}
		}},
		{"one that is refused does not spoil the others", func(t *testing.T, f *fakeStore) {
			f.fail = func(_ context.Context, names []string) error {
				if slices.Contains(names, "bad") {
					return rpctypes.ErrPermissionDenied
				}
				return nil
			}
			f.busy()
			a, bad, c := f.delete(f.ctx, "a"), f.delete(f.ctx, "bad"), f.delete(f.ctx, "c")
			ok(t, a, c)
			if err := <-bad; !errors.Is(err, rpctypes.ErrPermissionDenied) {
				t.Errorf("%v", err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if slices.Sort(f.sent[1:]); !slices.Equal(f.sent, []string{"(a bad c)", "a", "bad", "c"}) {
				t.Errorf("sent %q", f.sent)
			}
		}},
		{"what is not known of the request is not known of any", func(t *testing.T, f *fakeStore) {
			f.fail = func(_ context.Context, names []string) error {
				if len(names) > 1 {
					return rpctypes.ErrTimeout
				}
				return nil
			}
			f.busy()
			a, b := f.delete(f.ctx, "a"), f.delete(f.ctx, "b")
			for _, done := range []<-chan error{a, b} {
				if err := <-done; !errors.Is(err, rpctypes.ErrTimeout) || certain(classify(f.ctx, err, "")) {
					t.Errorf("%v", err)
				}
			}
			f.want(t, "(a b)")
		}},
		{"a panic is an error of all", func(t *testing.T, f *fakeStore) {
			f.fail = func(_ context.Context, names []string) error {
				if len(names) > 1 {
					panic("broken hook")
				}
				return nil
			}
			f.busy()
			a, b := f.delete(f.ctx, "a"), f.delete(f.ctx, "b")
			for _, done := range []<-chan error{a, b} {
				if err := <-done; err == nil || !strings.Contains(err.Error(), "panicked: broken hook") || certain(err) {
					t.Errorf("%v", err)
				}
			}
			ok(t, f.delete(f.ctx, "c"))
		}},
		{"closing", func(t *testing.T, f *fakeStore) {
			f.fail = func(ctx context.Context, names []string) error {
				if len(names) == 1 {
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			}
			f.busy()
			own, cancel := context.WithCancel(context.Background())
			defer cancel()
			a, b := f.delete(own, "a"), f.delete(own, "b")
			time.Sleep(delay + time.Millisecond)
			f.want(t, "(a b)")
			f.delete(own, "x")
			queued := []<-chan error{f.delete(own, "c"), f.delete(own, "d")}
			f.cancel()
			f.close()
			for _, done := range []<-chan error{a, b} {
				if err := <-done; err == nil || certain(classify(own, err, "")) {
					t.Errorf("on its way: %v", err)
				}
			}
			for _, done := range queued {
				if err := <-done; err == nil {
					t.Error("not sent, and no error")
				}
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFakeStore()
				c.run(t, f)
				f.cancel()
				f.close()
			})
		})
	}
}
