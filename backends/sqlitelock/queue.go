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

// survey is what a request for a key finds there.
type survey struct {
	held   holding
	token  int64 // of the owner's grant, or 0
	queue  bool  // somebody has a ticket, live or lapsed
	ticket int64 // of the owner, or 0
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
	found, err := t.survey(key, owner)
	if err != nil {
		return lease, nil, err
	}
	held := found.held
	if found.token != 0 {
		if held.mode != req.Mode || held.permits != req.Limit {
			return lease, nil, fmt.Errorf("%w: owner holds key %q in another mode or with another limit", driver.ErrInvalid, req.Key)
		}
		lease = driver.Lease{Key: req.Key, Owner: req.Owner, Token: found.token, TTL: req.TTL, Mode: req.Mode}
		if _, err := t.extend(lease); err != nil {
			return lease, nil, err
		}
		if found.queue {
			_, _, err = t.serve(key, nil, &held)
		}
		return lease, nil, err
	}
	limit := held.permits
	if limit == 0 && found.queue {
		if limit, err = t.limit(key, owner); err != nil {
			return lease, nil, err
		}
	}
	if limit != 0 && limit != req.Limit {
		return lease, nil, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: limit}
	}

	own := ticket{
		id: found.ticket, owner: owner, mode: req.Mode, permits: req.Limit, ttl: req.TTL, manager: req.Manager,
	}
	if req.Enqueue && (found.queue || !held.admits(own.mode, own.permits)) {
		found.queue = true
		if err := t.enqueue(key, &own, life); err != nil {
			return lease, nil, err
		}
	}
	if found.queue {
		lease, n, err := t.serve(key, owner, &held)
		if err != nil || lease.Token != 0 {
			return lease, nil, err
		}
		if n > 0 {
			if held, err = t.holding(key); err != nil {
				return lease, nil, err
			}
		}
	}
	// Without a ticket, the request comes after those who have one.
	free := own.id == 0 && held.admits(own.mode, own.permits)
	if free && found.queue {
		_, waiting, err := t.head(key)
		if err != nil {
			return lease, nil, err
		}
		free = !waiting
	}
	if !free {
		refusal, err = t.refuse(key, own, &held)
		return lease, refusal, err
	}
	lease, err = t.grant(key, own, after(t.now, own.ttl), false)
	return lease, nil, err
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
	_, _, err = t.serve(key, nil, nil)
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
// done, and returns how often it was. held are the present grants, or nil if
// they are not known. The caller, if any, gets its whole TTL, and serve returns
// its lease. To all others the key is handed over: that grant lapses with the
// ticket unless its owner confirms it, so that a dead waiter costs no more than
// its ticket did.
func (t *tx) serve(key, caller []byte, held *holding) (own driver.Lease, n int, err error) {
	for ; ; n++ {
		head, waiting, err := t.head(key)
		if err != nil || !waiting {
			return own, n, err
		}
		if held == nil {
			h, err := t.holding(key)
			if err != nil {
				return own, n, err
			}
			held = &h
		}
		if !held.admits(head.mode, head.permits) {
			return own, n, nil
		}
		if _, err := t.s.exec("DELETE FROM tickets WHERE key = ? AND ticket = ?", key, head.id); err != nil {
			return own, n, err
		}
		expires := after(t.now, head.ttl)
		mine := caller != nil && string(head.owner) == string(caller)
		if !mine {
			expires = min(expires, head.expires)
			t.granted = append(t.granted, head.manager)
		}
		lease, err := t.grant(key, head, expires, !mine)
		if err != nil {
			return own, n, err
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
func (t *tx) refuse(key []byte, own ticket, held *holding) (*driver.HeldError, error) {
	e := &driver.HeldError{Token: held.first, Ticket: own.id}
	if held.n > 0 {
		e.Remaining = time.Duration(held.expires - t.now)
	}
	var holder []byte
	_, err := t.s.row(`SELECT (SELECT owner FROM holds WHERE key = ?1 AND token = ?2),
			(SELECT count(*) FROM tickets WHERE key = ?1 AND ticket <= ?3 AND expires > ?4)`,
		[]any{key, held.first, own.id, t.now}, &holder, &e.Position)
	e.Holder = string(holder)
	return e, err
}

// enqueue takes a ticket, or refreshes the one with the id.
func (t *tx) enqueue(key []byte, own *ticket, life time.Duration) (err error) {
	own.expires = after(t.now, life)
	// A ticket that has lapsed is passed over, but keeps its place for as
	// long again, so that a stall of the file does not cost live waiters
	// theirs.
	dies := after(own.expires, life)
	if own.id != 0 {
		_, err = t.s.exec(`UPDATE tickets SET mode = ?, permits = ?, ttl = ?, expires = ?, dies = ?, manager = ?
			WHERE key = ? AND ticket = ?`,
			own.mode, own.permits, int64(own.ttl), own.expires, dies, []byte(own.manager), key, own.id)
		return err
	}
	if own.id, err = t.next(); err != nil {
		return err
	}
	_, err = t.s.exec(`INSERT INTO tickets (key, ticket, owner, mode, permits, ttl, since, expires, dies, manager)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		key, own.id, own.owner, own.mode, own.permits, int64(own.ttl), t.now, own.expires, dies, []byte(own.manager))
	return err
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

// sums are the columns of a holding.
const sums = "count(*), ifnull(max(mode), 0), ifnull(max(permits), 0), ifnull(min(token), 0), ifnull(min(expires), 0)"

// holding sums up the key's grants. None has expired: dropExpired came before.
func (t *tx) holding(key []byte) (h holding, err error) {
	_, err = t.s.row("SELECT "+sums+" FROM holds WHERE key = ?",
		[]any{key}, &h.n, &h.mode, &h.permits, &h.first, &h.expires)
	return h, err
}

// survey is holding with what concerns one owner.
func (t *tx) survey(key, owner []byte) (s survey, err error) {
	h := &s.held
	_, err = t.s.row("SELECT "+sums+`,
			ifnull(max(CASE WHEN owner = ?2 THEN token END), 0),
			EXISTS (SELECT 1 FROM tickets WHERE key = ?1),
			ifnull((SELECT ticket FROM tickets WHERE key = ?1 AND owner = ?2), 0)
		FROM holds WHERE key = ?1`,
		[]any{key, owner}, &h.n, &h.mode, &h.permits, &h.first, &h.expires, &s.token, &s.queue, &s.ticket)
	return s, err
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
		if _, _, err := t.serve(key, nil, nil); err != nil {
			return err
		}
	}
	_, err = t.s.exec(`DELETE FROM tickets WHERE (key, ticket) IN
		(SELECT key, ticket FROM tickets WHERE dies <= ? ORDER BY dies LIMIT ?)`, t.now, sweepSize)
	return err
}
