// Package pglock keeps locks in the tables of a PostgreSQL database, 12 or later,
// over a pool of pgx ([New]) or any driver for database/sql ([NewDB]), also through
// a pooler such as PgBouncer in transaction mode. [NewAdvisory] keeps them as
// advisory locks instead, see below.
//
// What it does not do:
//
//   - It cannot keep a lock through the loss of data. After a failover to a
//     replica that lags behind, or with synchronous_commit off after a crash of the
//     server, the last locks are forgotten, and granted again while their holders
//     believe to have them. synchronous_standby_names closes that gap, for as long
//     as only a replica named there is promoted.
//   - It judges expiry by the server's wall clock (clock_timestamp()), as nothing
//     else outlasts a restart. A clock that is set forward ends locks early; one that
//     is set back is noticed, and what then seems to last longer than its TTL is cut
//     to it. After a failover it is the new primary's clock that counts.
//   - A request that was given up while the network or the server hung for longer
//     than five seconds may still be carried out later. What it is granted then
//     ends with its TTL.
//
// Where a second holder would cost money, let the resource check the fencing
// token, whatever the store; it can lie in the same database. Manager.Check, or the
// command dlm doctor, says whether a server is set up for what is wanted.
//
// # URL
//
// The command and the daemon know it as
//
//	postgres://user:password@host:5432/database?schema=dlm
//
// or, for advisory locks, with mode=advisory, and with the parameters of pgx, see dlm --help.
//
// # Guarantees
//
// Every call is one statement, a function in the database, and one round trip. Calls
// of one backend that meet share a statement, if each is simply granted or given up;
// the others among them take a second round trip. A key's row is locked for the time
// of the call, so that calls on one key follow each other, and keys do not know of
// each other. A release hands the key over to the head of its queue in the same
// transaction, and tells that waiter's manager through NOTIFY. Waiters hold no
// connection, and are served in the order in which the server saw them. Each manager
// that has had to wait has one connection that listens, beside the pool's.
//
// Where no notifications arrive, waiters look for themselves every
// [Options.PollInterval]: over database/sql, behind a pooler in transaction mode
// (which is found out), while the connection is down, and if owner and key together
// have more than about 3,500 bytes.
//
// The functions run under READ COMMITTED, whatever the default is. If that is
// another, each call is a transaction of three statements, still in one round trip
// (three with database/sql). Statements are prepared if the pool of pgx is set so
// and no pooler is in between.
//
// A call whose context ends comes back at once. Its statement goes on, and keeps its
// connection, until it is answered, for five seconds at most, or for as long as
// others who share it wait: a withdrawal waits for it, so that it is not overtaken.
//
// Rows of keys are kept for [Options.KeepTokens] after the last lock, a day by
// default. Then later calls, on whatever key, delete them, and what dead processes
// left, a few at a time.
//
// # Fencing token
//
// The larger of the last token of the key plus one, and the server's clock in
// microseconds since 1970. When a key's row is deleted, its last token goes into one
// number for all keys, above which new rows begin. Tokens therefore rise for as long
// as the database keeps what it has acknowledged, whatever the clock does; and if it
// has lost something, they still rise unless the clock was also set back.
//
// # Required server settings
//
// The tables, which [CreateSchema] makes, or the text of [SchemaSQL] in your own
// migrations. The user then needs
//
//	GRANT USAGE ON SCHEMA dlm TO user;
//	GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dlm TO user;
//	GRANT USAGE ON ALL SEQUENCES IN SCHEMA dlm TO user; -- for advisory locks
//	GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA dlm TO user;
//
// of which the last one is the default. Better leave fsync, full_page_writes and
// synchronous_commit on, and autovacuum too, as the rows are written all the time.
// Long transactions elsewhere in the cluster keep old versions of the rows alive and
// make locks slower. statement_timeout and lock_timeout should be a second or more.
//
// # Advisory locks
//
// The locks of an [Advisory] belong to one session at the server, on a connection
// of its own, and are free at once when the process dies. They exclude those of
// other such backends with the same schema and prefix; they do not exclude locks
// in tables, nor those of [LockTx].
//
// What they do not do, beyond what was said above:
//
//   - They do not outlast the connection. If that breaks, or the server restarts,
//     all are lost, which is told at once.
//   - They do not survive a failover: replicas know nothing of them. A holder that is
//     cut off learns of it when it has had no answer for half of
//     [AdvisoryOptions].SessionTimeout, or when its TTL is over; until then the new
//     primary may have granted its keys. Tokens can repeat if the replica lagged
//     behind.
//   - They do not end while their process is stopped (SIGSTOP, a debugger), since the
//     operating system answers for it; nor do its places in queues. That process has
//     lost its locks for itself when it goes on after their deadlines.
//   - They have no permits, and a pooler in transaction mode is refused. In session
//     mode it must reset sessions between clients, as PgBouncer does by default.
//   - A grant can be given up only by the backend that has it, also by force, which
//     asks that backend.
//   - Numbers of 64 bits stand for keys. If two keys in use have the same, the second
//     request gets a [*CollisionError].
//
// An acquire and a release are one round trip each; who has to wait needs a second
// one. Calls of all goroutines share the connection without waiting for each
// other's answers. Those on one key take turns.
//
// All locks of all users of a server share a table of bounded size, about
// max_locks_per_transaction times max_connections, 6,400 by default: raise it for
// many locks, since others get errors too when it is full.
//
// # Errors
//
// A [*ServerError] says what is wrong with the server or its set-up; what does not
// mend by itself matches [driver.ErrInvalid]. A statement that the server refuses is
// rolled back, so that deadlocks, serialization failures, time-outs of the server
// and a read-only standby match [driver.ErrNotApplied], as does a failure to get a
// connection. After any other failure, such as a connection that broke or a session
// that was ended, it is not known what became of the call.
package pglock
