package flow

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// Turns are bounded for each key, are taken in order, pass by those who have
// left, and are not blocked by those who do not come back.
func TestTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ts := NewTurns(2)
		var began []string
		take := func(ctx context.Context, name string, d time.Duration) <-chan error {
			done := make(chan error, 1)
			go func() {
				leave, err := ts.Take(ctx, "k")
				if err == nil {
					ts.mu.Lock()
					began = append(began, name)
					ts.mu.Unlock()
					time.Sleep(d)
					leave()
				}
				done <- err
			}()
			synctest.Wait()
			return done
		}
		start := time.Now()
		a, b := take(t.Context(), "a", 10*time.Millisecond), take(t.Context(), "b", 20*time.Millisecond)
		c, gone, d := take(t.Context(), "c", time.Hour), take(ctx, "gone", 0), take(t.Context(), "d", time.Hour)
		e := take(t.Context(), "e", 0)
		if leave, err := ts.Take(t.Context(), "other"); err != nil {
			t.Error(err)
		} else {
			leave()
		}
		cancel()
		if err := <-gone; !errors.Is(err, context.Canceled) || !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%v", err)
		}
		for _, done := range []<-chan error{a, b, e} {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if took := time.Since(start); took != 10*time.Millisecond+turnLasts {
			t.Errorf("the last came after %v", took)
		}
		for _, done := range []<-chan error{c, d} {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		ts.mu.Lock()
		defer ts.mu.Unlock()
		if want := []string{"a", "b", "c", "d", "e"}; !slices.Equal(began, want) {
			t.Errorf("%v had a turn, want %v", began, want)
		}
		if len(ts.keys) != 0 {
			t.Errorf("%d keys are left", len(ts.keys))
		}
	})
}

// Whose turn comes while it gives up passes it on.
func TestTurnIsPassedOn(t *testing.T) {
	t.Parallel()
	for range 200 {
		ts := NewTurns(1)
		leave, err := ts.Take(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if leave, err := ts.Take(ctx, "k"); err == nil {
				leave()
			}
		}()
		go cancel()
		leave()
		<-ended
		if leave, err = ts.Take(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		leave()
		if len(ts.keys) != 0 {
			t.Fatal("something is left behind")
		}
	}
}
