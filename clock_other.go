//go:build !linux

package dlm

import "time"

// systemSuspended is not known here. On the systems where Go's monotonic clock
// stops while the machine is suspended, a lock's deadline then comes late.
var systemSuspended func() time.Duration
