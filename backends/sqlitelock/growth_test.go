package sqlitelock_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// Released and abandoned locks leave nothing in the file for good, and the log
// is written back: the file does not grow with use.
func TestFileDoesNotGrow(t *testing.T) {
	t.Parallel()
	path := file(t)
	b := open(t, path, nil)
	cycles := 20_000
	if testing.Short() || raceEnabled {
		cycles = 1_000
	}
	size := func() (n int64) {
		for _, suffix := range []string{"", "-wal", "-shm"} {
			info, err := os.Stat(path + suffix)
			if err != nil {
				t.Fatal(err)
			}
			n += info.Size()
		}
		return n
	}
	for i := range cycles {
		req := ask(fmt.Sprintf("key/%d", i), "owner-of-some-length-"+fmt.Sprint(i))
		if i%3 == 0 { // abandoned
			req.TTL = time.Millisecond
			acquire(t, b, req)
			if i%9 == 0 {
				acquire(t, b, try(req.Key+"/held", req.Owner)) // at times with a waiter
				waiter := ask(req.Key+"/held", req.Owner+"/w")
				refused(t, b, waiter)
				release(t, b, driver.Lease{Key: waiter.Key, Owner: req.Owner})
				release(t, b, driver.Lease{Key: waiter.Key, Owner: waiter.Owner})
			}
			continue
		}
		release(t, b, acquire(t, b, req))
	}
	if n := size(); n > 10<<20 {
		t.Errorf("the file has grown to %d bytes", n)
	}
	rows, err := b.Number(t.Context(), "SELECT (SELECT count(*) FROM holds) + (SELECT count(*) FROM tickets)")
	if err != nil || rows > 20 {
		t.Errorf("%d rows are left (%v)", rows, err)
	}
}
