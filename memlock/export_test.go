package memlock

// Keys is how many keys the backend's store has an entry for.
func Keys(b *Backend) int {
	b.store.mu.Lock()
	defer b.store.mu.Unlock()
	return len(b.store.keys)
}
