package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-dlm/dlm"
)

// The exit codes of dlm itself. They are those of sysexits.h where it has one;
// 79 is the first that it leaves free.
const (
	exitNothing     = 1   // nothing was there to be done
	exitUsage       = 64  // EX_USAGE
	exitStore       = 69  // EX_UNAVAILABLE
	exitInternal    = 70  // EX_SOFTWARE
	exitNotAcquired = 75  // EX_TEMPFAIL
	exitUnfit       = 78  // EX_CONFIG: the store's settings
	exitLost        = 79  // the lock, not the command
	exitCannotRun   = 126 // as shells do
	exitNotFound    = 127 // as shells do
	exitSignal      = 128 // plus the signal's number
)

const exitHelp = `Exit codes of dlm itself:
  64     the command line, or a variable of the environment, is wrong
  69     the store cannot be reached or used
  70     something failed that should not, such as the supervision of a command
  75     the lock was not acquired: it is held, or still held after the wait
  78     dlm doctor has found that the store is not set up well for locks
  79     the lock was lost while the command ran, or could not be renewed in
         time; the command was stopped
  126    the command cannot be executed
  127    the command was not found
  128+n  dlm was ended by signal n
With each of them comes a line on standard error that begins with "dlm: ".`

// exitError ends the process with a code, after a message if there is one.
type exitError struct {
	code int
	err  error // nil if all has been said
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func exitWith(code int, format string, args ...any) *exitError {
	return &exitError{code: code, err: fmt.Errorf(format, args...)}
}

// usageError says what is wrong with the command line.
func usageError(format string, args ...any) *exitError { return exitWith(exitUsage, format, args...) }

// storeFaults say of errors that they are about the state of the store and not
// about what the user has typed, though they match dlm.ErrInvalid. The files of
// the stores fill it.
var storeFaults []func(error) bool

func isStoreFault(err error) bool {
	return slices.ContainsFunc(storeFaults, func(is func(error) bool) bool { return is(err) })
}

// codeOf is the exit code for an error of the library.
func codeOf(err error) int {
	var sig signalError
	var limit *dlm.LimitError
	switch {
	case errors.As(err, &sig):
		return exitSignal + int(sig.sig)
	case errors.Is(err, dlm.ErrHeld):
		return exitNotAcquired
	case errors.Is(err, errors.ErrUnsupported), errors.As(err, &limit):
		return exitUsage
	case errors.Is(err, dlm.ErrInvalid) && !errors.Is(err, dlm.ErrNotApplied) && !isStoreFault(err):
		// With ErrNotApplied the store says it, of its own state.
		return exitUsage
	case errors.Is(err, dlm.ErrLost):
		return exitLost
	}
	return exitStore
}

// classify gives an error of the library its exit code.
func classify(err error) error {
	if err == nil || errors.As(err, new(*exitError)) {
		return err
	}
	code := codeOf(err)
	switch {
	case code != exitStore:
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("no answer from the store in time: %w", err)
	default:
		err = fmt.Errorf("the store cannot be used: %w", err)
	}
	return &exitError{code: code, err: err}
}
