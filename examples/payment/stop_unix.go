//go:build unix

package main

import (
	"os"
	"syscall"
)

// stop stops a process, which does not notice.
func stop(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }

// resume lets it go on.
func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
