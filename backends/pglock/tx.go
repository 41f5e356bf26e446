package pglock

import (
	"context"
	"crypto/sha256"
	"encoding/binary"

	"github.com/jackc/pgx/v5"
)

// LockTx locks a key for the rest of the caller's own transaction: it waits until
// no other transaction has it, or the context ends, which ends the transaction,
// too. The lock is gone with the transaction, however that ends; it has no TTL, no
// token and no queue of dlm's, and has nothing to do with the locks of a manager
// that have the same key.
//
// It is pg_advisory_xact_lock on 64 bits of a hash of the key. Two keys in 2^64
// share a number: their transactions then wait for each other though they need not,
// and who locks several keys at a time can come into a deadlock, which the
// server ends with an error (SQLSTATE 40P01). Advisory locks are one space for the
// whole database, which others may use, too. It works behind a pooler in
// transaction mode. In a transaction above READ COMMITTED, what is read afterwards
// is as old as its first statement: lock first.
func LockTx(ctx context.Context, tx pgx.Tx, key string) error {
	if tx == nil {
		return invalidf("tx is nil")
	}
	if key == "" {
		return invalidf("key is empty")
	}
	_, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1::bigint)", pgx.QueryExecModeExec, lockNumber("dlm key "+key))
	return err
}

// lockNumber is the number of an advisory lock.
func lockNumber(name string) int64 {
	sum := sha256.Sum256([]byte(name))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}
