package fence

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// What stands beside a guarded file: its record, a lock file, and what is written
// before it takes the place of either of the others.
const (
	recordSuffix = ".fence"
	lockSuffix   = ".fence.lock"
	tempSuffix   = ".fence.tmp"
)

// The pauses between two tries to lock a file.
const (
	minFilePause = time.Millisecond
	maxFilePause = 20 * time.Millisecond
)

// WriteFile replaces the contents of a file, unless a higher token was accepted for
// it before. It is safe among goroutines and processes of one machine, and
// whoever reads the file sees either all of the old contents or all of the new
// ones. perm is as in [os.WriteFile]: for a file that is not there yet, and
// before the umask; an existing file keeps its permissions, but it gets the writer
// as its owner.
//
// Beside the file are two others: name.fence has the highest token that was accepted, and
// name.fence.lock is locked (flock) while somebody writes. The record has the
// permissions of the file, the lock file those of perm when it is made, and whoever
// may open that can hold up writers. Neither may be removed as long as a stale holder may exist, and
// all have to be moved together.
//
// The order is: check, record the token, write the data to a third file,
// rename it; each is on disk before the next begins. So a process or machine that dies
// at any point leaves the old contents or the new ones, and never new ones whose
// token is not on record. If WriteFile fails after the check, the token counts as
// seen. If it fails in its last step, when the folder is synced, then the new contents
// may be seen although they may not survive a loss of power.
//
// What is not guaranteed: anything, if the file is written in other ways too, or
// on a file system that several machines share. The path must not be a symbolic
// link, and the file must not have other names (hard links), which would go on
// to lead to the old contents.
//
// ctx bounds the wait for other writers, who are asked for again every 20ms or
// less, in no order; a process that is stopped while it writes keeps others
// waiting. The error matches [ErrStale], with the path as resource; [dlm.ErrInvalid]
// if an argument is wrong, or the path is no regular file, or ends in the name of
// what stands beside guarded files; the context's cause;
// [errors.ErrUnsupported] where there is no flock (on Windows, for one); or it comes from
// the file system, or says that the record is damaged: then nobody can write
// until it was repaired by hand.
func WriteFile(ctx context.Context, path string, data []byte, perm fs.FileMode, token int64) error {
	w := fileWriter{path: path, perm: perm}
	return w.write(ctx, data, token)
}

// fileWriter is one call of WriteFile.
type fileWriter struct {
	path string
	perm fs.FileMode
	at   func(point string) error // tests stop there, as a crash would; or nil
}

func (w *fileWriter) write(ctx context.Context, data []byte, token int64) (err error) {
	if err := validToken(token); err != nil {
		return err
	}
	switch {
	case ctx == nil:
		return invalidf("context is nil")
	case w.path == "":
		return invalidf("path is empty")
	case w.perm&^fs.ModePerm != 0:
		return invalidf("permissions are %v, must have permission bits only", w.perm)
	}
	for _, suffix := range []string{recordSuffix, lockSuffix, tempSuffix} {
		if strings.HasSuffix(w.path, suffix) {
			return invalidf("path %q ends in %s, as what stands beside guarded files does", w.path, suffix)
		}
	}
	lock, err := w.lock(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }() // which unlocks it

	info, err := os.Lstat(w.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return invalidf("%s is no regular file", w.path)
	}
	highest, err := w.highest()
	if err != nil {
		return err
	}
	if token < highest {
		return &StaleError{Resource: w.path, Token: token, Highest: highest}
	}
	if token > highest {
		record := strconv.AppendInt(nil, token, 10)
		err = w.replace(w.path+recordSuffix, append(record, '\n'), info)
	} else {
		// Whoever wrote the record may have died before it was sure to last.
		err = syncDir(filepath.Dir(w.path))
	}
	if err != nil {
		return err
	}
	return w.replace(w.path, data, info)
}

// lock locks the lock file. Closing it unlocks it.
func (w *fileWriter) lock(ctx context.Context) (*os.File, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	// Some systems lock only what can be written to.
	f, err := os.OpenFile(w.path+lockSuffix, os.O_RDWR|os.O_CREATE, w.perm|0o600)
	if err != nil {
		return nil, err
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for pause := minFilePause; ; pause = min(2*pause, maxFilePause) {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), f.Close())
		}
		locked, err := flock(f)
		if err != nil {
			return nil, errors.Join(&fs.PathError{Op: "flock", Path: f.Name(), Err: err}, f.Close())
		}
		if locked {
			return f, nil
		}
		timer.Reset(pause)
	}
}

// highest reads the record. There is none before the first write.
func (w *fileWriter) highest() (int64, error) {
	name := w.path + recordSuffix
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	line, whole := bytes.CutSuffix(text, []byte("\n"))
	token, err := parseToken(string(line))
	if !whole || err != nil || validToken(token) != nil {
		return 0, fmt.Errorf("dlm: %s is damaged: it must have the highest token that was accepted, and a newline", name)
	}
	return token, nil
}

// replace gives a file new contents in one step. Of two processes only the one that
// has the lock is here, so what a dead one has left is in nobody's use. old is
// the guarded file if it is there, or nil.
func (w *fileWriter) replace(name string, data []byte, old fs.FileInfo) error {
	temp := w.path + tempSuffix
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	perm := w.perm
	if old != nil {
		perm &= old.Mode().Perm() // nobody opens it who may not open the other
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	err = w.fill(f, data, old)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := w.reach("synced"); err != nil {
		return err
	}
	if err := os.Rename(temp, name); err != nil {
		return err
	}
	if err := w.reach("renamed"); err != nil {
		return err
	}
	return syncDir(filepath.Dir(name))
}

func (w *fileWriter) fill(f *os.File, data []byte, old fs.FileInfo) error {
	if old != nil {
		if err := f.Chmod(old.Mode().Perm()); err != nil {
			return err
		}
	}
	if err := w.reach("created"); err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return err
	}
	return f.Sync()
}

// reach is where a test may stop.
func (w *fileWriter) reach(point string) error {
	if w.at == nil {
		return nil
	}
	return w.at(point)
}

// syncDir makes sure that a rename lasts.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
