package sqlitelock

import (
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// creating is held while a new file is open other than through SQLite: to
// close any descriptor of a file drops the locks that this process has on it.
var creating sync.Mutex

// maxPath is the longest path that SQLite opens, less the ending of a journal.
const maxPath = 500

// prepare makes sure that the path names a file that is fit to carry locks,
// and creates it if it is missing. It returns the path that does not depend on
// the working directory or on links between folders.
func prepare(path string) (string, os.FileInfo, error) {
	switch {
	case path == "":
		return "", nil, unusable("the path is empty")
	case strings.ContainsRune(path, 0):
		return "", nil, unusable("the path contains a zero byte")
	case os.IsPathSeparator(path[len(path)-1]):
		return "", nil, unusable("%s names a folder, not a file", path)
	}
	full, err := filepath.Abs(path)
	if err != nil {
		return "", nil, unusable("%s: %w", path, err)
	}
	dir, name := filepath.Split(full)
	if name == "" {
		return "", nil, unusable("%s names a folder, not a file", path)
	}
	if len(full) > maxPath {
		return "", nil, unusable("%s: the path is longer than %d bytes", path, maxPath)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, unusable("cannot make the folder of %s: %w", path, err)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return "", nil, unusable("cannot find the folder of %s: %w", path, err)
	}
	if err := checkFolder(dir); err != nil {
		return "", nil, err
	}
	full = filepath.Join(dir, name)
	if err := create(full); err != nil {
		return "", nil, err
	}
	file, err := os.Lstat(full)
	if err != nil {
		return "", nil, unusable("%w", err)
	}
	if err := checkFile(full, file); err != nil {
		return "", nil, err
	}
	return full, file, probe(full, file)
}

// create makes an empty file that only its owner can use, unless there is one.
func create(path string) error {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return nil // what it is, is looked at later
	}
	creating.Lock()
	defer creating.Unlock()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return unusable("cannot create the file: %w", err)
	}
	// A power failure must not take the name away again once tokens have
	// been given out.
	err = errors.Join(f.Chmod(0o600), f.Sync(), f.Close(), syncFolder(filepath.Dir(path)))
	if err != nil {
		return unusable("cannot create %s: %w", path, err)
	}
	return nil
}

func syncFolder(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// checkFolder refuses folders where the file would not be safe.
func checkFolder(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return unusable("%w", err)
	}
	if info.Mode().Perm()&0o002 != 0 && info.Mode()&os.ModeSticky == 0 {
		return unusable("folder %s can be written by everybody, who could replace the file", dir)
	}
	kind, err := remote(dir)
	if err != nil {
		return unusable("%s: %w", dir, err)
	}
	if kind != "" {
		return fmt.Errorf("%w: sqlitelock: %s is on a file system of type %s, which other machines may share: "+
			"leases are timed by the clock of one machine", errors.ErrUnsupported, dir, kind)
	}
	if err := writable(dir); err != nil {
		return unusable("folder %s: %w", dir, err)
	}
	return nil
}

// checkFile refuses what is not a plain file of our own.
func checkFile(path string, file os.FileInfo) error {
	switch mode := file.Mode(); {
	case mode.IsDir():
		return unusable("%s is a folder", path)
	case mode&os.ModeSymlink != 0:
		return unusable("%s is a symbolic link; name the file itself", path)
	case !mode.IsRegular():
		return unusable("%s is not a plain file", path)
	case mode.Perm()&0o022 != 0:
		return unusable("%s can be written by other users (mode %#o)", path, mode.Perm())
	case links(file) > 1:
		return unusable("%s has %d names, and SQLite's log would depend on which is used", path, links(file))
	}
	if err := writable(path); err != nil {
		return unusable("%s: %w", path, err)
	}
	return nil
}

// probe refuses a file of another program without writing to it, as merely
// opening a database may do, and without the locks that this would take. A file
// that changes meanwhile may look damaged this way, so that is found out later.
func probe(path string, file os.FileInfo) error {
	if file.Size() == 0 {
		return nil
	}
	// With a journal beside it, the file may have to be recovered first.
	if _, err := os.Lstat(path + "-journal"); err == nil {
		return nil
	}
	connector, err := sqlite.NewConnector(dsn(path, "mode=ro&immutable=1"))
	if err != nil {
		return fmt.Errorf("sqlitelock: %w", err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	s, err := newSession(db)
	if err != nil {
		return unusable("cannot open %s: %w", path, err)
	}
	_, err = look(s, path)
	if code(err) == sqlite3.SQLITE_NOTADB {
		err = unusable("%s is not a database: %w", path, err)
	} else if code(err) != 0 {
		err = nil
	}
	return errors.Join(err, s.close())
}
