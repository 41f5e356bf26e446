package redisfence

// Record is the name of the record of a resource.
func (g *Guard) Record(resource string) (string, error) { return g.record(resource, 1) }
