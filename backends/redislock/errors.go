package redislock

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

// Problem is what is wrong with a server, or with how it is reached.
type Problem string

// The problems that a [ServerError] can have.
const (
	// ProblemAuth: user or password are wrong or missing.
	ProblemAuth Problem = "authentication"
	// ProblemPermission: the user lacks the right to a command, a key or a
	// channel, which the server's words name.
	ProblemPermission Problem = "permission"
	// ProblemDatabase: the database number is out of range.
	ProblemDatabase Problem = "database"
	// ProblemTLS: one side speaks TLS and the other does not, or a certificate
	// is not trusted.
	ProblemTLS Problem = "TLS"
	// ProblemNotRedis: what answers is no Redis server, or lacks Lua scripts.
	ProblemNotRedis Problem = "not Redis"
	// ProblemTooOld: the server is older than Redis 6.2.
	ProblemTooOld Problem = "too old"
	// ProblemReplica: the server is a replica. Its primary must be used.
	ProblemReplica Problem = "replica"
	// ProblemCluster: the server is one of a cluster, and another has the key. A
	// [redis.ClusterClient] must be used.
	ProblemCluster Problem = "cluster"
	// ProblemMemory: the server's memory is full, and it may not evict.
	ProblemMemory Problem = "out of memory"
	// ProblemForeign: a key under the prefix holds something else than a lock.
	ProblemForeign Problem = "foreign key"
	// ProblemSameServer: two clients of a quorum lead to the same server.
	ProblemSameServer Problem = "same server twice"
	// ProblemAcknowledgement: fewer replicas than wanted have acknowledged a
	// grant, which was therefore taken back, or a renewal.
	ProblemAcknowledgement Problem = "not acknowledged"
)

// ServerError says that a call failed because of the server's state or set-up.
// It matches [driver.ErrInvalid] if repeating the call does not help before
// somebody has done something, and [driver.ErrNotApplied] if it may; in either
// case the call had no effect. A renewal that was not acknowledged matches
// neither.
type ServerError struct {
	Problem Problem
	// Detail says more, or is empty.
	Detail string
	// Err is what the client or the server said, or nil.
	Err error
}

func (e *ServerError) Error() string {
	s := "redislock: " + string(e.Problem)
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

// is says whether err is a ServerError of this problem.
func is(err error, p Problem) bool {
	e, ok := errors.AsType[*ServerError](err)
	return ok && e.Problem == p
}

// problem makes a ServerError that repeating the call does not mend.
func problem(p Problem, err error, format string, args ...any) error {
	return fmt.Errorf("%w: %w", driver.ErrInvalid, &ServerError{Problem: p, Detail: fmt.Sprintf(format, args...), Err: err})
}

// passing makes a ServerError that may pass by itself.
func passing(p Problem, err error, format string, args ...any) error {
	return fmt.Errorf("%w: %w", driver.ErrNotApplied, &ServerError{Problem: p, Detail: fmt.Sprintf(format, args...), Err: err})
}

// refusals are what servers say before they do anything, by its beginning, and
// what stands behind it. An empty problem means that the call may succeed when
// it is repeated.
var refusals = []struct {
	begins string
	mends  bool // by itself
	is     Problem
}{
	{"NOSCRIPT", true, ""},
	{"LOADING", true, ""},
	{"CLUSTERDOWN", true, ""},
	{"MASTERDOWN", true, ""},
	{"TRYAGAIN", true, ""},
	{"MOVED", true, ""},
	{"ASK", true, ""},
	{"NOREPLICAS", true, ""},
	{"MISCONF", true, ""},
	{"BUSY ", true, ""},
	{"max number of clients", true, ""},
	{"READONLY", true, ProblemReplica},
	{"OOM", true, ProblemMemory},
	{"NOAUTH", false, ProblemAuth},
	{"WRONGPASS", false, ProblemAuth},
	{"AUTH", false, ProblemAuth},
	{"invalid password", false, ProblemAuth},
	{"Client sent AUTH", false, ProblemAuth},
	{"NOPERM", false, ProblemPermission},
	{"DB index is out of range", false, ProblemDatabase},
	{"invalid DB index", false, ProblemDatabase},
	{"SELECT is not allowed", false, ProblemDatabase},
	{"WRONGTYPE", false, ProblemForeign},
	{"CROSSSLOT", false, ""},
	{"unknown command", false, ProblemNotRedis},
}

// classify says of a failed call whether it certainly had no effect, and of
// what kind the failure is. Calls are sent once, so a failure to connect is
// certain.
func classify(err error) error {
	if says, ok := serverSays(err); ok {
		return classifyReply(err, says)
	}
	switch {
	case errors.Is(err, driver.ErrNotApplied), errors.Is(err, driver.ErrInvalid), errors.Is(err, driver.ErrClosed):
		return err
	case errors.Is(err, redis.ErrClosed):
		return fmt.Errorf("%w: %w", driver.ErrClosed, err)
	case tlsMismatch(err):
		return problem(ProblemTLS, err, "")
	case strings.Contains(err.Error(), "redis: can't parse"), strings.Contains(err.Error(), "redis: invalid reply"):
		return problem(ProblemNotRedis, err, "")
	case notConnected(err):
		return fmt.Errorf("%w: redislock: %w", driver.ErrNotApplied, err)
	}
	return fmt.Errorf("redislock: %w", err)
}

// serverSays returns the server's own words, if err has any.
func serverSays(err error) (string, bool) {
	e, ok := errors.AsType[redis.Error](err)
	if !ok || errors.Is(err, redis.Nil) {
		return "", false
	}
	return strings.TrimPrefix(e.Error(), "ERR "), true
}

// place is where in a script something failed, as far as it stands before the
// reason.
var place = regexp.MustCompile(`^(?:Error running script .*)?@?user_script: ?\d+: -?(?:ERR )?`)

func classifyReply(err error, says string) error {
	inside := strings.Contains(says, "user_script")
	says = place.ReplaceAllString(says, "")
	for _, r := range refusals {
		if !strings.HasPrefix(says, r.begins) {
			continue
		}
		switch {
		case r.is == "" && r.mends:
			return fmt.Errorf("%w: redislock: %w", driver.ErrNotApplied, err)
		case r.is == "":
			return fmt.Errorf("%w: redislock: %w", driver.ErrInvalid, err)
		case r.mends:
			return passing(r.is, err, "")
		}
		return problem(r.is, err, "")
	}
	switch {
	case strings.Contains(says, "Bad data format"), inside && strings.Contains(says, "attempt to"):
		return problem(ProblemForeign, err, "")
	case strings.Contains(says, "Write commands not allowed after non deterministic"),
		strings.Contains(says, "Write commands are not allowed after non deterministic"):
		return problem(ProblemTooOld, err, "")
	case strings.Contains(says, "can't run this command"), strings.Contains(says, "can't access"):
		return problem(ProblemPermission, err, "")
	}
	return fmt.Errorf("redislock: %w", err)
}

// notConnected says that no connection was had, so that nothing was sent.
func notConnected(err error) bool {
	if errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) {
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// tlsMismatch says that two sides do not agree on TLS.
func tlsMismatch(err error) bool {
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.AlertError](err); ok {
		return true
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return true
	}
	// The beginning of a TLS alert, read as a reply.
	return strings.Contains(err.Error(), `"\x15\x03`)
}
