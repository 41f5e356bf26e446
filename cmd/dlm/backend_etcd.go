//go:build !no_etcd

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/driver"
)

func init() {
	storeFaults = append(storeFaults, func(err error) bool { return errors.As(err, new(*etcdlock.ServerError)) })
	schemes["etcd"] = scheme{usage: `  etcd://[USER[:PASSWORD]@]HOST[:PORT],HOST[:PORT],...[/PREFIX]?waiter_ttl=20s
      an etcd cluster, 3.4 or later; name all members. PREFIX/ begins the keys of
      locks, dlm/ by default. USER and PASSWORD may also be in the environment, as
      DLM_ETCD_USER and DLM_ETCD_PASSWORD. etcds:// uses TLS, with the parameters
      ca, cert, key, server_name and insecure. waiter_ttl is how long a waiter
      that has died holds up the others.`, parse: parseEtcd}
	schemes["etcds"] = scheme{parse: parseEtcd}
}

const (
	etcdPort = "2379"
	// etcdPatience bounds connecting. A member that is silent is given up after
	// etcdQuiet and as long again.
	etcdPatience = 3 * time.Second
	etcdQuiet    = 5 * time.Second
)

// etcdURL is what a URL says.
type etcdURL struct {
	endpoints      []string
	user, password string
	opts           etcdlock.Options
	tls            *etcdTLS // or nil
}

func parseEtcd(u *storeURL, env func(string) (string, bool)) (opener, error) {
	switch {
	case u.Opaque != "":
		return nil, fmt.Errorf("write %s:// with two slashes", u.Scheme)
	case strings.Contains(u.EscapedPath()+u.RawQuery+u.EscapedFragment(), "@"):
		// Most likely what stands before it is a part of a password.
		return nil, errors.New("a @ stands behind the host; write %2F for /, %3F for ?, %23 for # " +
			"within user and password, and %40 for a @ that is meant")
	case u.Fragment != "" || strings.HasSuffix(u.String(), "#"):
		return nil, errors.New("a # stands in the URL; write %23 for it")
	}
	e := &etcdURL{}
	p := parseParams(u)
	for _, host := range u.hosts {
		if !strings.HasPrefix(host, "[") && strings.Count(host, ":") > 1 {
			return nil, errors.New("a host has several colons; write [ and ] around an IPv6 address")
		}
		if strings.HasPrefix(host, ":") || host == "" {
			return nil, fmt.Errorf("a host is missing, as in %s://localhost", u.Scheme)
		}
		host = strings.TrimSuffix(host, ":")
		if _, _, err := net.SplitHostPort(host); err != nil {
			host = net.JoinHostPort(strings.Trim(host, "[]"), etcdPort)
		}
		e.endpoints = append(e.endpoints, host)
	}
	e.user = u.User.Username()
	password, given := u.User.Password()
	e.password = password
	if e.user == "" {
		e.user, _ = env("DLM_ETCD_USER")
	}
	if !given {
		e.password, _ = env("DLM_ETCD_PASSWORD")
	}
	if (e.user == "") != (e.password == "") {
		return nil, errors.New("user and password need each other; set DLM_ETCD_USER and DLM_ETCD_PASSWORD")
	}
	if prefix := strings.Trim(u.Path, "/"); prefix != "" {
		e.opts.Prefix = prefix + "/"
	}
	// The bounds are those of etcdlock.Options.
	if len(e.opts.Prefix) > 128 || strings.Contains(e.opts.Prefix, "\x00") {
		p.fail("the path is %q, must be up to 127 bytes without NUL", u.Path)
	}
	e.opts.WaiterTTL = p.duration("waiter_ttl", time.Second, time.Hour)
	secure := u.Scheme == "etcds"
	t := &etcdTLS{}
	for name, field := range map[string]*string{"ca": &t.ca, "cert": &t.cert, "key": &t.key, "server_name": &t.serverName} {
		text, ok := p.take(name)
		if ok && !secure {
			p.fail("parameter %s is about TLS, which etcds:// uses", name)
		}
		*field = text
	}
	text, ok := p.take("insecure")
	t.insecure = text == "true"
	switch {
	case ok && !secure:
		p.fail("parameter insecure is about TLS, which etcds:// uses")
	case ok && !t.insecure:
		p.fail("parameter insecure is %q, must be true, or left out", text)
	case t.insecure && t.ca != "":
		p.fail("parameters insecure and ca exclude each other")
	case (t.cert == "") != (t.key == ""):
		p.fail("parameters cert and key need each other")
	}
	if secure {
		e.tls = t
	}
	if err := p.finish(); err != nil {
		return nil, err
	}
	return e.open, nil
}

// open opens a client, and a manager that closes it.
func (e *etcdURL) open(cfg *dlm.LockConfig) (*dlm.Manager, error) {
	config, err := e.tls.load()
	if err != nil {
		return nil, err
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: e.endpoints, Username: e.user, Password: e.password, TLS: config,
		DialTimeout: etcdPatience, DialKeepAliveTime: etcdQuiet, DialKeepAliveTimeout: etcdQuiet,
		// The client's own messages would mix with ours.
		Logger: zap.NewNop(),
	})
	if errors.Is(err, context.DeadlineExceeded) {
		// With a user, it asks for a token at once.
		return nil, fmt.Errorf("no member answers within %v: %w", etcdPatience, err)
	}
	if err != nil {
		return nil, err
	}
	b, err := etcdlock.New(client, &e.opts)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	m, err := dlm.NewManager(&owningEtcd{b, client}, cfg)
	if err != nil {
		return nil, errors.Join(err, b.Close(), client.Close())
	}
	return m, nil
}

// owningEtcd is a backend whose client is closed with it.
type owningEtcd struct {
	driver.Backend
	client *clientv3.Client
}

// Unwrap lets the manager find what else the backend can do.
func (o *owningEtcd) Unwrap() driver.Backend { return o.Backend }

// Close closes the client too. That it was closed before is no error.
func (o *owningEtcd) Close() error {
	err := o.Backend.Close()
	if closed := o.client.Close(); closed != nil && !errors.Is(closed, context.Canceled) {
		err = errors.Join(err, closed)
	}
	return err
}

// etcdTLS says how to use TLS.
type etcdTLS struct {
	ca, cert, key, serverName string
	insecure                  bool
}

// load reads the files. Without TLS it returns nil.
func (t *etcdTLS) load() (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	config := &tls.Config{ServerName: t.serverName, InsecureSkipVerify: t.insecure, MinVersion: tls.VersionTLS12}
	if t.ca != "" {
		pem, err := os.ReadFile(t.ca)
		if err != nil {
			return nil, fmt.Errorf("parameter ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("parameter ca: no certificate in %s", t.ca)
		}
	}
	if t.cert != "" {
		pair, err := tls.LoadX509KeyPair(t.cert, t.key)
		if err != nil {
			return nil, fmt.Errorf("parameters cert and key: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
