//go:build !no_redis

package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// lookup is an environment of NAME=value pairs.
func lookup(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, pair := range pairs {
			if value, ok := strings.CutPrefix(pair, name+"="); ok {
				return value, true
			}
		}
		return "", false
	}
}

func TestRedisURL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text     string
		env      []string
		addrs    []string
		user, pw string
		path     []string
	}{
		{text: "redis://h", addrs: []string{"h:6379"}},
		{text: "redis://h:1/2", addrs: []string{"h:1"}, path: []string{"2"}},
		{text: "REDIS://h:/", addrs: []string{"h:6379"}},
		{text: "redis://[::1]", addrs: []string{"[::1]:6379"}},
		{text: "redis://[::1]:7/0", addrs: []string{"[::1]:7"}, path: []string{"0"}},
		{text: "redis://u:p@h", addrs: []string{"h:6379"}, user: "u", pw: "p"},
		{text: "redis://:p@h", addrs: []string{"h:6379"}, pw: "p"},
		{text: "redis://u:p%40%2F%3F%23%25,:@h", addrs: []string{"h:6379"}, user: "u", pw: "p@/?#%,:"},
		{text: "redis://h", env: []string{"DLM_REDIS_USER=u", "DLM_REDIS_PASSWORD=p@/"}, addrs: []string{"h:6379"}, user: "u", pw: "p@/"},
		{text: "redis://u@h", env: []string{"DLM_REDIS_USER=v", "DLM_REDIS_PASSWORD=p"}, addrs: []string{"h:6379"}, user: "u", pw: "p"},
		{text: "redis://u:p@h", env: []string{"DLM_REDIS_USER=v", "DLM_REDIS_PASSWORD=q"}, addrs: []string{"h:6379"}, user: "u", pw: "p"},
		{text: "redis+cluster://a,b:1,c", addrs: []string{"a:6379", "b:1", "c:6379"}},
		{text: "redis+cluster://a:1,b", addrs: []string{"a:1", "b:6379"}},
		{text: "redis+quorum://u:p@[::1]:1,[::2],c:3", addrs: []string{"[::1]:1", "[::2]:6379", "c:3"}, user: "u", pw: "p"},
		{text: "rediss+sentinel://a,b/my%2Fmaster/3", addrs: []string{"a:6379", "b:6379"}, path: []string{"my/master", "3"}},
	} {
		u, err := parseURL(c.text)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		r, err := newRedisURL(u, lookup(c.env...))
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		if got := r.addrs(redisPort); !slices.Equal(got, c.addrs) || r.user != c.user || r.password != c.pw || !slices.Equal(r.path, c.path) {
			t.Errorf("%s: got %q, %q, %q, %q", c.text, got, r.user, r.password, r.path)
		}
	}
}

func TestRedisBackendURLs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, want string }{
		{"redis://h", ""},
		{"redis://h/15?prefix=x:&liveness_window=5s&keep_tokens=48h&replicas=1&replica_timeout=1s", ""},
		{"rediss://h?ca=/x&cert=/y&key=/z&server_name=n", ""},
		{"rediss://h?insecure=true", ""},
		{"redis+cluster://a:1,b:2", ""},
		{"rediss+cluster://a/0?insecure=true", ""},
		{"redis+quorum://a,b,c", ""},
		{"rediss+quorum://a,b,c,d,e/1?node_timeout=100ms&max_ttl=5m&prefix=q:", ""},
		{"redis+sentinel://a,b,c/mymaster", ""},
		{"rediss+sentinel://a/mymaster/1?replicas=1", ""},

		{"redis:h", "two slashes"},
		{"redis://", "a host is missing"},
		{"redis://:6379", "a host is missing"},
		{"redis+cluster://a,,b", "a host is missing"},
		{"redis+cluster://a,", "a host is missing"},
		{"redis://u@h", "DLM_REDIS_PASSWORD"},
		{"redis://h:x", "not a URL"},
		{"redis://h:1:2", "several colons"},
		{"redis://::1", "several colons"},
		{"redis://h/x", "number of a database"},
		{"redis://h/-1", "number of a database"},
		{"redis://h/99999999999", "number of a database"},
		{"redis://h/0/1", "more parts"},
		{"redis://h#x", "# stands in the URL"},
		{"redis://a,b", "more than one host"},
		{"redis://h?bogus=1", `unknown parameter "bogus"`},
		{"redis://h?password=x", `unknown parameter "password"`},
		{"redis://h?max_ttl=1m", `unknown parameter "max_ttl"`},
		{"redis://h?prefix={", "braces"},
		{"redis://h?prefix=%ff", "UTF-8"},
		{"redis://h?liveness_window=1ms", "between 100ms and 1h"},
		{"redis://h?keep_tokens=1s", "between 1m"},
		{"redis://h?replicas=17", "between 0 and 16"},
		{"redis://h?replicas=one", "must be a number"},
		{"redis://h?replicas=1&replicas=2", "given 2 times"},
		{"redis://h?ca=/x", "rediss://"},
		{"redis+cluster://h?insecure=true", "rediss+cluster://"},
		{"rediss://h?insecure=false", "must be true"},
		{"rediss://h?insecure=true&ca=/x", "exclude each other"},
		{"rediss://h?cert=/x", "need each other"},
		{"redis+cluster://h/1", "database 0 only"},
		{"redis+quorum://a,b", "an odd number"},
		{"redis+quorum://a,b,c,d", "an odd number"},
		{"redis+quorum://a,b,c?replicas=1", `unknown parameter "replicas"`},
		{"redis+quorum://a,b,c?max_ttl=1ms", "between 1s"},
		{"redis+sentinel://a,b,c", "the name by which"},
		{"redis+sentinel://a,b,c/", "the name by which"},
		{"redis+sentinel://a/m/x", "number of a database"},
		{"redis+sentinel://a/m?sentinel_user=u", "DLM_REDIS_SENTINEL_PASSWORD"},
	} {
		open, err := parseBackend(c.text, lookup())
		if c.want == "" && (err != nil || open == nil) {
			t.Errorf("%s: %v", c.text, err)
		}
		if c.want != "" && (err == nil || open != nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.text, err, c.want)
		}
	}
}

// Whatever is wrong with a URL, its password is not shown.
func TestRedisPasswordIsNotShown(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"redis://u:S3CRET/@h", "redis://u:S3CRET?@h", "redis://u:S3CRET#@h", "redis://u:S3CRET%@h", "redis://u:S3CRET%zz@h",
		"redis://u:1/S3CRET@h", "redis://u:1?S3CRET@h", "redis://u:1?S3CRET=1@h", "redis://u:1#S3CRET@h", "redis://u:S3CRET",
		"redis://u:S3CRET@", "redis://u:S3CRET@h:x", "redis://u:S3CRET@h/x", "redis://u:S3CRET@h?x=1", "redis://u:S3CRET@a,b",
		"redis://u:S3CRET @h", "redis://u:S3CRET\x01@h", "redis://u:S3CRET[@h", "bogus://u:S3CRET@h", "redis+quorum://u:S3CRET@h",
		"redis://h?password=S3CRET",
	} {
		code, out, msg := call(t.Context(), map[string]string{"DLM_BACKEND": text}, "ls")
		if code != 64 || strings.Contains(out+msg, "S3CRET") || !isMessage(msg, "DLM_BACKEND: ") {
			t.Errorf("%s: exit code %d: %s%s", text, code, out, msg)
		}
	}
}

func FuzzRedisPassword(f *testing.F) {
	for _, s := range []string{"", "@", "/", "?x=", "#", "%", "@a,b", "@h/x", "%2"} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, before, after string) {
		if _, err := parseBackend("redis://u:"+before+"S3CRET"+after+"@h", lookup()); err != nil && strings.Contains(err.Error(), "S3CRET") {
			t.Error(err)
		}
	})
}

func TestRedisFilesOfTLS(t *testing.T) {
	t.Parallel()
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ query, want string }{
		{"ca=/nonexistent", "parameter ca: open /nonexistent"},
		{"ca=" + junk, "no certificate in"},
		{"cert=/nonexistent&key=/nonexistent", "parameters cert and key"},
	} {
		for _, store := range []string{"rediss://h?", "rediss+quorum://a,b,c?"} {
			code, out, msg := call(t.Context(), map[string]string{"DLM_BACKEND": store + c.query}, "ls")
			if code != 69 || out != "" || !isMessage(msg, c.want) {
				t.Errorf("%s: exit code %d: %s%s", c.query, code, out, msg)
			}
		}
	}
}

// Nothing listens there. The client's own messages do not mix with ours.
func TestRedisUnreachable(t *testing.T) {
	t.Parallel()
	for _, store := range []string{
		"redis://127.0.0.1:1", "redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/m",
		"redis+quorum://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
	} {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			p := startDLM(t, store, "ls")
			p.expect(69)
			if p.stdout.Len() > 0 || !isMessage(p.stderr.String(), "the store") {
				t.Errorf("got %q, %q", &p.stdout, &p.stderr)
			}
			if strings.HasPrefix(store, "redis+quorum") {
				return
			}
			code, out, msg := call(ctx, map[string]string{"DLM_BACKEND": store}, "doctor")
			if code != 78 || !strings.HasPrefix(out, "critical  connection") || !isMessage(msg, "1 critical") {
				t.Errorf("doctor: exit code %d: %s%s", code, out, msg)
			}
		})
	}
}
