package redislock_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
)

func TestAcquired(t *testing.T) {
	t.Parallel()
	req := driver.Request{Key: "k", Owner: "me", TTL: time.Second, Limit: 3, Mode: driver.Shared}
	lease, err := redislock.Acquired(&req, int64(7))
	if want := (driver.Lease{Key: "k", Owner: "me", Token: 7, TTL: time.Second, Mode: driver.Shared}); err != nil || lease != want {
		t.Errorf("granted: %+v, %v; want %+v", lease, err, want)
	}

	_, err = redislock.Acquired(&req, []any{int64(0), "other", int64(7), int64(1500), int64(2), int64(9)})
	held, ok := errors.AsType[*driver.HeldError](err)
	if want := (driver.HeldError{Holder: "other", Token: 7, Remaining: 1500 * time.Microsecond, Position: 2, Ticket: 9}); !ok || *held != want {
		t.Errorf("held: %+v, want %+v", err, want)
	}

	_, err = redislock.Acquired(&req, []any{int64(1), int64(5)})
	limit, ok := errors.AsType[*driver.LimitError](err)
	if want := (driver.LimitError{Key: "k", Want: 3, Have: 5}); !ok || *limit != want {
		t.Errorf("another limit: %+v, want %+v", err, want)
	}

	if _, err = redislock.Acquired(&req, []any{int64(2)}); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("another kind: %v", err)
	}
}

// What no script replies is an unknown outcome and no panic.
func TestStrangeReplies(t *testing.T) {
	t.Parallel()
	req := driver.Request{Key: "k", Owner: "me", TTL: time.Second, Limit: 1}
	for _, reply := range []any{
		nil, "", "OK", 1.5, true,
		[]any{},
		[]any{nil},
		[]any{int64(3)},
		[]any{int64(0)},
		[]any{int64(0), "a"},
		[]any{int64(0), "a", "b", int64(1), int64(1), int64(1)},
		[]any{int64(0), nil, int64(1), int64(1), int64(1), int64(1)},
		[]any{[]any{}},
		map[any]any{},
		errors.New("nested"),
	} {
		if lease, err := redislock.Acquired(&req, reply); err == nil || driverError(err) {
			t.Errorf("%#v is read as %+v, %v", reply, lease, err)
		}
	}
	for _, reply := range []any{
		nil, "", int64(1),
		[]any{},
		[]any{[]any{}},
		[]any{"a", "b"},
		[]any{[]any{int64(1)}, []any{}},
		[]any{[]any{[]any{}}, []any{}},
		[]any{[]any{[]any{"o", int64(1), "z", int64(1), int64(1), int64(1)}}, []any{}},
		[]any{[]any{}, []any{[]any{"o", "x1"}}},
	} {
		if info, err := redislock.ParseInspection("k", reply); err == nil {
			t.Errorf("%#v is read as %+v", reply, info)
		}
	}
}

func driverError(err error) bool {
	for _, s := range []error{driver.ErrHeld, driver.ErrLost, driver.ErrInvalid, driver.ErrNotApplied, driver.ErrClosed} {
		if errors.Is(err, s) {
			return true
		}
	}
	return false
}

func TestParseInspection(t *testing.T) {
	t.Parallel()
	info, err := redislock.ParseInspection("k", []any{
		[]any{
			[]any{"b", int64(9), "x3", int64(1_000_000), int64(5), int64(7)},
			[]any{"a", int64(8), "x3", int64(2_000_000), int64(6), int64(8)},
		},
		[]any{[]any{"w", "x3", int64(4)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	us := time.Microsecond
	want := []driver.HolderInfo{
		{Owner: "a", Token: 8, TTL: 2 * time.Second, Held: 6 * us, Remaining: 8 * us},
		{Owner: "b", Token: 9, TTL: time.Second, Held: 5 * us, Remaining: 7 * us},
	}
	if info.Limit != 3 || len(info.Holders) != 2 || info.Holders[0] != want[0] || info.Holders[1] != want[1] {
		t.Errorf("holders %+v, want %+v", info, want)
	}
	if len(info.Waiters) != 1 || info.Waiters[0] != (driver.WaiterInfo{Owner: "w", Waiting: 4 * us}) {
		t.Errorf("waiters %+v", info.Waiters)
	}
	info, err = redislock.ParseInspection("k", []any{[]any{}, []any{[]any{"w", "s1", int64(4)}}})
	if err != nil || info.Limit != 1 || info.Waiters[0].Mode != driver.Shared {
		t.Errorf("waiters only: %+v, %v", info, err)
	}
}

func TestParsedInt(t *testing.T) {
	t.Parallel()
	for v, want := range map[any]int64{int64(5): 5, "5": 5, "-5": -5, "9007199254740991": 1<<53 - 1, int64(math.MinInt64): math.MinInt64} {
		if got, err := redislock.ParsedInt(v); got != want || err != nil {
			t.Errorf("%#v is read as %d, %v", v, got, err)
		}
	}
	for _, v := range []any{nil, "", "a", "1.5", " 1", "9223372036854775808", 1.5, true} {
		if got, err := redislock.ParsedInt(v); err == nil {
			t.Errorf("%#v is read as %d", v, got)
		}
	}
}

func TestKinds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		mode  driver.Mode
		limit int
		want  string
	}{{driver.Exclusive, 1, "x1"}, {driver.Exclusive, 3, "x3"}, {driver.Exclusive, 1 << 30, "x1073741824"}, {driver.Shared, 1, "s1"}} {
		got := redislock.Kind(tt.mode, tt.limit)
		mode, limit, err := redislock.ParseKind(got)
		if got != tt.want || mode != tt.mode || limit != tt.limit || err != nil {
			t.Errorf("%v %d is %q (want %q) and comes back as %v %d, %v", tt.mode, tt.limit, got, tt.want, mode, limit, err)
		}
	}
	for _, s := range []string{"", "x", "s", "s2", "xx", "y1", "x1.5"} {
		if mode, limit, err := redislock.ParseKind(s); err == nil {
			t.Errorf("%q is read as %v %d", s, mode, limit)
		}
	}
}

// Nothing may last shorter than it was promised to.
func TestRounded(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration][2]int64{
		0: {0, 0}, 1: {1, 1}, time.Microsecond: {1, 1}, time.Microsecond + 1: {2, 1}, time.Millisecond: {1000, 1},
		time.Millisecond + 1: {1001, 2}, 366 * 24 * time.Hour: {366 * 24 * 3600 * 1e6, 366 * 24 * 3600 * 1e3},
	} {
		if us, ms := redislock.Rounded(d); us != want[0] || ms != want[1] {
			t.Errorf("%v is %d us and %d ms, want %v", d, us, ms, want)
		}
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	for v, want := range map[string]bool{
		"6.2": false, "6.2.0": false, "6.2.14": false, "6.10": false, "7.0.15": false, "8.0-rc1": false, "10.0": false, "255.255.255": false,
		"6.0.16": true, "6.1": true, "5.0.14": true, "4": true, "6": true, "2.8.24": true,
	} {
		if got := redislock.Older(v, "6.2"); got != want {
			t.Errorf("%s is older than 6.2: %v, want %v", v, got, want)
		}
	}
	info := redislock.ParseInfo("# Server\r\nredis_version:7.0.15\r\nexecutable:/a:b\r\n\r\nrole:master\r\n")
	if info["redis_version"] != "7.0.15" || info["executable"] != "/a:b" || info["role"] != "master" {
		t.Errorf("INFO is read as %v", info)
	}
}
