// Package zklock keeps locks in ZooKeeper 3.5 and later, on one server or an
// ensemble.
//
// What it does not do:
//
//   - It cannot free the locks of a process that died before its session has timed
//     out: up to the negotiated [Options.SessionTimeout] and one tick of the
//     server after it was last heard of, whatever the TTL of the lock.
//   - A lock does not outlast its session, whatever its TTL. Its deadline is never
//     later than the session is sure to last, which is between about 40 and 75
//     percent of the time-out from the last answered write. A lock that is not
//     renewed (AutoRenew off) and has a longer TTL ends there: set SessionTimeout
//     to three times the longest TTL of such locks.
//   - It does not promise anything if the ensemble forgets what it has
//     acknowledged, because its data were lost or restored from a backup.
//   - Closing the backend, and so the manager, ends the session and with it
//     whatever has not been released.
//
// Where a second holder would cost money, let the resource check the fencing
// token, whatever the store. Manager.Check, or the command dlm doctor, says
// whether the servers are set up for what is wanted.
//
// # URL
//
// The command and the daemon know it as
//
//	zk://host1:2181,host2:2181,host3:2181
//	zk://name:password@host:2181/chroot?root=/dlm&session_timeout=20s
//
// and with zks in place of zk over TLS; see dlm --help for parameters.
//
// # Guarantees
//
// A key is a node below [Options.Root], and its children are the grants and
// tickets: ephemeral sequential nodes whose names carry mode, limit, session and
// owner. The oldest children that may hold the key together hold it; nothing is
// written when one of them goes. They are granted strictly in the order of their
// creation, and an attempt that does not wait is one transaction that fails if
// anybody has come since the key was looked at. An acquisition of a free key is one
// transaction, which also makes the key's node, and its release another one, which
// also removes it. A process that dies leaves the key's node behind, without
// children, until the key is used again.
//
// A waiter watches the one node before it (with n permits the n before it, a reader
// the last writer before it), so a release wakes one waiter. If that node is of the
// same backend, neither the watch nor the hand-over takes a request. All watches of
// a backend are on its one connection. Waiters look again by themselves, when the
// connection comes back, and every few seconds. A holder is told at once when its
// session has expired, and within about a second when its node is deleted; a lock
// that is younger than that, at its next renewal.
//
// While there is no connection, nothing is lost before its deadline, and the
// session is taken up again at any server in time. A session that has expired is
// over: its locks are lost, its waiters are told to ask again, and get new tickets.
// So do waiters whose node is deleted by hand, within about a second.
// A node counts as ours only if its session is ours.
//
// Only writes prove that the session lives, as they need the leader and a majority:
// a server that is cut off from the leader goes on answering questions for a
// while. So a renewal, of any number of locks, is a transaction that changes
// nothing. Expiry is judged by the leader; the bounds above take the time-out to
// be at least two ticks, as servers do by default.
//
// # Fencing token
//
// The id of the transaction that made the holder's node (czxid). It rises with
// every write to the ensemble, and so does not begin again when the key's node is
// removed, or when a leader follows another. It is below 2^53 for the first two
// million leaders; after that locks are refused with [ProblemToken].
//
// # Required server settings
//
// None but the rights to read, write, create and delete at and below Root. All
// clients need the same user or an ACL that lets them touch each other's nodes.
// minSessionTimeout and maxSessionTimeout bound the session; the defaults are two
// and twenty times tickTime. The answer to srvr, for which 4lw.commands.whitelist
// must not be narrower than by default, tells Check more.
//
// # Errors
//
// A [*ServerError] says what is wrong with the server's set-up, and which node it is
// about; it matches [driver.ErrInvalid]. A refusal by the server, and having no
// connection, match [driver.ErrNotApplied]. If the connection breaks with a
// request under way, or the context ends, it is not known what became of it.
package zklock
