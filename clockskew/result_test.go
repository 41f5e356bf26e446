package clockskew_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm/clockskew"
)

const ms = time.Millisecond

func TestJudge(t *testing.T) {
	t.Parallel()
	type answers = []clockskew.Answer
	for _, c := range []struct {
		name          string
		answers       answers
		servers, need int
		limit         time.Duration
		verdict       clockskew.Verdict
		offset, bound time.Duration
		text          string
	}{
		{"nobody", nil, 3, 2, 500 * ms, clockskew.Unknown, 0, 0, "no server"},
		{"one", answers{{10 * ms, 5 * ms, nil}}, 1, 1, 500 * ms, clockskew.Fine, 10 * ms, 5 * ms, "10ms behind, give or take 5ms, by 1 of 1 servers"},
		{"one, ahead", answers{{-10 * ms, 5 * ms, nil}}, 1, 1, 500 * ms, clockskew.Fine, -10 * ms, 5 * ms, "10ms ahead"},
		{"one, skewed", answers{{600 * ms, 99 * ms, nil}}, 1, 1, 500 * ms, clockskew.Skewed, 600 * ms, 99 * ms, ""},
		{"one, skewed ahead", answers{{-600 * ms, 99 * ms, nil}}, 1, 1, 500 * ms, clockskew.Skewed, -600 * ms, 99 * ms, ""},
		{"just fine", answers{{400 * ms, 100 * ms, nil}}, 1, 1, 500 * ms, clockskew.Fine, 400 * ms, 100 * ms, ""},
		{"hardly fine", answers{{401 * ms, 100 * ms, nil}}, 1, 1, 500 * ms, clockskew.Unknown, 401 * ms, 100 * ms, "too uncertain for a limit of 500ms"},
		{"hardly skewed", answers{{600 * ms, 100 * ms, nil}}, 1, 1, 500 * ms, clockskew.Unknown, 600 * ms, 100 * ms, "too uncertain"},
		{"wide", answers{{0, time.Second, nil}}, 1, 1, 500 * ms, clockskew.Unknown, 0, time.Second, "too uncertain"},
		{"three", answers{{9 * ms, 5 * ms, nil}, {10 * ms, 6 * ms, nil}, {12 * ms, 5 * ms, nil}}, 3, 2, 500 * ms, clockskew.Fine, 10 * ms, 6 * ms, "3 of 3"},
		{"a liar", answers{{9 * ms, 5 * ms, nil}, {10 * ms, 6 * ms, nil}, {time.Hour, 0, nil}}, 3, 2, 500 * ms, clockskew.Fine, 10 * ms, 6 * ms, "3 of 3"},
		{"a liar with a wide range", answers{{9 * ms, 5 * ms, nil}, {10 * ms, 6 * ms, nil}, {0, time.Hour, nil}}, 3, 2, 500 * ms, clockskew.Fine, 9 * ms, 7 * ms, ""},
		{"a liar, skewed", answers{{0, ms, nil}, {time.Hour, 6 * ms, nil}, {time.Hour, 5 * ms, nil}}, 3, 2, 500 * ms, clockskew.Skewed, time.Hour, 6 * ms, ""},
		{"one is silent, one lies", answers{{0, ms, nil}, {time.Hour, ms, nil}}, 3, 2, 500 * ms, clockskew.Unknown, 30 * time.Minute, 30*time.Minute + ms, "too uncertain"},
		{"all contradict", answers{{0, ms, nil}, {time.Hour, ms, nil}, {2 * time.Hour, ms, nil}}, 3, 2, 500 * ms, clockskew.Unknown, time.Hour, time.Hour + ms, "contradict"},
		{"two contradict", answers{{0, ms, nil}, {10 * ms, ms, nil}}, 2, 2, 500 * ms, clockskew.Unknown, 5 * ms, 6 * ms, "contradict"},
		{"two", answers{{0, 10 * ms, nil}, {90 * ms, 81 * ms, nil}}, 2, 2, 500 * ms, clockskew.Fine, 10 * ms, ms, ""},
		{"four, a liar", answers{{0, ms, nil}, {0, ms, nil}, {time.Hour, ms, nil}, {0, ms, nil}}, 4, 3, 500 * ms, clockskew.Fine, 0, ms, ""},
		{"four, two liars", answers{{0, ms, nil}, {0, ms, nil}, {time.Hour, ms, nil}, {time.Hour, ms, nil}}, 4, 3, 500 * ms, clockskew.Unknown, 30 * time.Minute, 30*time.Minute + ms, "contradict"},
		{"too few", answers{{0, ms, nil}}, 3, 2, 500 * ms, clockskew.Unknown, 0, ms, "2 answers are needed"},
		{"one is enough", answers{{0, ms, nil}}, 3, 1, 500 * ms, clockskew.Fine, 0, ms, "1 of 3"},
		{"wider than all", answers{{math.MaxInt64, math.MaxInt64, nil}, {math.MinInt64, math.MaxInt64, nil}}, 2, 2, 500 * ms, clockskew.Unknown, 0, 50 * 365 * 24 * time.Hour, "too uncertain"},
		{"far", answers{{math.MaxInt64, 0, nil}, {math.MinInt64, 0, nil}, {math.MaxInt64, 0, nil}}, 3, 2, 500 * ms, clockskew.Skewed, 50 * 365 * 24 * time.Hour, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := clockskew.Judge(c.answers, c.servers, c.need, c.limit)
			if r.Verdict != c.verdict || r.Offset != c.offset || r.Bound != c.bound || r.Answers != len(c.answers) || !strings.Contains(r.String(), c.text) {
				t.Errorf("%v, offset %v, bound %v, %d answers, %q", r.Verdict, r.Offset, r.Bound, r.Answers, r)
			}
		})
	}
}

// TestBoundHolds draws servers of which fewer than half lie, and leaves some out:
// whatever they say, the truth is within the bound.
func TestBoundHolds(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	draw := func(limit time.Duration) time.Duration { return time.Duration(rnd.Int64N(int64(2*limit))) - limit }
	decided := 0
	for range 50_000 {
		truth := draw(2 * time.Second)
		servers := 1 + rnd.IntN(7)
		liars := rnd.IntN((servers-1)/2 + 1)
		var answers []clockskew.Answer
		for i := range servers {
			distance := time.Duration(rnd.Int64N(int64(100 * ms)))
			a := clockskew.Answer{Offset: truth, Distance: distance}
			if i < liars {
				a.Offset += draw(3 * time.Second)
			} else if distance > 0 {
				a.Offset += draw(distance)
			}
			answers = append(answers, a)
		}
		rnd.Shuffle(servers, func(i, j int) { answers[i], answers[j] = answers[j], answers[i] })
		need := servers/2 + 1
		answers = answers[:need+rnd.IntN(servers-need+1)]
		r := clockskew.Judge(answers, servers, need, time.Second)
		if (r.Offset - truth).Abs() > r.Bound {
			t.Fatalf("seed %d: the truth is %v, but %v of %v", seed, truth, r, answers)
		}
		if r.Verdict == clockskew.Fine && truth.Abs() > time.Second || r.Verdict == clockskew.Skewed && truth.Abs() <= time.Second {
			t.Fatalf("seed %d: the truth is %v, but %v: %v of %v", seed, truth, r.Verdict, r, answers)
		}
		if r.Verdict != clockskew.Unknown {
			decided++
		}
	}
	if decided < 25_000 {
		t.Errorf("seed %d: only %d checks could tell", seed, decided)
	}
}

func TestGauges(t *testing.T) {
	t.Parallel()
	var none clockskew.Result
	if !math.IsNaN(none.OffsetSeconds()) || !math.IsNaN(none.BoundSeconds()) || none.String() != "not checked yet" {
		t.Errorf("%v %v %v", none.OffsetSeconds(), none.BoundSeconds(), none)
	}
	r := clockskew.Judge([]clockskew.Answer{{Offset: -1500 * ms, Distance: 250 * ms}}, 1, 1, time.Second)
	if r.OffsetSeconds() != -1.5 || r.BoundSeconds() != 0.25 {
		t.Errorf("%v %v", r.OffsetSeconds(), r.BoundSeconds())
	}
	for v, want := range map[clockskew.Verdict]string{0: "unknown", 1: "fine", 2: "skewed", 3: "Verdict(3)"} {
		if v.String() != want {
			t.Errorf("%d is %q, want %q", v, v, want)
		}
	}
}
