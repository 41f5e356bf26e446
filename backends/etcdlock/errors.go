package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/go-dlm/dlm/driver"
)

// Problem is what is wrong with a server, or with how it is reached.
type Problem string

// The problems that a [ServerError] can have.
const (
	// ProblemAuth: user or password are wrong or missing.
	ProblemAuth Problem = "authentication"
	// ProblemPermission: the user may not read and write the range that the
	// detail names.
	ProblemPermission Problem = "permission"
	// ProblemTLS: one side speaks TLS and the other does not, or a certificate
	// is not trusted.
	ProblemTLS Problem = "TLS"
	// ProblemNotEtcd: what answers is no etcd server, or none with API v3.
	ProblemNotEtcd Problem = "not etcd"
	// ProblemTooOld: the server is older than etcd 3.4.
	ProblemTooOld Problem = "too old"
	// ProblemNoSpace: the database has reached its quota. Locks cannot be had
	// before it is compacted and defragmented and the alarm is disarmed.
	ProblemNoSpace Problem = "no space"
	// ProblemBusy: the server refuses requests because it has too many.
	ProblemBusy Problem = "too many requests"
	// ProblemForeign: a key under the prefix holds something else than a lock.
	ProblemForeign Problem = "foreign key"
	// ProblemCorrupt: the members' data differ, and the server has raised the
	// alarm for it.
	ProblemCorrupt Problem = "corrupt"
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
	s := "etcdlock: " + string(e.Problem)
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

// refusals are what servers say before they do anything, and what stands behind
// it. An empty problem means that the call may succeed when it is repeated.
// Nothing is in here that can also be said of a request which went into the log,
// such as that it timed out.
var refusals = []struct {
	says  error
	mends bool // by itself
	is    Problem
}{
	{rpctypes.ErrAuthFailed, false, ProblemAuth},
	{rpctypes.ErrUserEmpty, false, ProblemAuth},
	{rpctypes.ErrUserNotFound, false, ProblemAuth},
	{rpctypes.ErrAuthNotEnabled, false, ProblemAuth},
	{rpctypes.ErrPermissionDenied, false, ProblemPermission},
	{rpctypes.ErrInvalidAuthToken, true, ProblemAuth},
	{rpctypes.ErrAuthOldRevision, true, ProblemAuth},
	{rpctypes.ErrNoSpace, true, ProblemNoSpace},
	{rpctypes.ErrTooManyRequests, true, ProblemBusy},
	{rpctypes.ErrCorrupt, false, ProblemCorrupt},
	{rpctypes.ErrGRPCNotSupportedForLearner, true, ""},
	{rpctypes.ErrLeaseNotFound, true, ""},
	{rpctypes.ErrLeaseTTLTooLarge, false, ""},
	{rpctypes.ErrRequestTooLarge, false, ""},
	{rpctypes.ErrTooManyOps, false, ""},
}

// says tells whether an error is what the server says with another.
func says(err, what error) bool {
	return errors.Is(err, what) || strings.Contains(err.Error(), rpctypes.ErrorDesc(what))
}

// classify says of a failed call whether it certainly had no effect, and of what
// kind the failure is. place is the range that it was about.
func classify(ctx context.Context, err error, place string) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) || errors.Is(err, driver.ErrClosed) {
		return err
	}
	if end := ctx.Err(); end != nil {
		return fmt.Errorf("etcdlock: no reply yet: %w", end)
	}
	// The server may notice the end of the context before we do.
	if end := serverEnded(ctx, err); end != nil {
		return fmt.Errorf("etcdlock: %w: %w", end, err)
	}
	for _, r := range refusals {
		if !says(err, r.says) {
			continue
		}
		switch {
		case r.is == "" && r.mends:
			return fmt.Errorf("%w: etcdlock: %w", driver.ErrNotApplied, err)
		case r.is == "":
			return fmt.Errorf("%w: etcdlock: %w", driver.ErrInvalid, err)
		case r.mends:
			return passing(r.is, err)
		case r.is == ProblemPermission:
			return problem(r.is, err, "read and write the keys that begin with %q", place)
		}
		return problem(r.is, err, "")
	}
	text := err.Error()
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	switch {
	case errors.Is(err, clientv3.ErrNoAvailableEndpoints):
		return fmt.Errorf("%w: etcdlock: %w", driver.ErrNotApplied, err)
	case has("authentication handshake failed", "x509:", "first record does not look like a TLS handshake"):
		return problem(ProblemTLS, err, "")
	case has("error reading server preface") && has("frame", "HTTP/1"), status.Code(err) == codes.Unimplemented:
		return problem(ProblemNotEtcd, err, "")
	case has("Error while dialing", "error reading server preface"):
		// There was no connection to send it on.
		return fmt.Errorf("%w: etcdlock: %w", driver.ErrNotApplied, err)
	}
	return fmt.Errorf("etcdlock: %w", err)
}

// classifyFirst is classify for a question that changes nothing, to a server of
// which nothing is known yet. From one that was etcd before, an answer that is none
// of etcd comes from something on the way, such as a proxy that has lost patience,
// and the request may have been carried out.
func classifyFirst(ctx context.Context, err error, place string) error {
	classified := classify(ctx, err, place)
	if err == nil || certain(classified) {
		return classified
	}
	for _, says := range []string{"unexpected HTTP status", "unexpected content-type"} {
		if strings.Contains(err.Error(), says) {
			return problem(ProblemNotEtcd, err, "")
		}
	}
	return classified
}

// drift is how much earlier than a context's deadline a server may take it to
// be over, because its clock does not run exactly as ours.
const drift = 10 * time.Millisecond

// serverEnded returns the error of a context that ended the call at the server.
// A server knows the deadline of a request. When that is over before it has an
// answer it may say just that the request timed out, as it does after a time-out
// of its own, and its words may come before our context's timer has run.
func serverEnded(ctx context.Context, err error) error {
	for _, end := range []error{context.DeadlineExceeded, context.Canceled} {
		if errors.Is(err, end) || strings.HasSuffix(err.Error(), end.Error()) {
			return end
		}
	}
	deadline, ok := ctx.Deadline()
	if !ok || time.Until(deadline) > drift {
		return nil
	}
	// What it says of the reason, if it has one, comes after these words.
	if says(err, rpctypes.ErrTimeout) {
		return context.DeadlineExceeded
	}
	return nil
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
