package consullock

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// Problem is what is wrong with a server, or with how it is reached.
type Problem string

// The problems that a [ServerError] can have.
const (
	// ProblemToken: the server does not know the ACL token.
	ProblemToken Problem = "ACL token"
	// ProblemPermission: the ACL token lacks a right; the detail names the rules
	// that locks need.
	ProblemPermission Problem = "permission"
	// ProblemTLS: one side speaks TLS and the other does not, or a certificate
	// is not trusted.
	ProblemTLS Problem = "TLS"
	// ProblemNotConsul: what answers is no Consul agent.
	ProblemNotConsul Problem = "not Consul"
	// ProblemTooOld: the agent is older than Consul 1.10.
	ProblemTooOld Problem = "too old"
	// ProblemDatacenter: the agent does not know the datacenter.
	ProblemDatacenter Problem = "datacenter"
	// ProblemSession: the server grants no session as it is asked for.
	ProblemSession Problem = "session"
	// ProblemNoLeader: the servers have no leader.
	ProblemNoLeader Problem = "no leader"
	// ProblemBusy: the agent refuses requests because it has too many.
	ProblemBusy Problem = "too many requests"
	// ProblemForeign: a key under the prefix holds something else than a lock.
	ProblemForeign Problem = "foreign key"
)

// ServerError says that a call failed because of the server's state or set-up.
// It matches [driver.ErrInvalid] if repeating the call does not help before
// somebody has done something, and [driver.ErrNotApplied] if it may; in either
// case the call had no effect.
type ServerError struct {
	Problem Problem
	// Detail says more, or is empty.
	Detail string
	// Err is what the client or the server said, or nil.
	Err error
}

func (e *ServerError) Error() string {
	s := "consullock: " + string(e.Problem)
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns what the client or the server said.
func (e *ServerError) Unwrap() error { return e.Err }

// problem makes a ServerError that repeating the call does not mend.
func problem(p Problem, err error, format string, args ...any) error {
	return fmt.Errorf("%w: %w", driver.ErrInvalid, &ServerError{Problem: p, Detail: fmt.Sprintf(format, args...), Err: err})
}

// passing makes a ServerError that may pass by itself.
func passing(p Problem, err error) error {
	return fmt.Errorf("%w: %w", driver.ErrNotApplied, &ServerError{Problem: p, Err: err})
}

// rules are what an ACL policy must have.
func rules(prefix string) string {
	return fmt.Sprintf(`key_prefix %q { policy = "write" } and session_prefix "" { policy = "write" }`, prefix)
}

// refusals are what a server says before it does anything, by a part of the
// text. Nothing is in here that can also be said of a request that went into the
// log, such as that leadership was lost.
var refusals = []struct {
	says  string
	mends bool // by itself
	is    Problem
}{
	{"ACL not found", false, ProblemToken},
	{"Permission denied", false, ProblemPermission},
	{"token does not exist", false, ProblemToken},
	{"No path to datacenter", false, ProblemDatacenter},
	{"Invalid Session TTL", false, ProblemSession},
	{"No cluster leader", true, ProblemNoLeader},
	{"HTTP request to an HTTPS server", false, ProblemTLS},
}

// lockDelayed is what a server says of a lock whose last holder's session was
// ended a short time ago.
const lockDelayed = "due to lock delay"

// classify says of a failed request whether it certainly had no effect, and of
// what kind the failure is.
func (b *Backend) classify(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if certain(err) {
		return err
	}
	if end := ctx.Err(); end != nil {
		return fmt.Errorf("consullock: no reply yet: %w", end)
	}
	text := err.Error()
	for _, r := range refusals {
		if !strings.Contains(text, r.says) {
			continue
		}
		switch {
		case r.mends:
			return passing(r.is, err)
		case r.is == ProblemPermission:
			return problem(r.is, err, "the token needs %s", rules(b.opts.Prefix))
		case r.is == ProblemSession:
			return problem(r.is, err, "Options.MinSessionTTL and WaiterTTL must be at least session_ttl_min of the servers")
		}
		return problem(r.is, err, "")
	}
	if status, ok := errors.AsType[api.StatusError](err); ok {
		return byStatus(status)
	}
	return b.byTransport(err)
}

// byStatus judges an answer of HTTP.
func byStatus(err api.StatusError) error {
	switch {
	case err.Code == http.StatusTooManyRequests:
		return passing(ProblemBusy, err)
	case err.Code == http.StatusForbidden, err.Code == http.StatusUnauthorized:
		return problem(ProblemToken, err, "")
	case err.Code == http.StatusNotFound, err.Code == http.StatusMethodNotAllowed, err.Code >= 300 && err.Code < 400:
		return problem(ProblemNotConsul, err, "it does not know the API")
	case err.Code >= 400 && err.Code < 500:
		return fmt.Errorf("%w: consullock: %w", driver.ErrInvalid, err)
	}
	// It may have happened, for all that the agent knows.
	return fmt.Errorf("consullock: %w", err)
}

// byTransport judges a failure of the connection.
func (b *Backend) byTransport(err error) error {
	var record tls.RecordHeaderError
	var verification *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	var alert tls.AlertError
	text := err.Error()
	op, isOp := errors.AsType[*net.OpError](err)
	b.mu.Lock()
	looked := b.looked
	b.mu.Unlock()
	switch {
	case errors.As(err, &verification), errors.As(err, &authority), strings.Contains(text, "server gave HTTP response to HTTPS client"):
		return problem(ProblemTLS, err, "")
	case isOp && op.Op == "dial", strings.Contains(text, "TLS handshake"):
		// There was no connection to send it on.
		return fmt.Errorf("%w: consullock: %w", driver.ErrNotApplied, err)
	case looked:
		// Before, it was Consul. So an answer that cannot be read was spoilt on its way,
		// and the request may have been carried out.
	case errors.As(err, &record), errors.As(err, &alert), strings.Contains(text, "remote error: tls:"):
		return problem(ProblemTLS, err, "")
	case strings.Contains(text, "malformed HTTP"), syntaxError(err):
		return problem(ProblemNotConsul, err, "")
	}
	return fmt.Errorf("consullock: %w", err)
}

// syntaxError says whether an answer was no JSON, rather than cut short.
func syntaxError(err error) bool {
	syntax, ok := errors.AsType[*json.SyntaxError](err)
	return ok && !strings.Contains(syntax.Error(), "unexpected end") || errors.As(err, new(*json.UnmarshalTypeError))
}

// certain says whether a call that failed had no effect.
func certain(err error) bool {
	return errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) || errors.Is(err, driver.ErrClosed)
}

// is says whether err is a ServerError of this problem.
func is(err error, p Problem) bool {
	e, ok := errors.AsType[*ServerError](err)
	return ok && e.Problem == p
}
