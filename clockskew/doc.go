// Package clockskew asks NTP servers by how much the clock of this machine is
// off, and can refuse new locks while it is.
//
// # Who needs it
//
// Locks do not. No wall clock of a client decides anything about a lock: the
// store, or its leader, counts the time to live by its own clock, only durations
// are sent to it, and a holder counts its deadline on its own monotonic clock,
// which nobody can set. A client whose clock shows the wrong year holds its locks
// as safely as any other. NTP is for finding out, and for these cases:
//
//   - The machine of a store that judges by its wall clock: Redis, each node of a
//     Redis quorum, PostgreSQL with tables. A clock that is set forward there
//     ends locks early, and after a failover the new primary's clock counts. Run
//     the check on the store's machine; on the clients it says nothing about it.
//   - A SQLite file counts on the boot clock, which cannot be set. Memory, etcd,
//     ZooKeeper, Consul and PostgreSQL's advisory locks count on timers.
//   - What an application does with times under a lock: time stamps that it
//     writes, certificates, and the ticks of a [dlm.Once], whose minimum hold
//     must be longer than the clocks of its nodes are apart.
//
// All stores ask that clocks run at the same rate to within one percent. NTP as
// used here measures an offset, not a rate.
//
// # What a check says
//
// [Checker.Check] asks all servers side by side. Each valid answer is a range: its
// offset, give or take its distance, which is half of all round trips between the
// server's reference clock and this machine, plus what the servers on the way
// admit. The [Result] has the median of the offsets and a bound that holds if
// fewer than half of the servers are wrong, whichever of them answered; see ADR
// 0017. If the clock is within Options.MaxOffset for certain, the verdict is
// [Fine]; if it is beyond it for certain, [Skewed]; else [Unknown].
//
// NTP without authentication believes whoever can answer from the server's
// address: a liar on the way can make any clock look fine or skewed. Servers that
// smear leap seconds disagree with those that do not by up to a second for a day.
//
// # What a guard does not do
//
// [NewGuard] puts a check in front of a manager. It knows the last result only,
// which is up to an interval old, starts no check of its own, and lets through what
// is under way: calls that wait go on waiting, and locks that are held are renewed
// and released as ever. It is no replacement for the fencing token. Refusing is a
// choice of availability against other people's time stamps, not against a second
// holder.
package clockskew
