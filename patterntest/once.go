package patterntest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
)

var onceCases = []testCase{
	{"OneRunPerTick", runOnce},
	{"HoldOutlastsRun", holdTick},
}

func onces(t *testing.T, cfg *Config) { runCases(t, cfg, onceCases) }

// once returns the guard of a job for a client of its own.
func (s *stage) once(minHold time.Duration) *dlm.Once {
	s.Helper()
	o, err := dlm.NewOnce(s.open(nil).Manager, "job", minHold)
	if err != nil {
		s.Fatal(err)
	}
	return o
}

// runOnce checks that of many nodes one runs a tick, also for those that come when
// the run is over, and that the next tick is run.
func runOnce(s *stage) {
	var nodes [5]*dlm.Once
	for i := range nodes {
		nodes[i] = s.once(time.Hour)
	}
	planned := time.Now()
	for range 3 {
		planned = planned.Add(time.Second)
		tick := dlm.TickAt(planned)
		var runs atomic.Int64
		for range 2 {
			answers := make(chan error)
			for _, o := range nodes {
				s.workers.Go(func() {
					answers <- o.Do(s.ctx, tick, func(context.Context) error {
						runs.Add(1)
						return nil
					})
				})
			}
			for range nodes {
				if err := <-answers; err != nil && !errors.Is(err, dlm.ErrHeld) {
					s.Error(err)
				}
			}
		}
		if n := runs.Load(); n != 1 {
			s.Fatalf("%d runs of a tick", n)
		}
	}
}

// holdTick checks that a run that is over keeps others from the tick for the
// minimum hold, and for not much longer.
func holdTick(s *stage) {
	const minHold = 500 * time.Millisecond
	a, b := s.once(minHold), s.once(minHold)
	first, err := a.Claim(s.ctx, "")
	if err != nil {
		s.Fatal(err)
	}
	if err := first.End(s.ctx); err != nil {
		s.Fatal(err)
	}
	for {
		second, err := b.Claim(s.ctx, "")
		if err == nil {
			held := second.Lock().AcquiredAt.Sub(first.Lock().AcquiredAt)
			if held < minHold && !errors.Is(first.Lock().Err(), dlm.ErrLost) {
				s.Errorf("held for %v, want at least %v", held, minHold)
			}
			s.Logf("held for %v", held)
			if err := errors.Join(second.End(s.ctx), a.Wait(s.ctx)); err != nil {
				s.Error(err)
			}
			return
		}
		if !errors.Is(err, dlm.ErrHeld) || s.ctx.Err() != nil {
			s.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
