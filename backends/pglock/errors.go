package pglock

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/go-dlm/dlm/driver"
)

// Problem is what is wrong with a server, or with how it is reached.
type Problem string

// The problems that a [ServerError] can have.
const (
	// ProblemAuth: user or password are wrong or missing, or the server does not
	// let this user in from here.
	ProblemAuth Problem = "authentication"
	// ProblemPermission: the user lacks a right, which the error names.
	ProblemPermission Problem = "permission"
	// ProblemDatabase: there is no such database.
	ProblemDatabase Problem = "database"
	// ProblemTLS: one side wants TLS and the other does not, or a certificate is
	// not trusted.
	ProblemTLS Problem = "TLS"
	// ProblemNotPostgres: what answers is no PostgreSQL server.
	ProblemNotPostgres Problem = "not PostgreSQL"
	// ProblemTooOld: the server is older than PostgreSQL 12.
	ProblemTooOld Problem = "too old"
	// ProblemReadOnly: the server is a standby, or its transactions are
	// read-only.
	ProblemReadOnly Problem = "read-only"
	// ProblemNoSchema: a table or a function is missing; see [CreateSchema].
	ProblemNoSchema Problem = "no schema"
	// ProblemSchemaVersion: the tables are those of another version of this
	// package.
	ProblemSchemaVersion Problem = "schema version"
	// ProblemPooling: the connections go through a pooler, and the driver uses
	// them in a way that it does not carry.
	ProblemPooling Problem = "pooling"
)

// ServerError says that a call failed because of the server's state or set-up.
// It matches [driver.ErrInvalid] if repeating the call does not help before
// somebody has done something, and [driver.ErrNotApplied] if it may; in either
// case the call had no effect.
type ServerError struct {
	Problem Problem
	// Detail says more, such as what to do, or is empty.
	Detail string
	// Err is what the client or the server said, or nil.
	Err error
}

func (e *ServerError) Error() string {
	s := "pglock: " + string(e.Problem)
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

// unsentError says that a call failed before anything was sent for it.
type unsentError struct{ error }

func (e unsentError) Unwrap() error { return e.error }

// SQLSTATEs that are looked at.
const (
	stateIsolation  = "DL001" // of our own functions
	stateReadOnly   = "25006"
	stateNoPrepared = "26000"
	statePrepared   = "42P05"
	stateNoTable    = "42P01"
	stateNoSchema   = "3F000"
	stateNoFunction = "42883"
	stateNoRight    = "42501"
	stateNoDatabase = "3D000"
	stateUnknown    = "40003" // whether the statement was completed
	stateProtocol   = "08P01"
)

// state returns the SQLSTATE of what the server has said, or "". All drivers
// for database/sql that are in use tell it in this way.
func state(err error) string {
	if e, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return e.SQLState()
	}
	return ""
}

// classify says of a failed call whether it certainly had no effect, and of what
// kind the failure is. A statement is a transaction, or the only one of it, so
// what the server refuses is rolled back.
func (o *Options) classify(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) || errors.Is(err, driver.ErrClosed) {
		return err
	}
	// Not driver.ErrBadConn: there are drivers that return it for a connection
	// that has broken under a statement.
	unsent := errors.As(err, new(unsentError)) || pgconn.SafeToRetry(err) || errors.As(err, new(*pgconn.ConnectError))
	code := state(err)
	switch {
	case strings.HasPrefix(code, "28"):
		return problem(ProblemAuth, err, "")
	case code == stateNoDatabase:
		return problem(ProblemDatabase, err, "")
	case code == stateNoRight:
		return problem(ProblemPermission, err, "the user needs what the package's documentation lists under Required server settings")
	case code == stateNoTable, code == stateNoSchema, code == stateNoFunction:
		return o.noSchema(err)
	case code == stateReadOnly:
		return passing(ProblemReadOnly, err, "the server is a standby, or default_transaction_read_only is on")
	case code == stateNoPrepared, code == statePrepared:
		return passing(ProblemPooling, err, "connections go through a pooler that does not know prepared statements; "+
			"with pgx through database/sql add default_query_exec_mode=exec to the URL")
	case code == "57P01", code == "57P02":
		// The server ends the session. It may say so to a statement that has
		// taken effect and waited for replicas.
	case code == stateUnknown, code == stateProtocol, strings.HasPrefix(code, "08"):
	case code != "":
		return fmt.Errorf("%w: pglock: %w", driver.ErrNotApplied, err)
	}
	if unsent {
		return classifyUnsent(err)
	}
	return fmt.Errorf("pglock: %w", err)
}

// classifyUnsent says of what kind a failure is by which nothing was sent.
func classifyUnsent(err error) error {
	switch {
	case tlsMismatch(err):
		return problem(ProblemTLS, err, "")
	case notPostgres(err):
		return problem(ProblemNotPostgres, err, "")
	}
	return fmt.Errorf("%w: pglock: %w", driver.ErrNotApplied, err)
}

// noSchema says what is missing and where it comes from.
func (o *Options) noSchema(err error) error {
	return problem(ProblemNoSchema, err, "the tables %s and others, or the functions that belong to them, are missing in this database; "+
		"create them with pglock.CreateSchema, or with the text of pglock.SchemaSQL in your migrations", o.name("meta"))
}

// tlsMismatch says that two sides do not agree on TLS.
func tlsMismatch(err error) bool {
	for _, is := range []bool{
		errors.As(err, new(tls.RecordHeaderError)),
		errors.As(err, new(*tls.CertificateVerificationError)),
		errors.As(err, new(tls.AlertError)),
		errors.As(err, new(x509.HostnameError)),
		errors.As(err, new(x509.UnknownAuthorityError)),
	} {
		if is {
			return true
		}
	}
	return strings.Contains(err.Error(), "server refused TLS")
}

// notPostgres says that what answered while a connection was being made does
// not speak the protocol.
func notPostgres(err error) bool {
	text := err.Error()
	return errors.As(err, new(*pgproto3.ExceededMaxBodyLenErr)) || strings.Contains(text, "unknown message type") ||
		strings.Contains(text, "invalid message length") || strings.Contains(text, "received unexpected message") ||
		strings.Contains(text, "invalid length of") || strings.Contains(text, "invalid body length")
}

// ended returns the error of the context if a failure comes of its end, or nil.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	// The time-out of a connection attempt can be a moment earlier than that of
	// the context that it was made of.
	timeout, ok := errors.AsType[net.Error](err)
	if deadline, bounded := ctx.Deadline(); ok && timeout.Timeout() && bounded && time.Until(deadline) < 20*time.Millisecond {
		return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	return nil
}
