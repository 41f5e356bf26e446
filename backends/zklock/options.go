package zklock

import (
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/driver"
)

// Options configures a backend. Nil means the defaults, and so does the zero
// value of each field.
type Options struct {
	// SessionTimeout is what is asked of the server; it grants no less than two
	// and no more than twenty of its ticks, unless it is set up otherwise. A
	// process that dies frees its locks when its session has timed out, and no
	// lock outlasts a loss of the connection by more than about half of it. It
	// must be between 100ms and 1h. Defaults to 20s.
	SessionTimeout time.Duration
	// Chroot is a path that stands before all others, such as "/app". It must
	// exist, or the user have the right to create it. Defaults to none.
	Chroot string
	// Root is the node that all locks are below. It is created if it is missing.
	// All clients that are to exclude each other must use the same. Defaults to
	// "/dlm".
	Root string
	// Auth is the user as "name:password", for the scheme digest. Defaults to
	// none.
	Auth string
	// ACL is for all nodes that are created. Every client must have the rights to
	// read, write, create and delete them. Defaults to all rights for the user of
	// Auth, or for everybody if there is none.
	ACL []zk.ACL
	// Dial connects to a server, within the time-out. Defaults to
	// [net.DialTimeout].
	Dial func(network, address string, timeout time.Duration) (net.Conn, error)
	// TLS speaks TLS over what Dial returns. A ServerName that is empty is that of
	// the address. Defaults to nil: plain TCP.
	TLS *tls.Config
}

const (
	defaultSessionTimeout = 20 * time.Second
	minSessionTimeout     = 100 * time.Millisecond
	maxSessionTimeout     = time.Hour
	defaultRoot           = "/dlm"
	maxPathLen            = 256
	defaultPort           = "2181"
	maxServers            = 64
)

// Validate checks servers and options as [New] does, and opens nothing.
func Validate(servers []string, opts *Options) error {
	if _, err := checkServers(servers); err != nil {
		return err
	}
	_, err := opts.withDefaults()
	return err
}

// withDefaults checks the options and fills in the defaults.
func (o *Options) withDefaults() (Options, error) {
	var opts Options
	if o != nil {
		opts = *o
	}
	if opts.SessionTimeout == 0 {
		opts.SessionTimeout = defaultSessionTimeout
	}
	if opts.SessionTimeout < minSessionTimeout || opts.SessionTimeout > maxSessionTimeout {
		return opts, invalidf("Options.SessionTimeout is %v, must be between %v and %v",
			opts.SessionTimeout, minSessionTimeout, maxSessionTimeout)
	}
	if opts.Root == "" {
		opts.Root = defaultRoot
	}
	if opts.Chroot == "/" {
		opts.Chroot = ""
	}
	if err := checkPath("Options.Root", opts.Root); err != nil {
		return opts, err
	}
	if opts.Chroot != "" {
		if err := checkPath("Options.Chroot", opts.Chroot); err != nil {
			return opts, err
		}
	}
	if name, password, ok := strings.Cut(opts.Auth, ":"); opts.Auth != "" && (!ok || name == "" || password == "") {
		return opts, invalidf("Options.Auth must be a name, a colon and a password")
	}
	switch {
	case len(opts.ACL) > 0:
		opts.ACL = slices.Clone(opts.ACL)
	case opts.Auth != "":
		opts.ACL = zk.AuthACL(zk.PermAll)
	default:
		opts.ACL = zk.WorldACL(zk.PermAll)
	}
	const needed = zk.PermRead | zk.PermWrite | zk.PermCreate | zk.PermDelete
	for i, a := range opts.ACL {
		if a.Scheme == "" || a.Perms == 0 || a.Perms&^zk.PermAll != 0 {
			return opts, invalidf("Options.ACL[%d] is %+v, must have a scheme and rights of zk.PermAll", i, a)
		}
	}
	if !slices.ContainsFunc(opts.ACL, func(a zk.ACL) bool { return a.Perms&needed == needed }) {
		return opts, invalidf("Options.ACL gives nobody the rights to read, write, create and delete")
	}
	if opts.Dial == nil {
		opts.Dial = net.DialTimeout
	}
	return opts, nil
}

// checkPath checks a path as ZooKeeper does.
func checkPath(field, path string) error {
	switch {
	case len(path) > maxPathLen:
		return invalidf("%s has %d bytes, must have at most %d", field, len(path), maxPathLen)
	case !strings.HasPrefix(path, "/") || len(path) < 2 || strings.HasSuffix(path, "/"):
		return invalidf("%s is %q, must begin with a slash and not end with one", field, path)
	case !utf8.ValidString(path) || strings.ContainsFunc(path, func(r rune) bool {
		return unicode.IsControl(r) || r >= 0xd800 && r <= 0xf8ff || r >= 0xfff0 && r <= 0xffff
	}):
		return invalidf("%s is %q, must be UTF-8 that ZooKeeper allows in paths", field, path)
	}
	for part := range strings.SplitSeq(path[1:], "/") {
		if part == "" || part == "." || part == ".." {
			return invalidf("%s is %q, must have no part that is empty, . or ..", field, path)
		}
	}
	if path == "/zookeeper" || strings.HasPrefix(path, "/zookeeper/") {
		return invalidf("%s is %q, which ZooKeeper keeps for itself", field, path)
	}
	return nil
}

// checkServers returns the addresses with their ports.
func checkServers(servers []string) ([]string, error) {
	if len(servers) == 0 || len(servers) > maxServers {
		return nil, invalidf("there are %d servers, must be between 1 and %d", len(servers), maxServers)
	}
	list := make([]string, len(servers))
	for i, s := range servers {
		host, port, err := net.SplitHostPort(s)
		if err != nil {
			host, port = strings.Trim(s, "[]"), defaultPort
			if strings.Contains(host, ":") && net.ParseIP(host) == nil {
				return nil, invalidf("servers[%d] is %q, must be host:port", i, s)
			}
		}
		if host == "" || port == "" || strings.ContainsAny(host, "/, ") {
			return nil, invalidf("servers[%d] is %q, must be host:port", i, s)
		}
		list[i] = net.JoinHostPort(host, port)
	}
	return list, nil
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: zklock: "+format, append([]any{driver.ErrInvalid}, args...)...)
}
