package zklock

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/go-dlm/dlm/driver"
)

// contender is a node below a key's parent: a grant or a ticket. Its name says
// all that others must know:
//
//	kind-session-owner-sequence
type contender struct {
	name    string
	mode    driver.Mode
	limit   int
	session int64
	owner   string
	// seq is the server's count of the parent's children. It begins again with
	// every new parent and wraps round, so it only orders the children that are
	// there together.
	seq int32
}

// namePrefix is the name of a node but for its sequence number. Owners are
// unique, and the session is in it, so nobody else's node is ever so called.
func namePrefix(mode driver.Mode, limit int, session int64, owner string) string {
	kind := "x"
	if mode == driver.Shared {
		kind = "s"
	}
	return fmt.Sprintf("%s%d-%016x-%s-", kind, limit, uint64(session), escape(owner, false))
}

// parseName reads the name of a node; false means that it is none of ours.
func parseName(name string) (contender, bool) {
	kind, rest, ok1 := strings.Cut(name, "-")
	session, rest, ok2 := strings.Cut(rest, "-")
	owner, seq, ok3 := strings.Cut(rest, "-")
	if !ok1 || !ok2 || !ok3 || len(kind) < 2 || kind[0] != 'x' && kind[0] != 's' || len(session) != 16 ||
		len(strings.TrimPrefix(seq, "-")) != 10 {
		return contender{}, false
	}
	c := contender{name: name}
	if kind[0] == 's' {
		c.mode = driver.Shared
	}
	limit, err1 := strconv.ParseInt(kind[1:], 10, 32)
	id, err2 := strconv.ParseUint(session, 16, 64)
	number, err3 := strconv.ParseInt(seq, 10, 32)
	if err1 != nil || err2 != nil || err3 != nil || limit < 1 {
		return contender{}, false
	}
	if c.owner, ok1 = unescape(owner); !ok1 {
		return contender{}, false
	}
	c.limit, c.session, c.seq = int(limit), int64(id), int32(number)
	return c, true
}

// parseNames reads the names of a parent's children, leaves out foreign ones,
// and puts the rest in order of their creation.
func parseNames(names []string) []contender {
	list := make([]contender, 0, len(names))
	for _, name := range names {
		if c, ok := parseName(name); ok {
			list = append(list, c)
		}
	}
	slices.SortFunc(list, func(a, b contender) int {
		return cmp.Compare(a.seq-b.seq, 0) // as the count wraps round, only the difference counts
	})
	return list
}

// holders is how many of the nodes hold the key: the longest row from the first
// on that may hold it together. The rest wait.
func holders(list []contender) int {
	if len(list) == 0 {
		return 0
	}
	first, n := list[0], 1
	for n < len(list) && list[n].mode == first.mode && list[n].limit == first.limit &&
		(first.mode == driver.Shared || n < first.limit) {
		n++
	}
	return n
}

// ahead are the nodes that the waiter at place i has to watch: it cannot come to
// hold the key before one of them has gone. For a lock that is the one before it,
// for n permits the n before it, for a reader the last writer before it.
func ahead(list []contender, i int) []contender {
	if list[i].mode == driver.Shared {
		for j := i - 1; j >= 0; j-- {
			if list[j].mode != driver.Shared {
				return list[j : j+1]
			}
		}
		return list[max(0, i-1):i]
	}
	return list[max(0, i-list[i].limit):i]
}

// find returns the place of a node, or -1.
func find(list []contender, name string) int {
	return slices.IndexFunc(list, func(c contender) bool { return c.name == name })
}

// plain says of characters that stand for themselves everywhere.
func plain(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '_' || r == ':'
}

const hexDigits = "0123456789ABCDEF"

// escape makes the name of a node of any string, so that no two strings have
// the same.
func escape(s string, dashes bool) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		switch {
		case plain(rune(c)), c == '-' && dashes, c == '.' && s != "." && s != "..":
			b.WriteByte(c)
		default:
			b.WriteByte('%')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
	}
	return b.String()
}

// unescape is the reverse of escape; false means that escape makes no such name.
func unescape(name string) (string, bool) {
	if !strings.ContainsFunc(name, func(r rune) bool { return !plain(r) }) {
		return name, name != ""
	}
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		if name[i] != '%' {
			b.WriteByte(name[i])
			continue
		}
		if i+2 >= len(name) {
			return "", false
		}
		c, err := strconv.ParseUint(name[i+1:i+3], 16, 8)
		if err != nil {
			return "", false
		}
		b.WriteByte(byte(c))
		i += 2
	}
	s := b.String()
	return s, s != "" && (escape(s, true) == name || escape(s, false) == name)
}
