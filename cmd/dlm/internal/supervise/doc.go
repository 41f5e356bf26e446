// Package supervise runs a command that must not outlive a deadline, nor the
// process that started it.
//
// # Three processes
//
// The caller does not start the command itself. It starts its own program once
// more as a shim, which starts the command:
//
//	caller ──socket──> shim ──> command ──> whatever the command starts
//
// The shim knows by when the command must be gone: the caller sends it a
// [Schedule], and a new one whenever the deadline has moved. It waits for the
// command, and reports to the caller what becomes of it.
//
//   - At Schedule.Term the shim sends SIGTERM to the command's process group
//     and to all its descendants, at Schedule.Kill SIGKILL. It does so by the
//     boot clock, which also counts the time that the machine is suspended,
//     and whether or not the caller still runs: a caller that is stopped
//     (SIGSTOP, a debugger) cannot keep its command past the deadline.
//   - If the caller dies, however that comes about, the socket closes and the
//     shim kills everything at once.
//   - If the shim dies, or has not done its work at Schedule.Hard (because it
//     is stopped itself, say), the caller kills everything.
//   - When the command has ended and processes that it started are left, they
//     have a second to end by themselves; then they too get SIGTERM, and
//     SIGKILL after Spec.Leftover.
//
// The run is over, [Done], when no process is left.
//
// # How far this reaches
//
// On Linux both the shim and the caller are "child subreapers": a process whose
// parent has died becomes their child, so that they find all descendants of the
// command, also those which moved to a process group or session of their own,
// and know for sure when none is left. Not found are processes that another
// service starts on the command's behalf (a container engine, at, systemd-run):
// those are no descendants.
//
// If caller and shim are killed in the same moment (kill -9 of both, the kill
// of a whole control group takes all processes anyway), the kernel kills the
// command itself (PR_SET_PDEATHSIG), but not what the command has started. The
// same setting is void for set-user-ID commands.
//
// A process that the user may not signal, such as one that became root through
// sudo, cannot be killed; neither can one that is stuck inside the kernel. The
// run is then not over until it has ended by itself; [Stuck] reports it.
//
// On other Unix systems only the command's process group is killed, and nothing
// is killed by the kernel if caller and shim both die.
//
// # Rules for callers
//
// The first statement of main must be [Init]. The process must not start
// children other than through this package while a command runs: what it finds
// as its child it takes for a descendant of the command.
package supervise
