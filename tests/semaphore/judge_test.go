package semaphore_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// moment is a reading of the machine's monotonic clock, which all of its
// processes share.
type moment int64

func now() moment {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err) // no such clock
	}
	return moment(ts.Nano())
}

// ahead returns the moment of a time of this process, or one just before.
func ahead(t time.Time) moment {
	n := now() // first, so that it is not too late
	return n + moment(time.Until(t))
}

func (m moment) String() string {
	return fmt.Sprintf("%.6f", time.Duration(m).Seconds())
}

// The kinds of reports.
const (
	entered = "entered" // a permit was granted
	stays   = "stays"   // it has been held for a while, and may have been renewed
	leaves  = "leaves"  // it is going to be released, or is lost
	lost    = "lost"    // it was lost before it was released
	fault   = "fault"   // something went wrong
)

// report is what a worker tells the judge, by one write to a pipe: what a process
// has reported is there also when it has been killed.
type report struct {
	Kind   string
	Worker int
	Asked  moment // just before Acquire was called
	At     moment // entered: after Acquire returned; leaves: before Release is called
	Until  moment // the deadline of the lock
	Token  int64
	Text   string
}

// tenure is how long a worker surely had a permit: from when Acquire had
// returned until it began to release, but not beyond the deadline that its lock
// had when it was last heard of.
type tenure struct {
	who             string
	token           int64
	asked, from, to moment
	end             string
}

func (t tenure) String() string {
	return fmt.Sprintf("token %d of %s: asked %v, from %v to %v (%s)", t.token, t.who, t.asked, t.from, t.to, t.end)
}

// account is what one process has reported in its life.
type account struct {
	granted *atomic.Int64 // counts permits, of all processes
	tenures []tenure
	lost    int
	faults  []string
}

// read reads all reports of a process.
func (a *account) read(name string, from io.Reader) {
	inside := map[int]tenure{}
	leave := func(worker int, at moment, end string) {
		t := inside[worker]
		delete(inside, worker)
		t.to, t.end = min(t.to, at), end
		a.tenures = append(a.tenures, t)
	}
	for dec := json.NewDecoder(from); ; {
		var r report
		if err := dec.Decode(&r); err != nil {
			if !errors.Is(err, io.EOF) {
				a.faults = append(a.faults, fmt.Sprintf("%s: reading reports: %v", name, err))
			}
			break
		}
		t, in := inside[r.Worker]
		switch {
		case r.Kind == fault:
			a.faults = append(a.faults, fmt.Sprintf("%s, worker %d: %s", name, r.Worker, r.Text))
		case r.Kind == lost:
			a.lost++
		case in == (r.Kind == entered):
			a.faults = append(a.faults, fmt.Sprintf("%s, worker %d: out of turn: %+v", name, r.Worker, r))
		case r.Kind == entered:
			a.granted.Add(1)
			inside[r.Worker] = tenure{
				who: fmt.Sprintf("%s, worker %d", name, r.Worker), token: r.Token, asked: r.Asked, from: r.At, to: r.Until,
			}
		case r.Kind == stays:
			t.to = r.Until
			inside[r.Worker] = t
		case r.Kind == leaves:
			t.to = r.Until
			inside[r.Worker] = t
			leave(r.Worker, r.At, "left")
		}
	}
	// The process is dead. The store keeps these permits for at least so long.
	for worker := range inside {
		leave(worker, math.MaxInt64, abandoned)
	}
}

const abandoned = "killed inside"

// judge returns how many were inside at once at most, and what is against the rules:
//
//   - More inside at the same moment than there are permits. Nobody is counted before
//     its Acquire has returned, after it has begun to release, or after its deadline;
//     in between the permit is promised to be its own, whether it lives or not.
//   - A token that is not larger than that of a permit which somebody had in hand
//     before this one was asked for, or the same token twice. Of two that were asked
//     for at the same time nobody but the store knows which was granted first.
func judge(tenures []tenure, permits int) (most int, faults []string) {
	type step struct {
		at    moment
		enter bool
		of    *tenure
	}
	var steps []step
	for i := range tenures {
		if t := &tenures[i]; t.from < t.to {
			steps = append(steps, step{t.from, true, t}, step{t.to, false, t})
		}
	}
	slices.SortFunc(steps, func(a, b step) int {
		order := cmp.Compare(a.at, b.at)
		switch {
		case order != 0 || a.enter == b.enter:
			return order
		case a.enter:
			return 1 // whoever leaves at that moment goes first
		}
		return -1
	})
	inside := map[*tenure]bool{}
	for _, s := range steps {
		if !s.enter {
			delete(inside, s.of)
			continue
		}
		inside[s.of] = true
		most = max(most, len(inside))
		if len(inside) > permits {
			var text strings.Builder
			fmt.Fprintf(&text, "%d inside at %v:", len(inside), s.at)
			for t := range inside {
				fmt.Fprintf(&text, "\n\t%v", *t)
			}
			faults = append(faults, text.String())
		}
	}

	byAsked, byFrom := slices.Clone(tenures), slices.Clone(tenures)
	slices.SortFunc(byAsked, func(a, b tenure) int { return cmp.Compare(a.asked, b.asked) })
	slices.SortFunc(byFrom, func(a, b tenure) int { return cmp.Compare(a.from, b.from) })
	var before tenure // with the largest token of those that were granted before
	for _, t := range byAsked {
		for len(byFrom) > 0 && byFrom[0].from <= t.asked {
			if byFrom[0].token > before.token {
				before = byFrom[0]
			}
			byFrom = byFrom[1:]
		}
		if t.token <= before.token {
			faults = append(faults, fmt.Sprintf("the token does not rise:\n\t%v\n\t%v", before, t))
		}
	}
	byToken := map[int64]tenure{}
	for _, t := range tenures {
		if other, ok := byToken[t.token]; ok {
			faults = append(faults, fmt.Sprintf("the same token twice:\n\t%v\n\t%v", other, t))
		}
		byToken[t.token] = t
	}
	return most, faults
}

// The judge finds what is wrong, and nothing else.
func TestJudge(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		tenures []tenure
		most    int
		faults  int
	}{
		{"nobody", nil, 0, 0},
		{"two of two", []tenure{{token: 1, from: 1, to: 9}, {token: 2, from: 2, to: 9}}, 2, 0},
		{"three of two", []tenure{{token: 1, from: 1, to: 9}, {token: 2, from: 2, to: 9}, {token: 3, from: 8, to: 12}}, 3, 1},
		{"one after the other", []tenure{{token: 1, from: 1, to: 9}, {token: 2, from: 2, to: 5}, {token: 3, from: 5, to: 7}}, 2, 0},
		{"too late", []tenure{{token: 1, from: 1, to: 9}, {token: 2, from: 1, to: 9}, {token: 3, from: 5, to: 4}}, 2, 0},
		{"falling tokens", []tenure{{token: 2, from: 1, to: 2}, {token: 1, asked: 1, from: 3, to: 4}}, 1, 1},
		{"either order", []tenure{{token: 2, from: 2, to: 3}, {token: 1, asked: 1, from: 3, to: 4}}, 1, 0},
		{"the same token", []tenure{{token: 2, from: 2, to: 3}, {token: 2, asked: 1, from: 3, to: 4}}, 1, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			most, faults := judge(tc.tenures, 2)
			if most != tc.most || len(faults) != tc.faults {
				t.Errorf("most %d, faults %q", most, faults)
			}
		})
	}
}

// The account of a process ends where its reports do.
func TestAccount(t *testing.T) {
	t.Parallel()
	r, w := io.Pipe()
	go func() {
		enc := json.NewEncoder(w)
		for _, rep := range []report{
			{Kind: entered, Worker: 1, Asked: 1, At: 2, Until: 10, Token: 1},
			{Kind: entered, Worker: 2, Asked: 1, At: 2, Until: 10, Token: 2},
			{Kind: entered, Worker: 3, Asked: 1, At: 2, Until: 10, Token: 3},
			{Kind: leaves, Worker: 1, At: 5, Until: 10},
			{Kind: stays, Worker: 2, Until: 20},
			{Kind: leaves, Worker: 3, At: 35, Until: 30},
			{Kind: lost, Worker: 3},
			{Kind: entered, Worker: 1, Asked: 6, At: 7, Until: 17, Token: 4},
			{Kind: leaves, Worker: 3},
			{Kind: fault, Worker: 4, Text: "failed"},
		} {
			_ = enc.Encode(rep) // the reader does not fail
		}
		w.Close()
	}()
	a := account{granted: new(atomic.Int64)}
	a.read("p", r)
	ends := map[int64]moment{}
	for _, t := range a.tenures {
		ends[t.token] = t.to
	}
	if want := (map[int64]moment{1: 5, 2: 20, 3: 30, 4: 17}); fmt.Sprint(ends) != fmt.Sprint(want) {
		t.Errorf("tenures end at %v, want %v", ends, want)
	}
	if a.lost != 1 || len(a.faults) != 2 {
		t.Errorf("%d lost, faults %q", a.lost, a.faults)
	}
}
