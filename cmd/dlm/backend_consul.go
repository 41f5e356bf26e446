//go:build !no_consul

package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/consullock"
)

func init() {
	storeFaults = append(storeFaults, func(err error) bool { return errors.As(err, new(*consullock.ServerError)) })
	schemes["consul"] = scheme{
		usage: `  consul://HOST[:PORT],HOST[:PORT],...[/PREFIX]?dc=NAME&waiter_ttl=30s&lock_delay=0s
      Consul, 1.10 or later: the local agent, or several to be used in turn.
      PREFIX/ begins the keys of locks, dlm/ by default. The ACL token is in the
      environment, as DLM_CONSUL_TOKEN, or stands in the URL as :TOKEN@. A process
      that dies holds its locks for up to twice their TTL, and at least for
      min_session=10s, which session_ttl_min of the servers must allow. waiter_ttl
      is the same for waiters; lock_delay keeps a lock free after its holder died.
      consuls:// uses TLS, with the parameters ca, cert, key and server_name.`,
		parse: parseConsul,
	}
	schemes["consuls"] = scheme{parse: parseConsul}
}

// consulURL is what a URL says.
type consulURL struct {
	cfg                       consullock.Config
	opts                      consullock.Options
	secure                    bool
	ca, cert, key, serverName string
}

func parseConsul(u *storeURL, env func(string) (string, bool)) (opener, error) {
	switch {
	case u.Opaque != "":
		return nil, fmt.Errorf("write %s:// with two slashes", u.Scheme)
	case u.Fragment != "" || strings.HasSuffix(u.String(), "#"):
		return nil, errors.New("a # stands in the URL; write %23 for it")
	}
	c := &consulURL{secure: u.Scheme == "consuls"}
	port := "8500"
	if c.secure {
		port = "8501"
	}
	for _, host := range u.hosts {
		if strings.HasPrefix(host, ":") || host == "" {
			return nil, fmt.Errorf("a host is missing, as in %s://localhost", u.Scheme)
		}
		host = strings.TrimSuffix(host, ":")
		if _, _, err := net.SplitHostPort(host); err != nil {
			host = net.JoinHostPort(strings.Trim(host, "[]"), port)
		}
		c.cfg.Addresses = append(c.cfg.Addresses, host)
	}
	token, given := u.User.Password()
	switch {
	case u.User.Username() != "":
		return nil, errors.New("there are no users in Consul; write :TOKEN@, or set DLM_CONSUL_TOKEN")
	case !given:
		token, _ = env("DLM_CONSUL_TOKEN")
	}
	c.cfg.Token = token
	if prefix := strings.Trim(u.Path, "/"); prefix != "" {
		c.opts.Prefix = prefix + "/"
	}
	// The bounds are those of consullock.Options.
	p := parseParams(u)
	c.cfg.Datacenter, _ = p.take("dc")
	c.opts.MinSessionTTL = p.duration("min_session", time.Second, time.Hour)
	c.opts.WaiterTTL = p.duration("waiter_ttl", time.Second, time.Hour)
	c.opts.LockDelay = p.duration("lock_delay", 0, time.Minute)
	for name, field := range map[string]*string{"ca": &c.ca, "cert": &c.cert, "key": &c.key, "server_name": &c.serverName} {
		text, ok := p.take(name)
		if ok && !c.secure {
			p.fail("parameter %s is about TLS, which consuls:// uses", name)
		}
		*field = text
	}
	if (c.cert == "") != (c.key == "") {
		p.fail("parameters cert and key need each other")
	}
	if err := p.finish(); err != nil {
		return nil, err
	}
	if err := c.cfg.Validate(&c.opts); err != nil {
		return nil, err
	}
	return c.open, nil
}

// open opens a manager.
func (c *consulURL) open(lockConfig *dlm.LockConfig) (*dlm.Manager, error) {
	cfg := c.cfg
	if c.secure {
		config := &tls.Config{ServerName: c.serverName, MinVersion: tls.VersionTLS12}
		if c.ca != "" {
			pem, err := os.ReadFile(c.ca)
			if err != nil {
				return nil, fmt.Errorf("parameter ca: %w", err)
			}
			config.RootCAs = x509.NewCertPool()
			if !config.RootCAs.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("parameter ca: no certificate in %s", c.ca)
			}
		}
		if c.cert != "" {
			pair, err := tls.LoadX509KeyPair(c.cert, c.key)
			if err != nil {
				return nil, fmt.Errorf("parameters cert and key: %w", err)
			}
			config.Certificates = []tls.Certificate{pair}
		}
		cfg.TLS = config
	}
	return consullock.OpenLockManager(&cfg, lockConfig, &c.opts)
}
