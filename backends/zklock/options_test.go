package zklock_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/backends/zklock"
	"github.com/go-dlm/dlm/driver"
)

func TestBadOptions(t *testing.T) {
	for _, c := range []struct {
		servers string
		opts    zklock.Options
		want    string
	}{
		{"", zklock.Options{}, "servers[0]"},
		{"h:1,", zklock.Options{}, "servers[1]"},
		{"a:b:c", zklock.Options{}, "host:port"},
		{"h", zklock.Options{SessionTimeout: time.Millisecond}, "Options.SessionTimeout is 1ms, must be between 100ms and 1h0m0s"},
		{"h", zklock.Options{SessionTimeout: 2 * time.Hour}, "Options.SessionTimeout"},
		{"h", zklock.Options{Root: "dlm"}, "Options.Root"},
		{"h", zklock.Options{Root: "/"}, "Options.Root"},
		{"h", zklock.Options{Root: "/a/"}, "Options.Root"},
		{"h", zklock.Options{Root: "/a/../b"}, "Options.Root"},
		{"h", zklock.Options{Root: "/a\x00"}, "Options.Root"},
		{"h", zklock.Options{Root: "/zookeeper/locks"}, "Options.Root"},
		{"h", zklock.Options{Root: "/" + strings.Repeat("a", 256)}, "at most 256"},
		{"h", zklock.Options{Chroot: "app"}, "Options.Chroot"},
		{"h", zklock.Options{Auth: "name"}, "Options.Auth"},
		{"h", zklock.Options{Auth: ":password"}, "Options.Auth"},
		{"h", zklock.Options{ACL: []zk.ACL{{Perms: zk.PermAll}}}, "Options.ACL[0]"},
		{"h", zklock.Options{ACL: zk.WorldACL(zk.PermRead)}, "Options.ACL"},
	} {
		_, err := zklock.New(strings.Split(c.servers, ","), &c.opts)
		if !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q, %+v: %v, want an invalid argument with %q", c.servers, c.opts, err, c.want)
		}
		if c.opts.Auth != "" && strings.Contains(err.Error(), "password") && !strings.Contains(err.Error(), "a colon and a password") {
			t.Errorf("the password is shown: %v", err)
		}
	}
	if err := zklock.Validate(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("no servers: %v", err)
	}
	for _, servers := range []string{"h", "h:1", "h,i:2", "::1", "[::1]", "[::1]:3"} {
		if err := zklock.Validate(strings.Split(servers, ","), nil); err != nil {
			t.Errorf("%q: %v", servers, err)
		}
	}
}
