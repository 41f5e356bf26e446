package redislock_test

import (
	"path"
	"strings"
	"testing"

	"github.com/go-dlm/dlm/backends/redislock"
)

// awkward are keys that mean something to Redis, to its clusters, or to us.
var awkward = []string{
	"a", "a:q", "a:h", "a:q:h", "{", "}", "{}", "{a}", "a}", "}a", "a}:q", "{%}", "%", "%%", "%7D", "%25", "%7d", "%257D", "%2",
	"a b", "a\nb", "a\r\nb", "\x00", "a\x00b", "*", "?", "[a]", `\`, "^", "dlm:{a}", "dlm:", "!", "ключ", "鍵", "\U0001f512",
	strings.Repeat("}", 512), strings.Repeat("k", 512),
}

func TestKeysStayApart(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, key := range awkward {
		for _, suffix := range []string{"", ":q", ":h"} {
			name := redislock.RecordKey("dlm:", key) + suffix
			if other, ok := seen[name]; ok {
				t.Errorf("%q and %q share the name %q", key, other, name)
			}
			seen[name] = key
			got, ok := redislock.LockKey("dlm:", name)
			if ok != (suffix == "") || ok && got != key {
				t.Errorf("%q is read as %q, %v; want %q, %v", name, got, ok, key, suffix == "")
			}
		}
	}
}

func TestNamesOfOthers(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"", "dlm:", "dlm:{", "dlm:{}", "dlm:}", "dlm:a", "dlm:{a", "dlm:a}", "{a}", "xdlm:{a}", "dlm2:{a}", "dlm:{a}}", "dlm:{a}:x",
		"dlm:{%}", "dlm:{%zz}", "dlm:{a%7d}", "dlm:{%7}", "dlm:!a",
	} {
		if key, ok := redislock.LockKey("dlm:", name); ok {
			t.Errorf("%q is taken for the record of %q", name, key)
		}
	}
}

// The tag of a key decides on its slot: what Redis takes for it must be all
// that stands between our braces.
func TestTagIsTheWholeKey(t *testing.T) {
	t.Parallel()
	for _, key := range awkward {
		name := redislock.RecordKey("dlm:", key)
		_, rest, _ := strings.Cut(name, "{")
		tag, _, ok := strings.Cut(rest, "}")
		if !ok || tag != redislock.EscapeKey(key) || tag == "" {
			t.Errorf("the tag of %q is %q, want %q", name, tag, redislock.EscapeKey(key))
		}
	}
}

func TestPatternIsLiteral(t *testing.T) {
	t.Parallel()
	for _, key := range awkward {
		if strings.Contains(key, "/") {
			continue // path.Match is not the server's matching there
		}
		pattern := redislock.RecordPattern("d[l]m*:", key)
		for _, other := range awkward {
			name := redislock.RecordKey("d[l]m*:", other)
			got, err := path.Match(pattern, name)
			if want := strings.HasPrefix(redislock.EscapeKey(other), redislock.EscapeKey(key)); err != nil || got != want {
				t.Errorf("pattern %q for %q: %v, %v; want %v", pattern, name, got, err, want)
			}
		}
	}
}

func FuzzKeys(f *testing.F) {
	for _, key := range awkward {
		f.Add("dlm:", key, "dlm:{"+key+"}")
	}
	f.Fuzz(func(t *testing.T, prefix, key, name string) {
		if strings.ContainsAny(prefix, "{}") || key == "" {
			return // no input of these functions
		}
		if got, ok := redislock.LockKey(prefix, redislock.RecordKey(prefix, key)); !ok || got != key {
			t.Errorf("%q comes back as %q, %v", key, got, ok)
		}
		if got, ok := redislock.LockKey(prefix, name); ok && redislock.RecordKey(prefix, got) != name {
			t.Errorf("%q is read as %q, whose name is %q", name, got, redislock.RecordKey(prefix, got))
		}
	})
}

// The values are those of CLUSTER KEYSLOT.
func TestSlot(t *testing.T) {
	t.Parallel()
	for tag, want := range map[string]int{
		"123456789": 12739, // 0x31C3, from the specification
		"foo":       12182,
		"bar":       5061,
		"hello":     866,
		"a":         15495,
		"user1000":  3443,
	} {
		if got := redislock.Slot(tag); got != want {
			t.Errorf("slot(%q) = %d, want %d", tag, got, want)
		}
	}
}
