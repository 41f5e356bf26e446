//go:build !no_redis

package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
)

func init() {
	// The client's own messages would mix with ours.
	logging.Disable()
	storeFaults = append(storeFaults, func(err error) bool { return errors.As(err, new(*redislock.ServerError)) })
	for _, kind := range []struct {
		name, usage string
		parse       func(r *redisURL) (opener, error)
	}{
		{"redis", `  redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]?prefix=dlm:
      a Redis server, 6.2 or later, or Valkey. USER and PASSWORD may also be in
      the environment, as DLM_REDIS_USER and DLM_REDIS_PASSWORD; others on this
      machine can then not read them in the list of processes. Special
      characters in a URL are written as %40 for @, and so on.
      rediss:// and so on use TLS: ca=FILE names who has signed the server's
      certificate, cert=FILE and key=FILE are ours, server_name=NAME is whose
      the server's must be, and insecure=true trusts anybody.
      Other parameters: liveness_window=20s, keep_tokens=24h, and replicas=0
      and replica_timeout=500ms: how many replicas must have each lock.`, parseRedisSingle},
		{"redis+cluster", `  redis+cluster://[USER[:PASSWORD]@]HOST[:PORT],HOST[:PORT],...
      a Redis Cluster, found through any of its nodes. Parameters as above.`, parseRedisCluster},
		{"redis+quorum", `  redis+quorum://[USER[:PASSWORD]@]HOST[:PORT],HOST[:PORT],HOST[:PORT],...
      independent Redis servers, an odd number of at least three, a majority of
      which must agree. Parameters as above, but prefix=dlmq:, and in place of
      those about replicas: node_timeout=250ms, and max_ttl=1m, the longest TTL.`, parseRedisQuorum},
		{"redis+sentinel", `  redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT],.../NAME[/DATABASE]
      a Redis that several Sentinels watch under NAME. Parameters as for redis,
      and sentinel_user=USER for the Sentinels themselves, with the password
      in the environment, as DLM_REDIS_SENTINEL_PASSWORD.`, parseRedisSentinel},
	} {
		parse := func(u *storeURL, env func(string) (string, bool)) (opener, error) {
			r, err := newRedisURL(u, env)
			if err != nil {
				return nil, err
			}
			open, err := kind.parse(r)
			if err := errors.Join(r.params.finish(), err); err != nil {
				return nil, firstError(err)
			}
			return open, nil
		}
		schemes[kind.name] = scheme{usage: kind.usage, parse: parse}
		schemes["rediss"+strings.TrimPrefix(kind.name, "redis")] = scheme{parse: parse}
	}
}

// firstError is the first of errors that were joined.
func firstError(err error) error {
	if list, ok := err.(interface{ Unwrap() []error }); ok {
		return list.Unwrap()[0]
	}
	return err
}

const (
	redisPort    = "6379"
	sentinelPort = "26379"
	// redisPatience bounds connecting, and each answer.
	redisPatience = 3 * time.Second
	// redisPool bounds the connections to one server.
	redisPool = 8
)

// redisURL is what the URLs of all kinds of Redis have in common.
type redisURL struct {
	hosts          []string
	path           []string // what stands between the slashes
	params         *params
	env            func(string) (string, bool)
	user, password string
	prefix         string
	window, keep   time.Duration
	tls            *redisTLS // or nil
}

func newRedisURL(u *storeURL, env func(string) (string, bool)) (*redisURL, error) {
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
	r := &redisURL{params: parseParams(u), env: env}
	for _, host := range u.hosts {
		if !strings.HasPrefix(host, "[") && strings.Count(host, ":") > 1 {
			return nil, errors.New("a host has several colons; write [ and ] around an IPv6 address")
		}
		if strings.HasPrefix(host, ":") || host == "" {
			return nil, fmt.Errorf("a host is missing, as in %s://localhost", u.Scheme)
		}
		r.hosts = append(r.hosts, host)
	}
	if path := strings.TrimPrefix(u.EscapedPath(), "/"); path != "" {
		for part := range strings.SplitSeq(path, "/") {
			plain, err := url.PathUnescape(part)
			if err != nil {
				return nil, errors.New("malformed path")
			}
			r.path = append(r.path, plain)
		}
	}
	if err := r.credentials(u); err != nil {
		return nil, err
	}
	r.prefix, _ = r.params.take("prefix")
	if len(r.prefix) > 128 || !utf8.ValidString(r.prefix) || strings.ContainsAny(r.prefix, "{}") {
		r.params.fail("parameter prefix is %q, must be up to 128 bytes of UTF-8 without braces", r.prefix)
	}
	// The bounds are those of redislock.Options.
	r.window = r.params.duration("liveness_window", 100*time.Millisecond, time.Hour)
	r.keep = r.params.duration("keep_tokens", time.Minute, 366*24*time.Hour)
	if strings.HasPrefix(u.Scheme, "rediss") {
		r.tls = parseRedisTLS(r.params)
		return r, nil
	}
	for _, name := range tlsParams {
		if _, ok := r.params.take(name); ok {
			r.params.fail("parameter %s is about TLS, which %s:// uses", name, "rediss"+strings.TrimPrefix(u.Scheme, "redis"))
		}
	}
	return r, nil
}

// credentials takes user and password from the URL, or from the environment.
func (r *redisURL) credentials(u *storeURL) error {
	r.user = u.User.Username()
	password, given := u.User.Password()
	r.password = password
	if r.user == "" {
		r.user, _ = r.env("DLM_REDIS_USER")
	}
	if !given {
		r.password, _ = r.env("DLM_REDIS_PASSWORD")
	}
	if r.user != "" && r.password == "" {
		return errors.New("there is a user and no password; set DLM_REDIS_PASSWORD")
	}
	return nil
}

// database is the number of a database, the part of the path with this index.
func (r *redisURL) database(index int) int {
	if len(r.path) > index+1 {
		r.params.fail("the path has more parts than it may have")
	}
	if len(r.path) <= index || r.path[index] == "" {
		return 0
	}
	n, err := strconv.ParseUint(r.path[index], 10, 31)
	if err != nil {
		r.params.fail("the path is %q where the number of a database must be", r.path[index])
	}
	return int(n)
}

// addrs are the hosts, with a port if they have none.
func (r *redisURL) addrs(port string) []string {
	list := make([]string, len(r.hosts))
	for i, host := range r.hosts {
		host = strings.TrimSuffix(host, ":")
		if _, _, err := net.SplitHostPort(host); err != nil {
			host = net.JoinHostPort(strings.Trim(host, "[]"), port)
		}
		list[i] = host
	}
	return list
}

// options takes the parameters for all kinds but the quorum.
func (r *redisURL) options() *redislock.Options {
	return &redislock.Options{
		Prefix: r.prefix, LivenessWindow: r.window, KeepTokens: r.keep,
		Replicas:       r.params.number("replicas", 0, 16),
		ReplicaTimeout: r.params.duration("replica_timeout", time.Millisecond, time.Minute),
	}
}

func (r *redisURL) client(addr string, db int, config *tls.Config) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: addr, Username: r.user, Password: r.password, DB: db, TLSConfig: config,
		DialTimeout: redisPatience, ReadTimeout: redisPatience, WriteTimeout: redisPatience, DialerRetries: 1, PoolSize: redisPool,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

func parseRedisSingle(r *redisURL) (opener, error) {
	if len(r.hosts) != 1 {
		return nil, errors.New("there is more than one host; use redis+cluster://, redis+sentinel:// or redis+quorum://")
	}
	db, opts := r.database(0), r.options()
	return r.opener(opts, func(config *tls.Config) redis.UniversalClient {
		return r.client(r.addrs(redisPort)[0], db, config)
	}), nil
}

func parseRedisSentinel(r *redisURL) (opener, error) {
	if len(r.path) == 0 || r.path[0] == "" {
		return nil, errors.New("the name by which the Sentinels know the server is missing, " +
			"as in redis+sentinel://host1,host2,host3/mymaster")
	}
	db, opts := r.database(1), r.options()
	user, _ := r.params.take("sentinel_user")
	password, _ := r.env("DLM_REDIS_SENTINEL_PASSWORD")
	if user != "" && password == "" {
		return nil, errors.New("there is a sentinel_user and no password; set DLM_REDIS_SENTINEL_PASSWORD")
	}
	return r.opener(opts, func(config *tls.Config) redis.UniversalClient {
		return redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: r.path[0], SentinelAddrs: r.addrs(sentinelPort), SentinelUsername: user, SentinelPassword: password,
			Username: r.user, Password: r.password, DB: db, TLSConfig: config,
			DialTimeout: redisPatience, ReadTimeout: redisPatience, WriteTimeout: redisPatience, DialerRetries: 1, PoolSize: redisPool,
			DisableIdentity: true,
		})
	}), nil
}

func parseRedisCluster(r *redisURL) (opener, error) {
	if r.database(0) != 0 {
		return nil, errors.New("a cluster has database 0 only")
	}
	opts := r.options()
	return r.opener(opts, func(config *tls.Config) redis.UniversalClient {
		return redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: r.addrs(redisPort), Username: r.user, Password: r.password, TLSConfig: config,
			DialTimeout: redisPatience, ReadTimeout: redisPatience, WriteTimeout: redisPatience, DialerRetries: 1, PoolSize: redisPool,
			DisableIdentity:          true,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		})
	}), nil
}

func parseRedisQuorum(r *redisURL) (opener, error) {
	if n := len(r.hosts); n < 3 || n%2 == 0 {
		return nil, fmt.Errorf("there are %d hosts, must be an odd number and at least 3", n)
	}
	db := r.database(0)
	// The bounds are those of redislock.QuorumOptions.
	opts := &redislock.QuorumOptions{
		Prefix: r.prefix, LivenessWindow: r.window, KeepTokens: r.keep,
		NodeTimeout: r.params.duration("node_timeout", time.Millisecond, time.Minute),
		MaxTTL:      r.params.duration("max_ttl", time.Second, 366*24*time.Hour),
	}
	return func(cfg *dlm.LockConfig) (*dlm.Manager, error) {
		config, err := r.tls.load()
		if err != nil {
			return nil, err
		}
		var clients []redis.UniversalClient
		var open closers
		for _, addr := range r.addrs(redisPort) {
			client := r.client(addr, db, config)
			clients, open = append(clients, client), append(open, client)
		}
		b, err := redislock.NewQuorum(clients, opts)
		return manage(b, err, open, cfg)
	}, nil
}

// opener opens a client, and a manager that closes it.
func (r *redisURL) opener(opts *redislock.Options, connect func(*tls.Config) redis.UniversalClient) opener {
	return func(cfg *dlm.LockConfig) (*dlm.Manager, error) {
		config, err := r.tls.load()
		if err != nil {
			return nil, err
		}
		client := connect(config)
		b, err := redislock.New(client, opts)
		return manage(b, err, closers{client}, cfg)
	}
}

// manage returns a manager over a backend that may have failed, and closes the
// backend's clients with it.
func manage(b driver.Backend, err error, clients closers, cfg *dlm.LockConfig) (*dlm.Manager, error) {
	if err != nil {
		return nil, errors.Join(err, clients.Close())
	}
	m, err := dlm.NewManager(&owning{b, clients}, cfg)
	if err != nil {
		return nil, errors.Join(err, b.Close(), clients.Close())
	}
	return m, nil
}

// owning is a backend whose clients are closed with it.
type owning struct {
	driver.Backend
	clients closers
}

// Unwrap lets the manager find what else the backend can do.
func (o *owning) Unwrap() driver.Backend { return o.Backend }

func (o *owning) Close() error { return errors.Join(o.Backend.Close(), o.clients.Close()) }

type closers []io.Closer

// Close closes all. That they were closed before is no error.
func (c closers) Close() error {
	var errs []error
	for _, one := range c {
		if err := one.Close(); !errors.Is(err, redis.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// tlsParams are the parameters of redisTLS.
var tlsParams = []string{"ca", "cert", "key", "server_name", "insecure"}

// redisTLS says how to use TLS.
type redisTLS struct {
	ca, cert, key, serverName string
	insecure                  bool
}

func parseRedisTLS(p *params) *redisTLS {
	t := &redisTLS{}
	t.ca, _ = p.take("ca")
	t.cert, _ = p.take("cert")
	t.key, _ = p.take("key")
	t.serverName, _ = p.take("server_name")
	text, ok := p.take("insecure")
	t.insecure = text == "true"
	switch {
	case ok && !t.insecure:
		p.fail("parameter insecure is %q, must be true, or left out", text)
	case t.insecure && t.ca != "":
		p.fail("parameters insecure and ca exclude each other")
	case (t.cert == "") != (t.key == ""):
		p.fail("parameters cert and key need each other")
	}
	return t
}

// load reads the files. Without TLS it returns nil.
func (t *redisTLS) load() (*tls.Config, error) {
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
