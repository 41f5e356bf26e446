package consullock

import (
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

func FuzzEscape(f *testing.F) {
	for _, s := range []string{"", ".", "..", "a/b", "a=2Fb", "=s/", "\x00", "\xff", "é", "a b", "A:b_c-d.e", "%2F", "lock"} {
		f.Add(s, s+"x")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := escape(a), escape(b)
		if got, ok := unescape(x); !ok || got != a {
			t.Errorf("%q becomes %q and then %q, %t", a, x, got, ok)
		}
		if (x == y) != (a == b) {
			t.Errorf("%q and %q become %q and %q", a, b, x, y)
		}
		if strings.HasPrefix(b, a) != strings.HasPrefix(y, x) && !strings.Contains(x+y, "=2E") {
			t.Errorf("%q and %q become %q and %q", a, b, x, y)
		}
		if strings.ContainsAny(x, "/ %?#\x00") || x == "." || x == ".." || strings.HasPrefix(x, "=s") {
			t.Errorf("%q becomes %q", a, x)
		}
		if got, ok := unescape(a); ok && escape(got) != a {
			t.Errorf("%q is read as %q", a, got)
		}
	})
}

func TestUnescape(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"=", "=2", "=2f", "=41", "a/b", "=zz", ".", "=+1"} {
		if got, ok := unescape(s); ok {
			t.Errorf("%q is read as %q", s, got)
		}
	}
}

func TestValue(t *testing.T) {
	t.Parallel()
	v := value{ttl: 1500 * time.Millisecond, made: time.UnixMilli(12345), owner: "o w/n", manager: ""}
	got, err := parseValue(v.String())
	if err != nil || got != v {
		t.Errorf("%q is read as %+v, %v", v.String(), got, err)
	}
	for _, text := range []string{"", "1 2 3", "x 2 a b", "1 x a b", "1 2 / b", "1 2 a b c"} {
		if got, err := parseValue(text); err == nil {
			t.Errorf("%q is read as %+v", text, got)
		}
	}
}

func pair(name string, create uint64, mode driver.Mode, limit int) *api.KVPair {
	return &api.KVPair{
		Key: name, CreateIndex: create, ModifyIndex: create + 100, Session: "s", Flags: flagsOf(mode, limit),
		Value: []byte(value{owner: "fast"}.String()),
	}
}

func TestParseState(t *testing.T) {
	t.Parallel()
	dead, strange := pair("p/k/wait/dead", 1, 0, 1), pair("p/k/wait/strange", 1, 0, 1)
	dead.Session, strange.Flags = "", 7
	st, err := parseState("p/k/", []*api.KVPair{
		pair("p/k/wait/b", 9, driver.Exclusive, 1), pair("p/k/wait/a", 8, driver.Shared, 1), pair("p/k/lock", 7, driver.Exclusive, 1),
		{Key: "p/k/queue", ModifyIndex: 11},
		{Key: "p/k/other"},
		pair("p/k/wait/=zz", 1, 0, 1), dead, strange,
		pair("p/kk/lock", 1, 0, 1),
	})
	if err != nil || st.lock != 107 || st.queue != 11 || len(st.list) != 3 {
		t.Fatalf("%+v, %v", st, err)
	}
	for i, owner := range []string{"fast", "a", "b"} {
		if st.list[i].owner != owner || find(st.list, owner) != i {
			t.Errorf("%d is %+v, want %s", i, st.list[i], owner)
		}
	}
	foreign := pair("p/k/lock", 1, 0, 1)
	foreign.Value = []byte("x")
	if _, err := parseState("p/k/", []*api.KVPair{foreign}); !is(err, ProblemForeign) {
		t.Errorf("a foreign lock: %v", err)
	}
}

func TestHolders(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kinds string // x and s with limit 1, 2 and 3 permits
		want  int
	}{
		{"", 0},
		{"x", 1},
		{"xx", 1},
		{"xs", 1},
		{"s", 1},
		{"ss", 2},
		{"ssx", 2},
		{"ssxs", 2},
		{"sx", 1},
		{"2", 1},
		{"22", 2},
		{"222", 2},
		{"3333", 3},
		{"x2", 1},
		{"2x", 1},
		{"23", 1},
		{"s2", 1},
		{"2s2", 1},
		{"32", 1},
	} {
		var list []ticket
		for i, k := range c.kinds {
			one := ticket{create: uint64(i + 1), limit: 1}
			switch k {
			case 's':
				one.mode = driver.Shared
			case '2', '3':
				one.limit = int(k - '0')
			}
			list = append(list, one)
		}
		n := holders(list)
		if n != c.want {
			t.Errorf("%s: %d hold it, want %d", c.kinds, n, c.want)
		}
		for i := range list {
			if holds(list, i) != (i < n) {
				t.Errorf("%s: whether the ticket at %d holds it is %t", c.kinds, i, holds(list, i))
			}
		}
	}
}

func TestClass(t *testing.T) {
	t.Parallel()
	classes := make(map[time.Duration]bool)
	for ttl := time.Millisecond; ttl < 48*time.Hour; ttl += max(ttl/100, time.Millisecond) {
		c := class(ttl, 10*time.Second)
		switch {
		case c < min(ttl, maxSession) || c < 10*time.Second || c > maxSession:
			t.Fatalf("%v has class %v", ttl, c)
		case ttl >= 10*time.Second && c > ttl+ttl/4+time.Second:
			t.Fatalf("%v has class %v, which is much longer", ttl, c)
		case c != class(c, 0):
			t.Fatalf("%v has class %v, which is none", ttl, c)
		}
		classes[c] = true
	}
	if len(classes) > 70 {
		t.Errorf("there are %d classes", len(classes))
	}
}

func TestOlder(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"1.9.17", "1.10", true},
		{"1.10.0", "1.10", false},
		{"1.14.11", "1.10", false},
		{"2.0", "1.10", false},
		{"1.10.0-dev", "1.10", false},
		{"0.7", "1.10", true},
		{"1", "1.10", true},
	} {
		if got := older(c.a, c.b); got != c.want {
			t.Errorf("%s before %s: %t", c.a, c.b, got)
		}
	}
}
