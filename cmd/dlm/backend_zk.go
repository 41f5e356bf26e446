//go:build !no_zk

package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/zklock"
)

func init() {
	storeFaults = append(storeFaults, func(err error) bool { return errors.As(err, new(*zklock.ServerError)) })
	schemes["zk"] = scheme{
		usage: `  zk://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT],...[/CHROOT]?root=/dlm&session_timeout=20s
      a ZooKeeper ensemble, 3.5 or later. USER and PASSWORD, for the scheme digest,
      may also be in the environment, as DLM_ZK_USER and DLM_ZK_PASSWORD. All locks
      are below root, which is below CHROOT. A process that dies holds its locks
      until its session has timed out.
      zks:// uses TLS: ca=FILE names who has signed the servers' certificates, and
      server_name=NAME is whose they must be.`,
		parse: parseZK,
	}
	schemes["zks"] = scheme{parse: parseZK}
}

func parseZK(u *storeURL, env func(string) (string, bool)) (opener, error) {
	switch {
	case u.Opaque != "":
		return nil, fmt.Errorf("write %s:// with two slashes", u.Scheme)
	case u.Fragment != "" || strings.HasSuffix(u.String(), "#"):
		return nil, errors.New("a # stands in the URL; write %23 for it")
	}
	p := parseParams(u)
	// The bounds are those of zklock.Options.
	opts := &zklock.Options{
		Chroot: strings.TrimSuffix(u.Path, "/"), SessionTimeout: p.duration("session_timeout", 100*time.Millisecond, time.Hour),
	}
	opts.Root, _ = p.take("root")
	ca, _ := p.take("ca")
	serverName, _ := p.take("server_name")
	if u.Scheme == "zks" {
		opts.TLS = &tls.Config{ServerName: serverName, MinVersion: tls.VersionTLS12}
	} else if ca != "" || serverName != "" {
		p.fail("parameters ca and server_name are about TLS, which zks:// uses")
	}
	if err := p.finish(); err != nil {
		return nil, err
	}
	user, password := u.User.Username(), ""
	if given, ok := u.User.Password(); ok {
		password = given
	} else {
		password, _ = env("DLM_ZK_PASSWORD")
	}
	if user == "" {
		user, _ = env("DLM_ZK_USER")
	}
	switch {
	case user != "" && password == "":
		return nil, errors.New("there is a user and no password; set DLM_ZK_PASSWORD")
	case user == "" && u.User != nil:
		return nil, errors.New("there is a password and no user")
	case user != "":
		opts.Auth = user + ":" + password
	}
	servers := u.hosts
	if err := zklock.Validate(servers, opts); err != nil {
		return nil, err
	}
	return func(cfg *dlm.LockConfig) (*dlm.Manager, error) {
		if ca != "" {
			pem, err := os.ReadFile(ca)
			if err != nil {
				return nil, fmt.Errorf("parameter ca: %w", err)
			}
			opts.TLS.RootCAs = x509.NewCertPool()
			if !opts.TLS.RootCAs.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("parameter ca: no certificate in %s", ca)
			}
		}
		return zklock.NewLockManager(servers, cfg, opts)
	}, nil
}
