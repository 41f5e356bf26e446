//go:build !linux

package procs

import "syscall"

func attributes() *syscall.SysProcAttr { return nil }
