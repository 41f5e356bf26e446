// Package secure decides who may have which locks, how many, and for how long:
// admission in front of any lock manager, for a server whose clients are not all
// well-behaved.
//
// [New] wraps a manager and a [Policy]. Every call is made for a client, whom the
// context names (see [WithClient]). Before the manager and its store are asked, the
// call is checked against the client's rate, its keys, the bounds on its
// arguments, and the number of locks that it has already. What is refused costs no
// call to the store; the error is a [*DeniedError], which says which bound was
// met, and when to come again.
//
// # What counts
//
// A lock counts from before the store is asked until its Done channel closes, by
// whatever way it ends: released here or by [dlm.Lock.Release], expired, taken by
// force, closed with its manager. Each handle of a nested lock counts as one. An
// acquisition that fails, is cancelled or panics counts no longer when it returns.
//
// # What is not guaranteed
//
//   - All limits are those of one wrapper in one process. Three servers with one
//     policy admit three times as much in all; nothing is written to the store.
//   - The wrapper authenticates nobody. It believes [WithClient], or Policy.Client.
//   - A [dlm.Lock] is as good as a key: code of this process that has one can
//     release and extend it by its own methods, past the policy. Nor does the
//     policy bind those who have the manager itself.
//   - A client that never releases keeps its locks for ever if the manager renews
//     them, as many as it may have, unless Policy.MaxHold is set.
//   - Clients are fair to each other in what they may have, not in the order of
//     service: that is the store's queue.
package secure
