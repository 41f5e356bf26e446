package consullock

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		opts *Options
		want string
	}{
		{"nil", nil, ""},
		{"all", &Options{Prefix: "a/b_c-d.e:f/", MinSessionTTL: time.Second, WaiterTTL: time.Hour, LockDelay: time.Minute}, ""},
		{"no slash at the end", &Options{Prefix: "a"}, ""},
		{"long", &Options{Prefix: strings.Repeat("a", 129)}, "at most 128"},
		{"slash", &Options{Prefix: "/a/"}, "Options.Prefix"},
		{"only a slash", &Options{Prefix: "/"}, "Options.Prefix"},
		{"dots", &Options{Prefix: "a/../b/"}, "Options.Prefix"},
		{"empty part", &Options{Prefix: "a//"}, "Options.Prefix"},
		{"space", &Options{Prefix: "a b/"}, "Options.Prefix"},
		{"equals", &Options{Prefix: "a=b/"}, "Options.Prefix"},
		{"no UTF-8", &Options{Prefix: "a\xff/"}, "Options.Prefix"},
		{"short session", &Options{MinSessionTTL: time.Second - 1}, "Options.MinSessionTTL"},
		{"long session", &Options{MinSessionTTL: time.Hour + 1}, "Options.MinSessionTTL"},
		{"negative waiter", &Options{WaiterTTL: -1}, "Options.WaiterTTL"},
		{"negative delay", &Options{LockDelay: -1}, "Options.LockDelay"},
		{"long delay", &Options{LockDelay: time.Minute + 1}, "Options.LockDelay"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, err := New(new(api.Client), c.opts)
			if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	if _, err := New(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("no client: %v", err)
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	many := make([]string, 65)
	for i := range many {
		many[i] = "h:1"
	}
	for _, c := range []struct {
		name string
		cfg  *Config
		want string
	}{
		{"nil", nil, "Config.Addresses"},
		{"good", &Config{Addresses: []string{"h:1", "[::1]:2"}, Token: "t", Datacenter: "dc1"}, ""},
		{"many", &Config{Addresses: many}, "Config.Addresses"},
		{"no port", &Config{Addresses: []string{"h:1", "h"}}, "Config.Addresses[1]"},
		{"no host", &Config{Addresses: []string{":1"}}, "Config.Addresses[0]"},
		{"scheme", &Config{Addresses: []string{"http://h:1"}}, "Config.Addresses[0]"},
		{"token", &Config{Addresses: []string{"h:1"}, Token: "a\nb"}, "Config.Token"},
		{"datacenter", &Config{Addresses: []string{"h:1"}, Datacenter: "a b"}, "Config.Datacenter"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, err := Open(c.cfg, nil)
			if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if err == nil {
				b.Close()
			} else if strings.Contains(err.Error(), "a\nb") {
				t.Error("the error shows the token")
			}
		})
	}
}
