package consullock

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// What is not known to be certain must not be said to be.
func TestClassify(t *testing.T) {
	t.Parallel()
	b, err := New(new(api.Client), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	known, err := New(new(api.Client), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer known.Close()
	known.looked = true
	dial := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	for _, c := range []struct {
		name    string
		err     error
		want    error // nil: unknown
		problem Problem
	}{
		{"dialling", &url.Error{Op: "Put", Err: dial}, driver.ErrNotApplied, ""},
		{"broken connection", &url.Error{Op: "Put", Err: &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}}, nil, ""},
		{"EOF", &url.Error{Op: "Put", Err: errors.New("EOF")}, nil, ""},
		{"no leader", api.StatusError{Code: 500, Body: "rpc error making call: No cluster leader"}, driver.ErrNotApplied, ProblemNoLeader},
		{"leadership lost", api.StatusError{Code: 500, Body: "raft apply failed: leadership lost while committing log"}, nil, ""},
		{"not the leader", api.StatusError{Code: 500, Body: "raft apply failed: node is not the leader"}, nil, ""},
		{"no answer from the leader", api.StatusError{Code: 500, Body: "rpc error making call: EOF"}, nil, ""},
		{"gateway", api.StatusError{Code: 502, Body: "Bad Gateway"}, nil, ""},
		{"too many", api.StatusError{Code: 429, Body: "Your IP is issuing too many concurrent connections"}, driver.ErrNotApplied, ProblemBusy},
		{"forbidden", api.StatusError{Code: 403, Body: "Permission denied: token with AccessorID"}, driver.ErrInvalid, ProblemPermission},
		{"unknown token", api.StatusError{Code: 403, Body: "ACL not found"}, driver.ErrInvalid, ProblemToken},
		{"proxy wants a password", api.StatusError{Code: 401}, driver.ErrInvalid, ProblemToken},
		{"not there", api.StatusError{Code: 404}, driver.ErrInvalid, ProblemNotConsul},
		{"redirect", api.StatusError{Code: 301}, driver.ErrInvalid, ProblemNotConsul},
		{"bad request", api.StatusError{Code: 400, Body: "Failed to parse body"}, driver.ErrInvalid, ""},
		{"too large", api.StatusError{Code: 413}, driver.ErrInvalid, ""},
		{"datacenter", api.StatusError{Code: 500, Body: "No path to datacenter"}, driver.ErrInvalid, ProblemDatacenter},
		{"HTTP to HTTPS", api.StatusError{Code: 400, Body: "Client sent an HTTP request to an HTTPS server."}, driver.ErrInvalid, ProblemTLS},
		{"HTTPS to HTTP", errors.New("http: server gave HTTP response to HTTPS client"), driver.ErrInvalid, ProblemTLS},
		{"spoilt: no JSON", &json.SyntaxError{Offset: 1}, driver.ErrInvalid, ProblemNotConsul},
		{"spoilt: no HTTP", &url.Error{Op: "Put", Err: errors.New("malformed HTTP response")}, driver.ErrInvalid, ProblemNotConsul},
		{"spoilt: no TLS", &url.Error{Op: "Put", Err: tls.RecordHeaderError{Msg: "bad version"}}, driver.ErrInvalid, ProblemTLS},
		{"spoilt: TLS alert", &url.Error{Op: "Put", Err: errors.New("remote error: tls: bad record MAC")}, driver.ErrInvalid, ProblemTLS},
		{"certain already", fmt.Errorf("%w: x", driver.ErrNotApplied), driver.ErrNotApplied, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			err := b.classify(context.Background(), c.err)
			if strings.HasPrefix(c.name, "spoilt: ") {
				if err := known.classify(context.Background(), c.err); certain(err) {
					t.Errorf("%v, though it was Consul before and may have carried out the request", err)
				}
			}
			for _, sentinel := range []error{driver.ErrNotApplied, driver.ErrInvalid} {
				if errors.Is(err, sentinel) != errors.Is(c.want, sentinel) {
					t.Errorf("%v matches %v: %t", err, sentinel, errors.Is(err, sentinel))
				}
			}
			if e, ok := errors.AsType[*ServerError](err); ok != (c.problem != "") || ok && e.Problem != c.problem {
				t.Errorf("%v, want the problem %q", err, c.problem)
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.classify(ctx, dial); certain(err) || !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
}

// roundTripper is a transport of a test.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A panic in code of the client, as in a transport that somebody passed in, is an
// error of the call, in all goroutines.
func TestPanic(t *testing.T) {
	t.Parallel()
	client, err := api.NewClient(&api.Config{HttpClient: &http.Client{
		Transport: roundTripper(func(*http.Request) (*http.Response, error) { panic("broken transport") }),
	}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(client, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = b.Acquire(ctx, driver.Request{Key: "k", Owner: "o", TTL: time.Second, Limit: 1})
	if err == nil || !strings.Contains(err.Error(), "panicked: broken transport") {
		t.Errorf("%v, want the panic", err)
	}
	if _, err := b.Inspect(ctx, "k"); err == nil || !strings.Contains(err.Error(), "panicked") {
		t.Errorf("%v, want the panic", err)
	}
}
