// Package sqlitelock keeps locks in a file that the processes of one machine
// share. There is no server: whoever opens the file takes part.
//
// What it does not do:
//
//   - It does not reach beyond the machine. A file on a network file system is
//     refused. Two machines that get at one file all the same, as through a
//     shared disk, are told apart by their boot ids: the one that opened it
//     last goes on, and every call on the other fails.
//   - It does not survive what is done to the file from outside. To delete or
//     replace it, or to restore it from a copy, while locks are held makes
//     them available again at once. A process that still has the old file open
//     is refused from then on, but what it holds it learns to have lost only
//     when its time is up.
//   - It cannot go on while the file is stuck. SQLite lets one process write at
//     a time; one that is stopped (SIGSTOP, a debugger) in the middle of a
//     write, which is a fraction of a millisecond, holds up all others until
//     it goes on or is killed. Locks then run out, but are not granted twice.
//     A full disk refuses new grants, renewals and releases.
//
// It is made for some thousands of lock operations a second. Ten callers or ten
// processes are not faster than one, as all take turns at the file.
//
// # URL
//
// The command and the daemon know it as
//
//	sqlite:///var/lib/app/locks.db?liveness_window=10s
//
// and as sqlite:// for a file in the user's state folder.
//
// # Guarantees
//
// Every call is one SQLite transaction. Time is told by CLOCK_BOOTTIME, which
// all processes of the machine share, which nobody can set, and which goes on
// while the machine sleeps; on macOS by its counterpart. The wall clock plays
// no part. In another Linux time namespace the file counts as moved to another
// machine, as that clock may be off.
//
// A process that is killed, at whatever moment, leaves the file whole and no
// lock on it. What the process held ends with its TTL, and if it was waiting
// it holds up the others for one liveness window at most.
//
// After a reboot, also one by power failure, all grants are kept for as long as
// they were to run when they were last renewed, counted from the moment when
// the file is first opened again, since nobody knows how long the machine was
// off. Waiters have to ask again. A power failure, unlike the death of a
// process, can take back what was done in the last moments before it; those
// who held or released then are gone too.
//
// Waiters are served in the order in which their requests reached the file. A
// ticket that has lapsed, because its waiter or the file was stalled, is
// passed over, but keeps its place for as long again.
//
// Between processes there is no notification. Each manager that has somebody
// waiting looks at the file every half millisecond while it changes, and ever
// more seldom, down to every 20ms, while it does not. Within a process a
// release wakes the waiter at once.
//
// # Fencing token
//
// One counter serves all keys of the file, so the file keeps nothing about a
// key that is free. Tokens are reserved in blocks of 2^20, and a reservation is
// on the disk before a token of it is given out, so they rise even over a power
// failure. A new file begins at the wall clock in microseconds since 1970: a
// file that is deleted and made anew gives higher tokens, unless the clock has
// been set back. A file that is restored from a copy, or with the whole machine
// from a snapshot, gives tokens again that it has given before.
//
// # Required settings
//
// Linux or macOS, and a local file system; FUSE and 9p count as remote, as
// nobody can say what lies behind them. The file is created with mode 0600, and
// missing folders with 0700; a file that others can write, a symbolic link, a
// file with a second name, and a folder that everybody can write (but for
// sticky ones such as /tmp) are refused. So all processes run as one user; those
// of several users can share the locks of a daemon.
//
// Beside the file there are, while it is in use, one with the ending -wal, of a
// few MB, and one with -shm. To copy or to move the file, end all processes
// first. In a process that uses it, do not open it by other means: to close any
// descriptor of a file ends the locks that the process has on it.
//
// # Errors
//
// Errors of a file that cannot be used match [driver.ErrInvalid], as repeating
// the call does not help: not a database, damaged, of another program or a
// later version, read-only, removed or replaced while in use, taken over by
// another boot. Such calls had no effect.
//
// A call whose context ends while others keep the file locked, and one that
// finds the disk full, matches [driver.ErrNotApplied]. So does any failure
// before the commit. Unknown are the outcome of a commit that failed for
// another reason, such as an I/O error, and that of a call that was given up
// because the disk did not answer.
package sqlitelock
