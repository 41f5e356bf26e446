// Package promdlm turns the events of package dlm into Prometheus metrics.
//
// A [Collector] is both a [dlm.Observer], to be set as LockConfig.Observer,
// and a [prometheus.Collector], to be registered once. One Collector can
// observe any number of managers.
//
// # What the figures are not
//
// They are what the observed managers saw, not what the store holds: locks of
// other processes are counted by the collectors of those processes. Background
// events may be reported some time after they happened, so a gauge can trail
// the truth by a moment; it is exact once the managers are at rest, and it is
// never shown below zero.
//
// # Metrics
//
//	name                                   type       labels                    meaning
//	dlm_lock_acquisition_duration_seconds  histogram  backend, waited, class    from the call to the lock, for calls that got one
//	dlm_lock_wait_seconds                  histogram  backend, mode, class      time in a queue, whether or not a lock came of it
//	dlm_lock_hold_seconds                  histogram  backend, mode, class      from the grant to the release or loss
//	dlm_lock_renewal_margin_seconds        histogram  backend, class            how far the deadline still was when a lock was renewed
//	dlm_locks_acquired_total               counter    backend, mode, class      locks granted
//	dlm_locks_released_total               counter    backend, mode, class      locks released, whether or not the store confirmed it
//	dlm_locks_lost_total                   counter    backend, reason, class    locks lost
//	dlm_lock_extensions_total              counter    backend, class            locks renewed, by the manager or by hand
//	dlm_lock_conflicts_total               counter    backend, class            acquisitions refused because the key was held
//	dlm_lock_timeouts_total                counter    backend, class            acquisitions given up because their context ended while waiting
//	dlm_lock_errors_total                  counter    backend, operation, kind  acquisitions, renewals and releases that failed otherwise
//	dlm_lock_forced_releases_total         counter    backend, class            locks removed by ForceRelease
//	dlm_lock_store_errors_total            counter    backend, operation, kind  failed calls to the store, each try by itself
//	dlm_locks_held                         gauge      backend, mode, class      locks held now; re-entry counts every handle
//	dlm_locks_waiting                      gauge      backend, mode, class      calls waiting in a queue now
//
// # Labels
//
//	backend    the backend's name, such as "redis"
//	mode       exclusive or shared
//	class      only with Options.KeyClass: what it made of the key, or "other"
//	waited     true if the call had to queue, or false
//	reason     expired, gone, taken, session, max-hold, closed or other
//	operation  of lock errors: acquire, extend or release; of store errors also
//	           withdraw, listen, get, list, force or other
//	kind       invalid, unsupported, closed, indeterminate, unreachable,
//	           not_applied, canceled, deadline or other; the first that fits
//
// Neither keys nor owners are ever label values, so the number of series does
// not grow with them. See Options.KeyClass for telling groups of keys apart.
//
// The renewal margin is a histogram, not a gauge, because a process holds many
// locks: a gauge would show the margin of whichever lock was renewed last and
// hide the one that is about to be lost, while the lowest buckets count every
// close call. A failed renewal has no margin to speak of, since the lock is
// tried again; it counts as an error of operation "extend".
package promdlm
