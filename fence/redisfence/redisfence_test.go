package redisfence_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
	"github.com/go-dlm/dlm/fence/redisfence"
)

// What the scripts do is tested on real servers, in tests/fence. Here it is about
// what is not sent.

// newGuard returns a guard whose client fails the test if it is used.
func newGuard(t *testing.T, opts *redisfence.Options) *redisfence.Guard {
	t.Helper()
	client := redis.NewClient(&redis.Options{
		MaxRetries: -1,
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			t.Error("the server was asked")
			return nil, errors.ErrUnsupported
		},
	})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	g, err := redisfence.New(client, opts)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestNewInvalid(t *testing.T) {
	t.Parallel()
	if _, err := redisfence.New(nil, nil); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("no client: %v", err)
	}
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	for _, prefix := range []string{"a{", "a}", "\xff", strings.Repeat("x", 129)} {
		if _, err := redisfence.New(client, &redisfence.Options{Prefix: prefix}); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("%q: %v", prefix, err)
		}
	}
}

func TestNewScriptInvalid(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"", " \n", "#!lua flags=no-writes\nreturn 1"} {
		if _, err := redisfence.NewScript(source); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("%q: %v", source, err)
		}
	}
}

func TestRecord(t *testing.T) {
	t.Parallel()
	g := newGuard(t, &redisfence.Options{Prefix: "f:"})
	seen := make(map[string]bool)
	for resource, want := range map[string]string{
		"a":         "f:{a}",
		"{a}":       "f:{a}:{a}",
		"x{a}y":     "f:{a}:x{a}y",
		"{a}:{a}":   "f:{a}:{a}:{a}",
		"{a}{b}":    "f:{a}:{a}{b}",
		"{{a}}":     "f:{{a}:{{a}}",
		"{":         "f:{{}",
		"a{b":       "f:{a{b}",
		"a{b}c}":    "f:{b}:a{b}c}",
		"世":         "f:{世}",
		"f:{a}":     "f:{a}:f:{a}",
		"}":         "",
		"a}b":       "",
		"{}":        "",
		"{}a":       "",
		"a}{b":      "",
		"":          "",
		"\xff":      "",
		"a}{b}":     "f:{b}:a}{b}",
		"{}{a}":     "",
		"a{}b{c}":   "",
		"a{b}{}":    "f:{b}:a{b}{}",
		"a{b{c}d}e": "f:{b{c}:a{b{c}d}e",
	} {
		got, err := g.Record(resource)
		if got != want || (want == "") != errors.Is(err, dlm.ErrInvalid) || want != "" && seen[got] {
			t.Errorf("%q: %q, %v, want %q", resource, got, err, want)
		}
		seen[got] = true
	}
}

// The record is in the slot of its resource, and tells which one that is.
func FuzzRecord(f *testing.F) {
	for _, s := range []string{"a", "{a}", "a{", "}{", "{}a", "{{}}"} {
		f.Add(s)
	}
	client := redis.NewClient(&redis.Options{})
	f.Cleanup(func() { _ = client.Close() })
	g, err := redisfence.New(client, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, resource string) {
		record, err := g.Record(resource)
		if err != nil {
			return
		}
		if tag(record) != tag(resource) {
			t.Errorf("%q and %q are in different slots", record, resource)
		}
		_, rest, _ := strings.Cut(record, "}")
		named, ok := strings.CutPrefix(rest, ":")
		if !ok {
			named = tag(record)
		}
		if named != resource {
			t.Errorf("%q could be that of %q", record, named)
		}
	})
}

// tag is the part of a key that decides on its slot, as Redis defines it.
func tag(key string) string {
	i := strings.IndexByte(key, '{')
	if i < 0 {
		return key
	}
	j := strings.IndexByte(key[i+1:], '}')
	if j <= 0 {
		return key
	}
	return key[i+1 : i+1+j]
}

func TestInvalid(t *testing.T) {
	t.Parallel()
	g := newGuard(t, nil)
	script, err := redisfence.NewScript("return 1")
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	for _, c := range []struct {
		name string
		err  error
	}{
		{"no key", g.Set(ctx, "", "x", 1, 0)},
		{"a key without a slot for its record", g.Set(ctx, "a}b", "x", 1, 0)},
		{"a key that is too long", g.Set(ctx, strings.Repeat("x", fence.MaxResourceLen+1), "x", 1, 0)},
		{"token 0", g.Set(ctx, "k", "x", 0, 0)},
		{"a token that is too high", g.Set(ctx, "k", "x", fence.MaxToken+1, 0)},
		{"a negative ttl", g.Set(ctx, "k", "x", 1, -time.Second)},
		{"a ttl that is too short", g.Set(ctx, "k", "x", 1, time.Microsecond)},
		{"no script", g.Run(ctx, nil, nil, nil, "k", 1).Err()},
		{"the zero script", g.Run(ctx, &redisfence.Script{}, nil, nil, "k", 1).Err()},
		{"no resource", g.Run(ctx, script, nil, nil, "", 1).Err()},
		{"a negative token", g.Run(ctx, script, nil, nil, "k", -1).Err()},
		//lint:ignore SA1012 nil is what is tested
		{"no context", g.Run(nil, script, nil, nil, "k", 1).Err()},
	} {
		if !errors.Is(c.err, dlm.ErrInvalid) {
			t.Errorf("%s: %v", c.name, c.err)
		}
	}
}
