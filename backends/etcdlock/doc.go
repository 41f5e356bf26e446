// Package etcdlock keeps locks in etcd 3.4 and later: one server, or a cluster.
//
// What it does not do:
//
//   - It cannot have a lock end to the second when its process dies. etcd ends
//     leases when its leader sees fit: up to about a second after the TTL, and if
//     the leader has changed meanwhile, up to a TTL later, as the new one starts
//     all leases anew.
//   - It cannot give a lock a TTL below the floor of the cluster, which is one and a
//     half election timeouts, 2s by default, in full seconds. A shorter TTL is
//     raised, and one above a minute may be raised by up to a tenth. What was granted
//     is in the lock.
//   - It cannot have locks while there is no majority of the members, or while the
//     database has reached its quota. What is held then is released or ends with
//     its lease.
//   - etcd 3.4 does not look at rights within nested transactions, by one of which
//     a waiter's ticket is made if its TTL is longer than [Options.WaiterTTL]: there,
//     who may read the keys of a lock may wait for it, and so come to hold it.
//   - Before etcd 3.4.26 and 3.5.9, a leader that was replaced without noticing
//     can confirm the renewal of a lease for up to an election timeout. A lock can
//     then end in the store by so much earlier than its holder believes.
//
// Where a second holder would cost money, let the resource check the fencing
// token, whatever the store. Manager.Check, or the command dlm doctor, says
// whether a cluster is set up for what is wanted.
//
// # URL
//
// The command and the daemon know it as
//
//	etcd://host1:2379,host2:2379,host3:2379/prefix
//
// and with etcds in place of etcd over TLS; see dlm --help for parameters.
//
// # Guarantees
//
// A lock's queue is a range of keys, in the order of their creation. Whoever is
// among the first that may hold the lock together holds it: the first, or as many
// as there are permits, or all who share it. Nothing is written when a holder
// leaves, so between two holders there is no moment at which somebody else could
// come in. To take a lock, or a place in its queue, is one transaction that
// decides everything; only permits that are tried for without waiting take two,
// and more if others try at the same time. Calls for different locks that are made
// while others are on their way share a request and an entry of etcd's log; a lone
// call does not wait for that, and each ends with its own context.
//
// All locks of one TTL share a lease, which is renewed every third of the TTL, and
// sooner if locks are taken; all leases share one stream. A lock therefore costs
// no request to be kept. Renewals ask whether the key is still there, for 100
// locks at once. If a lease cannot be renewed while other calls work, locks move
// to another one with their next renewal. The deadline of a lock counts from before
// the last renewal of its lease was sent.
//
// A lock ends in the store when it is released, which the manager also does with
// one whose TTL runs out although its process lives, or when its lease does. If
// somebody revokes the lease or deletes the key, the holder is told within
// about a second: by a watch on the lease's own key, and by one on the key of each
// lock that has been held for half a second. Those are at most 1,000 for each
// manager; of further ones a loss is told with the next renewal.
//
// A waiter watches whom it waits for, by one stream for each manager, and asks
// again when that one has left. It does not rely on it: the first in the queue look
// about once a second, the others every half minute. A waiter's ticket belongs to
// a lease with a TTL of at most [Options.WaiterTTL]; a waiter that has died holds
// up the others for so long, and all that died together do so together.
//
// An answer that was lost leaves nothing behind: a withdrawal rewrites a key that
// every attempt names the revision of, so that one which is still on its way fails.
//
// The times in KeyInfo compare clocks of two machines and are for people only.
//
// # Fencing token
//
// The revision of the cluster at which the key was created. It rises with each
// write to the cluster, and so from each ticket to the next, and from each holder
// to the next. It falls if the cluster is restored from an older snapshot, unless
// that is done with --bump-revision; do not restore while resources remember tokens.
//
// # Required server settings
//
// etcd 3.4, better 3.4.26, 3.5.9 or later; three members or five; a history that is
// compacted, as with --auto-compaction-retention. A user needs
//
//	etcdctl role grant-permission ROLE --prefix=true readwrite dlm/
//
// The client should name all members, and have DialKeepAliveTime and
// DialKeepAliveTimeout set, so that it notices a member that has gone silent: an
// acquisition or a release that was sent there waits for its context otherwise.
// Renewals are asked for again at other members. The client may not be one
// whose KV or Watcher was replaced, such as by package namespace; use
// [Options.Prefix].
//
// # Errors
//
// A [*ServerError] says what is wrong with the server or its set-up; what does
// not mend by itself matches [driver.ErrInvalid]. A refusal by the server (no
// space, too many requests, a token that has expired) and a failure to
// connect match [driver.ErrNotApplied]. After any other failure, such as a
// connection that broke, a time-out or a change of the leader, it is not known what
// became of the call.
package etcdlock
