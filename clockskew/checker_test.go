package clockskew_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/clockskew"
)

func checker(t *testing.T, servers []string, opts *clockskew.Options) *clockskew.Checker {
	t.Helper()
	c, err := clockskew.New(servers, opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func check(t *testing.T, c *clockskew.Checker) clockskew.Result {
	t.Helper()
	r, err := c.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestNew(t *testing.T) {
	t.Parallel()
	one := []string{"a"}
	for _, c := range []struct {
		name    string
		servers []string
		opts    clockskew.Options
		text    string // empty: no error
	}{
		{"hosts", []string{"a", "B:1123", "192.0.2.1", "192.0.2.1:124", "2001:db8::1", "[2001:db8::2]", "[2001:db8::1]:124", "[fe80::1%Eth0]:123"}, clockskew.Options{}, ""},
		{"bounds", one, clockskew.Options{MaxOffset: ms, Timeout: ms, Interval: time.Second, MinAnswers: 1}, ""},
		{"no servers", nil, clockskew.Options{}, "servers has 0 elements"},
		{"too many servers", make([]string, 33), clockskew.Options{}, "servers has 33 elements"},
		{"empty", []string{"a", ""}, clockskew.Options{}, "servers[1]"},
		{"no host", []string{":123"}, clockskew.Options{}, "no host or no port"},
		{"no port", []string{"a:"}, clockskew.Options{}, "no host or no port"},
		{"wrong port", []string{"a:70000"}, clockskew.Options{}, "wrong port"},
		{"named port", []string{"a:ntp"}, clockskew.Options{}, "wrong port"},
		{"port 0", []string{"a:0"}, clockskew.Options{}, "wrong port"},
		{"space", []string{"a b"}, clockskew.Options{}, "not a host"},
		{"half a bracket", []string{"[::1"}, clockskew.Options{}, "neither host"},
		{"three parts", []string{"a:b:c"}, clockskew.Options{}, "neither host"},
		{"URL", []string{"ntp://a"}, clockskew.Options{}, "servers[0]"},
		{"twice", []string{"a", "b", "A:123"}, clockskew.Options{}, `servers[2]: "A:123" is there twice`},
		{"offset", one, clockskew.Options{MaxOffset: -1}, "Options.MaxOffset"},
		{"small offset", one, clockskew.Options{MaxOffset: time.Microsecond}, "Options.MaxOffset"},
		{"large offset", one, clockskew.Options{MaxOffset: 25 * time.Hour}, "Options.MaxOffset"},
		{"timeout", one, clockskew.Options{Timeout: time.Minute}, "Options.Timeout"},
		{"interval", one, clockskew.Options{Interval: ms}, "Options.Interval"},
		{"answers", one, clockskew.Options{MinAnswers: 2}, "Options.MinAnswers"},
		{"negative answers", one, clockskew.Options{MinAnswers: -1}, "Options.MinAnswers"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, err := clockskew.New(c.servers, &c.opts)
			if c.text == "" {
				if err != nil {
					t.Error(err)
				}
			} else if !errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want it to contain %q", err, c.text)
			}
		})
	}
}

// network stands in for servers, all of which say the same.
type network struct {
	mu    sync.Mutex
	say   clockskew.Answer
	asked []time.Time
}

func (n *network) set(a clockskew.Answer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.say = a
}

func (n *network) answer(context.Context, string) clockskew.Answer {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked = append(n.asked, time.Now())
	return n.say
}

func (n *network) pauses() []time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []time.Duration
	for i := range n.asked[1:] {
		list = append(list, n.asked[i+1].Sub(n.asked[i]))
	}
	return list
}

var (
	good = clockskew.Answer{Distance: ms}
	off  = clockskew.Answer{Offset: time.Minute, Distance: ms}
	dead = clockskew.Answer{Err: errors.New("unreachable")}
)

// run runs a checker until the test ends.
func run(t *testing.T, c *clockskew.Checker) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
}

func TestPauses(t *testing.T) {
	t.Parallel()
	const interval = 80 * time.Second
	for _, c := range []struct {
		name string
		say  clockskew.Answer
		want []time.Duration // in tenths of the interval, the last from then on
	}{
		{"fine", good, []time.Duration{interval}},
		{"skewed", off, []time.Duration{interval}},
		{"unknown", dead, []time.Duration{interval / 8, interval / 4, interval / 2, interval}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := &network{say: c.say}
				k := checker(t, []string{"a"}, &clockskew.Options{Interval: interval})
				k.SetQuery(n.answer)
				run(t, k)
				start := time.Now()
				time.Sleep(200 * interval)
				synctest.Wait()
				if n.asked[0] != start {
					t.Errorf("first asked after %v", n.asked[0].Sub(start))
				}
				pauses := n.pauses()
				for i, got := range pauses {
					want := c.want[min(i, len(c.want)-1)]
					if got < want-want/10 || got > want+want/10 {
						t.Errorf("pause %d is %v, want %v give or take a tenth", i, got, want)
					}
				}
				rest := pauses[len(c.want):]
				if len(rest) < 150 || slices.Max(rest)-slices.Min(rest) < interval/10 {
					t.Errorf("%d pauses between %v and %v are not spread", len(rest), slices.Min(rest), slices.Max(rest))
				}
			})
		})
	}
}

func TestBackOffEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &network{say: dead}
		c := checker(t, []string{"a"}, &clockskew.Options{Interval: 4 * time.Second})
		c.SetQuery(n.answer)
		run(t, c)
		time.Sleep(500 * ms) // one check
		synctest.Wait()
		n.set(good)
		time.Sleep(700 * ms) // the second, a second after the first
		synctest.Wait()
		n.set(dead)
		time.Sleep(6 * time.Second) // the third four seconds later, and the fourth
		synctest.Wait()
		p := n.pauses()
		if len(p) < 3 || p[0] > 1100*ms || p[1] < 3600*ms || p[2] > 1100*ms {
			t.Errorf("pauses %v", p)
		}
		if s := c.Snapshot(); s.Checks != uint64(len(n.asked)) || s.Unknown != s.Checks-1 || s.Decided.Verdict != clockskew.Fine || s.Last.Verdict != clockskew.Unknown {
			t.Errorf("%+v", s)
		}
	})
}

func TestRunOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := checker(t, []string{"a"}, nil)
		c.SetQuery((&network{say: good}).answer)
		for range 2 { // it can be run again
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- c.Run(ctx) }()
			synctest.Wait()
			if err := c.Run(ctx); !errors.Is(err, dlm.ErrInvalid) {
				t.Errorf("a second Run: %v", err)
			}
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	})
}

func TestOnChange(t *testing.T) {
	t.Parallel()
	var changes []string
	n := &network{}
	c := checker(t, []string{"a"}, &clockskew.Options{OnChange: func(before, now clockskew.Result) {
		changes = append(changes, before.Verdict.String()+" "+now.Verdict.String())
	}})
	c.SetQuery(n.answer)
	for _, a := range []clockskew.Answer{dead, good, good, off, off, dead, dead, off, good} {
		n.set(a)
		check(t, c)
	}
	want := []string{"unknown fine", "fine skewed", "skewed unknown", "unknown skewed", "skewed fine"}
	if !slices.Equal(changes, want) {
		t.Errorf("%q, want %q", changes, want)
	}
}

func TestCheckEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := checker(t, []string{"a", "b", "c"}, &clockskew.Options{Timeout: 2 * time.Second})
		c.SetQuery(func(ctx context.Context, address string) clockskew.Answer {
			if address == "c:123" {
				<-ctx.Done()
				return clockskew.Answer{Err: ctx.Err()}
			}
			time.Sleep(time.Second)
			return good
		})
		start := time.Now()
		r := check(t, c)
		if took := time.Since(start); took != 2*time.Second || r.Verdict != clockskew.Fine || r.Answers != 2 || r.Asked != 3 || !r.Time.Equal(start) {
			t.Errorf("%v after %v: %+v", r, took, r)
		}
		if len(r.Errors) != 1 || r.Errors[0].Server != "c" || !errors.Is(r.Errors[0], context.DeadlineExceeded) {
			t.Errorf("errors %v", r.Errors)
		}
		r.Errors[0].Server = "changed"
		if s := c.Snapshot(); s.Last.Errors[0].Server != "c" || s.Checks != 1 {
			t.Errorf("%+v", s)
		}
		// One check is under way; another waits for its turn until it may not.
		ctx, cancel := context.WithTimeout(t.Context(), 500*ms)
		defer cancel()
		done := make(chan error)
		for range 2 {
			go func() {
				_, err := c.Check(ctx)
				done <- err
			}()
		}
		for range 2 {
			if err := <-done; !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		}
		if s := c.Snapshot(); s.Checks != 1 || s.Last.Verdict != clockskew.Fine {
			t.Errorf("a check that was given up counts: %+v", s)
		}
		if _, err := c.Check(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}

func TestKissOfDeath(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const interval = time.Minute
		asked := map[string][]time.Time{}
		var mu sync.Mutex
		say := map[string]clockskew.Answer{"a:123": clockskew.Kiss("RATE"), "b:123": clockskew.Kiss("DENY"), "c:123": good}
		c := checker(t, []string{"a", "b", "c"}, &clockskew.Options{Interval: interval, MinAnswers: 1})
		c.SetQuery(func(_ context.Context, address string) clockskew.Answer {
			mu.Lock()
			defer mu.Unlock()
			asked[address] = append(asked[address], time.Now())
			return say[address]
		})
		start := time.Now()
		for time.Since(start) < 15*time.Minute {
			check(t, c)
			time.Sleep(interval / 2)
		}
		// After 2 minutes, another 4 and another 8.
		if got := asked["a:123"]; len(got) != 4 || got[1].Sub(start) != 2*time.Minute || got[2].Sub(start) != 6*time.Minute || got[3].Sub(start) != 14*time.Minute {
			t.Errorf("RATE: asked at %v", got)
		}
		if got := asked["b:123"]; len(got) != 1 {
			t.Errorf("DENY: asked at %v", got)
		}
		if got := asked["c:123"]; len(got) != 30 {
			t.Errorf("asked %d times", len(got))
		}
		if r := c.Snapshot().Last; r.Asked != 1 || r.Answers != 1 || len(r.Errors) != 2 || !strings.Contains(r.Errors[1].Error(), "b: asked to be left alone") {
			t.Errorf("%+v", r)
		}
		mu.Lock()
		say["a:123"] = good
		mu.Unlock()
		time.Sleep(24 * time.Hour)
		check(t, c)
		mu.Lock()
		say["a:123"] = clockskew.Kiss("RATE")
		mu.Unlock()
		check(t, c)
		time.Sleep(2 * time.Minute)
		if r := check(t, c); r.Asked != 2 { // b was asked a day later, and again says no
			t.Errorf("%+v", r)
		}
	})
}

func TestNilContext(t *testing.T) {
	t.Parallel()
	c := checker(t, []string{"a"}, nil)
	//lint:ignore SA1012 nil is what is tested
	if _, err := c.Check(nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Error(err)
	}
	//lint:ignore SA1012 nil is what is tested
	if err := c.Run(nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Error(err)
	}
}
