package promdlm

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unicode"
	"unicode/utf8"

	"github.com/go-dlm/dlm"
)

// other is the value of whatever lies outside a label's fixed set.
const other = "other"

// maxValueLen bounds a label value in bytes.
const maxValueLen = 128

// clean makes a label value of any string: valid UTF-8, printable, short.
func clean(s string) string {
	if len(s) > maxValueLen {
		n := maxValueLen
		for n > maxValueLen-utf8.UTFMax && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '_'
		}
		return r
	}, s)
}

// classifier turns keys into a bounded number of classes. A class that was
// admitted stays, and one that was not never is, so that a key has the same
// class for ever.
type classifier struct {
	of  func(key string) string
	max int

	mu   sync.RWMutex
	seen map[string]struct{}
}

func newClassifier(of func(key string) string, limit int) *classifier {
	return &classifier{of: of, max: limit, seen: make(map[string]struct{})}
}

func (c *classifier) class(key string) string {
	class := clean(c.ask(key))
	if class == "" || class == other {
		return other
	}
	c.mu.RLock()
	_, ok := c.seen[class]
	full := len(c.seen) >= c.max
	c.mu.RUnlock()
	switch {
	case ok:
		return class
	case full:
		return other
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.seen[class]; !ok {
		if len(c.seen) >= c.max {
			return other
		}
		c.seen[strings.Clone(class)] = struct{}{}
	}
	return class
}

// ask calls the user's function. Were its panic to pass, the event would be
// dropped and the gauges would drift.
func (c *classifier) ask(key string) (class string) {
	defer func() {
		if recover() != nil {
			class = other
		}
	}()
	return c.of(key)
}

// outcome is how an acquisition failed.
type outcome int

const (
	failed outcome = iota
	conflict
	timeout
)

// failure says whether an acquisition was refused, given up, or went wrong.
func failure(err error) outcome {
	switch {
	case !errors.Is(err, dlm.ErrHeld) || errors.Is(err, dlm.ErrClosed):
		return failed
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return timeout
	}
	return conflict
}

// kind sorts an error into the fixed set that doc.go lists.
func kind(err error) string {
	switch {
	case errors.Is(err, dlm.ErrInvalid):
		return "invalid"
	case errors.Is(err, errors.ErrUnsupported):
		return "unsupported"
	case errors.Is(err, dlm.ErrClosed):
		return "closed"
	case errors.Is(err, dlm.ErrIndeterminate):
		return "indeterminate"
	case unreachable(err):
		return "unreachable"
	case errors.Is(err, dlm.ErrNotApplied):
		return "not_applied"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, context.DeadlineExceeded):
		return "deadline"
	}
	return other
}

// unreachable says whether an error comes from the network. The errors of
// contexts do not, though one of them is a [net.Error] too.
func unreachable(err error) bool {
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return true
	}
	for _, target := range []error{
		io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, os.ErrDeadlineExceeded,
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, syscall.ETIMEDOUT,
		syscall.EHOSTUNREACH, syscall.ENETUNREACH,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

var reasons = []dlm.LostReason{
	dlm.ReasonExpired, dlm.ReasonGone, dlm.ReasonTaken, dlm.ReasonSession, dlm.ReasonMaxHold, dlm.ReasonClosed,
}

func reason(r dlm.LostReason) string {
	if slices.Contains(reasons, r) {
		return string(r)
	}
	return other
}

func operation(op string) string {
	switch op {
	case "acquire", "extend", "release", "withdraw", "listen", "get", "list", "force":
		return op
	}
	return other
}
