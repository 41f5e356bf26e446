package dlm

import "time"

// SetSuspended replaces the source of the time that the machine was suspended.
func SetSuspended(m *Manager, suspended func() time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.clock.suspended = suspended
	m.clock.asleep = 0
}

// DriftMargin is the margin of a TTL's deadline.
var DriftMargin = driftMargin

// Idle says whether a manager keeps nothing: no lock, no waiter, no re-entry,
// nothing to clean.
func Idle(m *Manager) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cleaner.mu.Lock()
	defer m.cleaner.mu.Unlock()
	for i := range m.keeper.lanes {
		if m.keeper.lanes[i].calls != 0 {
			return false
		}
	}
	return len(m.grants) == 0 && len(m.waiters) == 0 && len(m.owned) == 0 && len(m.keeper.heap) == 0 &&
		len(m.cleaner.queue) == 0
}
