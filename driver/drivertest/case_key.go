package drivertest

import (
	"slices"
	"strings"
	"time"

	"github.com/go-dlm/dlm/driver"
)

var keyCases = slices.Concat(
	bothOver("KeysAreIndependent", "I12, KEY2",
		"two keys that meet in the store block each other, or free each other's locks",
		// It takes longer than the longest TTL of some stores.
		renewing, keysAreIndependent),
	[]Case{{
		Name: "Backend/ListGivesPagesInOrder", Guarantee: "I12, contract of List",
		Why: "an operator who pages through the locks would miss some, or never come to an end",
		run: listGivesPagesInOrder,
	}},
)

// awkwardKeys are keys that some store's escaping might confuse.
func awkwardKeys() []string {
	long512 := strings.Repeat("x", 511)
	return []string{
		"a", "a/b", "a-b", "a:b", "ab", "A", "a/", "/a", "a/b/", "a//b", "a:", ":a", "a.b", "a_b", "a+b", "a=b", "a,b",
		"{a}", "{a}b", "a{b}", "{}", "{", "}", "{}a", "}{", "a*", "a?", "a[b]", "a\\b", "a'b", `a"b`, "a`b", "a;b", "a|b", "a#b", "$a", "~a", "^a",
		" ", " a", "a ", "a b", "a  b", "\t", "a\n", "\na", "a\nb", "a\r\nb", "a\x00", "a\x00b", "\x00", "\x7f", "\x01",
		"%", "%a", "a%", "a%b", "a%2Fb", "a%2fb", "a%25b", "%00", "a%00b", "%s", "a_", "a%_",
		".", "..", "../a", "./a", "a/..", "a/../b", "-", "--", "_", "0", "00", "1", "-1", "null", "nil", "true",
		"é", "e\u0301", "ß", "ss", "İ", "i", "I", "ı", "世界", "世", "🔒", "\u200b", "a\u200b", "\ufeff", "\ufffd", "\U0010ffff",
		"k/holder", "k/lock", "k/queue", "k:q", "k:t", "k",
		long512 + "y", long512 + "z", long512, strings.Repeat("世", 170), strings.Repeat("世", 170) + "ab", strings.Repeat("a", 255), strings.Repeat("a", 256),
	}
}

func keysAreIndependent(e *env, open func() locker) {
	a, b := open(), open()
	keys := awkwardKeys()
	held := make(map[string]*grip, len(keys))
	for _, key := range keys {
		held[key] = e.take(a, key, want{})
	}
	for _, key := range keys {
		e.denied(b, key, want{})
	}
	e.wantListed(keys, held)
	// One half is released, and taken by the others; nothing happens to the
	// other half.
	for i, key := range keys {
		if i%2 == 0 {
			e.drop(held[key])
			held[key] = e.take(b, key, want{})
		}
	}
	for i, key := range keys {
		if i%2 == 1 {
			e.denied(b, key, want{})
		}
		e.drop(held[key])
	}
	for _, key := range keys {
		e.drop(e.take(b, key, want{}))
	}
}

// wantListed checks that the store lists these keys, all held, and no others.
func (e *env) wantListed(keys []string, held map[string]*grip) {
	in, ok := driver.As[driver.Inspector](e.open().backend)
	if !ok {
		return
	}
	list, err := in.List(e.within(e.patience), "", "", len(keys)+10)
	if err != nil {
		e.fatalf("List: %w", err)
	}
	var names []string
	for _, info := range list {
		names = append(names, info.Key)
		g := held[info.Key]
		if g != nil && (len(info.Holders) != 1 || info.Holders[0].Owner != g.owner || info.Holders[0].Token != g.token) {
			e.fatalf("List says that %q is held by %+v, want %q alone", info.Key, info.Holders, g.owner)
		}
	}
	if want := slices.Sorted(slices.Values(keys)); !slices.Equal(names, want) {
		e.fatalf("List gives the keys %q, want %q", names, want)
	}
}

func listGivesPagesInOrder(e *env) {
	cl := e.open()
	in, ok := driver.As[driver.Inspector](cl.backend)
	if !ok {
		e.wantUnsupported()
		return
	}
	list := func(prefix, after string, limit int) []string {
		page, err := in.List(e.within(e.patience), prefix, after, limit)
		if err != nil {
			e.fatalf("List(%q, %q, %d): %w", prefix, after, limit, err)
		}
		keys := []string{}
		for _, info := range page {
			keys = append(keys, info.Key)
		}
		return keys
	}
	if got := list("", "", 0); len(got) != 0 {
		e.fatalf("an empty store lists %q", got)
	}
	leases := map[string]driver.Lease{}
	all := awkwardKeys()
	for _, key := range all {
		leases[key] = cl.grant(driver.Request{Key: key, Owner: "a"})
	}
	// Of these nothing is to be seen: free again, expired.
	cl.mustRelease(cl.grant(driver.Request{Key: "a/free", Owner: "a"}))
	if !e.props.SessionLeases {
		lease := cl.grant(driver.Request{Key: "a/lapsed", Owner: "a", TTL: e.unit})
		pass(expired(time.Now(), lease.TTL))
	}
	slices.Sort(all)
	from := func(prefix, after string, limit int) []string {
		keys := []string{}
		for _, key := range all {
			if strings.HasPrefix(key, prefix) && key > after && len(keys) < limit {
				keys = append(keys, key)
			}
		}
		return keys
	}
	for _, prefix := range []string{"", "a", "a/", "a%", "a_", "{", "世", "nothing", "xxx", "\x00", "a\n"} {
		for _, limit := range []int{1, 3, 1000} {
			after := ""
			for {
				got, want := list(prefix, after, limit), from(prefix, after, limit)
				if !slices.Equal(got, want) {
					e.fatalf("List(%q, %q, %d) = %q, want %q", prefix, after, limit, got, want)
				}
				if len(got) < limit {
					break
				}
				after = got[len(got)-1]
			}
		}
	}
	for _, limit := range []int{0, -1} {
		if got := list("a", "a/", limit); !slices.Equal(got, from("a", "a/", 1000)) {
			e.fatalf("List with limit %d = %q, want %q", limit, got, from("a", "a/", 1000))
		}
	}
	// Places between keys serve as well as keys.
	if got := list("", "a/a", 2); !slices.Equal(got, from("", "a/a", 2)) {
		e.fatalf("List after a key that does not exist = %q, want %q", got, from("", "a/a", 2))
	}
	for _, lease := range leases {
		cl.mustRelease(lease)
	}
	if got := list("", "", 0); len(got) != 0 {
		e.fatalf("a store with nothing held lists %q", got)
	}
}
