package main

import (
	"errors"
	"sync/atomic"
	"testing"
)

func TestEach(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ n, together int }{{0, 4}, {3, 4}, {100, 4}} {
		var calls [100]atomic.Int64
		if err := each(tt.n, tt.together, func(i int) error { calls[i].Add(1); return nil }); err != nil {
			t.Error(err)
		}
		for i := range calls {
			if got := calls[i].Load(); (got == 1) != (i < tt.n) || got > 1 {
				t.Errorf("%d calls: the %dth is made %d times", tt.n, i, got)
			}
		}
	}
	var calls atomic.Int64
	wrong := errors.New("wrong")
	if err := each(1000, 1, func(int) error { calls.Add(1); return wrong }); !errors.Is(err, wrong) || calls.Load() != 1 {
		t.Errorf("got %v after %d calls, want the first error after the first call", err, calls.Load())
	}
}
