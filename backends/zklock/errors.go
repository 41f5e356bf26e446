package zklock

import (
	"errors"
	"fmt"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/driver"
)

// Problem is what is wrong with a server, or with how it is reached.
type Problem string

// The problems that a [ServerError] can have.
const (
	// ProblemAuth: the server does not accept the user.
	ProblemAuth Problem = "authentication"
	// ProblemPermission: the user lacks a right to a node, which is named.
	ProblemPermission Problem = "permission"
	// ProblemACL: the server does not accept the ACL of new nodes.
	ProblemACL Problem = "ACL"
	// ProblemNotZooKeeper: what answers is no ZooKeeper server.
	ProblemNotZooKeeper Problem = "not ZooKeeper"
	// ProblemParent: a node that locks are to be below cannot have children, as
	// it is ephemeral.
	ProblemParent Problem = "ephemeral parent"
	// ProblemToken: the ensemble has counted so far that tokens do not fit.
	ProblemToken Problem = "token too large"
)

// ServerError says that a call failed because of the server's set-up. It matches
// [driver.ErrInvalid], as repeating the call does not help before somebody has
// done something, except for [ProblemNotZooKeeper], which matches
// [driver.ErrNotApplied]. The call had no effect.
type ServerError struct {
	Problem Problem
	// Detail says more, or is empty.
	Detail string
	// Err is what the client or the server said, or nil.
	Err error
}

func (e *ServerError) Error() string {
	s := "zklock: " + string(e.Problem)
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
func problem(p Problem, err error, detail string) error {
	return fmt.Errorf("%w: %w", driver.ErrInvalid, &ServerError{Problem: p, Detail: detail, Err: err})
}

// errNoReply says that a call was given up, or cut off, after it had been sent.
var errNoReply = errors.New("no reply")

// refusal says whether the server has answered a request by refusing it, so
// that it certainly had no effect.
func refusal(err error) bool {
	for _, known := range []error{
		zk.ErrNoNode, zk.ErrNoAuth, zk.ErrBadVersion, zk.ErrNoChildrenForEphemerals, zk.ErrNodeExists,
		zk.ErrNotEmpty, zk.ErrInvalidACL, zk.ErrAuthFailed, zk.ErrBadArguments,
	} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// classify says of a failed request whether it certainly had no effect, and of
// what kind the failure is. The path is what it was about.
func classify(err error, path string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, driver.ErrNotApplied), errors.Is(err, driver.ErrInvalid), errors.Is(err, driver.ErrClosed):
		return err
	case errors.Is(err, zk.ErrNoAuth):
		return problem(ProblemPermission, err, path)
	case errors.Is(err, zk.ErrAuthFailed):
		return problem(ProblemAuth, err, "")
	case errors.Is(err, zk.ErrInvalidACL):
		return problem(ProblemACL, err, path)
	case errors.Is(err, zk.ErrNoChildrenForEphemerals):
		return problem(ProblemParent, err, path)
	case errors.Is(err, zk.ErrNoServer), refusal(err):
		return fmt.Errorf("%w: zklock: %w", driver.ErrNotApplied, err)
	}
	// The connection broke, or the session ended, with the request on its way.
	return fmt.Errorf("zklock: %w: %w", errNoReply, err)
}
