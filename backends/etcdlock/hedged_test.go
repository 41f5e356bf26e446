package etcdlock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestHedged(t *testing.T) {
	const pause = time.Second
	silent := func(ctx context.Context) (int, error) {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	after := func(d time.Duration, v int, err error) func(context.Context) (int, error) {
		return func(ctx context.Context) (int, error) {
			select {
			case <-time.After(d):
				return v, err
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
	}
	// stubborn does not obey its context in time.
	stubborn := func(d time.Duration, v int) func(context.Context) (int, error) {
		return func(context.Context) (int, error) {
			time.Sleep(d)
			return v, nil
		}
	}
	broken := errors.New("broken")
	for _, c := range []struct {
		name    string
		members int
		answers []func(context.Context) (int, error)
		want    int
		err     error
		took    time.Duration
		dropped []int
	}{
		{"first answers", 2, []func(context.Context) (int, error){after(pause/2, 1, nil), silent}, 1, nil, pause / 2, nil},
		{"second answers", 2, []func(context.Context) (int, error){silent, after(0, 2, nil), silent}, 2, nil, pause, nil},
		{"first is slow", 2, []func(context.Context) (int, error){after(3*pause/2, 1, nil), silent}, 1, nil, 3 * pause / 2, nil},
		{"at once broken", 2, []func(context.Context) (int, error){after(0, 0, broken), after(0, 2, nil)}, 0, broken, 0, nil},
		{"broken beside a silent one", 2, []func(context.Context) (int, error){silent, after(0, 0, broken), after(0, 3, nil)}, 3, nil, 3 * pause, nil},
		{"all silent", 2, []func(context.Context) (int, error){silent, silent, silent, silent, silent}, 0, context.DeadlineExceeded, 9 * pause, nil},
		{"next round answers", 2, []func(context.Context) (int, error){silent, silent, after(0, 3, nil)}, 3, nil, 3 * pause, nil},
		{"one member", 1, []func(context.Context) (int, error){after(5*pause, 1, nil)}, 1, nil, 5 * pause, nil},
		{"a panic", 2, []func(context.Context) (int, error){func(context.Context) (int, error) { panic("client") }}, 0, errPanic, 0, nil},
		{"answered in vain", 2, []func(context.Context) (int, error){stubborn(4*pause, 1), after(0, 2, nil)}, 2, nil, 4 * pause, []int{1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 9*pause)
				defer cancel()
				var next atomic.Int32
				var dropped []int
				start := time.Now()
				got, err := hedged(ctx, c.members, pause, func(ctx context.Context) (int, error) {
					return c.answers[next.Add(1)-1](ctx)
				}, func(v int) { dropped = append(dropped, v) })
				if got != c.want || !errors.Is(err, c.err) || time.Since(start) != c.took {
					t.Errorf("%d, %v after %v, want %d, %v after %v", got, err, time.Since(start), c.want, c.err, c.took)
				}
				if len(dropped) != len(c.dropped) || len(dropped) == 1 && dropped[0] != c.dropped[0] {
					t.Errorf("dropped %v, want %v", dropped, c.dropped)
				}
			})
		})
	}
}
