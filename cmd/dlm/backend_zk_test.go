//go:build !no_zk

package main

import (
	"strings"
	"testing"
)

func TestZKURL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, want string }{
		{"zk://h", ""},
		{"zk://h:2181,i,j:1/app/one?root=/locks&session_timeout=5s", ""},
		{"zk://u:p@h,i", ""},
		{"zks://h?server_name=x", ""},
		{"zk:h", "two slashes"},
		{"zk://", "host:port"},
		{"zk://h?root=dlm", "Options.Root"},
		{"zk://h/a//b", "Options.Chroot"},
		{"zk://h?session_timeout=1ms", "session_timeout"},
		{"zk://h?ca=x", "zks://"},
		{"zk://h?x=1", "unknown parameter"},
		{"zk://u@h", "DLM_ZK_PASSWORD"},
		{"zk://h#x", "%23"},
	} {
		_, err := parseBackend(c.text, func(string) (string, bool) { return "", false })
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", c.text, err, c.want)
		}
	}
	// A password is never shown.
	_, err := parseBackend("zk://u:secret@h?x=1", func(string) (string, bool) { return "", false })
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v, want an error without the password", err)
	}
}
