package redislock_test

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// problem says whether an error is a server's problem with the sentinel that
// tells what to do about it.
func problem(err error, p redislock.Problem, sentinel error) bool {
	e, ok := errors.AsType[*redislock.ServerError](err)
	return ok && e.Problem == p && errors.Is(err, sentinel)
}

// kinds are the ways to take a key.
var kinds = []struct {
	name  string
	mode  driver.Mode
	limit int
}{{"exclusive", driver.Exclusive, 1}, {"permits", driver.Exclusive, 3}, {"shared", driver.Shared, 1}}

// A server whose memory is full grants nothing, but what is held and waited for
// goes on.
func TestSingleMemoryFull(t *testing.T) {
	t.Parallel()
	r := newRig(t, &servers.RedisConfig{Args: []string{"--maxmemory-policy", "noeviction"}})
	b := r.backend(redislock.Options{})
	ctx := t.Context()
	acquire := func(key, owner string, kind int) (driver.Lease, error) {
		k := kinds[kind]
		return b.Acquire(ctx, driver.Request{
			Key: key, Owner: owner, TTL: time.Minute, Mode: k.mode, Limit: k.limit, Enqueue: true, Manager: "m",
		})
	}
	leases := make([]driver.Lease, len(kinds))
	others := slices.Clone(kinds)
	others[2].mode = driver.Exclusive // waits for the shared lock
	for i, k := range kinds {
		var err error
		if leases[i], err = acquire(k.name, "holder", i); err != nil {
			t.Fatal(err)
		}
		for n := 1; n < k.limit; n++ {
			if _, err := acquire(k.name, fmt.Sprint("another", n), i); err != nil {
				t.Fatal(err)
			}
		}
	}
	enqueue := func(i int, owner string) error {
		k := others[i]
		_, err := b.Acquire(ctx, driver.Request{
			Key: k.name, Owner: owner, TTL: time.Minute, Mode: k.mode, Limit: k.limit, Enqueue: true, Manager: "m",
		})
		return err
	}
	for i := range kinds {
		if err := enqueue(i, "waiter"); !errors.Is(err, driver.ErrHeld) {
			t.Fatal(err)
		}
	}
	lone, err := acquire("lone", "holder", 0)
	if err != nil {
		t.Fatal(err)
	}
	r.s.MustDo("CONFIG", "SET", "maxmemory", "1")
	r.s.MustDo("SCRIPT", "FLUSH")

	for i, k := range kinds {
		_, err := acquire("new "+k.name, "me", i)
		if !problem(err, redislock.ProblemMemory, driver.ErrNotApplied) {
			t.Errorf("%s: an acquisition without memory: %v", k.name, err)
		}
		if err := enqueue(i, "waiter"); !errors.Is(err, driver.ErrHeld) {
			t.Errorf("%s: a waiter's refresh without memory: %v", k.name, err)
		}
		if err := enqueue(i, "late"); !problem(err, redislock.ProblemMemory, driver.ErrNotApplied) {
			t.Errorf("%s: a new waiter without memory: %v", k.name, err)
		}
		if again, err := acquire(k.name, "holder", i); err != nil || again.Token != leases[i].Token {
			t.Errorf("%s: a repeated acquisition without memory: %+v, %v", k.name, again, err)
		}
	}
	batch := make([]driver.Renewal, len(leases))
	for i := range leases {
		batch[i].Lease = leases[i]
	}
	b.Extend(ctx, batch)
	for i := range batch {
		if batch[i].Err != nil {
			t.Errorf("%s: a renewal without memory: %v", kinds[i].name, batch[i].Err)
		}
	}
	for i, k := range kinds {
		if err := b.Release(ctx, leases[i]); err != nil {
			t.Errorf("%s: a release without memory: %v", k.name, err)
		}
		info, err := b.Inspect(ctx, k.name)
		if err != nil || len(info.Waiters) != 0 {
			t.Errorf("%s: the waiter was not served without memory: %+v, %v", k.name, info, err)
		}
		if err := b.Release(ctx, driver.Lease{Key: k.name, Owner: "waiter"}); err != nil {
			t.Errorf("%s: a withdrawal without memory: %v", k.name, err)
		}
		if _, err := b.ForceRelease(ctx, k.name, 0); err != nil {
			t.Errorf("%s: a forced release without memory: %v", k.name, err)
		}
	}
	if err := b.Release(ctx, lone); err != nil {
		t.Errorf("a lone release without memory: %v", err)
	}
	r.clean()
	r.s.MustDo("CONFIG", "SET", "maxmemory", "0")
	if _, err := acquire("exclusive", "me", 0); err != nil {
		t.Error(err)
	}
}

// RED6: a server that evicts takes locks away. The next renewal finds out.
func TestSingleEviction(t *testing.T) {
	t.Parallel()
	r := newRig(t, &servers.RedisConfig{Args: []string{"--maxmemory-policy", "allkeys-lru"}})
	m := r.manager(r.client(redis.Options{}), dlm.LockConfig{RenewInterval: 200 * time.Millisecond}, redislock.Options{})
	l := r.take(m, "a", 10*time.Minute)
	r.s.MustDo("CONFIG", "SET", "maxmemory", "1")
	r.until("the lock is evicted", func() bool {
		// Evicts, and is refused.
		_ = r.admin.Set(t.Context(), "filler", "x", 0).Err()
		return len(r.names()) == 0
	})
	r.s.MustDo("CONFIG", "SET", "maxmemory", "0")
	if lost := r.lossOf(l); lost.Reason != dlm.ReasonGone {
		t.Errorf("lost by %s", lost.Reason)
	}
	next := r.take(m, "a", time.Minute)
	if next.Token <= l.Token {
		t.Errorf("token %d follows %d", next.Token, l.Token)
	}
	r.release(next)
}

// foreigners write something that is no lock.
var foreigners = []struct {
	name string
	set  []any
}{
	{"string", []any{"SET", "", "value"}},
	{"list", []any{"RPUSH", "", "a", "b"}},
	{"set", []any{"SADD", "", "a", "b"}},
	{"stream", []any{"XADD", "", "1-1", "a", "b"}},
	{"sorted set", []any{"ZADD", "", "1", "a", "2", "b"}},
	{"hash", []any{"HSET", "", "name", "value"}},
	{"hash with an h", []any{"HSET", "", "h", "h"}},
	{"hash with an empty h", []any{"HSET", "", "h", ""}},
	{"hash with a number h", []any{"HSET", "", "h", "12"}},
	{"hash with a text h", []any{"HSET", "", "h", "a longer text", "w", "10"}},
	{"hash with a binary h", []any{"HSET", "", "h", "\xd9\x05hello\xc1\x00\xff"}},
	{"hash with a q", []any{"HSET", "", "q", "1"}},
	{"hash with an m", []any{"HSET", "", "m", "1"}},
}

// OWN9: what is not ours is refused with a clear error, and stays as it is.
func TestSingleForeignData(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend(redislock.Options{})
	ctx := t.Context()
	operations := []struct {
		name string
		call func(key string) error
	}{
		{"extend", func(key string) error {
			batch := []driver.Renewal{{Lease: driver.Lease{Key: key, Owner: "me", Token: 7, TTL: time.Minute}}}
			b.Extend(ctx, batch)
			return batch[0].Err
		}},
		{"release", func(key string) error { return b.Release(ctx, driver.Lease{Key: key, Owner: "me", Token: 7}) }},
		{"withdraw", func(key string) error { return b.Release(ctx, driver.Lease{Key: key, Owner: "me"}) }},
		{"inspect", func(key string) error { _, err := b.Inspect(ctx, key); return err }},
		{"force one", func(key string) error { _, err := b.ForceRelease(ctx, key, 7); return err }},
		{"force all", func(key string) error { _, err := b.ForceRelease(ctx, key, 0); return err }},
	}
	for _, k := range kinds {
		for _, enqueue := range []bool{false, true} {
			operations = append(operations, struct {
				name string
				call func(key string) error
			}{fmt.Sprintf("acquire %s %v", k.name, enqueue), func(key string) error {
				_, err := b.Acquire(ctx, driver.Request{
					Key: key, Owner: "me", TTL: time.Minute, Mode: k.mode, Limit: k.limit, Enqueue: enqueue, Manager: "m",
				})
				return err
			}})
		}
	}
	n := 0
	dump := func(name string) string {
		t.Helper()
		s, err := r.admin.Dump(ctx, name).Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			t.Fatal(err)
		}
		ttl, err := r.admin.PTTL(ctx, name).Result()
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%q for %v", s, ttl)
	}
	for _, foreign := range foreigners {
		for _, suffix := range []string{"", ":q", ":h"} {
			for _, op := range operations {
				n++
				key := fmt.Sprint("k", n)
				name := r.prefix + "{" + key + "}" + suffix
				args := slices.Clone(foreign.set)
				args[1] = name
				if suffix != "" {
					// Our own record leads to it.
					if _, err := b.Acquire(ctx, driver.Request{Key: key, Owner: "other", TTL: time.Minute, Limit: 1}); err != nil {
						t.Fatal(err)
					}
					if suffix == ":h" {
						if _, err := b.ForceRelease(ctx, key, 0); err != nil {
							t.Fatal(err)
						}
					}
				}
				if err := r.admin.Do(ctx, args...).Err(); err != nil {
					t.Fatal(err)
				}
				before := dump(name)
				err := op.call(key)
				if after := dump(name); after != before {
					t.Errorf("%s of a %s%s: %v\nit was %s\nand is  %s", op.name, foreign.name, suffix, err, before, after)
				}
				// Beside a record of ours, most calls need not look.
				typed := problem(err, redislock.ProblemForeign, driver.ErrInvalid)
				quiet := err == nil || errors.Is(err, driver.ErrHeld) || errors.Is(err, driver.ErrLost) || errors.As(err, new(*driver.LimitError))
				if !typed && (suffix == "" && strings.HasPrefix(op.name, "acquire") || !quiet) {
					t.Errorf("%s of a %s%s: %v", op.name, foreign.name, suffix, err)
				}
			}
		}
	}
	list, err := b.List(ctx, "", "", 0)
	if err != nil {
		t.Errorf("a list of locks beside foreign keys: %v", err)
	}
	for _, info := range list {
		if len(info.Holders)+len(info.Waiters) == 0 {
			t.Errorf("a list of locks has %+v", info)
		}
	}
}

// A foreign record does no harm to the locks that are renewed along with it.
func TestSingleForeignAmongOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend(redislock.Options{})
	var batch []driver.Renewal
	for i := range 9 {
		k := kinds[i%len(kinds)]
		l, err := b.Acquire(t.Context(), driver.Request{Key: fmt.Sprint(i), Owner: "me", TTL: time.Minute, Mode: k.mode, Limit: k.limit})
		if err != nil {
			t.Fatal(err)
		}
		batch = append(batch, driver.Renewal{Lease: l})
	}
	for i, name := range []string{"{0}", "{4}:h", "{8}", "{3}"} {
		r.s.MustDo("DEL", r.prefix+name)
		if i < 3 {
			r.s.MustDo("SET", r.prefix+name, "x")
		} else {
			r.s.MustDo("HSET", r.prefix+name, "h", "x")
		}
	}
	b.Extend(t.Context(), batch)
	for i := range batch {
		err := batch[i].Err
		foreign := slices.Contains([]int{0, 3, 4, 8}, i)
		if foreign && !problem(err, redislock.ProblemForeign, driver.ErrInvalid) || !foreign && err != nil {
			t.Errorf("renewal %d: %v", i, err)
		}
	}
	var journal journal
	m := r.manager(r.client(redis.Options{}), dlm.LockConfig{RenewInterval: 100 * time.Millisecond, Observer: &journal}, redislock.Options{})
	bad := r.take(m, "bad", 1500*time.Millisecond)
	good := r.take(m, "good", 1500*time.Millisecond)
	r.s.MustDo("SET", r.prefix+"{bad}", "x")
	r.lossOf(bad)
	if journal.count(dlm.EventExtendFailed, string(redislock.ProblemForeign)) == 0 {
		t.Error("nothing says why the lock was lost")
	}
	r.held(good)
	r.release(good)
	if got := r.s.MustDo("GET", r.prefix+"{bad}"); got != "x" {
		t.Errorf("the foreign value is %v", got)
	}
}

// KEY2: keys that look like parts or parents of each other are strangers.
func TestSingleSiblings(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend(redislock.Options{})
	keys := []string{
		"path", "path/1", "path:q", "path:h", "{path}", "{path}:q", "path}", "path}:q", "{", "}", "{}", "%", "%7D", "dlm:{path}", "pat", " path",
		"a\x00b", "a\x00", "a\n", "a", "!", "*", "pat?", strings.Repeat("}", 512), strings.Repeat("p", 512), "ключ", "-", "o", "s", "h", "m",
	}
	leases := map[string]driver.Lease{}
	for _, key := range keys {
		l, err := b.Acquire(t.Context(), driver.Request{Key: key, Owner: "o of " + key, TTL: time.Minute, Limit: 1})
		if err != nil {
			t.Fatalf("%q: %v", key, err)
		}
		leases[key] = l
		_, err = b.Acquire(t.Context(), driver.Request{Key: key, Owner: "w", TTL: time.Minute, Limit: 1, Enqueue: true})
		if held, ok := errors.AsType[*driver.HeldError](err); !ok || held.Holder != l.Owner || held.Position != 1 {
			t.Errorf("%q: %v", key, err)
		}
	}
	list, err := b.List(t.Context(), "", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	sorted := slices.Sorted(slices.Values(keys))
	var listed []string
	for _, info := range list {
		listed = append(listed, info.Key)
	}
	if !slices.Equal(sorted, listed) {
		t.Errorf("listed %q\nwant   %q", listed, sorted)
	}
	for _, key := range keys {
		if err := b.Release(t.Context(), leases[key]); err != nil {
			t.Errorf("%q: %v", key, err)
		}
		info, err := b.Inspect(t.Context(), key)
		if err != nil || len(info.Holders) != 1 || info.Holders[0].Owner != "w" {
			t.Errorf("%q was not handed over: %+v, %v", key, info, err)
		}
	}
}

// SEM2: when a part of a record disappears, the capacity is there again within
// a TTL, and at no time do more hold it than may.
func TestSinglePartsDisappear(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend(redislock.Options{LivenessWindow: 400 * time.Millisecond})
	const ttl = 150 * time.Millisecond
	parts := []string{"", ":q", ":h", "h", "q", "m", "o0", "o1", "s9"}
	for _, k := range kinds {
		for holders := range 4 {
			for _, waits := range []bool{false, true} {
				if k.mode == driver.Exclusive && holders > k.limit {
					continue
				}
				for _, part := range parts {
					name := fmt.Sprintf("%s, %d holders, waiting %v, without %q", k.name, holders, waits, part)
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						key := name
						r.loseParts(t, b, driver.Request{Key: key, TTL: ttl, Mode: k.mode, Limit: k.limit, Manager: "m"}, holders, waits, part)
					})
				}
			}
		}
	}
}

func (r *rig) loseParts(t *testing.T, b *redislock.Backend, req driver.Request, holders int, waits bool, part string) {
	ctx := t.Context()
	acquire := func(owner string, enqueue bool) (driver.Lease, error) {
		req := req
		req.Owner, req.Enqueue = owner, enqueue
		return b.Acquire(ctx, req)
	}
	var leases []driver.Lease
	for i := range holders {
		l, err := acquire(fmt.Sprint(i), false)
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
	}
	blocker := req
	if waits {
		blocker.Owner, blocker.Enqueue = "9", true
		if blocker.Mode == driver.Shared {
			blocker.Mode = driver.Exclusive
		}
		if _, err := b.Acquire(ctx, blocker); err != nil && !errors.Is(err, driver.ErrHeld) {
			t.Fatal(err)
		}
	}
	record := r.prefix + "{" + req.Key + "}"
	if part == "" || part[0] == ':' {
		r.admin.Del(ctx, record+part)
	} else {
		r.admin.HDel(ctx, record, part)
	}
	last := int64(0)
	for _, l := range leases {
		last = max(last, l.Token)
	}

	// Everybody asks again, new ones too, as do the old.
	for i := range 5 {
		l, err := acquire(fmt.Sprint(100+i), false)
		switch {
		case err == nil:
			if l.Token <= last {
				t.Errorf("token %d follows %d", l.Token, last)
			}
			last = l.Token
			leases = append(leases, l)
		case !errors.Is(err, driver.ErrHeld) && !errors.As(err, new(*driver.LimitError)):
			t.Errorf("a new owner: %v", err)
		}
	}
	for i := range holders {
		if _, err := acquire(fmt.Sprint(i), false); err != nil && !errors.Is(err, driver.ErrHeld) && !errors.As(err, new(*driver.LimitError)) {
			t.Errorf("a holder asks again: %v", err)
		}
	}
	if waits {
		if _, err := b.Acquire(ctx, blocker); err != nil && !errors.Is(err, driver.ErrHeld) && !errors.As(err, new(*driver.LimitError)) {
			t.Errorf("a waiter asks again: %v", err)
		}
	}
	if req.Mode == driver.Exclusive {
		if info, err := b.Inspect(ctx, req.Key); err != nil || len(info.Holders) > req.Limit {
			t.Errorf("%d hold it: %+v, %v", len(info.Holders), info, err)
		}
		batch := make([]driver.Renewal, len(leases))
		for i := range leases {
			batch[i].Lease = leases[i]
		}
		b.Extend(ctx, batch)
		alive := 0
		for i := range batch {
			if batch[i].Err == nil {
				alive++
			} else if !errors.Is(batch[i].Err, driver.ErrLost) {
				t.Errorf("a renewal: %v", batch[i].Err)
			}
		}
		if alive > req.Limit {
			t.Errorf("%d of %d holders could renew", alive, len(leases))
		}
	}

	// Nobody renews: within a TTL, and the life of the ticket, all is to be had.
	for i := range req.Limit {
		owner := fmt.Sprint(200 + i)
		r.until("the capacity is there again", func() bool {
			_, err := b.Acquire(ctx, driver.Request{
				Key: req.Key, Owner: owner, TTL: time.Minute, Mode: req.Mode, Limit: req.Limit, Manager: "m",
			})
			if err != nil && !errors.Is(err, driver.ErrHeld) && !errors.As(err, new(*driver.LimitError)) {
				t.Fatal(err)
			}
			return err == nil
		})
	}
	for i := range req.Limit {
		if err := b.Release(ctx, driver.Lease{Key: req.Key, Owner: fmt.Sprint(200 + i)}); err != nil {
			t.Error(err)
		}
	}
}

// ACQ11: whatever is done, nothing stays for ever, and nothing for longer than
// tokens are kept once the last lock has ended.
func TestSingleEverythingExpires(t *testing.T) {
	t.Parallel()
	for seed := range uint64(3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			rnd := rand.New(rand.NewPCG(seed, 1))
			opts := redislock.Options{KeepTokens: time.Minute, LivenessWindow: 100 * time.Millisecond}
			b := r.backend(opts)
			ctx := t.Context()
			const longest = 20 * time.Second
			leases := map[string]driver.Lease{}
			for n := range 1500 {
				key, owner := fmt.Sprint(rnd.IntN(2)), fmt.Sprint(rnd.IntN(6))
				k := kinds[rnd.IntN(len(kinds))]
				ttl := []time.Duration{time.Millisecond, 20 * time.Millisecond, longest}[rnd.IntN(3)]
				what := ""
				switch op := rnd.IntN(20); {
				case op < 11:
					what = "acquire " + k.name
					l, err := b.Acquire(ctx, driver.Request{
						Key: key, Owner: owner, TTL: ttl, Mode: k.mode, Limit: k.limit, Enqueue: rnd.IntN(2) == 0, Manager: "m",
					})
					if err == nil {
						leases[key+owner] = l
					} else if !errors.Is(err, driver.ErrHeld) && !errors.Is(err, driver.ErrInvalid) || problem(err, redislock.ProblemForeign, driver.ErrInvalid) {
						t.Fatal(err)
					}
				case op < 14:
					what = "release"
					if err := b.Release(ctx, driver.Lease{Key: key, Owner: owner, Token: leases[key+owner].Token}); err != nil && !errors.Is(err, driver.ErrLost) {
						t.Fatal(err)
					}
				case op < 17:
					what = "extend"
					l := leases[key+owner]
					l.Key, l.Owner, l.TTL = key, owner, ttl
					batch := []driver.Renewal{{Lease: l}}
					b.Extend(ctx, batch)
					if err := batch[0].Err; err != nil && !errors.Is(err, driver.ErrLost) {
						t.Fatal(err)
					}
				case op < 18:
					what = "force"
					if _, err := b.ForceRelease(ctx, key, leases[key+owner].Token); err != nil {
						t.Fatal(err)
					}
				case op < 19:
					if n%4 != 0 {
						continue
					}
					what = "delete a part"
					name := r.prefix + "{" + key + "}"
					switch part := []string{"", ":q", ":h", "h", "q", "m", "o" + owner, "s" + owner}[rnd.IntN(8)]; {
					case part == "", part[0] == ':':
						r.admin.Del(ctx, name+part)
					default:
						r.admin.HDel(ctx, name, part)
					}
				default:
					what = "inspect"
					if _, err := b.Inspect(ctx, key); err != nil {
						t.Fatal(err)
					}
				}
				r.expires(what, longest+opts.KeepTokens+time.Second)
			}
		})
	}
}

// A record that loses its last field on the way, and gets a new one, expires.
func TestSingleRecordMadeAnew(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(b *redislock.Backend, l driver.Lease) error{
		"release":  func(b *redislock.Backend, l driver.Lease) error { return b.Release(t.Context(), l) },
		"withdraw": func(b *redislock.Backend, l driver.Lease) error { l.Token = 0; return b.Release(t.Context(), l) },
		"force": func(b *redislock.Backend, l driver.Lease) error {
			_, err := b.ForceRelease(t.Context(), "a", 0)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			b := r.backend(redislock.Options{})
			l, err := b.Acquire(t.Context(), driver.Request{Key: "a", Owner: "me", TTL: time.Minute, Limit: 2})
			if err != nil {
				t.Fatal(err)
			}
			r.s.MustDo("HDEL", r.prefix+"{a}", "h")
			if err := end(b, l); err != nil {
				t.Error(err)
			}
			r.expires("the end", 25*time.Hour)
		})
	}
}

// expires checks that all keys under the prefix expire in time, which is up to
// an eighth longer than they have to be kept.
func (r *rig) expires(after string, most time.Duration) {
	r.Helper()
	most += most / 8
	names := r.names()
	for _, name := range names {
		ttl, err := r.admin.PTTL(r.Context(), name).Result()
		if err != nil {
			r.Fatal(err)
		}
		if ttl == -1 || ttl > most {
			r.Fatalf("after %s, %q expires in %v, must be in at most %v", after, name, ttl, most)
		}
	}
}

// RWM5: a holder with a short TTL does not shorten the others'.
func TestSingleShortAmongLong(t *testing.T) {
	t.Parallel()
	for _, k := range kinds[1:] {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			b := r.backend(redislock.Options{KeepTokens: time.Minute})
			req := driver.Request{Key: "a", Owner: "long", TTL: 2 * time.Hour, Mode: k.mode, Limit: k.limit}
			long, err := b.Acquire(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			req.Owner, req.TTL = "short", time.Millisecond
			if _, err := b.Acquire(t.Context(), req); err != nil {
				t.Fatal(err)
			}
			batch := []driver.Renewal{{Lease: driver.Lease{Key: "a", Owner: "long", Token: long.Token, TTL: time.Second}}}
			b.Extend(t.Context(), batch) // never shortens
			if batch[0].Err != nil {
				t.Error(batch[0].Err)
			}
			r.until("the short one is over", func() bool {
				info, err := b.Inspect(t.Context(), "a")
				return err == nil && len(info.Holders) == 1
			})
			if err := b.Release(t.Context(), driver.Lease{Key: "a", Owner: "short"}); err != nil {
				t.Error(err)
			}
			info, err := b.Inspect(t.Context(), "a")
			if err != nil || len(info.Holders) != 1 || info.Holders[0].Remaining < time.Hour {
				t.Errorf("%+v, %v", info, err)
			}
			for _, name := range r.names() {
				if ttl := r.admin.PTTL(t.Context(), name).Val(); ttl < 2*time.Hour {
					t.Errorf("%q goes in %v", name, ttl)
				}
			}
		})
	}
}

// startOnClock starts a server whose wall clock the test sets.
func startOnClock(t *testing.T) (r *rig, set func(offset time.Duration)) {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		servers.Missing(t, "a server's clock cannot be set without a C compiler: install gcc")
	}
	lib, name := filepath.Join(t.TempDir(), "clock.so"), filepath.Join(t.TempDir(), "offset")
	if out, err := exec.CommandContext(t.Context(), cc, "-shared", "-fPIC", "-O1", "-o", lib, "testdata/clock.c").CombinedOutput(); err != nil {
		t.Fatalf("compiling: %v\n%s", err, out)
	}
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	write := func(offset time.Duration) {
		t.Helper()
		if err := binary.Write(io.NewOffsetWriter(file, 0), binary.NativeEndian, offset.Microseconds()); err != nil {
			t.Fatal(err)
		}
	}
	write(0)
	t.Setenv("LD_PRELOAD", lib)
	t.Setenv("DLM_TEST_CLOCK", name)
	r = newRig(t, nil)
	return r, func(offset time.Duration) {
		t.Helper()
		write(offset)
		now, err := r.admin.Time(t.Context()).Result()
		if err != nil || time.Until(now.Add(-offset)).Abs() > time.Minute {
			t.Fatalf("the server's clock says %v, want an offset of %v, %v", now, offset, err)
		}
	}
}

// TTL5, SEM6: the server's clock is set while locks are held and waited for.
func TestSingleClockSet(t *testing.T) {
	r, set := startOnClock(t)
	b := r.backend(redislock.Options{LivenessWindow: 600 * time.Millisecond})
	for _, tt := range []struct {
		name   string
		offset time.Duration
	}{{"an hour back", -time.Hour}, {"a day forward", 24 * time.Hour}, {"a day back", -24 * time.Hour}, {"to now", 0}} {
		last := map[string]int64{}
		token := func(key string, n int64) {
			t.Helper()
			if n <= last[key] {
				t.Errorf("%s: token %d of %q follows %d", tt.name, n, key, last[key])
			}
			last[key] = n
		}
		m := r.manager(r.client(redis.Options{}), dlm.LockConfig{RenewInterval: 300 * time.Millisecond}, redislock.Options{LivenessWindow: 600 * time.Millisecond})
		kept := r.take(m, "kept", 20*time.Second)
		token("kept", kept.Token)
		ctx := t.Context()
		for _, k := range kinds {
			// They die: nobody renews them.
			for i := range k.limit {
				l, err := b.Acquire(ctx, driver.Request{Key: k.name, Owner: fmt.Sprint(i), TTL: 300 * time.Millisecond, Mode: k.mode, Limit: k.limit})
				if err != nil {
					t.Fatal(err)
				}
				token(k.name, l.Token)
			}
			_, err := b.Acquire(ctx, driver.Request{
				Key: k.name, Owner: "dead waiter", TTL: time.Hour, Limit: k.limit, Enqueue: true, Manager: "m",
			})
			if !errors.Is(err, driver.ErrHeld) {
				t.Fatal(err)
			}
		}
		next := r.later(r.manager(r.client(redis.Options{}), dlm.LockConfig{}, redislock.Options{LivenessWindow: 600 * time.Millisecond}), "kept", time.Minute)
		r.queued(b, "kept", 1)

		set(tt.offset)
		for _, k := range kinds {
			// What seems to last longer than it can must not.
			ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
			l, err := m.Acquire(ctx, k.name, time.Minute, &dlm.AcquireOptions{Limit: k.limit})
			cancel()
			if err != nil {
				t.Errorf("%s: %s: %v", tt.name, k.name, err)
				continue
			}
			token(k.name, l.Token)
			r.release(l)
		}
		if tt.offset > 0 || tt.name == "to now" {
			// The server takes it for expired: that is told at once.
			if lost := r.lossOf(kept); lost.Reason == dlm.ReasonExpired {
				t.Errorf("%s: lost by %s", tt.name, lost.Reason)
			}
		} else {
			r.held(kept)
			r.release(kept)
		}
		got := closed(r, "the waiter is served: "+tt.name, next)
		token("kept", got.Token)
		r.release(got)
		r.end(m)
	}
}

// source is a script of the package, put together of its parts. The server must know
// it already.
func source(t *testing.T, admin *redis.Client, parts ...string) string {
	t.Helper()
	var text strings.Builder
	for _, part := range parts {
		b, err := os.ReadFile(filepath.Join("..", "..", "backends", "redislock", "lua", part+".lua"))
		if err != nil {
			t.Fatal(err)
		}
		text.Write(b)
	}
	if known, err := admin.ScriptExists(t.Context(), fmt.Sprintf("%x", sha1.Sum([]byte(text.String())))).Result(); err != nil || !known[0] {
		t.Fatalf("the server does not know a script of these parts: %v, %v", known, err)
	}
	return text.String()
}

// TTL5: a script sees the keys as of when it began, but PEXPIRE goes by the clock. So a
// queue, or the holders, can vanish within the script, if the clock is set back by more
// than they are kept for at that very moment. Here they are kept for no time at all.
func TestSinglePartsExpireWithinScript(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend(redislock.Options{})
	for _, tt := range []struct {
		name string
		mode driver.Mode
		kept time.Duration // besides the TTL
	}{{"queue", driver.Exclusive, 0}, {"holders", driver.Shared, -time.Hour}} {
		if _, err := b.Acquire(t.Context(), driver.Request{Key: tt.name, Owner: "a", TTL: time.Minute, Mode: tt.mode, Limit: 1}); err != nil {
			t.Fatal(err)
		}
		text := source(t, r.admin, "acquire", "acquire_wait", "tell", "queue", "acquire_slow")
		name := record(r.prefix, tt.name)
		reply, err := r.admin.Eval(t.Context(), text, []string{name, name + ":q", name + ":h"},
			"b", time.Minute.Microseconds(), "", (time.Minute + tt.kept).Milliseconds(), "x1", time.Minute.Microseconds()).Result()
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if list, ok := reply.([]any); !ok || len(list) != 6 || list[0] != int64(0) || list[5] == int64(0) {
			t.Errorf("%s: got %v, want a refusal with a ticket", tt.name, reply)
		}
	}
}

// A script that comes upon something foreign after it has written leaves nothing of
// what it wrote, as the caller is told that the request had no effect.
func TestSingleForeignTicketLeavesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend(redislock.Options{})
	ask := func(owner string, mode driver.Mode) error {
		_, err := b.Acquire(t.Context(), driver.Request{Key: "k", Owner: owner, TTL: time.Minute, Mode: mode, Limit: 1, Enqueue: owner != "holder"})
		return err
	}
	if err := ask("holder", driver.Exclusive); err != nil {
		t.Fatal(err)
	}
	for _, owner := range []string{"first", "foreign"} {
		if err := ask(owner, driver.Exclusive); !errors.Is(err, driver.ErrHeld) {
			t.Fatal(err)
		}
	}
	name := record(r.prefix, "k")
	if err := r.admin.Eval(t.Context(), "return redis.call('HSET', KEYS[1], 'sforeign', cmsgpack.pack('x'))", []string{name}).Err(); err != nil {
		t.Fatal(err)
	}
	if err := ask("late", driver.Shared); !problem(err, redislock.ProblemForeign, driver.ErrInvalid) {
		t.Errorf("got %v, want a foreign key", err)
	}
	ids, err := r.admin.ZRange(t.Context(), name+":q", 0, -1).Result()
	if err != nil || !slices.Equal(ids, []string{"first", "foreign"}) {
		t.Errorf("in the queue are %q, %v", ids, err)
	}
	if there, err := r.admin.HExists(t.Context(), name, "slate").Result(); err != nil || there {
		t.Errorf("a ticket is left: %v, %v", there, err)
	}
}

// The same without a clock that can be set: the records are written as an
// earlier clock would have, an hour ahead of now.
func TestSingleClockSetBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend(redislock.Options{LivenessWindow: time.Second})
	const ahead = `
local hour = 3600 * 1000000
local main = KEYS[1]
local h = {cmsgpack.unpack(redis.call('HGET', main, 'h'))}
h[1] = h[1] + hour; h[3] = h[3] + hour
if h[9] then h[2] = h[2] + hour; h[5] = h[5] + hour; h[7] = h[7] + hour end
redis.call('HSET', main, 'h', cmsgpack.pack(unpack(h)))
for _, f in ipairs(redis.call('HKEYS', main)) do
  local c = string.sub(f, 1, 1)
  if c == 'o' or c == 's' then
    local v = {cmsgpack.unpack(redis.call('HGET', main, f))}
    v[1] = v[1] + hour
    if c == 'o' then v[3] = v[3] + hour else v[2] = v[2] + hour; v[6] = v[6] + hour end
    redis.call('HSET', main, f, cmsgpack.pack(unpack(v)))
  end
end
for i = 2, 3 do
  local l = redis.call('ZRANGE', KEYS[i], 0, -1)
  for _, id in ipairs(l) do redis.call('ZINCRBY', KEYS[i], hour, id) end
end
return 1`
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			var last int64
			for i := range k.limit {
				l, err := b.Acquire(ctx, driver.Request{Key: k.name, Owner: fmt.Sprint(i), TTL: 300 * time.Millisecond, Mode: k.mode, Limit: k.limit})
				if err != nil {
					t.Fatal(err)
				}
				last = l.Token
			}
			_, err := b.Acquire(ctx, driver.Request{Key: k.name, Owner: "dead", TTL: time.Hour, Limit: k.limit, Enqueue: true, Manager: "m"})
			if !errors.Is(err, driver.ErrHeld) {
				t.Fatal(err)
			}
			name := r.prefix + "{" + k.name + "}"
			if err := r.admin.Eval(ctx, ahead, []string{name, name + ":q", name + ":h"}).Err(); err != nil {
				t.Fatal(err)
			}
			last += time.Hour.Microseconds()
			info, err := b.Inspect(ctx, k.name)
			if err != nil || len(info.Holders) != k.limit || info.Holders[0].Remaining > 300*time.Millisecond {
				t.Errorf("%+v, %v", info, err)
			}
			var l driver.Lease
			r.until("the key can be had", func() bool {
				l, err = b.Acquire(ctx, driver.Request{Key: k.name, Owner: "new", TTL: time.Minute, Limit: k.limit})
				if err != nil && !errors.Is(err, driver.ErrHeld) {
					t.Fatal(err)
				}
				return err == nil
			})
			if l.Token <= last {
				t.Errorf("token %d follows %d", l.Token, last)
			}
			if err := b.Release(ctx, l); err != nil {
				t.Error(err)
			}
		})
	}
}
