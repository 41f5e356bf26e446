package procs

import "syscall"

// attributes put a process into a session of its own, so that Ctrl-C at the
// terminal reaches this program only, which passes it on. And they have the
// kernel kill the process when this program has died.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
}
