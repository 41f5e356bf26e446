//go:build !no_postgres

package main

import (
	"strings"
	"testing"
)

func TestPostgresURLs(t *testing.T) {
	none := func(string) (string, bool) { return "", false }
	for _, c := range []struct{ url, want string }{
		{"postgres://h/db", ""},
		{"postgresql://u:p%40@h:5433/db?schema=x&prefix=y&sslmode=verify-full", ""},
		{"postgres://a:1,b:2,[::1]:3/db?target_session_attrs=read-write&create_schema=true", ""},
		{"postgres://h/db?liveness_window=1s&keep_tokens=1h&poll_interval=1s&connect_timeout=2", ""},
		{"postgres://h/db?mode=table&liveness_window=1s", ""},
		{"postgres://h/db?mode=advisory&session_timeout=10s&schema=x&create_schema=true", ""},
		{"postgres://h/db?mode=other", "must be table or advisory"},
		{"postgres://h/db?mode=advisory&keep_tokens=1h", "keep_tokens does not go"},
		{"postgres://h/db?mode=advisory&session_timeout=1s", "must be between 2s"},
		{"postgres://h/db?session_timeout=10s", "session_timeout goes with"},
		{"postgres:h/db", "two slashes"},
		{"postgres://h", "name of the database is missing"},
		{"postgres:///db", "a host is missing"},
		{"postgres://:5432/db", "a host is missing"},
		{"postgres://::1/db", "several colons"},
		{"postgres://h/db/more", "more parts"},
		{"postgres://u/x@h/db", "a @ stands behind the host"},
		{"postgres://h/db#x", "a # stands"},
		{"postgres://h/db?create_schema=yes", "create_schema"},
		{"postgres://h/db?sslmode=sometimes", "parameter sslmode"},
		{"postgres://h/db?sslmode=", "parameter sslmode"},
		{"postgres://h/db?keep_tokens=1s", "must be between 1m0s"},
		{"postgres://h/db?prefix=" + strings.Repeat("x", 33), "parameter prefix"},
		{"postgres://h/db?schema=x&schema=y", "given 2 times"},
		{"postgres://h/db?password=x", `unknown parameter "password"`},
		{"postgres://h/db?nonsense=1", `unknown parameter "nonsense"`},
	} {
		_, err := parseBackend(c.url, none)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.url, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", c.url, err, c.want)
		}
	}
}
