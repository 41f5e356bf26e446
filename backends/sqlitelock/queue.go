package sqlitelock

import (
	"fmt"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// holding sums up the grants of one key.
type holding struct {
	n       int
	mode    driver.Mode // of all of them
	permits int         // the limit that they agree on
	first   int64       // the lowest token
	expires int64       // when the first of them does
}

// admits says whether another grant fits beside these.
func (h *holding) admits(mode driver.Mode, permits int) bool {
	switch {
	case h.n == 0:
		return true
	case h.mode != mode:
		return false
	default:
		return mode == driver.Shared || h.n < permits
	}
}

// ticket is a place in a key's queue.
type ticket struct {
	id      int64
	owner   []byte
	mode    driver.Mode
	permits int
	ttl     time.Duration
	expires int64
	manager string
}

// acquire is one call of [Backend.Acquire]. The refusal is a [driver.HeldError]
// whose transaction is kept: a ticket may have been taken, and others served.
// life is how long a ticket lasts.
func (t *tx) acquire(req driver.Request, life time.Duration) (lease driver.Lease, refusal *driver.HeldError, err error) {
	key, owner := []byte(req.Key), []byte(req.Owner)
	if err := t.sweep(); err != nil {
		return lease, nil, err
	}
	if err := t.dropExpired(key); err != nil {
		return lease, nil, err
	}
	held, err := t.holding(key)
	if err != nil {
		return lease, nil, err
	}
	if held.n > 0 {
		lease, found, err := t.confirm(key, owner, req)
		if found && err == nil {
			_, err = t.serve(key, nil)
		}
		if found || err != nil {
			return lease, nil, err
		}
	}

	queue, err := t.queued(key)
	if err != nil {
		return lease, nil, err
	}
	var own ticket
	limit := held.permits
	if queue {
		if own, err = t.ticket(key, owner); err != nil {
			return lease, nil, err
		}
		if held.n == 0 {
			if limit, err = t.limit(key, owner); err != nil {
				return lease, nil, err
			}
		}
	}
	if limit != 0 && limit != req.Limit {
		return lease, nil, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: limit}
	}

	// Without a ticket of its own, the request comes after those who have one.
	tail := ticket{owner: owner, mode: req.Mode, permits: req.Limit, ttl: req.TTL, manager: req.Manager}
	if queue || !held.admits(tail.mode, tail.permits) {
		if req.Enqueue {
			if own, err = t.enqueue(key, own.id, tail, life); err != nil {
				return lease, nil, err
			}
		}
		granted, err := t.serve(key, owner)
		if err != nil || granted.Token != 0 {
			return granted, nil, err
		}
		if held, err = t.holding(key); err != nil {
			return lease, nil, err
		}
		waiting := false
		if own.id == 0 {
			if _, waiting, err = t.head(key); err != nil {
				return lease, nil, err
			}
		}
		if own.id != 0 || waiting || !held.admits(tail.mode, tail.permits) {
			refusal, err = t.refuse(key, own, held)
			return lease, refusal, err
		}
	}
	lease, err = t.grant(key, tail, after(t.now, tail.ttl), false)
	return lease, nil, err
}

// confirm renews the owner's grant, if there is one.
func (t *tx) confirm(key, owner []byte, req driver.Request) (lease driver.Lease, found bool, err error) {
	var token int64
	var mode driver.Mode
	var permits int
	found, err = t.s.row("SELECT token, mode, permits FROM holds WHERE key = ? AND owner = ?",
		[]any{key, owner}, &token, &mode, &permits)
	if err != nil || !found {
		return lease, false, err
	}
	if mode != req.Mode || permits != req.Limit {
		return lease, true, fmt.Errorf("%w: owner holds key %q in another mode or with another limit", driver.ErrInvalid, req.Key)
	}
	lease = driver.Lease{Key: req.Key, Owner: req.Owner, Token: token, TTL: req.TTL, Mode: mode}
	_, err = t.extend(lease)
	return lease, true, err
}

// extend renews a grant and says whether it was there.
func (t *tx) extend(lease driver.Lease) (found bool, err error) {
	n, err := t.s.exec(`UPDATE holds SET ttl = ?1, renewed = ?2, expires = max(expires, ?3), provisional = 0
		WHERE key = ?4 AND owner = ?5 AND token = ?6 AND expires > ?2`,
		int64(lease.TTL), t.now, after(t.now, lease.TTL), []byte(lease.Key), []byte(lease.Owner), lease.Token)
	return n > 0, err
}

// release is one call of [Backend.Release]. The loss is a [driver.LostError]
// whose transaction is kept: what has expired is dropped, and others served.
func (t *tx) release(lease driver.Lease) (loss *driver.LostError, err error) {
	key, owner := []byte(lease.Key), []byte(lease.Owner)
	if err := t.sweep(); err != nil {
		return nil, err
	}
	if err := t.dropExpired(key); err != nil {
		return nil, err
	}
	if lease.Token == 0 {
		if _, err := t.s.exec("DELETE FROM holds WHERE key = ? AND owner = ?", key, owner); err != nil {
			return nil, err
		}
		if _, err := t.s.exec("DELETE FROM tickets WHERE key = ? AND owner = ?", key, owner); err != nil {
			return nil, err
		}
	} else {
		n, err := t.s.exec("DELETE FROM holds WHERE key = ? AND owner = ? AND token = ?", key, owner, lease.Token)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			if loss, err = t.lost(lease); err != nil {
				return nil, err
			}
		}
	}
	_, err = t.serve(key, nil)
	return loss, err
}

// lost says why a grant is not there.
func (t *tx) lost(lease driver.Lease) (*driver.LostError, error) {
	e := &driver.LostError{Key: lease.Key, Token: lease.Token, Reason: driver.ReasonGone}
	var one int
	found, err := t.s.row("SELECT 1 FROM holds WHERE key = ? AND expires > ? LIMIT 1", []any{[]byte(lease.Key), t.now}, &one)
	if found {
		e.Reason = driver.ReasonTaken
	}
	return e, err
}

// serve grants the key to the head of its queue for as long as that can be
// done. The caller, if any, gets its whole TTL, and serve returns its lease. To
// all others the key is handed over: that grant lapses with the ticket unless
// its owner confirms it, so that a dead waiter costs no more than its ticket
// did.
func (t *tx) serve(key, caller []byte) (own driver.Lease, err error) {
	var held holding
	for first := true; ; first = false {
		head, waiting, err := t.head(key)
		if err != nil || !waiting {
			return own, err
		}
		if first {
			if held, err = t.holding(key); err != nil {
				return own, err
			}
		}
		if !held.admits(head.mode, head.permits) {
			return own, nil
		}
		if _, err := t.s.exec("DELETE FROM tickets WHERE key = ? AND ticket = ?", key, head.id); err != nil {
			return own, err
		}
		expires := after(t.now, head.ttl)
		mine := caller != nil && string(head.owner) == string(caller)
		if !mine {
			expires = min(expires, head.expires)
			t.granted = append(t.granted, head.manager)
		}
		lease, err := t.grant(key, head, expires, !mine)
		if err != nil {
			return own, err
		}
		if mine {
			own = lease
		}
		held.n++
		held.mode = head.mode
	}
}

// grant makes a hold. The ticket, if any, has been removed.
func (t *tx) grant(key []byte, to ticket, expires int64, provisional bool) (driver.Lease, error) {
	token, err := t.next()
	if err != nil {
		return driver.Lease{}, err
	}
	_, err = t.s.exec(`INSERT INTO holds
		(key, owner, token, mode, permits, ttl, since, renewed, expires, manager, ticket, provisional)
		VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9, ?10, ?11)`,
		key, to.owner, token, to.mode, to.permits, int64(to.ttl), t.now, expires, []byte(to.manager), to.id, provisional)
	return driver.Lease{Key: string(key), Owner: string(to.owner), Token: token, TTL: to.ttl, Mode: to.mode}, err
}

// refuse describes why the key could not be granted.
func (t *tx) refuse(key []byte, own ticket, held holding) (*driver.HeldError, error) {
	e := &driver.HeldError{Ticket: own.id}
	if held.n > 0 {
		var holder []byte
		if _, err := t.s.row("SELECT owner FROM holds WHERE key = ? AND token = ?", []any{key, held.first}, &holder); err != nil {
			return nil, err
		}
		e.Holder, e.Token, e.Remaining = string(holder), held.first, time.Duration(held.expires-t.now)
	}
	if own.id != 0 {
		_, err := t.s.row("SELECT count(*) FROM tickets WHERE key = ? AND ticket <= ? AND expires > ?",
			[]any{key, own.id, t.now}, &e.Position)
		if err != nil {
			return nil, err
		}
	}
	return e, nil
}

// enqueue takes a ticket, or refreshes the one with this id.
func (t *tx) enqueue(key []byte, id int64, tk ticket, life time.Duration) (ticket, error) {
	tk.id = id
	tk.expires = after(t.now, life)
	// A ticket that has lapsed is passed over, but keeps its place for as
	// long again, so that a stall of the file does not cost live waiters
	// theirs.
	dies := after(tk.expires, life)
	if id != 0 {
		_, err := t.s.exec(`UPDATE tickets SET mode = ?, permits = ?, ttl = ?, expires = ?, dies = ?, manager = ?
			WHERE key = ? AND ticket = ?`, tk.mode, tk.permits, int64(tk.ttl), tk.expires, dies, []byte(tk.manager), key, id)
		return tk, err
	}
	var err error
	if tk.id, err = t.next(); err != nil {
		return tk, err
	}
	_, err = t.s.exec(`INSERT INTO tickets (key, ticket, owner, mode, permits, ttl, since, expires, dies, manager)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		key, tk.id, tk.owner, tk.mode, tk.permits, int64(tk.ttl), t.now, tk.expires, dies, []byte(tk.manager))
	return tk, err
}

// queued says whether the key has tickets, live or lapsed.
func (t *tx) queued(key []byte) (bool, error) {
	var one int
	return t.s.row("SELECT 1 FROM tickets WHERE key = ? LIMIT 1", []any{key}, &one)
}

// ticket returns the owner's ticket, or one with the id 0.
func (t *tx) ticket(key, owner []byte) (tk ticket, err error) {
	_, err = t.s.row("SELECT ticket FROM tickets WHERE key = ? AND owner = ?", []any{key, owner}, &tk.id)
	return tk, err
}

// head returns the live ticket that came first, if there is one.
func (t *tx) head(key []byte) (tk ticket, found bool, err error) {
	found, err = t.s.row(`SELECT ticket, owner, mode, permits, ttl, expires, manager FROM tickets
		WHERE key = ? AND expires > ? ORDER BY ticket LIMIT 1`,
		[]any{key, t.now}, &tk.id, &tk.owner, &tk.mode, &tk.permits, &tk.ttl, &tk.expires, &tk.manager)
	return tk, found, err
}

// limit is the limit that the live tickets of others agree on, or 0.
func (t *tx) limit(key, owner []byte) (permits int, err error) {
	_, err = t.s.row("SELECT permits FROM tickets WHERE key = ? AND owner <> ? AND expires > ? ORDER BY ticket LIMIT 1",
		[]any{key, owner, t.now}, &permits)
	return permits, err
}

// holding sums up the key's grants, which are unexpired: dropExpired came
// before.
func (t *tx) holding(key []byte) (h holding, err error) {
	_, err = t.s.row(`SELECT count(*), ifnull(max(mode), 0), ifnull(max(permits), 0), ifnull(min(token), 0), ifnull(min(expires), 0)
		FROM holds WHERE key = ?`, []any{key}, &h.n, &h.mode, &h.permits, &h.first, &h.expires)
	return h, err
}

// dropExpired removes what has expired on one key.
func (t *tx) dropExpired(key []byte) error {
	if !t.stale {
		return nil
	}
	if _, err := t.s.exec("DELETE FROM holds WHERE key = ? AND expires <= ?", key, t.now); err != nil {
		return err
	}
	_, err := t.s.exec("DELETE FROM tickets WHERE key = ? AND dies <= ?", key, t.now)
	return err
}

// sweepSize bounds how much a transaction tidies up on other keys. A call adds
// one row at most, so nothing piles up.
const sweepSize = 4

// sweep removes some of what has expired on keys that nobody may ask for
// again, and serves those who wait there.
func (t *tx) sweep() error {
	if !t.stale {
		return nil
	}
	var keys [][]byte
	err := t.s.rows("SELECT key FROM holds WHERE expires <= ? ORDER BY expires LIMIT ?", []any{t.now, sweepSize},
		func(scan func(...any) error) error {
			var key []byte
			err := scan(&key)
			keys = append(keys, key)
			return err
		})
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := t.dropExpired(key); err != nil {
			return err
		}
		if _, err := t.serve(key, nil); err != nil {
			return err
		}
	}
	_, err = t.s.exec(`DELETE FROM tickets WHERE (key, ticket) IN
		(SELECT key, ticket FROM tickets WHERE dies <= ? ORDER BY dies LIMIT ?)`, t.now, sweepSize)
	return err
}
