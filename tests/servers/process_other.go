//go:build !linux

package servers

import (
	"errors"
	"syscall"
)

// Nothing is started on this system: see command.

func childAttributes() *syscall.SysProcAttr { return nil }

func (p *process) pause() error { return errors.ErrUnsupported }

func (p *process) resume() error { return errors.ErrUnsupported }
