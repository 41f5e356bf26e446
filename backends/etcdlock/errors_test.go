package etcdlock

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// late is a context whose deadline has come, but whose timer has not run yet.
type late struct {
	context.Context
	deadline time.Time
}

func (l late) Deadline() (time.Time, bool) { return l.deadline, true }

// A server that notices the end of a context before the client does says only
// that the request timed out.
func TestTimedOutAtTheServer(t *testing.T) {
	tests := []struct {
		name    string
		ctx     context.Context
		err     error
		expired bool
	}{
		{"deadline over", late{t.Context(), time.Now()}, rpctypes.ErrTimeout, true},
		{"the server's own error", late{t.Context(), time.Now()}, rpctypes.ErrGRPCTimeout, true},
		{"no leader", late{t.Context(), time.Now()}, rpctypes.ErrTimeoutDueToLeaderFail, true},
		{"connection lost", late{t.Context(), time.Now()}, rpctypes.ErrTimeoutDueToConnectionLost, true},
		{"a time-out of its own", late{t.Context(), time.Now().Add(time.Minute)}, rpctypes.ErrTimeout, false},
		{"no deadline", t.Context(), rpctypes.ErrTimeout, false},
		{"something else", late{t.Context(), time.Now()}, rpctypes.ErrNoLeader, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := classify(tt.ctx, tt.err, "/dlm/")
			if got := errors.Is(err, context.DeadlineExceeded); got != tt.expired {
				t.Errorf("classify = %v, matches DeadlineExceeded: %v, want %v", err, got, tt.expired)
			}
			if !errors.Is(err, tt.err) {
				t.Errorf("classify = %v, want it to wrap %v", err, tt.err)
			}
			if certain(err) {
				t.Errorf("classify = %v says that the call had no effect, which a time-out does not show", err)
			}
		})
	}
}

// An answer that is none of etcd says that the server is none only if it has not
// been etcd before.
func TestAnswerOfAProxy(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"unexpected HTTP status code received from server: 504 (Gateway Timeout)",
		`unexpected HTTP status code received from server: 502 (Bad Gateway); transport: received unexpected content-type "text/html"`,
	} {
		err := status.Error(codes.Unavailable, text)
		if got := classify(t.Context(), err, "/dlm/"); certain(got) {
			t.Errorf("classify = %v, though the request may have been carried out", got)
		}
		if got := classifyFirst(t.Context(), err, "/dlm/"); !is(got, ProblemNotEtcd) {
			t.Errorf("classifyFirst = %v, want a problem %q", got, ProblemNotEtcd)
		}
	}
	if err := classifyFirst(t.Context(), nil, "/dlm/"); err != nil {
		t.Errorf("classifyFirst without an error = %v", err)
	}
}
