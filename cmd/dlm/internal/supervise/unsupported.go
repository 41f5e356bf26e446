//go:build !linux && !darwin && !freebsd && !openbsd

package supervise

// This does not compile, on purpose: a lock that cannot stop its command would
// be worse than no command.
var _ int = "cmd/dlm needs Linux, macOS, FreeBSD or OpenBSD: dlm run rests on process groups and signals"
