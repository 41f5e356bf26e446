package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// workload is one of the five ways in which the rows are used.
type workload int

// The workloads. Each states what it does and what its figures mean where it
// is implemented.
const (
	w1 workload = iota + 1 // uncontended
	w2                     // many keys
	w3                     // one key, contended
	w4                     // one key, many waiters
	w5                     // many locks held
)

func (w workload) String() string { return fmt.Sprintf("W%d", int(w)) }

// ttl is the lease of every lock, and three renewals.
const ttl = 10 * time.Second

// workers is how many goroutines of a workload use the row at the same time.
func (w workload) workers(scale float64) int {
	switch w {
	case w2, w5:
		return 64
	case w3:
		return 16
	case w4:
		return waiters(scale) + 1
	}
	return 1
}

// measurement is the outcome of one workload on one row, once. A figure that
// could not be measured is missing.
type measurement struct {
	Row      string             `json:"row"`
	Workload workload           `json:"workload"`
	Round    int                `json:"round"`
	At       time.Time          `json:"at"`
	Figures  map[string]float64 `json:"figures"`
	// Failures counts the errors that the row returned, by their text.
	Failures map[string]int `json:"failures,omitempty"`
	// Error is why the measurement came to no end.
	Error string `json:"error,omitempty"`
}

// figures are what a workload has measured, by the keys of its columns.
type figures map[string]float64

// run is a measurement while it runs.
type run struct {
	*probe
	store    *store
	locker   locker
	scale    float64
	ttl      time.Duration
	figures  figures
	failures failures
}

// measure runs one workload on one row, in this process.
func measure(ctx context.Context, s *store, r *row, w workload, list []server, scale float64) measurement {
	m := measurement{Row: r.name, Workload: w, At: time.Now().UTC().Truncate(time.Second)}
	f := &run{store: s, scale: scale, ttl: ttl, figures: figures{}}
	if err := f.measure(ctx, r, w, list); err != nil {
		m.Error = err.Error()
	}
	f.figures["failures"] = float64(f.failures.total())
	f.figures["load"] = load()
	for key, x := range f.figures {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			delete(f.figures, key)
		}
	}
	m.Figures, m.Failures = f.figures, f.failures.counts()
	return m
}

func (f *run) measure(ctx context.Context, r *row, w workload, list []server) error {
	if w == w5 {
		// Fewer locks for a shorter time, but still three renewals.
		f.ttl = max(time.Duration(float64(ttl)*f.scale), min(ttl, time.Second))
	}
	var err error
	if f.probe, err = newProbe(ctx, f.store, r, list); err != nil {
		return err
	}
	if f.locker, err = f.open(ctx, w.workers(f.scale)); err != nil {
		return fmt.Errorf("open: %w", err)
	}
	switch w {
	case w1:
		return f.uncontended(ctx)
	case w2:
		return f.manyKeys(ctx)
	case w3:
		return f.contended(ctx)
	case w4:
		return f.crowd(ctx)
	case w5:
		return f.hold(ctx)
	}
	return fmt.Errorf("no workload %v", w)
}

// open opens the row, as another client of the same servers each time.
func (f *run) open(ctx context.Context, workers int) (locker, error) {
	cfg := openConfig{workers: workers, ttl: f.ttl}
	for _, s := range f.servers {
		cfg.addrs = append(cfg.addrs, s.addr)
	}
	return f.row.open(ctx, cfg)
}

// scaled shortens a duration, and scaledCount lowers a number, but neither
// below a least value.
func (f *run) scaled(d, least time.Duration) time.Duration {
	return max(time.Duration(float64(d)*f.scale), least)
}

func scaledCount(n int, scale float64, least int) int {
	return max(int(float64(n)*scale), least)
}

// failures counts errors by their text. Its zero value is ready for use, by
// any number of goroutines.
type failures struct {
	mu sync.Mutex
	n  map[string]int
}

func (f *failures) add(op string, err error) {
	text, _, _ := strings.Cut(err.Error(), "\n")
	text = fmt.Sprintf("%s: %.120s", op, text)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n == nil {
		f.n = map[string]int{}
	}
	f.n[text]++
}

func (f *failures) total() (n int) {
	for _, c := range f.counts() {
		n += c
	}
	return n
}

func (f *failures) counts() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.n)
}

// watch counts how often two owners had the same key at once.
type watch struct {
	holders, violations atomic.Int64
}

func (w *watch) enter() {
	if w.holders.Add(1) != 1 {
		w.violations.Add(1)
	}
}

func (w *watch) leave() { w.holders.Add(-1) }
