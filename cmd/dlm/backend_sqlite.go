//go:build !no_sqlite

package main

import (
	"errors"
	"path/filepath"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/sqlitelock"
)

func init() {
	schemes["sqlite"] = scheme{
		usage: `  sqlite:///PATH?liveness_window=10s
      a file on this machine, which is created if need be; without a path it is
      $XDG_STATE_HOME/dlm/locks.db, or ~/.local/state/dlm/locks.db.
      liveness_window bounds how long a waiter that died holds up the others.`,
		parse: parseSQLite,
	}
}

func parseSQLite(u *storeURL, env func(string) (string, bool)) (opener, error) {
	switch {
	case u.Opaque != "" || u.Host != "":
		return nil, errors.New("the path must be absolute, as in sqlite:///var/lib/locks.db, with three slashes")
	case u.User != nil || u.Fragment != "":
		return nil, errors.New("a sqlite URL has a path and parameters only; write %23 for # within the path")
	}
	p := parseParams(u)
	// The bounds are those of sqlitelock.Options.
	opts := &sqlitelock.Options{LivenessWindow: p.duration("liveness_window", 100*time.Millisecond, time.Hour)}
	if err := p.finish(); err != nil {
		return nil, err
	}
	path := u.Path
	if path == "" {
		var err error
		if path, err = defaultFile(env); err != nil {
			return nil, err
		}
	}
	return func(cfg *dlm.LockConfig) (*dlm.Manager, error) {
		return sqlitelock.NewLockManager(path, cfg, opts)
	}, nil
}

// defaultFile is the file in the user's state folder, see the XDG base
// directory specification.
func defaultFile(env func(string) (string, bool)) (string, error) {
	// A relative path is to be ignored, says the specification.
	state, _ := env("XDG_STATE_HOME")
	if !filepath.IsAbs(state) {
		home, _ := env("HOME")
		if !filepath.IsAbs(home) {
			return "", errors.New("neither XDG_STATE_HOME nor HOME is set to an absolute path; " +
				"set one, or name a file with --backend sqlite:///PATH")
		}
		state = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(state, "dlm", "locks.db"), nil
}
