package fence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/go-dlm/dlm"
)

// The header fields. They are the same in requests and in answers.
const (
	// HeaderKey names the resource, percent-encoded as by [url.PathEscape]. Most
	// often it is the key of the lock.
	HeaderKey = "Dlm-Fence-Key"
	// HeaderToken is the token, in decimal digits.
	HeaderToken = "Dlm-Fence-Token"
	// HeaderHighest is, in an answer that refuses a stale token, the token that
	// was accepted before, or 0 if it is not known. It marks such answers.
	HeaderHighest = "Dlm-Fence-Highest"
)

// ErrNoToken says that a request has neither of the two header fields. It
// matches [dlm.ErrInvalid], too.
var ErrNoToken = fmt.Errorf("%w: the request has no fencing token", dlm.ErrInvalid)

// SetHeader puts resource and token into the header of a request. The error
// matches [dlm.ErrInvalid] if one of them is wrong; the header is then as it was.
func SetHeader(h http.Header, resource string, token int64) error {
	if err := Validate(resource, token); err != nil {
		return err
	}
	h.Set(HeaderKey, url.PathEscape(resource))
	h.Set(HeaderToken, strconv.FormatInt(token, 10))
	return nil
}

// ReadHeader gets resource and token out of the header of a request. If there
// are none, the error is [ErrNoToken]; if only one of them is there, or one of
// them twice, or malformed, it matches [dlm.ErrInvalid].
//
// It is for servers whose data are in a store that others write to, too: pass
// both on to the guard of that store, and answer with [WriteError] if that
// refuses. The client has chosen both, so make sure that the resource is the one
// that the request is about.
func ReadHeader(h http.Header) (resource string, token int64, err error) {
	keys, tokens := h.Values(HeaderKey), h.Values(HeaderToken)
	if len(keys) == 0 && len(tokens) == 0 {
		return "", 0, ErrNoToken
	}
	if len(keys) != 1 || len(tokens) != 1 {
		return "", 0, invalidf("header has %d %s and %d %s, must have one of each", len(keys), HeaderKey, len(tokens), HeaderToken)
	}
	if resource, err = url.PathUnescape(keys[0]); err != nil {
		return "", 0, invalidf("%s: %v", HeaderKey, err)
	}
	if token, err = parseToken(tokens[0]); err != nil {
		return "", 0, invalidf("%s: %v", HeaderToken, err)
	}
	if err := Validate(resource, token); err != nil {
		return "", 0, err
	}
	return resource, token, nil
}

// parseToken reads a token, or 0, that is written in the one way in which tokens
// are written.
func parseToken(text string) (int64, error) {
	token, err := strconv.ParseInt(text, 10, 64)
	if err != nil || token < 0 || strconv.FormatInt(token, 10) != text {
		return 0, fmt.Errorf("%.30q is no number in decimal digits", text)
	}
	return token, nil
}

// HandlerOptions are options of [Handler].
type HandlerOptions struct {
	// Resource returns the name of what a request writes to, from its path, say.
	// A request that names another one is answered with 400. By default the
	// client is believed; then one that names the wrong resource, or a new one
	// each time, is not held back by the guard.
	Resource func(*http.Request) string
}

// Handler returns a handler that serves only requests whose token the guard
// accepts, each as one step with its check, so one at a time for each resource.
// It answers others with
//
//   - 412 (Precondition Failed), with [HeaderHighest], if the token is stale;
//   - 428 (Precondition Required) if there is none;
//   - 400 (Bad Request) if it is malformed, or the resource is another one than the
//     options say;
//   - 503 (Service Unavailable) if the guard did not accept it for another reason,
//     such as the end of the request's context while it waited.
//
// It checks every request that it gets, whatever the method; so put it before the
// handlers that write.
//
// What is not guaranteed: what next leaves to be done after it has returned is not
// covered. A client that sends its request slowly keeps others from the
// resource; bound that by the time-outs of the server. With a [*Memory] guard the
// server must be the only one, and its data must not outlast it. Where
// data are in a database, use [ReadHeader] and the guard of the database.
//
// If the guard fails after next has returned, the connection is cut, as an
// answer would claim too much. A nil guard or handler panics; nil options mean the
// defaults.
func Handler(guard Guard, next http.Handler, opts *HandlerOptions) http.Handler {
	if guard == nil || next == nil {
		panic("fence: Handler: guard or handler is nil")
	}
	h := &handler{guard: guard, next: next}
	if opts != nil {
		h.resource = opts.Resource
	}
	return h
}

type handler struct {
	guard    Guard
	next     http.Handler
	resource func(*http.Request) string
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, token, err := ReadHeader(r.Header)
	if err == nil && h.resource != nil {
		if want := h.resource(r); want != resource {
			err = invalidf("the request is about %q, but its %s is %q", want, HeaderKey, resource)
		}
	}
	if err != nil {
		WriteError(w, err)
		return
	}
	served := false
	err = h.guard.Do(r.Context(), resource, token, func(ctx context.Context) error {
		served = true
		h.next.ServeHTTP(w, r.WithContext(ctx))
		return nil
	})
	switch {
	case err == nil:
	case served:
		panic(http.ErrAbortHandler)
	default:
		WriteError(w, err)
	}
}

// WriteError answers a request whose token was not accepted, with the status
// that [Handler] would choose for the error, and its text where it concerns the
// client. The error must not be nil.
func WriteError(w http.ResponseWriter, err error) {
	var stale *StaleError
	switch {
	case errors.As(err, &stale):
		w.Header().Set(HeaderKey, url.PathEscape(stale.Resource))
		w.Header().Set(HeaderToken, strconv.FormatInt(stale.Token, 10))
		w.Header().Set(HeaderHighest, strconv.FormatInt(stale.Highest, 10))
		http.Error(w, stale.Error(), http.StatusPreconditionFailed)
	case errors.Is(err, ErrNoToken):
		http.Error(w, err.Error(), http.StatusPreconditionRequired)
	case errors.Is(err, dlm.ErrInvalid):
		http.Error(w, err.Error(), http.StatusBadRequest)
	default:
		http.Error(w, "dlm: the fencing token could not be checked", http.StatusServiceUnavailable)
	}
}

// ResponseError returns a [*StaleError] if an answer says that the request's token
// was stale, and nil for any other answer, good or bad. It does not touch the body.
func ResponseError(resp *http.Response) error {
	if resp == nil || resp.StatusCode != http.StatusPreconditionFailed {
		return nil
	}
	// Others use this status, too, for conditions of their own.
	highest, err := parseToken(resp.Header.Get(HeaderHighest))
	if err != nil {
		return nil
	}
	resource, token, err := ReadHeader(resp.Header)
	if err != nil {
		return nil
	}
	return &StaleError{Resource: resource, Token: token, Highest: highest}
}

// Transport adds the key and the token of the lock in a request's context (see
// [dlm.LockFromContext]) to the request. [ResponseError] tells whether the server
// refused it. The zero value is ready for use; it is safe for concurrent use.
//
// Without an exclusive lock in its context, or with one of the header fields set
// already, a request is sent as it is. If the lock is no longer held, it is not
// sent, and the error is that of [dlm.Lock.Err]; it can be lost while the request
// is on its way, too.
//
// A permit of a semaphore looks like an exclusive lock here; do not send requests
// with the context of one, see the package comment.
//
// Headers are added to all requests, also those that follow a redirect to
// another host. Only the innermost lock of a context is used.
//
// A stale token is no error of the round trip, since by the contract of
// [http.RoundTripper] no answer of a server is.
type Transport struct {
	// Base sends the requests. Defaults to [http.DefaultTransport].
	Base http.RoundTripper
}

var _ http.RoundTripper = (*Transport)(nil)

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	lock := dlm.LockFromContext(r.Context())
	if lock == nil || lock.Mode != dlm.Exclusive || r.Header.Values(HeaderKey) != nil || r.Header.Values(HeaderToken) != nil {
		return base.RoundTrip(r)
	}
	err := lock.Err()
	if err == nil {
		r = r.Clone(r.Context())
		if r.Header == nil {
			r.Header = make(http.Header)
		}
		err = SetHeader(r.Header, lock.Key, lock.Token)
	}
	if err != nil {
		return nil, errors.Join(err, closeBody(r.Body))
	}
	return base.RoundTrip(r)
}

// CloseIdleConnections closes those of the base, if it has the method.
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.Base.(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	} else if t.Base == nil {
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	}
}

// closeBody closes the body of a request that is not sent.
func closeBody(body io.ReadCloser) error {
	if body == nil {
		return nil
	}
	return body.Close()
}
