package pglock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/go-dlm/dlm/driver"
)

func TestTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var turns turns
		enter := func(ctx context.Context, key string) {
			t.Helper()
			if err := turns.enter(ctx, key); err != nil {
				t.Fatal(err)
			}
		}
		enter(t.Context(), "k")
		enter(t.Context(), "other") // keys do not know of each other

		const n = 5
		served := make(chan int, n)
		leavers := make([]context.CancelFunc, n)
		for i := range n {
			ctx, cancel := context.WithCancel(t.Context())
			leavers[i] = cancel
			go func() {
				err := turns.enter(ctx, "k")
				switch {
				case err == nil:
					served <- i
				case !errors.Is(err, driver.ErrNotApplied) || !errors.Is(err, context.Canceled):
					t.Error(err)
				}
			}()
			synctest.Wait() // so that they come in this order
		}
		leavers[2]()
		synctest.Wait()
		for _, want := range []int{0, 1, 3, 4} {
			turns.leave("k")
			synctest.Wait()
			select {
			case got := <-served:
				if got != want {
					t.Errorf("%d has the turn, want %d", got, want)
				}
			default:
				t.Fatalf("nobody has the turn, want %d", want)
			}
		}
		turns.leave("k")
		turns.leave("other")
		if len(turns.waiting) != 0 {
			t.Errorf("left behind: %v", turns.waiting)
		}
		for _, cancel := range leavers {
			cancel()
		}
	})
}

// Whose turn comes while it gives up passes it on.
func TestTurnIsPassedOn(t *testing.T) {
	t.Parallel()
	for range 200 {
		var turns turns
		if err := turns.enter(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if turns.enter(ctx, "k") == nil {
				turns.leave("k")
			}
		}()
		go cancel()
		turns.leave("k")
		<-ended
		if err := turns.enter(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		turns.leave("k")
		if len(turns.waiting) != 0 {
			t.Fatalf("left behind: %v", turns.waiting)
		}
	}
}
