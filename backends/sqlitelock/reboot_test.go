package sqlitelock_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
)

// After a reboot, nobody may be granted a key earlier than a TTL after it was
// last renewed, whatever the clock of the new boot shows.
func TestReboot(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{-50 * time.Minute, 0, 24 * time.Hour} {
		t.Run(ahead.String(), func(t *testing.T) {
			t.Parallel()
			path := file(t)
			before := newFakeClock("first boot")
			old := openAt(t, path, before)
			short := acquire(t, old, ask("short", "a"))
			long := ask("long", "b")
			long.TTL = time.Hour
			acquire(t, old, long)
			before.advance(30 * time.Second)
			long.TTL = time.Second // does not shorten it
			acquire(t, old, long)
			refused(t, old, ask("short", "w"))

			after := newFakeClock("second boot")
			after.advance(ahead)
			b := openAt(t, path, after)
			info := inspect(t, b, "short")
			if owners(info) != "a /" || info.Holders[0].Remaining != time.Minute || info.Holders[0].Held != 0 {
				t.Fatalf("short: %+v", info)
			}
			if got := inspect(t, b, "long").Holders[0].Remaining; got != time.Hour-30*time.Second {
				t.Fatalf("long: %v remaining", got)
			}
			// To open it again changes nothing.
			after.advance(10 * time.Second)
			b = openAt(t, path, after)
			if held := refused(t, b, ask("short", "w")); held.Remaining != 50*time.Second || held.Position != 1 {
				t.Fatalf("%+v", held)
			}
			after.advance(50 * time.Second)
			next := acquire(t, b, ask("short", "w"))
			if next.Token < short.Token+sqlitelock.BlockSize/2 {
				t.Fatalf("token %d follows %d: a power failure may have taken tokens back", next.Token, short.Token)
			}

			// Whoever still goes by the old clock is refused.
			for _, err := range []error{
				extend(t.Context(), old, short),
				old.Release(t.Context(), short),
				func() error { _, err := old.Acquire(t.Context(), ask("x", "x")); return err }(),
				func() error { _, err := old.Inspect(t.Context(), "x"); return err }(),
			} {
				if !errors.Is(err, driver.ErrInvalid) || !contains(err, "taken over") {
					t.Errorf("from before the reboot: %v", err)
				}
			}
		})
	}
}

// A grant that was handed over and never confirmed is no more than that after
// a reboot either.
func TestRebootProvisional(t *testing.T) {
	t.Parallel()
	path := file(t)
	old := openAt(t, path, newFakeClock("first boot"))
	a := acquire(t, old, ask("k", "a"))
	refused(t, old, ask("k", "b"))
	release(t, old, a)
	b := openAt(t, path, newFakeClock("second boot"))
	if info := inspect(t, b, "k"); owners(info) != "b /" || info.Holders[0].Remaining != 7500*time.Millisecond {
		t.Fatalf("%+v", info)
	}
}

// Tokens go on when a block of them is used up, and the ceiling is always
// committed before.
func TestTokenBlocks(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	last := acquire(t, b, ask("k", "o"))
	release(t, b, last)
	for range 3 {
		if err := b.Exec(t.Context(), "UPDATE meta SET counter = ceiling - 2"); err != nil {
			t.Fatal(err)
		}
		for range 5 {
			next := acquire(t, b, ask("k", "o"))
			if next.Token <= last.Token {
				t.Fatalf("token %d follows %d", next.Token, last.Token)
			}
			ceiling, err := b.Number(t.Context(), "SELECT ceiling FROM meta")
			if err != nil || next.Token > ceiling {
				t.Fatalf("token %d is above the ceiling %d (%v)", next.Token, ceiling, err)
			}
			last = next
			release(t, b, last)
		}
	}
	if level, err := b.Number(t.Context(), "PRAGMA synchronous"); err != nil || level != 1 {
		t.Fatalf("synchronous is left at %d (%v)", level, err)
	}
	// A hand-over to many in one step may need a new block half-way.
	w := acquire(t, b, ask("k", "w"))
	for _, owner := range []string{"r1", "r2", "r3", "r4"} {
		req := ask("k", owner)
		req.Mode = driver.Shared
		refused(t, b, req)
	}
	if err := b.Exec(t.Context(), "UPDATE meta SET counter = ceiling - 2"); err != nil {
		t.Fatal(err)
	}
	release(t, b, w)
	if got := owners(inspect(t, b, "k")); got != "r1 r2 r3 r4 /" {
		t.Fatal(got)
	}
}

func TestTokensRunOut(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	if err := b.Exec(t.Context(), "UPDATE meta SET counter = 9007199254740990, ceiling = 9007199254740991"); err != nil {
		t.Fatal(err)
	}
	_, err := b.Acquire(t.Context(), ask("k", "o"))
	if !errors.Is(err, driver.ErrInvalid) || !contains(err, "no tokens left") {
		t.Fatal(err)
	}
}

// A file that is deleted and made anew gives higher tokens than the old one,
// as its counter begins at the wall clock; who still has the old one open gets
// nothing from it any more.
func TestFileDeletedOrReplaced(t *testing.T) {
	t.Parallel()
	path := file(t)
	start := time.Now().UnixMicro()
	old := open(t, path, nil)
	l := acquire(t, old, ask("k", "a"))
	if l.Token < start || l.Token > time.Now().UnixMicro() {
		t.Fatalf("first token %d is not the wall clock in microseconds", l.Token)
	}
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(path + suffix); err != nil {
			t.Fatal(err)
		}
	}
	check := func(word string) {
		t.Helper()
		_, err := old.Acquire(t.Context(), ask("k", "a"))
		for _, err := range []error{err, extend(t.Context(), old, l), old.Release(t.Context(), l)} {
			if !errors.Is(err, driver.ErrInvalid) || !contains(err, word) {
				t.Fatalf("%v; want %q", err, word)
			}
		}
	}
	check("removed")
	next := acquire(t, open(t, path, nil), ask("k", "b"))
	if next.Token <= l.Token {
		t.Fatalf("token %d follows %d", next.Token, l.Token)
	}
	check("replaced")
}

// Whoever opens the file after a part of its log has been deleted no longer
// sees what the others write, so these must stop.
func TestLogDeleted(t *testing.T) {
	t.Parallel()
	for _, suffix := range []string{"-wal", "-shm"} {
		t.Run(suffix, func(t *testing.T) {
			t.Parallel()
			path := file(t)
			old := open(t, path, nil)
			lease := acquire(t, old, ask("k", "a"))
			if err := os.Remove(path + suffix); err != nil {
				t.Fatal(err)
			}
			everyCall(t.Context(), old, lease, func(name string, err error) {
				if !errors.Is(err, driver.ErrInvalid) || !contains(err, suffix+" has been removed") {
					t.Errorf("%s: %v", name, err)
				}
			})
			if err := os.WriteFile(path+suffix, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			everyCall(t.Context(), old, lease, func(name string, err error) {
				if !errors.Is(err, driver.ErrInvalid) || !contains(err, suffix+" has been replaced") {
					t.Errorf("%s: %v", name, err)
				}
			})
		})
	}
}

// A power failure takes the last transactions back, but never tokens: the
// file as it was any time before, since the last reservation, gives higher
// ones than those given meanwhile.
func TestPowerFailure(t *testing.T) {
	t.Parallel()
	path, copied := file(t), file(t)
	b := open(t, path, nil)
	acquire(t, b, ask("before", "o"))
	// Not by this process: closing the files would drop its locks on them.
	for _, suffix := range []string{"", "-wal"} {
		if out, err := exec.CommandContext(t.Context(), "cp", path+suffix, copied+suffix).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	last := driver.Lease{}
	for i := range 200 {
		last = acquire(t, b, ask("k", fmt.Sprint(i)))
		release(t, b, last)
	}
	after := openAt(t, copied, newFakeClock("next boot"))
	if got := owners(inspect(t, after, "before")); got != "o /" {
		t.Fatal(got)
	}
	if next := acquire(t, after, ask("k", "o")); next.Token <= last.Token {
		t.Fatalf("token %d after the failure, %d before", next.Token, last.Token)
	}
}
