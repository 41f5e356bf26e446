package consullock

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm"
)

// Open returns a backend with a client of its own, which is closed with it. It
// asks the server nothing yet.
func Open(cfg *Config, opts *Options) (*Backend, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	if err := cfg.Validate(opts); err != nil {
		return nil, err
	}
	dial := cfg.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: dialPatience, KeepAlive: 15 * time.Second}).DialContext
	}
	transport := &http.Transport{
		DialContext:         dial,
		TLSHandshakeTimeout: dialPatience,
		MaxIdleConnsPerHost: maxCalls + maxWatched,
		IdleConnTimeout:     90 * time.Second,
	}
	scheme := "http"
	if cfg.TLS != nil {
		scheme = "https"
		transport.TLSClientConfig = cfg.TLS.Clone()
	}
	client, err := api.NewClient(&api.Config{
		Address: cfg.Addresses[0], Scheme: scheme, Token: cfg.Token, Datacenter: cfg.Datacenter,
		HttpClient: &http.Client{
			Transport: &inTurn{transport: transport, hosts: slices.Clone(cfg.Addresses)},
			// The token is for whom it was given for.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	})
	if err != nil {
		return nil, invalidf("%v", err)
	}
	b, err := New(client, opts)
	if err != nil {
		return nil, err
	}
	b.free = transport.CloseIdleConnections
	return b, nil
}

// OpenLockManager returns a manager with a client of its own, which is closed with
// it. A nil lockConfig or nil opts mean the defaults.
func OpenLockManager(cfg *Config, lockConfig *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
	b, err := Open(cfg, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(b, lockConfig)
}

const dialPatience = 3 * time.Second

// inTurn sends requests to one of several agents: to the same as long as it
// answers. What was not sent goes to the next at once, and what may have been is
// never repeated.
type inTurn struct {
	transport *http.Transport
	hosts     []string

	mu      sync.Mutex
	current int
}

// RoundTrip implements [http.RoundTripper].
func (t *inTurn) RoundTrip(req *http.Request) (*http.Response, error) {
	var errs []error
	for range t.hosts {
		host, n := t.pick()
		one := req.Clone(req.Context())
		one.URL = &url.URL{}
		*one.URL = *req.URL
		one.URL.Host, one.Host = host, host
		if req.Body != nil && req.GetBody != nil {
			body, err := req.GetBody()
			if err != nil {
				return nil, err
			}
			one.Body = body
		}
		resp, err := t.transport.RoundTrip(one)
		switch {
		case err == nil && resp.StatusCode < http.StatusInternalServerError:
			return resp, nil
		case err == nil:
			t.next(n)
			return resp, nil
		case !errors.Is(req.Context().Err(), context.Canceled):
			t.next(n)
		}
		errs = append(errs, err)
		if !notSent(err) || req.Context().Err() != nil {
			break
		}
	}
	if req.Body != nil {
		req.Body.Close()
	}
	return nil, errs[len(errs)-1]
}

// notSent says whether there was no connection to send a request on.
func notSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" || strings.Contains(err.Error(), "TLS handshake timeout")
}

func (t *inTurn) pick() (string, int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.hosts[t.current], t.current
}

// next gives up on one, unless somebody else has.
func (t *inTurn) next(from int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current == from {
		t.current = (from + 1) % len(t.hosts)
	}
}
