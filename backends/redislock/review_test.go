package redislock

import (
	"context"
	"errors"
	"net"
	"sync"
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
