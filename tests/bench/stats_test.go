package main

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"testing"
	"time"
)

func same(a, b float64) bool {
	return math.IsNaN(a) && math.IsNaN(b) || math.Abs(a-b) < 1e-9
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	var hundred []time.Duration
	for i := 100; i > 0; i-- {
		hundred = append(hundred, time.Duration(i)*time.Microsecond)
	}
	for _, tt := range []struct {
		name string
		list []time.Duration
		q    float64
		want float64
	}{
		{"none", nil, 0.5, math.NaN()},
		{"one", []time.Duration{1500}, 0.99, 1.5},
		{"p50", hundred, 0.50, 50},
		{"p99", hundred, 0.99, 99},
		{"all", hundred, 1, 100},
		{"least", hundred, 0, 1},
		{"odd", []time.Duration{3000, 1000, 2000}, 0.5, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := percentile(tt.list, tt.q); !same(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
	if hundred[0] != 100*time.Microsecond {
		t.Error("the argument was sorted in place")
	}
}

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		list []float64
		want float64
	}{
		{nil, math.NaN()},
		{[]float64{7}, 7},
		{[]float64{9, 1, 5}, 5},
		{[]float64{4, 1, 2, 100}, 3},
	} {
		if got := median(tt.list); !same(got, tt.want) {
			t.Errorf("%v: got %v, want %v", tt.list, got, tt.want)
		}
	}
}

func TestJain(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		shares []int
		want   float64
	}{
		{[]int{5, 5, 5, 5}, 1},
		{[]int{7, 0, 0, 0}, 0.25},
		{[]int{3, 3, 0, 0}, 0.5},
		{[]int{1, 3}, 0.8},
		{[]int{0, 0}, math.NaN()},
	} {
		if got := jain(tt.shares); !same(got, tt.want) {
			t.Errorf("%v: got %v, want %v", tt.shares, got, tt.want)
		}
	}
}

func TestInversions(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		list []int
		want int
	}{
		{nil, 0},
		{[]int{1}, 0},
		{[]int{1, 2, 3, 4}, 0},
		{[]int{2, 2, 2}, 0},
		{[]int{2, 1}, 1},
		{[]int{4, 3, 2, 1}, 6},
		{[]int{2, 3, 1, 5, 4}, 3},
		{[]int{5, 1, 2, 3, 4}, 4},
	} {
		before := slices.Clone(tt.list)
		if got := inversions(tt.list); got != tt.want {
			t.Errorf("%v: got %d, want %d", tt.list, got, tt.want)
		}
		if !slices.Equal(before, tt.list) {
			t.Errorf("%v became %v", before, tt.list)
		}
	}
}

func TestShow(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		x    float64
		want string
	}{
		{math.NaN(), "-"},
		{0, "0"},
		{2, "2"},
		{1.15, "1.15"},
		{0.95, "0.95"},
		{0.01234, "0.0123"},
		{45.678, "45.7"},
		{1234.5, "1234"},
		{-300.4, "-300"},
	} {
		if got := show(tt.x); got != tt.want {
			t.Errorf("%v: got %s, want %s", tt.x, got, tt.want)
		}
	}
}

func TestFailures(t *testing.T) {
	t.Parallel()
	var f failures
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() { f.add("lock", errors.New("no\nmore")) })
	}
	wg.Wait()
	f.add("unlock", errConflict)
	if want := map[string]int{"lock: no": 10, "unlock: " + errConflict.Error(): 1}; !maps.Equal(f.counts(), want) {
		t.Errorf("got %v, want %v", f.counts(), want)
	}
	if f.total() != 11 {
		t.Errorf("got %d in all, want 11", f.total())
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	var w watch
	w.enter()
	w.leave()
	w.enter()
	w.enter()
	w.leave()
	w.leave()
	if got := w.violations.Load(); got != 1 {
		t.Errorf("got %d violations, want 1", got)
	}
}

func TestTurns(t *testing.T) {
	t.Parallel()
	log := newTurns(3)
	for _, worker := range []int{0, 1, 1, 0} {
		log.waited(time.Duration(worker+1) * time.Millisecond)
		since := time.Now()
		if !log.released.IsZero() {
			since = log.released.Add(time.Duration(worker+1) * 10 * time.Microsecond)
		}
		log.begin(worker, since)
		log.end(worker)
	}
	got := figures{}
	log.report(got, spent{seconds: 2, sent: 8, all: 12, client: 0.4, server: 0.2})
	for key, want := range map[string]float64{
		"rate": 2, "gapP50": 20, "gapP99": 20, "otherP50": 10, "otherP99": 20, "self": 100. / 3, "jain": 2. / 3,
		"longest": 2, "never": 1, "violations": 0, "sent": 2, "all": 3, "client": 100, "server": 50,
	} {
		if !same(got[key], want) {
			t.Errorf("%s is %v, want %v", key, got[key], want)
		}
	}
}

// TestTurnOf checks that each row has its turn in each round, and that the
// rounds start at other rows as long as there are some.
func TestTurnOf(t *testing.T) {
	t.Parallel()
	for rows := 1; rows <= 12; rows++ {
		for rounds := 1; rounds <= 12; rounds++ {
			starts := map[int]bool{}
			for round := range rounds {
				seen := map[int]bool{}
				for i := range rows {
					seen[turnOf(i, round, rounds, rows)] = true
				}
				if len(seen) != rows {
					t.Errorf("%d rows, round %d of %d: %d had a turn", rows, round, rounds, len(seen))
				}
				starts[turnOf(0, round, rounds, rows)] = true
			}
			if len(starts) != min(rows, rounds) {
				t.Errorf("%d rows, %d rounds: %d starts", rows, rounds, len(starts))
			}
		}
	}
}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	s := &store{unit: "commands"}
	var o outcomes
	for round, x := range []float64{80, 100, 120} {
		o = append(o,
			measurement{Row: "floor", Workload: w4, Figures: figures{"drain": x}},
			measurement{Row: "ours", Workload: w4, Figures: figures{"drain": 1.5 * x, "violations": float64(round % 2)}},
			measurement{Row: "ours", Workload: w3, Figures: figures{"drain": 1}})
	}
	o = append(o, measurement{Row: "broken", Workload: w4, Error: "it broke"})
	for _, tt := range []struct {
		name   string
		target target
		want   verdict
	}{
		{
			"ratio",
			target{w4, "ours", "drain", "floor", atMost(1.6)},
			verdict{"W4 drain ms, ours / floor", "<= 1.60", "1.50 (150 / 100)", "yes"},
		},
		{
			"ratio missed",
			target{w4, "ours", "drain", "floor", atLeast(1.6)},
			verdict{"W4 drain ms, ours / floor", ">= 1.60", "1.50 (150 / 100)", "no"},
		},
		{
			"the worst round counts",
			target{w4, "ours", "violations", "", atMost(0)},
			verdict{"W4 violations, ours", "<= 0", "1", "no"},
		},
		{
			"report only",
			target{w4, "ours", "drain", "", bound{}},
			verdict{"W4 drain ms, ours", "-", "150", "-"},
		},
		{
			"not measured",
			target{w4, "broken", "drain", "floor", atMost(1)},
			verdict{"W4 drain ms, broken / floor", "<= 1", "- (- / 100)", "not measured"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := tt.target.check(s, o); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
	if got, want := fmt.Sprint(o.summarize(w4, "floor")), "[{W4 floor drain 3 100 80 120}]"; got != want {
		t.Errorf("summary is %s, want %s", got, want)
	}
}

// TestTables checks that all figures of targets and floors are shown, and all
// their rows are there.
func TestTables(t *testing.T) {
	t.Parallel()
	for _, s := range stores {
		measured := func(name string, w workload) bool {
			return slices.ContainsFunc(s.rows, func(r row) bool { return r.name == name && r.in(w) })
		}
		for _, g := range s.targets {
			if !slices.ContainsFunc(tables[g.workload].columns, func(c column) bool { return c.key == g.figure }) {
				t.Errorf("%v has no column %s", g.workload, g.figure)
			}
			if !measured(g.row, g.workload) || g.against != "" && !measured(g.against, g.workload) {
				t.Errorf("%v is not measured of both %s and %s", g.workload, g.row, g.against)
			}
		}
		for w, floor := range s.floors {
			if !measured(floor, w) {
				t.Errorf("%v is not measured of %s", w, floor)
			}
		}
	}
}

// TestHeads checks that each store names its unit, and shows no column that it has
// no figures for.
func TestHeads(t *testing.T) {
	t.Parallel()
	s := &store{unit: "packets"}
	if got, want := s.head(tables[w5].find("round")), "packets per renewal round"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := len(s.columns(w2)), len(tables[w2].columns)-1; got != want {
		t.Errorf("got %d columns, want %d", got, want)
	}
	s.extra = "with those of the server"
	if got := s.columns(w2)[len(tables[w2].columns)-1]; s.head(got) != s.extra {
		t.Errorf("the last column is %q, want %q", s.head(got), s.extra)
	}
}

func TestServersArgument(t *testing.T) {
	t.Parallel()
	list := []server{{"127.0.0.1:1", 23}, {"[::1]:2", 42}}
	got, err := parseServers(formatServers(list))
	if err != nil || !slices.Equal(got, list) {
		t.Errorf("got %v and %v, want %v", got, err, list)
	}
	for _, text := range []string{"", "127.0.0.1:1", "127.0.0.1:1/x"} {
		if _, err := parseServers(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

func TestProcessTB(t *testing.T) {
	t.Parallel()
	var order []int
	var tb processTB
	tb.Cleanup(func() { order = append(order, 1) })
	tb.Cleanup(func() { order = append(order, 2) })
	if err := tb.run(func() error { tb.Fatalf("no %s", "server"); return nil }); err == nil || err.Error() != "no server" {
		t.Errorf("got %v, want the text of Fatalf", err)
	}
	if err := tb.run(func() error { return errUsage }); !errors.Is(err, errUsage) {
		t.Errorf("got %v, want the error of the function", err)
	}
	tb.end()
	if want := []int{2, 1}; !slices.Equal(order, want) {
		t.Errorf("cleaned up in the order %v, want %v", order, want)
	}
}
