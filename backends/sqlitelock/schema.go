package sqlitelock

import (
	"context"
	"fmt"
	"time"
)

const (
	// applicationID marks the files of this package: "dlmL".
	applicationID = 0x646c6d4c
	// schemaVersion is the file's user_version. A version that changes what
	// the tables mean must also change how meta.boot is written: processes of
	// the older version, which check it in every transaction, then stop.
	schemaVersion = 1

	// blockSize is how many tokens are reserved at a time.
	blockSize = 1 << 20
	// endOfTokens bounds the tokens.
	endOfTokens = 1 << 53
	// lastStart bounds the first token of a new file, in case the wall clock
	// is far off.
	lastStart = 1 << 52
)

// All instants are readings of the clock of the boot that meta names.
//
// A hold's expires - renewed is how long it was to run when it was last
// granted or renewed. Its ticket is the ticket that it was granted for, and
// provisional is 1 until its owner has confirmed it.
//
// A ticket is live until it expires, and loses its place when it dies.
const schemaSQL = `
CREATE TABLE meta (
	id      INTEGER PRIMARY KEY CHECK (id = 1),
	boot    TEXT    NOT NULL,
	counter INTEGER NOT NULL,
	ceiling INTEGER NOT NULL
);
CREATE TABLE holds (
	key         BLOB    NOT NULL,
	owner       BLOB    NOT NULL,
	token       INTEGER NOT NULL,
	mode        INTEGER NOT NULL,
	permits     INTEGER NOT NULL,
	ttl         INTEGER NOT NULL,
	since       INTEGER NOT NULL,
	renewed     INTEGER NOT NULL,
	expires     INTEGER NOT NULL,
	manager     BLOB    NOT NULL,
	ticket      INTEGER NOT NULL,
	provisional INTEGER NOT NULL,
	PRIMARY KEY (key, owner)
) WITHOUT ROWID;
CREATE INDEX holds_expires ON holds (expires);
CREATE INDEX holds_provisional ON holds (manager) WHERE provisional = 1;
CREATE TABLE tickets (
	key     BLOB    NOT NULL,
	ticket  INTEGER NOT NULL,
	owner   BLOB    NOT NULL,
	mode    INTEGER NOT NULL,
	permits INTEGER NOT NULL,
	ttl     INTEGER NOT NULL,
	since   INTEGER NOT NULL,
	expires INTEGER NOT NULL,
	dies    INTEGER NOT NULL,
	manager BLOB    NOT NULL,
	PRIMARY KEY (key, ticket)
) WITHOUT ROWID;
CREATE UNIQUE INDEX tickets_owner ON tickets (key, owner);
CREATE INDEX tickets_dies ON tickets (dies);
`

// setup makes a session's file ready: it creates the tables in a new file,
// refuses a foreign one, and carries one from before the last boot over.
func (b *Backend) setup(ctx context.Context, s *session) error {
	err := b.patiently(ctx, func() error { return b.create(s) })
	if err == nil {
		err = b.patiently(ctx, s.refresh)
	}
	if err != nil {
		return err
	}
	var mode string
	err = b.patiently(ctx, func() error {
		_, err := s.row("PRAGMA journal_mode = WAL", nil, &mode)
		return err
	})
	if err != nil {
		return err
	}
	if mode != "wal" {
		return unusable("%s: the file system does not carry SQLite's write-ahead log", b.path)
	}
	var boot string
	err = b.patiently(ctx, func() error {
		_, err := s.row("SELECT boot FROM meta", nil, &boot)
		return err
	})
	if err == nil && boot != b.clock.boot {
		err = b.patiently(ctx, func() error { return s.durably(func() error { return b.rebase(s) }) })
	}
	if err != nil {
		return err
	}
	return b.checkFiles(s)
}

// refresh makes the connection read which tables there are. One that was opened
// before another process made them knows of none, and if the file is busy when
// SQLite should look again, the answer is "no such table" instead of "busy".
func (s *session) refresh() error {
	var tables int64
	_, err := s.row("SELECT count(*) FROM sqlite_schema", nil, &tables)
	return err
}

// create makes the tables if the file is new.
func (b *Backend) create(s *session) error {
	fresh, err := look(s, b.path)
	if err != nil || !fresh {
		return err
	}
	start := time.Now().UnixMicro()
	if start < 1 || start > lastStart {
		return unusable("%s: cannot create the file while the wall clock says %v", b.path, time.Now())
	}
	return s.durably(func() error {
		// Another process may have been faster.
		if fresh, err := identify(s, b.path); err != nil || !fresh {
			return err
		}
		if _, err := s.conn.ExecContext(background, schemaSQL); err != nil {
			return err
		}
		_, err := s.exec("INSERT INTO meta (id, boot, counter, ceiling) VALUES (1, ?, ?, ?)",
			b.clock.boot, start, start+blockSize)
		if err != nil {
			return err
		}
		_, err = s.conn.ExecContext(background, fmt.Sprintf(
			"PRAGMA application_id = %d; PRAGMA user_version = %d", applicationID, schemaVersion))
		return err
	})
}

// look is identify in a transaction of its own.
func look(s *session, path string) (fresh bool, err error) {
	if _, err := s.exec("BEGIN"); err != nil {
		return false, err
	}
	defer s.rollback()
	return identify(s, path)
}

// identify says whether the session's file is new. A file that is neither new
// nor ours is refused. It is called in a transaction: between two looks, another
// process may make the tables.
func identify(s *session, path string) (fresh bool, err error) {
	var app, version, objects int64
	if _, err := s.row("PRAGMA application_id", nil, &app); err != nil {
		return false, err
	}
	if _, err := s.row("PRAGMA user_version", nil, &version); err != nil {
		return false, err
	}
	switch {
	case app == applicationID && version == schemaVersion:
		return false, nil
	case app == applicationID:
		return false, unusable("%s has schema version %d; this version of dlm knows version %d", path, version, schemaVersion)
	}
	if _, err := s.row("SELECT count(*) FROM sqlite_schema", nil, &objects); err != nil {
		return false, err
	}
	if app != 0 || version != 0 || objects != 0 {
		return false, unusable("%s is a database of another program (application id %#x)", path, uint32(app))
	}
	return true, nil
}

// rebase carries the file over to this boot of the machine. How much time has
// passed is not known, so every hold runs for its whole time from now, and
// nobody is granted its key earlier than a TTL after it was last renewed.
// Whoever waited has to ask again. Tokens go on where no earlier boot can have
// come to.
func (b *Backend) rebase(s *session) error {
	// Another process may have been faster.
	var boot string
	if _, err := s.row("SELECT boot FROM meta", nil, &boot); err != nil || boot == b.clock.boot {
		return err
	}
	now, err := b.clock.now()
	if err != nil {
		return err
	}
	_, err = s.exec("UPDATE holds SET expires = ?1 + (expires - renewed), renewed = ?1, since = ?1", now)
	if err != nil {
		return err
	}
	if _, err := s.exec("DELETE FROM tickets"); err != nil {
		return err
	}
	_, err = s.exec("UPDATE meta SET boot = ?, counter = ceiling, ceiling = ceiling + ?", b.clock.boot, int64(blockSize))
	return err
}

// reserve makes room for another block of tokens. The reservation is on the
// disk before any of them is given out, so a power failure, which may take the
// latest transactions back, cannot take tokens back: after it, the count goes
// on from the ceiling.
func (b *Backend) reserve(ctx context.Context, s *session) error {
	return b.patiently(ctx, func() error {
		return s.durably(func() error {
			_, err := s.exec("UPDATE meta SET ceiling = counter + ?", int64(blockSize))
			return err
		})
	})
}
