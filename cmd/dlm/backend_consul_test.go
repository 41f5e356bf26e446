//go:build !no_consul

package main

import (
	"strings"
	"testing"
)

func TestConsulURL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, want string }{
		{"consul://h", ""},
		{"consul://h:8500,i,[::1]:1/app/one?dc=dc2&min_session=10s&waiter_ttl=30s&lock_delay=5s", ""},
		{"consul://:token@h", ""},
		{"consuls://h?server_name=x&ca=y", ""},
		{"consul:h", "two slashes"},
		{"consul://", "host is missing"},
		{"consul://h,:1", "host is missing"},
		{"consul://user:token@h", "no users"},
		{"consul://h/a//b", "Options.Prefix"},
		{"consul://h/a%20b", "Options.Prefix"},
		{"consul://h/../b", "Options.Prefix"},
		{"consul://h?min_session=1ms", "min_session"},
		{"consul://h?waiter_ttl=2h", "waiter_ttl"},
		{"consul://h?lock_delay=2m", "lock_delay"},
		{"consul://h?dc=a%20b", "Config.Datacenter"},
		{"consul://h?ca=x", "consuls://"},
		{"consuls://h?cert=x", "need each other"},
		{"consul://h?x=1", "unknown parameter"},
		{"consul://h#x", "%23"},
	} {
		_, err := parseBackend(c.text, func(string) (string, bool) { return "", false })
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", c.text, err, c.want)
		}
	}
	// A token is never shown, wherever it stands.
	for _, text := range []string{"consul://:secret@h?x=1", "consul://secret@h", "consul://h"} {
		_, err := parseBackend(text, func(name string) (string, bool) { return "secret token", name == "DLM_CONSUL_TOKEN" })
		if err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want an error without the token", text, err)
		}
	}
}
