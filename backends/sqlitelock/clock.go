package sqlitelock

import "time"

// clock is the time that leases are measured by: it goes on while the machine
// sleeps, and nobody can set it. It begins anew when the machine boots, so its
// readings mean something only together with the name of the boot.
type clock struct {
	boot string
	now  func() (int64, error) // nanoseconds, above 0
}

// longest bounds what is added to a reading, so that the sum cannot overflow.
// It is 146 years, longer than any boot.
const longest = time.Duration(1) << 62

// after is the reading of the clock when d will have passed since now.
func after(now int64, d time.Duration) int64 { return now + int64(min(d, longest)) }
