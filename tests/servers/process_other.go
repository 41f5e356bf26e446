//go:build !linux

package servers

import (
	"errors"
	"os"
	"syscall"
)

// Nothing is started on this system: see command.

func childAttributes(*account) *syscall.SysProcAttr { return nil }

func descendants(int) []int { return nil }

func sendSignal(int, syscall.Signal) error { return errors.ErrUnsupported }

func state(int) byte { return 'X' }

func ownerOf(os.FileInfo) int { return -1 }

func (p *process) pause() error { return errors.ErrUnsupported }

func (p *process) resume() error { return errors.ErrUnsupported }
