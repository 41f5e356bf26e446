package secure

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-dlm/dlm"
)

// The sentinels that callers match with [errors.Is]. Every [*DeniedError] matches
// ErrDenied, and at most one of the others; what is wrong in itself, such as a TTL
// out of bounds, matches [dlm.ErrInvalid] besides.
var (
	// ErrDenied: the policy refused the call.
	ErrDenied = errors.New("secure: denied")
	// ErrUnknownClient: the context names no client, or none that is accepted.
	ErrUnknownClient = errors.New("secure: unknown client")
	// ErrForbidden: the key, or the lock, is not the client's.
	ErrForbidden = errors.New("secure: forbidden")
	// ErrRateLimited: too many calls. DeniedError.RetryAfter says when the next is
	// admitted if no other comes before.
	ErrRateLimited = errors.New("secure: rate limited")
	// ErrQuota: too many locks or acquisitions. DeniedError.RetryAfter is a guess.
	ErrQuota = errors.New("secure: quota used up")
)

// Reason says which rule refused a call. There are no others than these, so a
// Reason may label a metric.
type Reason string

// The reasons of a [DeniedError], and the sentinels that they match.
const (
	ReasonClient       Reason = "client"        // ErrUnknownClient
	ReasonKey          Reason = "key"           // dlm.ErrInvalid: pattern or length
	ReasonPrefix       Reason = "prefix"        // ErrForbidden
	ReasonTTL          Reason = "ttl"           // dlm.ErrInvalid
	ReasonHold         Reason = "hold"          // dlm.ErrInvalid: AcquireOptions.MaxHold
	ReasonPermits      Reason = "permits"       // dlm.ErrInvalid: AcquireOptions.Limit
	ReasonRate         Reason = "rate"          // ErrRateLimited, of the client
	ReasonTotalRate    Reason = "total-rate"    // ErrRateLimited, of all
	ReasonHeld         Reason = "held"          // ErrQuota, of the client
	ReasonTotalHeld    Reason = "total-held"    // ErrQuota, of all
	ReasonWaiting      Reason = "waiting"       // ErrQuota, of the client
	ReasonTotalWaiting Reason = "total-waiting" // ErrQuota, of all
	ReasonClients      Reason = "clients"       // ErrQuota: Policy.MaxClients
	ReasonWait         Reason = "wait"          // context.DeadlineExceeded: Policy.MaxWait is over
	ReasonNotHolder    Reason = "not-holder"    // ErrForbidden
)

// sentinel is what a reason matches besides ErrDenied, or nil.
func (r Reason) sentinel() error {
	switch r {
	case ReasonClient:
		return ErrUnknownClient
	case ReasonPrefix, ReasonNotHolder:
		return ErrForbidden
	case ReasonKey, ReasonTTL, ReasonHold, ReasonPermits:
		return dlm.ErrInvalid
	case ReasonRate, ReasonTotalRate:
		return ErrRateLimited
	case ReasonHeld, ReasonTotalHeld, ReasonWaiting, ReasonTotalWaiting, ReasonClients:
		return ErrQuota
	}
	return nil
}

// quotaPause is the RetryAfter of quotas. When a lock ends cannot be known.
const quotaPause = time.Second

// DeniedError says why the policy refused a call. The store was not asked, except
// for ReasonWait: then it was, and nothing is left there unless the error that
// carries it says so. It matches [ErrDenied] and the sentinel of its reason.
type DeniedError struct {
	// Op is "acquire", "try", "get", "extend" or "release".
	Op string
	// Client is the client's id, or empty if it is not known. One that is too
	// long is cut.
	Client string
	// Key is the key of the call. One that is too long is cut.
	Key string
	// Reason says which rule it was.
	Reason Reason
	// Detail names the bound and its value for people.
	Detail string
	// RetryAfter is how long to wait before the call is made again, for rates
	// and quotas; otherwise zero.
	RetryAfter time.Duration
	// Err is the error of Policy.Client, or nil.
	Err error
}

func (e *DeniedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v: %s", ErrDenied, e.Op)
	if e.Key != "" {
		fmt.Fprintf(&b, " %q", e.Key)
	}
	if e.Client != "" {
		fmt.Fprintf(&b, " for client %q", e.Client)
	}
	fmt.Fprintf(&b, ": %s", e.Detail)
	if e.RetryAfter > 0 {
		fmt.Fprintf(&b, ", retry after %v", e.RetryAfter)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

// Unwrap returns what the error matches.
func (e *DeniedError) Unwrap() []error {
	all := []error{ErrDenied}
	if s := e.Reason.sentinel(); s != nil {
		all = append(all, s)
	}
	if e.Err != nil {
		all = append(all, e.Err)
	}
	return all
}

// clip cuts a string that nobody has checked, so that errors stay small.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.Clone(s[:n])
}
