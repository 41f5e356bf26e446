package clockskew

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// Verdict is what a check made of the clock.
type Verdict uint8

// The verdicts. Their numbers stay the same, so they may be values of a gauge.
const (
	// Unknown: too few valid answers, answers that contradict each other, or a
	// bound too wide to tell.
	Unknown Verdict = iota
	// Fine: the clock is off by at most Options.MaxOffset.
	Fine
	// Skewed: the clock is off by more than Options.MaxOffset.
	Skewed
)

func (v Verdict) String() string {
	switch v {
	case Unknown:
		return "unknown"
	case Fine:
		return "fine"
	case Skewed:
		return "skewed"
	}
	return fmt.Sprintf("Verdict(%d)", uint8(v))
}

// Result is what one check found. The zero Result is that of no check.
type Result struct {
	Verdict Verdict
	// Offset is what must be added to this machine's clock to make it right:
	// above zero the clock is behind, below zero ahead. It is the median of the
	// valid answers, moved into the range that Bound describes. More than 50
	// years are shown as 50 years. Zero if nobody answered.
	Offset time.Duration
	// Bound is by how much Offset may be wrong, if fewer than half of all
	// servers are wrong. If answers contradict each other so that half of the
	// servers must be wrong, it spans all that they said. Zero if nobody
	// answered.
	Bound time.Duration
	// Answers is how many valid answers there were, from Asked servers. A server
	// that has asked to be left alone is not asked for a while.
	Answers, Asked int
	// Time is when the check began, by the clock that is in question; its
	// monotonic reading is right for [time.Since].
	Time time.Time
	// Errors says why servers gave no valid answer, in the order of the servers.
	// It is the caller's own.
	Errors []ServerError

	why string // of Unknown
}

// ServerError says why a server gave no valid answer.
type ServerError struct {
	// Server is the server as it was given to [New].
	Server string
	// Err matches [context.DeadlineExceeded] if no answer came in time.
	Err error
}

func (e ServerError) Error() string { return e.Server + ": " + e.Err.Error() }

// Unwrap returns Err.
func (e ServerError) Unwrap() error { return e.Err }

// OffsetSeconds is Offset for a gauge: NaN if nobody answered.
func (r Result) OffsetSeconds() float64 { return r.seconds(r.Offset) }

// BoundSeconds is Bound for a gauge: NaN if nobody answered.
func (r Result) BoundSeconds() float64 { return r.seconds(r.Bound) }

func (r Result) seconds(d time.Duration) float64 {
	if r.Answers == 0 {
		return math.NaN()
	}
	return d.Seconds()
}

// String says in a few words what was found.
func (r Result) String() string {
	if r.Time.IsZero() {
		return "not checked yet"
	}
	if r.Answers == 0 {
		return r.why
	}
	way := "behind"
	if r.Offset < 0 {
		way = "ahead"
	}
	s := fmt.Sprintf("%v %s, give or take %v, by %d of %d servers", short(r.Offset.Abs()), way, short(r.Bound), r.Answers, r.Asked)
	if r.why != "" {
		s += ": " + r.why
	}
	return s
}

// short rounds to three digits or so.
func short(d time.Duration) time.Duration {
	for unit := time.Duration(1); unit < time.Minute; unit *= 10 {
		if d < 1000*unit {
			return d.Round(unit)
		}
	}
	return d.Round(time.Second)
}

// far is the largest offset, so that sums of a few do not overflow. A distance of
// twice that reaches all of them.
const far = 50 * 365 * 24 * time.Hour

// answer is a valid answer: the right offset lies within distance of offset, if
// the server is right.
type answer struct{ offset, distance time.Duration }

func newAnswer(offset, distance time.Duration) answer {
	return answer{min(max(offset, -far), far), min(max(distance, 0), 2*far)}
}

func (a answer) low() time.Duration  { return a.offset - a.distance }
func (a answer) high() time.Duration { return a.offset + a.distance }

// judge fills in what the answers say. There are so many servers in all, of which
// need must answer.
//
// Let at most f servers be wrong. Of the f+1 lowest upper ends, one at least is of
// a server that is right, and so not below the right offset; neither, then, is the
// highest of them. So it is with the lower ends. The right offset lies in all
// ranges but f: if no point does, more than f are wrong.
func (r *Result) judge(answers []answer, servers, need int, limit time.Duration) {
	n := len(answers)
	r.Answers = n
	if n == 0 {
		r.why = "no server gave a valid answer"
		return
	}
	offsets, lows, highs := sorted(answers, func(a answer) time.Duration { return a.offset }),
		sorted(answers, answer.low), sorted(answers, answer.high)
	wrong := min((servers-1)/2, n-1)
	median := (offsets[(n-1)/2] + offsets[n/2]) / 2
	low, high := lows[n-1-wrong], highs[wrong]
	agreed := agreeing(answers) >= n-wrong
	if !agreed {
		low, high = lows[0], highs[n-1]
	}
	r.Offset = min(max(median, low), high)
	r.Bound = max(high-r.Offset, r.Offset-low)
	off := r.Offset.Abs()
	switch {
	case n < need:
		r.why = fmt.Sprintf("%d answers are needed", need)
	case !agreed:
		r.why = "the servers contradict each other"
	case off+r.Bound <= limit:
		r.Verdict = Fine
	case off-r.Bound > limit:
		r.Verdict = Skewed
	default:
		r.why = fmt.Sprintf("too uncertain for a limit of %v", limit)
	}
}

func sorted(answers []answer, of func(answer) time.Duration) []time.Duration {
	list := make([]time.Duration, len(answers))
	for i, a := range answers {
		list[i] = of(a)
	}
	slices.Sort(list)
	return list
}

// agreeing returns how many ranges have a point in common, at most. The lower end
// of one of them is such a point.
func agreeing(answers []answer) int {
	most := 0
	for _, a := range answers {
		count := 0
		for _, b := range answers {
			if b.low() <= a.low() && a.low() <= b.high() {
				count++
			}
		}
		most = max(most, count)
	}
	return most
}
