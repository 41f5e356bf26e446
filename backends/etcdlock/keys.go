package etcdlock

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

// A ticket, granted or waiting, is one key:
//
//	dlm/ KEY NUL LIMIT / MODE / OWNER
//
// with the mode x or s, and a NUL within KEY doubled to NUL 0xFF, so that the
// keys in etcd sort like those of the locks. All that decides who may hold a lock
// is in the key, so that no value has to be read; and callers who agree have a
// range of their own, so that one comparison finds those who do not.
//
// Its value is text: the version of the format, the TTL in milliseconds, the
// time at which it was made in milliseconds since 1970, and the manager, with
// spaces between.
//
// What begins with the prefix and NUL s / belongs to a lease of a backend, and
// tells by its end that the lease has ended.

const (
	formatVersion  = "1"
	separator      = "\x00"
	escapedNUL     = "\x00\xff"
	sessionSection = "\x00s/"
)

func escape(key string) string { return strings.ReplaceAll(key, "\x00", escapedNUL) }

// lockBase begins all keys of a lock, and lockEnd comes behind them.
func lockBase(prefix, key string) string { return prefix + escape(key) + separator }
func lockEnd(prefix, key string) string  { return prefix + escape(key) + escapedNUL }

// limitBase begins all keys of a lock whose owners ask for this limit.
func limitBase(prefix, key string, limit int) string {
	return lockBase(prefix, key) + strconv.Itoa(limit) + "/"
}

func modeBase(prefix, key string, limit int, mode driver.Mode) string {
	letter := "x/"
	if mode == driver.Shared {
		letter = "s/"
	}
	return limitBase(prefix, key, limit) + letter
}

func ticketName(prefix, key string, limit int, mode driver.Mode, owner string) string {
	return modeBase(prefix, key, limit, mode) + owner
}

// after is the end of the range of all that begins with base.
func after(base string) string { return clientv3.GetPrefixRangeEnd(base) }

// ticket is one key of a lock.
type ticket struct {
	name  string
	key   string
	owner string
	mode  driver.Mode
	limit int
	rev   int64            // create revision
	lease clientv3.LeaseID // none, if it was read from etcd 3.7 without its value
	value []byte
}

// parseTicket reads a key. It returns false if it is no ticket.
func parseTicket(prefix string, kv *mvccpb.KeyValue) (ticket, bool) {
	rest, ok := bytes.CutPrefix(kv.Key, []byte(prefix))
	if !ok {
		return ticket{}, false
	}
	end := 0
	for ; end < len(rest); end++ {
		if rest[end] != 0 {
			continue
		}
		if end+1 < len(rest) && rest[end+1] == 0xff {
			end++
			continue
		}
		break
	}
	if end == 0 || end >= len(rest) {
		return ticket{}, false
	}
	t := ticket{
		name: string(kv.Key), key: strings.ReplaceAll(string(rest[:end]), escapedNUL, "\x00"),
		rev: kv.CreateRevision, lease: clientv3.LeaseID(kv.Lease), value: kv.Value,
	}
	parts := strings.SplitN(string(rest[end+1:]), "/", 3)
	if len(parts) != 3 {
		return ticket{}, false
	}
	limit, err := strconv.Atoi(parts[0])
	if err != nil || limit < 1 || strconv.Itoa(limit) != parts[0] {
		return ticket{}, false
	}
	t.limit, t.owner = limit, parts[2]
	switch {
	case parts[1] == "x":
	case parts[1] == "s" && limit == 1:
		t.mode = driver.Shared
	default:
		return ticket{}, false
	}
	return t, true
}

// parseTickets reads all keys of one lock, which is in use for something else
// if one of them is no ticket.
func parseTickets(prefix string, kvs []*mvccpb.KeyValue) ([]ticket, error) {
	list := make([]ticket, 0, len(kvs)+1)
	for _, kv := range kvs {
		t, ok := parseTicket(prefix, kv)
		if !ok {
			return nil, problem(ProblemForeign, nil, "key %q is none of a lock", kv.Key)
		}
		list = append(list, t)
	}
	return list, nil
}

// ticketsAmong reads the keys of one lock, and passes over what is no ticket.
func ticketsAmong(prefix string, kvs []*mvccpb.KeyValue) []ticket {
	list := make([]ticket, 0, len(kvs)+1)
	for _, kv := range kvs {
		if t, ok := parseTicket(prefix, kv); ok {
			list = append(list, t)
		}
	}
	return list
}

// holders is how many tickets at the beginning of a list, in the order of their
// creation, hold the lock: as many as may hold it together. Nothing has to be
// written for the next to hold it when one of them is gone.
func holders(list []ticket) int {
	switch {
	case len(list) == 0:
		return 0
	case list[0].limit > 1:
		return min(list[0].limit, len(list))
	case list[0].mode == driver.Exclusive:
		return 1
	}
	n := 0
	for n < len(list) && list[n].mode == driver.Shared {
		n++
	}
	return n
}

// value is what a ticket's key holds.
type value struct {
	ttl     time.Duration
	made    time.Time
	manager string
}

func (v value) String() string {
	return fmt.Sprintf("%s %d %d %s", formatVersion, v.ttl.Milliseconds(), v.made.UnixMilli(), v.manager)
}

func parseValue(name string, b []byte) (value, error) {
	parts := strings.SplitN(string(b), " ", 4)
	if len(parts) != 4 || parts[0] != formatVersion {
		return value{}, problem(ProblemForeign, nil, "the value of key %q is none of a lock", name)
	}
	ttl, err1 := strconv.ParseInt(parts[1], 10, 64)
	made, err2 := strconv.ParseInt(parts[2], 10, 64)
	if err1 != nil || err2 != nil {
		return value{}, problem(ProblemForeign, nil, "the value of key %q is none of a lock", name)
	}
	return value{ttl: time.Duration(ttl) * time.Millisecond, made: time.UnixMilli(made), manager: parts[3]}, nil
}

// class is the TTL of the lease that a lock with this TTL shares with others:
// the next full second, and for long ones up to a tenth more, so that there are
// few.
func class(ttl time.Duration) int64 {
	secs := int64((ttl + time.Second - 1) / time.Second)
	for _, step := range []int64{86400, 3600, 600, 60, 10, 5} {
		if secs >= 12*step {
			return (secs + step - 1) / step * step
		}
	}
	return max(secs, 1)
}

func sortByCreation(list []ticket) {
	slices.SortFunc(list, func(a, b ticket) int { return cmp.Compare(a.rev, b.rev) })
}
