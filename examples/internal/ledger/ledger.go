// Package ledger is what the examples protect with locks: a plain file that
// processes read and append to. It stands for the database of a real program.
//
// Nothing in it keeps two processes from reading the same state and both acting
// on it; that is what the locks are for. But it checks fencing tokens: an entry
// whose token is lower than one before it in the file does not count, so a
// process that lost its lock without noticing can do no harm. In SQL the same
// check would be a condition of the write itself:
//
//	UPDATE item SET stock = $1, token = $2 WHERE id = $3 AND token <= $2
package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
)

// ErrStale says that an entry came too late: the holder of a later lock has
// written before.
var ErrStale = errors.New("ledger: somebody with a higher token has written before")

// Entry is a line of the file.
type Entry[T any] struct {
	Token int64 `json:"token"`
	Value T     `json:"value"`
}

// Ledger is an open file. It is for one goroutine at a time; others open the
// file for themselves.
type Ledger[T any] struct {
	file    *os.File
	offset  int64 // of what has not been read yet
	highest int64 // token that was read
	entries []Entry[T]
}

// Open opens a file, which it creates if need be.
func Open[T any](path string) (*Ledger[T], error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	return &Ledger[T]{file: file}, nil
}

// Close closes the file.
func (l *Ledger[T]) Close() error { return l.file.Close() }

// Read returns all entries that count, in order. The slice belongs to the
// ledger.
func (l *Ledger[T]) Read() ([]Entry[T], error) {
	err := l.read(math.MaxInt64)
	return l.entries, err
}

// Append writes an entry. It returns [ErrStale], and the entry does not count,
// if there is an entry with a higher token before it.
//
// The system appends a line in one step, so that the order of the lines is the
// same for all, and with it the answer to which of them count.
func (l *Ledger[T]) Append(token int64, value T) error {
	line, err := json.Marshal(Entry[T]{token, value})
	if err != nil {
		return err
	}
	n, err := l.file.Write(append(line, '\n'))
	if err != nil {
		return err
	}
	end, err := l.file.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	if err := l.read(end - int64(n)); err != nil {
		return err
	}
	if token < l.highest {
		return ErrStale
	}
	return nil
}

// read takes in the lines up to an offset.
func (l *Ledger[T]) read(end int64) error {
	data, err := io.ReadAll(io.NewSectionReader(l.file, l.offset, end-l.offset))
	if err != nil {
		return err
	}
	for {
		line, rest, whole := bytes.Cut(data, []byte{'\n'})
		if !whole {
			return nil // the end, or a line that is being written
		}
		var e Entry[T]
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("%s: byte %d: %w", l.file.Name(), l.offset, err)
		}
		if e.Token >= l.highest {
			l.highest = e.Token
			l.entries = append(l.entries, e)
		}
		l.offset += int64(len(line) + 1)
		data = rest
	}
}
