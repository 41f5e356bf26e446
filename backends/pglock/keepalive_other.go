//go:build !linux

package pglock

import (
	"net"
	"time"
)

// setUserTimeout does nothing here: the backend's own watch does it.
func setUserTimeout(*net.TCPConn, time.Duration) {}
