package sqlitelock_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"

	"github.com/go-dlm/dlm/driver/drivertest"
)

const nobody = 65534

func init() { roles["open as nobody"] = openAsNobody }

func openAsNobody(_ context.Context, args []string) error {
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(nobody), syscall.Setuid(nobody)); err != nil {
		return err
	}
	b, err := sqlitelock.New(args[0], nil)
	if errors.Is(err, driver.ErrInvalid) {
		fmt.Print("invalid: ", err)
		return nil
	}
	if err != nil {
		return err
	}
	_, err = b.Acquire(context.Background(), try("k", "o"))
	return errors.Join(err, b.Close())
}

func TestFileModes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "new", "folder", "locks.db")
	b := open(t, path, nil)
	acquire(t, b, ask("k", "o"))
	for name, want := range map[string]os.FileMode{
		dir:                       os.ModeDir | 0o755, // was there, is left alone
		filepath.Join(dir, "new"): os.ModeDir | 0o700,
		filepath.Dir(path):        os.ModeDir | 0o700,
		path:                      0o600,
		path + "-wal":             0o600,
		path + "-shm":             0o600,
	} {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", name, info.Mode(), want)
		}
	}
}

// A child process must not inherit the file.
func TestDescriptorsAreNotInherited(t *testing.T) {
	t.Parallel()
	path := file(t)
	b := open(t, path, nil)
	acquire(t, b, ask("k", "o"))
	w := newWaiter(t.Context(), b, "m")
	defer w.close()
	count := func(listing string) int { return strings.Count(listing, "locks.db") }
	own, err := exec.CommandContext(t.Context(), "ls", "-l", fmt.Sprintf("/proc/%d/fd", os.Getpid())).Output()
	if err != nil || count(string(own)) < 3 {
		drivertest.Skip(t, "cannot see the own descriptors: %v\n%s", err, own)
	}
	child, err := exec.CommandContext(t.Context(), "ls", "-l", "/proc/self/fd").Output()
	if err != nil || count(string(child)) != 0 {
		t.Fatalf("the child has the file open: %v\n%s", err, child)
	}
}

func TestPathIsRelativeOrThroughLinks(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	if err := os.Mkdir("real", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", "link"); err != nil {
		t.Fatal(err)
	}
	a := open(t, "link/a %3f?x=1#&.db", nil)
	b := open(t, filepath.Join(dir, "real", "a %3f?x=1#&.db"), nil)
	acquire(t, a, ask("k", "a"))
	refused(t, b, ask("k", "b"))
}

func TestUnusableFiles(t *testing.T) {
	t.Parallel()
	write := func(path, content string, mode os.FileMode) error {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			return err
		}
		return os.Chmod(path, mode)
	}
	database := func(t *testing.T, path string, queries ...string) error {
		if err := write(path, "", 0o600); err != nil {
			return err
		}
		db := raw(t, path)
		for _, q := range queries {
			mustExec(t, db, q)
		}
		return db.Close()
	}
	valid := func(t *testing.T, path string) error {
		b, err := sqlitelock.New(path, nil)
		if err != nil {
			return err
		}
		return b.Close()
	}
	for _, c := range []struct {
		name string
		// make prepares the file and returns the path to open, if it is not
		// the same.
		make func(t *testing.T, path string) (string, error)
		want string
	}{
		{"empty path", func(*testing.T, string) (string, error) { return "", nil }, "path is empty"},
		{"zero byte", func(_ *testing.T, path string) (string, error) { return path + "\x00x", nil }, "zero byte"},
		{"folder", func(_ *testing.T, path string) (string, error) { return path, os.Mkdir(path, 0o700) }, "is a folder"},
		{"long path", func(_ *testing.T, path string) (string, error) {
			return filepath.Join(filepath.Dir(path), strings.Repeat("long/", 100), "locks.db"), nil
		}, "longer than"},
		{"trailing slash", func(_ *testing.T, path string) (string, error) { return path + "/", nil }, "names a folder"},
		{"root folder", func(*testing.T, string) (string, error) { return "/..", nil }, "names a folder"},
		{"below a file", func(_ *testing.T, path string) (string, error) {
			return path + "/locks.db", write(path, "", 0o600)
		}, "cannot make the folder"},
		{"symbolic link", func(t *testing.T, path string) (string, error) {
			return path, errors.Join(valid(t, path+".real"), os.Symlink(path+".real", path))
		}, "symbolic link"},
		{"dangling link", func(_ *testing.T, path string) (string, error) {
			return path, os.Symlink(path+".real", path)
		}, "symbolic link"},
		{"two names", func(t *testing.T, path string) (string, error) {
			return path, errors.Join(valid(t, path), os.Link(path, path+".other"))
		}, "has 2 names"},
		{"pipe", func(_ *testing.T, path string) (string, error) { return path, syscall.Mkfifo(path, 0o600) }, "not a plain file"},
		{"group can write", func(_ *testing.T, path string) (string, error) { return path, write(path, "", 0o620) }, "other users"},
		{"others can write", func(_ *testing.T, path string) (string, error) { return path, write(path, "", 0o602) }, "other users"},
		{"folder open to all", func(_ *testing.T, path string) (string, error) {
			return path, os.Chmod(filepath.Dir(path), 0o777)
		}, "written by everybody"},
		{"short text", func(_ *testing.T, path string) (string, error) { return path, write(path, "hello", 0o600) }, "not a database"},
		{"long text", func(_ *testing.T, path string) (string, error) {
			return path, write(path, strings.Repeat("hello ", 10000), 0o600)
		}, "not a database"},
		{"another program's", func(t *testing.T, path string) (string, error) {
			return path, database(t, path, "PRAGMA application_id = 77", "CREATE TABLE t (a)")
		}, "another program (application id 0x4d)"},
		{"another program's, with a log", func(t *testing.T, path string) (string, error) {
			return path, database(t, path, "PRAGMA journal_mode = WAL", "CREATE TABLE t (a)")
		}, "another program (application id 0x0)"},
		{"another program's, without tables", func(t *testing.T, path string) (string, error) {
			return path, database(t, path, "PRAGMA user_version = 3")
		}, "another program"},
		{"later version", func(t *testing.T, path string) (string, error) {
			return path, errors.Join(valid(t, path), database2(t, path, "PRAGMA user_version = 99"))
		}, "schema version 99; this version of dlm knows version 1"},
		{"no tables", func(t *testing.T, path string) (string, error) {
			return path, errors.Join(valid(t, path), database2(t, path, "DROP TABLE meta"))
		}, "no such table"},
		{"no counter", func(t *testing.T, path string) (string, error) {
			return path, errors.Join(valid(t, path), database2(t, path, "DELETE FROM meta"))
		}, "no sound counter"},
		{"bad counter", func(t *testing.T, path string) (string, error) {
			return path, errors.Join(valid(t, path), database2(t, path, "UPDATE meta SET counter = ceiling + 1"))
		}, "no sound counter"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			path, err := c.make(t, file(t))
			if err != nil {
				t.Fatal(err)
			}
			before := snapshot(t, filepath.Dir(path))
			b, err := sqlitelock.New(path, nil)
			if err == nil {
				b.Close()
			}
			if !errors.Is(err, driver.ErrInvalid) || !contains(err, c.want) {
				t.Fatalf("New: %v; want %q", err, c.want)
			}
			if strings.Contains(c.name, "another program") || strings.Contains(c.name, "version") {
				if after := snapshot(t, filepath.Dir(path)); after != before {
					t.Fatalf("New wrote to the folder:\n%s\nbefore:\n%s", after, before)
				}
			}
		})
	}
}

// database2 changes a file that exists.
func database2(t *testing.T, path string, query string) error {
	db := raw(t, path)
	mustExec(t, db, query)
	return db.Close()
}

// snapshot describes the files of a folder.
func snapshot(t *testing.T, dir string) string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err.Error()
	}
	var s strings.Builder
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		s.WriteString(fmt.Sprintln(e.Name(), info.Size(), info.Mode(), info.ModTime()))
	}
	return s.String()
}

// A database of another program that is open elsewhere, with changes only in
// its log, is left alone too.
func TestForeignFileInUse(t *testing.T) {
	t.Parallel()
	path := file(t)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	db := raw(t, path)
	for _, q := range []string{"PRAGMA journal_mode = WAL", "PRAGMA application_id = 77", "CREATE TABLE t (a)"} {
		mustExec(t, db, q)
	}
	if b, err := sqlitelock.New(path, nil); err == nil {
		b.Close()
		t.Fatal("New took it")
	} else if !errors.Is(err, driver.ErrInvalid) {
		t.Fatal(err)
	}
	var tables int
	if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM sqlite_schema").Scan(&tables); err != nil || tables != 1 {
		t.Fatal(tables, err)
	}
}

// Damage is reported as such, and at once, wherever it is met.
func TestDamagedFile(t *testing.T) {
	t.Parallel()
	path := file(t)
	b, err := sqlitelock.New(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	acquire(t, b, ask("k", "o"))
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	junk := []byte(strings.Repeat("\xff", 4096))
	for at := int64(4096); at < info.Size(); at += 4096 {
		if _, err := f.WriteAt(junk, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	b, err = sqlitelock.New(path, nil)
	if err == nil {
		defer b.Close()
		_, err = b.Acquire(t.Context(), ask("k", "o2"))
	}
	if !errors.Is(err, driver.ErrInvalid) || !contains(err, "malformed") {
		t.Fatal(err)
	}
}

// Damage done while the file is in use ends calls with an error, never with a
// grant.
func TestDamagedWhileInUse(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	acquire(t, b, ask("k", "o"))
	if err := b.Exec(t.Context(), "DROP TABLE holds"); err != nil {
		t.Fatal(err)
	}
	_, err := b.Acquire(t.Context(), ask("k", "o2"))
	if !errors.Is(err, driver.ErrInvalid) || !errors.Is(err, driver.ErrNotApplied) {
		t.Fatal(err)
	}
}

// The permissions are tried by an ordinary user, as root may do everything.
func TestPermissions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		make func(t *testing.T, path string) error
		want string
	}{
		{"fine", func(*testing.T, string) error { return nil }, ""},
		{"read-only file", func(t *testing.T, path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, nobody, nobody), os.Chmod(path, 0o400))
		}, "permission denied"},
		{"unreadable file", func(t *testing.T, path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, nobody, nobody), os.Chmod(path, 0o200))
		}, "permission denied"},
		{"read-only folder", func(_ *testing.T, path string) error { return os.Chmod(filepath.Dir(path), 0o500) }, "permission denied"},
		{"closed folder", func(_ *testing.T, path string) error { return os.Chmod(filepath.Dir(path), 0) }, "permission denied"},
		{"read-only folder, valid file", func(t *testing.T, path string) error {
			if out, err := tryOpen(t, path); err != nil || out != "" {
				return fmt.Errorf("%s (%w)", out, err)
			}
			return os.Chmod(filepath.Dir(path), 0o500)
		}, "permission denied"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(worldDir(t), "folder")
			if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, nobody, nobody)); err != nil {
				drivertest.Skip(t, "only root can try this: %v", err)
			}
			path := filepath.Join(dir, "locks.db")
			if err := c.make(t, path); err != nil {
				t.Fatal(err)
			}
			out, err := tryOpen(t, path)
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if c.want == "" && out != "" || c.want != "" && !(strings.HasPrefix(out, "invalid: ") && strings.Contains(out, c.want)) {
				t.Fatalf("got %q, want %q", out, c.want)
			}
		})
	}
}

// worldDir is a folder that other users can reach.
func worldDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// tryOpen opens and uses the file as an ordinary user, and returns the error's
// text.
func tryOpen(t *testing.T, path string) (string, error) {
	out, err := childCommand(t.Context(), "open as nobody", path).CombinedOutput()
	return string(out), err
}

func TestReadOnlyFileSystem(t *testing.T) {
	t.Parallel()
	dir := mount(t, "size=1m")
	path := filepath.Join(dir, "locks.db")
	b, err := sqlitelock.New(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := sqlitelock.New(path, nil); !errors.Is(err, driver.ErrInvalid) || !contains(err, "read-only") {
		t.Fatal(err)
	}
}

// mount makes a file system of its own for the test.
func mount(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options+",mode=0700"); err != nil {
		drivertest.Skip(t, "only root can try this: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// A full disk refuses what is new, certainly without effect.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	dir := mount(t, "size=400k")
	b, err := sqlitelock.New(filepath.Join(dir, "locks.db"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer closeBackend(t, b)
	fill(t, b, func() error { return nil })
}

func TestRemoteFileSystems(t *testing.T) {
	t.Parallel()
	for _, magic := range []uint32{unix.NFS_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CEPH_SUPER_MAGIC, unix.V9FS_MAGIC, unix.FUSE_SUPER_MAGIC} {
		if sqlitelock.RemoteTypes[magic] == "" {
			t.Errorf("%#x is not refused", magic)
		}
	}
	for _, magic := range []uint32{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC, unix.OVERLAYFS_SUPER_MAGIC} {
		if kind := sqlitelock.RemoteTypes[magic]; kind != "" {
			t.Errorf("%#x is refused as %s", magic, kind)
		}
	}
	// procfs is neither, and cannot carry a file; a refusal is tried for real
	// where one is at hand.
	if err := unix.Access("/proc/self", unix.F_OK); err == nil {
		if _, err := sqlitelock.New("/proc/self/locks.db", nil); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("in /proc: %v", err)
		}
	}
}
