package secure

// Holds is how many locks are known, those that have ended included.
func (g *gate) Holds() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.holds)
}
