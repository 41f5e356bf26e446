package dlm

import (
	"context"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// Mode is how a lock is held.
type Mode = driver.Mode

// The modes of a lock.
const (
	Exclusive = driver.Exclusive
	Shared    = driver.Shared
)

// LockInfo is a snapshot of one key: who holds it and who waits.
type LockInfo = driver.KeyInfo

// HolderInfo describes a lock as the store sees it. Its Owner is the
// [Lock.Value].
type HolderInfo = driver.HolderInfo

var _ = context.Background
var _ time.Duration
