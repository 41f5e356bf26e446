package zklock

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver"
)

func TestEscape(t *testing.T) {
	seen := make(map[string]string)
	for _, s := range []string{
		"a", "A", "a/b", "a%2Fb", "a%2fb", ".", "..", "a.", "...", "-", "a-b", "%", "%%", "\x00", "é", "世界", "\U0010ffff",
		"\ufffd", " ", "zookeeper", "!clock", strings.Repeat("世", 170),
	} {
		for _, dashes := range []bool{true, false} {
			name := escape(s, dashes)
			if back, ok := unescape(name); !ok || back != s {
				t.Errorf("%q becomes %q and then %q, %v", s, name, back, ok)
			}
			if strings.ContainsAny(name, "/!") || name == "." || name == ".." || !dashes && strings.Contains(name, "-") {
				t.Errorf("%q becomes %q", s, name)
			}
			if other, ok := seen[name]; ok && other != s {
				t.Errorf("%q and %q both become %q", s, other, name)
			}
			seen[name] = s
		}
	}
	for _, name := range []string{"", "%", "%4", "%zz", "a/b", "%61", "%2f", "!clock-00"} {
		if s, ok := unescape(name); ok {
			t.Errorf("%q is taken for %q", name, s)
		}
	}
}

func TestNodeNames(t *testing.T) {
	for _, owner := range []string{"a", "a-b", "-", "host:1/XYZ", "世", "."} {
		for _, seq := range []int32{0, 17, math.MaxInt32, math.MinInt32} {
			name := namePrefix(driver.Shared, 1, -5, owner) + fmt.Sprintf("%010d", seq)
			c, ok := parseName(name)
			if want := (contender{name: name, mode: driver.Shared, limit: 1, session: -5, owner: owner, seq: seq}); !ok || c != want {
				t.Errorf("%q is read as %+v, %v", name, c, ok)
			}
		}
	}
	good := namePrefix(driver.Exclusive, 3, 1, "a")
	for _, name := range []string{
		"", "x", good, good + "1", good + "00000000001", "y" + good[1:] + "0000000001", "x0" + good[2:] + "0000000001",
		"lock-0000000001", "x1-nonsense-0000000001", strings.Replace(good, "-a-", "--", 1) + "0000000001", good + "0000000001-0",
	} {
		if c, ok := parseName(name); ok {
			t.Errorf("%q is taken for %+v", name, c)
		}
	}
}

// row makes nodes of kinds, such as "x1 s1".
func row(kinds string, first int32) []contender {
	var names []string
	seq := first
	for i, kind := range strings.Fields(kinds) {
		// In another order than that of their creation.
		names = append([]string{fmt.Sprintf("%s-%016x-o%d-%010d", kind, 1, i, seq)}, names...)
		seq++ // wraps round
	}
	return parseNames(append(names, "foreign"))
}

func TestHoldersAndAhead(t *testing.T) {
	for _, c := range []struct {
		kinds   string
		holders int
		ahead   string // of the last one
	}{
		{"", 0, ""},
		{"x1", 1, ""},
		{"x1 x1", 1, "o0"},
		{"x1 x1 x1", 1, "o1"},
		{"s1 s1 s1", 3, ""},
		{"s1 s1 x1", 2, "o1"},
		{"s1 x1 s1", 1, "o1"},
		{"x1 s1 s1", 1, "o0"},
		{"x1 s1 x1 s1 s1", 1, "o2"},
		{"x3 x3 x3", 3, ""},
		{"x3 x3 x3 x3 x3", 3, "o1 o2 o3"},
		{"x3 x1", 1, "o0"},
	} {
		for _, first := range []int32{0, math.MaxInt32 - 1, math.MaxInt32} {
			list := row(c.kinds, first)
			n := holders(list)
			if n != c.holders {
				t.Errorf("%s: %d holders, want %d", c.kinds, n, c.holders)
			}
			if len(list) == n {
				continue
			}
			var owners []string
			for _, a := range ahead(list, len(list)-1) {
				owners = append(owners, a.owner)
			}
			if got := strings.Join(owners, " "); got != c.ahead {
				t.Errorf("%s: the last one waits for %q, want %q", c.kinds, got, c.ahead)
			}
		}
	}
}

func TestLeft(t *testing.T) {
	const timeout = 20 * time.Second
	now := time.Now()
	at := func(seconds float64) time.Time { return now.Add(time.Duration(seconds * float64(time.Second))) }
	for _, c := range []struct {
		name    string
		base    float64
		stalled float64
		proofs  []float64
		want    time.Duration
	}{
		{"just connected", 0, -100, nil, timeout},
		{"connected long ago", -30, -100, nil, -10 * time.Second},
		{"a first write: the ping before it counts", -300, -200, []float64{0}, timeout - timeout/4 - timeout/3},
		{"the process was stopped: not even that", -300, -1, []float64{0}, -280 * time.Second},
		{"an older write counts", -300, -1, []float64{-6, 0}, timeout - 6*time.Second},
		{"one that is too new does not", -300, -200, []float64{-4, 0}, timeout - timeout/4 - timeout/3},
		{"a new connection counts for more", -2, -100, []float64{-6, 0}, timeout - 2*time.Second},
	} {
		s := &session{b: &Backend{stalled: at(c.stalled)}, timeout: timeout, base: at(c.base)}
		for _, p := range c.proofs {
			s.b.proven(s, at(p))
		}
		if got := s.left(now); (got - c.want).Abs() > time.Millisecond {
			t.Errorf("%s: %v left, want %v", c.name, got, c.want)
		}
	}
}

// FuzzParseName checks that what is read as a node's name is written the same.
func FuzzParseName(f *testing.F) {
	f.Add("x1-0000000000000001-a-0000000001")
	f.Add("s1-ffffffffffffffff-a%2Db--2147483648")
	f.Fuzz(func(t *testing.T, name string) {
		c, ok := parseName(name)
		if !ok {
			return
		}
		if c.owner == "" || c.limit < 1 {
			t.Errorf("%q is read as %+v", name, c)
		}
	})
}
