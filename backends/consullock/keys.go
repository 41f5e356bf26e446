package consullock

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// A ticket, granted or waiting, is one key that its session has locked:
//
//	dlm/KEY/lock         of one who found the lock free
//	dlm/KEY/wait/OWNER   of all others
//
// As long as there may be tickets of the second kind there is also dlm/KEY/queue,
// which every one of them rewrites when it is made. So a transaction knows by the
// absence of two keys that nobody has the lock or waits for it, and by one index
// that nobody has come since it looked.
//
// dlm/KEY/delay is locked by who holds the lock for himself, if there is to be a
// delay after his death: Consul delays keys, and those of tickets differ.
//
// The flags of a ticket tell its format, mode and limit, so that lists are
// judged without their values. Its value is text: TTL in milliseconds, the time at
// which it was made in milliseconds since 1970, owner and manager, with spaces
// between.
//
// dlm/=s/SESSION belongs to a session of a backend; see session.

const (
	lockName    = "lock"
	queueName   = "queue"
	delayName   = "delay"
	waitSection = "wait/"
	// No key of a lock begins with it: what follows = in those is hexadecimal.
	sessionSection = "=s/"

	formatVersion = 1
	versionBits   = 4
	sharedBit     = 1 << versionBits
	limitShift    = 8
)

const hex = "0123456789ABCDEF"

// escape writes a string so that it is one part of a path, which nothing on the
// way to the server changes.
func escape(s string) string {
	plain := func(i int) bool {
		c := s[i]
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == ':' || c == '.' && i > 0
	}
	n := 0
	for i := range len(s) {
		if !plain(i) {
			n++
		}
	}
	if n == 0 {
		return s
	}
	b := make([]byte, 0, len(s)+2*n)
	for i := range len(s) {
		if plain(i) {
			b = append(b, s[i])
		} else {
			b = append(b, '=', hex[s[i]>>4], hex[s[i]&15])
		}
	}
	return string(b)
}

// unescape undoes escape. It returns false for what escape does not write.
func unescape(s string) (string, bool) {
	if !strings.Contains(s, "=") {
		return s, escape(s) == s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '=' {
			b = append(b, s[i])
			continue
		}
		if i+2 >= len(s) {
			return "", false
		}
		n, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
		if err != nil {
			return "", false
		}
		b = append(b, byte(n))
		i += 2
	}
	return string(b), escape(string(b)) == s
}

// lockBase begins all keys of a lock.
func lockBase(prefix, key string) string { return prefix + escape(key) + "/" }

func flagsOf(mode driver.Mode, limit int) uint64 {
	flags := uint64(limit)<<limitShift | formatVersion
	if mode == driver.Shared {
		flags |= sharedBit
	}
	return flags
}

// ticket is one key of a lock.
type ticket struct {
	name    string
	owner   string
	mode    driver.Mode
	limit   int
	create  uint64
	mod     uint64
	session string
	value   string
}

// state is what there is of a lock.
type state struct {
	// list are the tickets in the order of their creation.
	list []ticket
	// lock and queue are the indexes of the last change of these keys, 0 if they
	// are not there.
	lock, queue uint64
	// index is up to where all that happened is in here.
	index uint64
}

// parseState reads the keys of a lock, in any order. What is no ticket is passed
// over, but for one key that stands in the way.
func parseState(base string, kvs []*api.KVPair) (state, error) {
	s := state{list: make([]ticket, 0, len(kvs)+1)}
	for _, kv := range kvs {
		rest, ok := strings.CutPrefix(kv.Key, base)
		if !ok {
			continue
		}
		t := ticket{name: kv.Key, create: kv.CreateIndex, mod: kv.ModifyIndex, session: kv.Session, value: string(kv.Value)}
		limit := kv.Flags >> limitShift
		fits := kv.Session != "" && kv.Flags&(1<<versionBits-1) == formatVersion && limit >= 1 && limit <= 1<<31 &&
			kv.Flags == flagsOf(driver.Mode(kv.Flags>>versionBits&1), int(limit))
		t.mode, t.limit = driver.Mode(kv.Flags>>versionBits&1), int(limit)
		switch owner, waits := strings.CutPrefix(rest, waitSection); {
		case rest == queueName:
			s.queue = kv.ModifyIndex
		case rest == lockName:
			s.lock = kv.ModifyIndex
			v, err := parseValue(t.value)
			if !fits || err != nil {
				return s, problem(ProblemForeign, nil, "key %q is none of a lock", kv.Key)
			}
			t.owner = v.owner
			s.list = append(s.list, t)
		case waits && fits:
			if t.owner, ok = unescape(owner); ok {
				s.list = append(s.list, t)
			}
		}
	}
	slices.SortFunc(s.list, func(a, b ticket) int { return cmp.Compare(a.create, b.create) })
	return s, nil
}

// find returns the place of an owner's ticket in a list, or -1.
func find(list []ticket, owner string) int {
	return slices.IndexFunc(list, func(t ticket) bool { return t.owner == owner })
}

// holds says whether the ticket at a place of a list holds the lock: whether it
// may hold it together with all before it. Nothing has to be written for the next
// to hold it when one of them is gone. Those who ask for another limit than the
// ones before them are about to leave.
func holds(list []ticket, i int) bool {
	t := &list[i]
	if t.mode == driver.Exclusive && i >= t.limit {
		return false
	}
	for _, ahead := range list[:i] {
		if ahead.limit != t.limit || ahead.mode != t.mode {
			return false
		}
	}
	return true
}

// holders is how many tickets at the beginning of a list hold the lock.
func holders(list []ticket) int {
	if len(list) == 0 {
		return 0
	}
	n, first := 1, &list[0]
	for n < len(list) && (first.mode == driver.Shared || n < first.limit) && list[n].mode == first.mode && list[n].limit == first.limit {
		n++
	}
	return n
}

// value is what a ticket's key holds.
type value struct {
	ttl            time.Duration
	made           time.Time
	owner, manager string
}

func (v value) String() string {
	return fmt.Sprintf("%d %d %s %s", v.ttl.Milliseconds(), v.made.UnixMilli(), escape(v.owner), escape(v.manager))
}

func parseValue(text string) (value, error) {
	parts := strings.Split(text, " ")
	if len(parts) != 4 {
		return value{}, fmt.Errorf("%d parts", len(parts))
	}
	ttl, err := strconv.ParseInt(parts[0], 10, 64)
	if err != nil {
		return value{}, err
	}
	made, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil {
		return value{}, err
	}
	owner, ok1 := unescape(parts[2])
	manager, ok2 := unescape(parts[3])
	if !ok1 || !ok2 {
		return value{}, fmt.Errorf("%q and %q are not escaped", parts[2], parts[3])
	}
	return value{ttl: time.Duration(ttl) * time.Millisecond, made: time.UnixMilli(made), owner: owner, manager: manager}, nil
}

// class is the TTL of the session that a lock with this TTL shares with others:
// few, so that there are few sessions. A server grants none above a day.
func class(ttl, least time.Duration) time.Duration {
	ttl = max(ttl, least)
	step := time.Second
	for _, s := range classSteps {
		if ttl > 4*s {
			step = s
			break
		}
	}
	return min((ttl+step-1)/step*step, maxSession)
}

var classSteps = []time.Duration{
	4 * time.Hour, time.Hour, 30 * time.Minute, 10 * time.Minute, 5 * time.Minute, 2 * time.Minute, time.Minute,
	30 * time.Second, 10 * time.Second, 5 * time.Second, 2 * time.Second,
}

// maxSession is the longest TTL of a session.
const maxSession = 24 * time.Hour
