// Package redislock keeps locks in Redis 6.2 and later, or Valkey: one server, a
// primary with replicas and Sentinel, a Redis Cluster ([New]), or a majority of
// independent primaries ([NewQuorum]).
//
// What it does not do:
//
//   - It cannot keep a lock through the loss of data. Redis replicates in the
//     background: a primary that dies can take with it what its replica has not
//     seen yet, and after the failover the lock is granted again while its holder
//     believes to have it. [Options.Replicas] waits for acknowledgement and
//     closes that gap for as long as one of those replicas is promoted. A server
//     without persistence that is restarted has forgotten all locks; holders
//     learn it at their next renewal.
//   - It cannot protect locks from eviction. The server must run with
//     maxmemory-policy noeviction.
//   - It judges expiry by the server's wall clock, as Redis itself does for all
//     keys. A clock that is set forward ends locks early; one that is set back is
//     noticed, and what then seems to last longer than its TTL is cut to it.
//     After a failover it is the new primary's clock that counts.
//
// Where a second holder would cost money, let the resource check the fencing
// token, whatever the store. Manager.Check, or the command dlm doctor, says
// whether a server is set up for what is wanted.
//
// # URL
//
// The command and the daemon know it as
//
//	redis://user:password@host:6379/0
//	redis+sentinel://host1:26379,host2:26379,host3:26379/mymaster/0
//	redis+cluster://host1:6379,host2:6379
//	redis+quorum://host1:6379,host2:6379,host3:6379
//
// and with rediss in place of redis over TLS; see dlm --help for parameters.
//
// # Guarantees
//
// Every call is one Lua script, so it is atomic, and one round trip. The scripts
// touch the keys of one lock only, which share a slot whatever the lock's key
// contains. A release hands the key over to the head of its queue in the same
// step, and tells that waiter's manager through the one subscription that each
// manager has, so a release wakes one waiter and costs no second request.
// Waiters are served in the order in which the server saw them. While the
// subscription is down, waiters look for themselves about once a second.
//
// Calls that are made at the same time by one backend share a pipeline; a lone
// call does not wait for company. Each call ends with its context, whether or not
// the client has ContextTimeoutEnabled: at once, or within 250ms where it was
// made by the caller's own goroutine.
//
// With [Options.Replicas], a grant or a renewal counts only when so many replicas
// have acknowledged it, and a grant that they have not is taken back. It then
// holds through a failover to one of the replicas that acknowledged. To be sure
// that it is one of them, wait for all. A hand-over costs one more round trip
// then, as the waiter has to have its grant acknowledged.
//
// # Quorum
//
// [Quorum] is Redlock with fencing tokens: whoever is granted the key by a
// majority of the nodes has it. All nodes are asked side by side, and the answer
// of a majority is enough, so that one that hangs costs nothing. A lock lasts
// from before the first request was sent, for its TTL less one percent and a
// millisecond; if the nodes' clocks differ in their rate by more, it is not safe.
// It stays safe while a minority of nodes is down, slow, cut off, or restarted
// with its data. A node that comes back without its data does not vote for
// [QuorumOptions.MaxTTL], until all that it may have granted has run out, and is
// given the locks of others by their next renewal. So does a node that was
// restarted from a snapshot (RDB), which is always old, or whose place a replica
// has taken: it is told by its run id, if the user may ask for INFO. A node with
// an append-only file votes at once; without appendfsync always, a crash of the
// machine, not of the server alone, can make it forget the last second. What the
// quorum cannot survive is that a majority loses its data at the same time; and
// if all nodes are without data, they are taken for new.
//
// Waiters are served in the order in which a majority saw them, but not strictly
// so while nodes fail. There are no shared locks and no permits.
//
// # Fencing token
//
// The larger of the last token of the key plus one, and the server's clock in
// microseconds since 1970. The last token is kept for [Options.KeepTokens] after
// the last lock, a day by default, so that no key stays for ever. Tokens
// therefore rise even after the record has gone, after a restart without data,
// and after a failover to a replica that lags behind, unless the clock is set
// back at the same time by more than that, or the new primary's clock is behind
// by more than the lag.
//
// In a quorum the token is the largest that a majority gave, and is written to a
// majority before the lock is handed out, so that the next majority has a node
// that gives a larger one. The nodes mostly agree at once, because clients
// propose a number that all of them can take.
//
// # Required settings
//
// maxmemory-policy noeviction, and a clock that is kept by NTP. Better also
// appendonly yes, and with replicas min-replicas-to-write. The client must lead
// to a primary: replicas are refused, and so is a *redis.Ring. The user needs
//
//	ACL SETUSER dlm on >PASSWORD ~dlm:* &dlm:!* +eval +evalsha +time +hget +hmget +hset +hdel +pexpire +pttl
//	  +zadd +zcard +zrange +zrangebyscore +zrank +zrem +zremrangebyrank +zscore +publish +subscribe +ping
//	  +scan +info
//
// and +wait for [Options.Replicas], +get, +set and +lastsave for a quorum, +select for a
// database other than 0, and what the client itself uses in a cluster. INFO may
// be forbidden: then less is found out.
//
// # Errors
//
// A [*ServerError] says what is wrong with the server or its set-up; what does
// not mend by itself matches [driver.ErrInvalid]. A refusal by the server
// (LOADING, READONLY, OOM, CLUSTERDOWN, NOREPLICAS, MISCONF and the like) and a
// failure to connect match [driver.ErrNotApplied], as the client is not allowed to
// repeat a call by itself. After any other failure, such as a connection that
// broke or a time-out, it is not known what became of the call.
package redislock
