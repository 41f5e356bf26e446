package etcdlock

import (
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/go-dlm/dlm/driver"
)

func TestTicketNames(t *testing.T) {
	keys := []string{"a", "a\x00", "a\x00\x00", "a\x00b", "a\x01", "ab", "a/", "1/x/", "\x00", "\x00s/1", "世"}
	names := make(map[string]string)
	for _, key := range keys {
		for _, owner := range []string{"o", "o/1", "x/\x00", "a\x00\xff"} {
			for _, limit := range []int{1, 10, 2} {
				for _, mode := range []driver.Mode{driver.Exclusive, driver.Shared} {
					if mode == driver.Shared && limit > 1 {
						continue
					}
					name := ticketName("p/", key, limit, mode, owner)
					if other, ok := names[name]; ok {
						t.Errorf("%q is the name of two: %s", name, other)
					}
					names[name] = key
					got, ok := parseTicket("p/", &mvccpb.KeyValue{Key: []byte(name), CreateRevision: 7, Lease: 8})
					if !ok || got.key != key || got.owner != owner || got.limit != limit || got.mode != mode || got.rev != 7 || got.lease != 8 {
						t.Errorf("%q is read as %+v, %t", name, got, ok)
					}
					if name < limitBase("p/", key, limit) || name >= after(limitBase("p/", key, limit)) {
						t.Errorf("%q is not in the range of its limit", name)
					}
				}
			}
		}
	}
	for name, key := range names {
		for _, other := range keys {
			in := name >= lockBase("p/", other) && name < lockEnd("p/", other)
			if in != (key == other) {
				t.Errorf("%q of %q is in the range of %q: %t", name, key, other, in)
			}
		}
		if strings.HasPrefix(name, "p/"+sessionSection) {
			t.Errorf("%q is among the keys of leases", name)
		}
	}
	// They sort like the keys of the locks.
	slices.Sort(keys)
	for i := 1; i < len(keys); i++ {
		if lockEnd("p/", keys[i-1]) > lockEnd("p/", keys[i]) || lockBase("p/", keys[i-1]) >= lockBase("p/", keys[i]) {
			t.Errorf("%q and %q sort the wrong way", keys[i-1], keys[i])
		}
	}
}

func TestParseTicketRefuses(t *testing.T) {
	for _, name := range []string{
		"", "p/", "p/k", "q/k\x001/x/o", "p/k\x00", "p/k\x001", "p/k\x001/x", "p/k\x000/x/o", "p/k\x00-1/x/o", "p/k\x0001/x/o",
		"p/k\x001/y/o", "p/k\x002/s/o", "p/\x001/x/o", "p/\x00s/12", "p/k\x00\xff1/x/o",
	} {
		if got, ok := parseTicket("p/", &mvccpb.KeyValue{Key: []byte(name)}); ok {
			t.Errorf("%q is read as %+v", name, got)
		}
	}
}

func TestValue(t *testing.T) {
	v := value{ttl: 1500 * time.Millisecond, made: time.UnixMilli(1234), manager: "m 1"}
	if got, err := parseValue("k", []byte(v.String())); err != nil || got != v {
		t.Errorf("%q is read as %+v, %v", v, got, err)
	}
	for _, text := range []string{"", "1", "2 1 1 m", "1 x 1 m", "1 1 x m", "precious"} {
		if got, err := parseValue("k", []byte(text)); !is(err, ProblemForeign) {
			t.Errorf("%q is read as %+v, %v", text, got, err)
		}
	}
}

func TestHolders(t *testing.T) {
	x, s, two := ticket{limit: 1}, ticket{limit: 1, mode: driver.Shared}, ticket{limit: 2}
	for _, c := range []struct {
		list []ticket
		want int
	}{
		{nil, 0},
		{[]ticket{x}, 1},
		{[]ticket{x, x, s}, 1},
		{[]ticket{s, s, x, s}, 2},
		{[]ticket{s, s}, 2},
		{[]ticket{two}, 1},
		{[]ticket{two, two, two}, 2},
	} {
		if got := holders(c.list); got != c.want {
			t.Errorf("%+v: %d hold it, want %d", c.list, got, c.want)
		}
	}
}

func TestClass(t *testing.T) {
	for _, c := range []struct {
		ttl  time.Duration
		want int64
	}{
		{time.Millisecond, 1},
		{time.Second, 1},
		{time.Second + 1, 2},
		{10 * time.Second, 10},
		{30 * time.Second, 30},
		{59 * time.Second, 59},
		{61 * time.Second, 65},
		{time.Minute, 60},
		{5 * time.Minute, 300},
		{time.Hour, 3600},
		{24 * time.Hour, 86400},
	} {
		if got := class(c.ttl); got != c.want {
			t.Errorf("class(%v) = %d, want %d", c.ttl, got, c.want)
		}
	}
	count, last := 0, int64(0)
	for ttl := time.Second; ttl < 400*24*time.Hour; ttl += max(time.Second, ttl/1000) {
		got := class(ttl)
		if secs := int64((ttl + time.Second - 1) / time.Second); got < secs || got > secs+max(secs/10, 1) {
			t.Errorf("class(%v) = %d", ttl, got)
		}
		if got != last {
			count, last = count+1, got
		}
	}
	if count > 1000 {
		t.Errorf("there are %d classes", count)
	}
}

func TestOlder(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"3.4", "3.4", false},
		{"3.4.0", "3.4", false},
		{"3.3.27", "3.4", true},
		{"3.10.1", "3.4", false},
		{"3", "3.4", true},
		{"", "3.4", true},
	} {
		if got := older(c.a, c.b); got != c.want {
			t.Errorf("older(%q, %q) = %t", c.a, c.b, got)
		}
	}
}
