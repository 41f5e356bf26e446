package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/go-dlm/dlm"
)

// quote shows a text so that it cannot do anything to a terminal or a table:
// what is not printable, and what would be ambiguous, is shown as in Go.
func quote(s string) string {
	q := strconv.Quote(s)
	if q[1:len(q)-1] == s && s != "" && s != "-" && !strings.Contains(s, " ") {
		return s
	}
	return q
}

// printable shows a sentence so that it cannot do anything to a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return utf8.RuneError
		}
		return r
	}, s)
}

// shellQuote shows a text as it can be pasted into a shell, if that is possible.
func shellQuote(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./:@%+=,", r)
	}
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return !plain(r) }) && s[0] != '-' {
		return s
	}
	if q := strconv.Quote(s); strings.Trim(q, `"`) == s {
		return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
	}
	return quote(s)
}

// round makes a duration readable: three digits or so, and no nanoseconds.
func round(d time.Duration) time.Duration {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second)
	case d >= time.Second:
		return d.Round(100 * time.Millisecond)
	}
	return d.Round(time.Millisecond)
}

// table writes aligned columns.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, columns ...string) *table {
	t := &table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.row(columns...)
	return t
}

func (t *table) row(cells ...string) { fmt.Fprintln(t.w, strings.Join(cells, "\t")) }

var lockColumns = []string{"KEY", "HOLDER", "TOKEN", "MODE", "HELD", "REMAINING", "WAITING"}

// lock writes a row for each holder of a key, or one if there is none.
func (t *table) lock(info *dlm.LockInfo) {
	key, waiting := quote(info.Key), strconv.Itoa(len(info.Waiters))
	for _, h := range info.Holders {
		t.row(key, quote(h.Owner), strconv.FormatInt(h.Token, 10), h.Mode.String(), round(h.Held).String(),
			round(h.Remaining).String(), waiting)
	}
	if len(info.Holders) == 0 {
		t.row(key, "-", "-", "-", "-", "-", waiting)
	}
}

func (t *table) flush() error { return t.w.Flush() }

// The JSON forms. Tokens are text, since many programs read numbers as floating
// point; durations are whole milliseconds.
type (
	lockJSON struct {
		Time    string       `json:"time,omitempty"`
		Key     string       `json:"key"`
		Limit   int          `json:"limit"`
		Holders []holderJSON `json:"holders"`
		Waiters []waiterJSON `json:"waiters"`
	}
	holderJSON struct {
		Owner     string `json:"owner"`
		Token     string `json:"token"`
		Mode      string `json:"mode"`
		TTL       int64  `json:"ttl_ms"`
		Held      int64  `json:"held_ms"`
		Remaining int64  `json:"remaining_ms"`
	}
	waiterJSON struct {
		Owner   string `json:"owner"`
		Mode    string `json:"mode"`
		Waiting int64  `json:"waiting_ms"`
	}
	removedJSON struct {
		Key     string       `json:"key"`
		Removed []holderJSON `json:"removed"`
	}
)

func lockToJSON(info *dlm.LockInfo) lockJSON {
	out := lockJSON{Key: info.Key, Limit: info.Limit, Holders: holdersToJSON(info.Holders), Waiters: []waiterJSON{}}
	for _, w := range info.Waiters {
		out.Waiters = append(out.Waiters, waiterJSON{w.Owner, w.Mode.String(), w.Waiting.Milliseconds()})
	}
	return out
}

func holdersToJSON(holders []dlm.HolderInfo) []holderJSON {
	out := []holderJSON{}
	for _, h := range holders {
		out = append(out, holderJSON{
			h.Owner, strconv.FormatInt(h.Token, 10), h.Mode.String(),
			h.TTL.Milliseconds(), h.Held.Milliseconds(), h.Remaining.Milliseconds(),
		})
	}
	return out
}

// writeJSON writes a value on a line.
func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
