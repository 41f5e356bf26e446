// Package consullock keeps locks in Consul 1.10 and later: one server, or a
// cluster, directly or through an agent.
//
// What it does not do:
//
//   - It cannot have a lock end to the second when its process dies. Consul ends
//     sessions when its leader sees fit: between once and twice their TTL after it
//     was last heard of them, and if the leader has changed meanwhile, up to as
//     long again later. That TTL is the lock's, rounded up by up to a quarter, and
//     at least [Options.MinSessionTTL], 10s by default.
//   - It cannot have locks while the servers have no leader. What is held then is
//     lost at its deadline, and ends with its session.
//   - It does not promise anything if the servers forget what they have
//     acknowledged, because their data were lost or restored from a snapshot.
//   - A session belongs to the node of the agent that it was made through. If that
//     agent leaves the datacenter (consul leave) or is deregistered, Consul ends its
//     sessions, and their locks are lost; that is told at once. By default
//     autopilot deregisters a server within seconds of its death
//     (cleanup_dead_servers), so use the agent of the own machine rather than a
//     server, or turn that off.
//   - It does not know the namespaces and partitions of Consul Enterprise: a client
//     that is set up for one cannot be used. Use [Options.Prefix].
//   - It does not protect from a token that may read only some of the keys: Consul
//     hides the others, and so who holds a lock.
//
// Where a second holder would cost money, let the resource check the fencing
// token, whatever the store. Manager.Check, or the command dlm doctor, says
// whether the servers are set up for what is wanted.
//
// # URL
//
// The command and the daemon know it as
//
//	consul://host1:8500,host2:8500/prefix
//
// and with consuls in place of consul over TLS; see dlm --help for parameters.
//
// # Guarantees
//
// A lock's holders and waiters are keys below one prefix, each locked by a session,
// in the order of their creation. Whoever is among the first that may hold the lock
// together holds it: the first, or as many as there are permits, or all who share
// it. Nothing is written when a holder leaves, so between two holders there is no
// moment at which somebody else could come in, unless [Options.LockDelay] asks for
// one.
//
// To take a lock that is free, and to release it, is one transaction each. To take
// a place in the queue is one, after two that found the lock in use, which are
// left out for some time afterwards. An attempt that does not wait leaves nothing:
// it is a transaction that fails if anybody has come since it looked. Where the
// tickets of a queue end with their processes, one small key is left behind, which
// goes with the next use of the lock.
//
// Locks share sessions, one for each class of TTLs, without health checks, so that
// they do not depend on gossip. Each is renewed every quarter of its TTL by one
// goroutine. The deadline of a lock counts from before the last answered renewal of
// its session was sent. A renewal is answered by the leader without a log entry, so
// one that has been replaced may still answer, until it notices. That does no harm,
// as the new one lets all sessions run anew, and for twice their TTL, unless the old
// one was stopped for longer than a TTL and answers in the moment it goes on. The
// keeper's renewals also ask whether the keys are still there, for 100 locks at
// once.
//
// A lock ends in the store when it is released, which the manager also does with
// one whose TTL runs out although its process lives, or when its session does. If
// somebody ends the session, the holder is told at once, by a question that waits
// for it. If somebody deletes the key, it is told with the next renewal.
//
// The waiters of a lock in one backend share one question that waits for changes of
// the lock, for at most 32 locks; the waiters of others look once a second. It
// lists all tickets, so nothing is missed, and one of them gets the lock without
// asking. What is released in the same process is handed over before that. No
// delivery is relied upon: the first in the queue look about once a second. A
// waiter's ticket belongs to a session with a TTL of at most [Options.WaiterTTL]; a
// waiter that has died holds up the others for up to twice as long, and all that
// died together do so together.
//
// An answer that was lost leaves nothing behind: a withdrawal rewrites a key that
// every attempt names the index of, so that one which is still on its way fails.
//
// The times in KeyInfo compare clocks of two machines and are for people only.
//
// # Fencing token
//
// The index of the servers' log at which the holder's key was made. It rises with
// each entry, and so from each ticket to the next, and from each holder to the
// next, also when keys are deleted and made again. It falls if the servers are
// restored from a snapshot; do not restore while resources remember tokens.
//
// # Required server settings
//
// Consul 1.10 or later; three servers or five; a session_ttl_min of at most
// MinSessionTTL. With ACLs, a token needs
//
//	key_prefix "dlm/" { policy = "write" }
//	session_prefix "" { policy = "write" }
//
// for its own prefix and, if wanted, the agent's node in place of "". An agent
// allows 200 connections from one address by default
// (limits.http_max_conns_per_client); a backend uses up to 32, one for each lock
// that is waited for, and one for each class of TTLs. A client that is passed in should
// keep as many open when they are idle (MaxIdleConnsPerHost), as [Open] does.
// Consul's lists have no pages: the keys of a queue are read together.
//
// # Errors
//
// A [*ServerError] says what is wrong with the server or its set-up; what does
// not mend by itself matches [driver.ErrInvalid]. A refusal by the server (no
// leader, too many requests) and a failure to connect match
// [driver.ErrNotApplied]. After any other failure, such as a connection that
// broke, a time-out or a change of the leader, it is not known what became of the
// call.
package consullock
