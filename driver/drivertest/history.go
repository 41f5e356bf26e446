package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// maxToken is the first number that a token must not reach.
const maxToken = int64(1) << 53

// maxProblems bounds how much one history complains.
const maxProblems = 10

// history records all calls to the backends of one store, and checks them
// against each other as they happen. It knows no more than the callers do, so
// it never takes a correct store for a wrong one: a grant is known to be valid
// from the moment its call returned until the start of the call that gives it
// up, or until its TTL, counted from the start of the last call that won or
// renewed it, has run out.
type history struct {
	mu       sync.Mutex
	keys     map[string]*keyHistory
	problems []error
}

// keyHistory is what was seen of one key.
type keyHistory struct {
	claims []*claim
	// newest is the largest token seen.
	newest int64
	// plain says that all requests were for exclusive locks with limit 1, so
	// that no two grants can be valid together.
	plain bool
}

// claim is what one owner did on one key, from its first request to its last.
type claim struct {
	owner  string
	by     *recorder // the client that asked
	mode   driver.Mode
	limit  int
	floor  int64     // the largest token seen when it first asked
	asked  time.Time // start of the last request that was refused
	ticket int64     // the ticket that this refusal told of
	token  int64     // 0 as long as no grant has been seen
	until  time.Time // the grant surely runs until then

	waiting  bool // it may have a ticket
	ended    bool // it has been given up: by a call that has begun, or with its session
	releases int  // how many calls to give it up have begun
	forced   bool // a call to take it away has begun
	gone     bool // the store has said that nothing of it is left
	unsure   bool // a call failed, so anything may be left
	late     bool // that call was a request, which may yet arrive at the store
}

func newHistory() *history { return &history{keys: make(map[string]*keyHistory)} }

// errorf notes what a backend did wrong. h.mu is held.
func (h *history) errorf(format string, args ...any) {
	if len(h.problems) < maxProblems {
		h.problems = append(h.problems, fmt.Errorf(format, args...))
	}
}

// err returns everything that went wrong.
func (h *history) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(h.problems...)
}

// record returns b with its calls recorded.
func (h *history) record(b driver.Backend) (driver.Backend, *recorder) {
	p := b.Properties()
	r := &recorder{history: h, inner: b, session: p.SessionLeases, ticketLife: p.LivenessWindow / 4 * 3}
	return Intercept(b, Hooks{
		Acquire: r.acquire, Extend: r.extend, Release: r.release, Listen: r.listen, ForceRelease: r.force,
		Close: func() error {
			r.sessionEnds()
			return b.Close()
		},
	}), r
}

// recorder records the calls to one backend.
type recorder struct {
	*history
	inner   driver.Backend
	session bool // grants end with the client
	// ticketLife is how long a grant that was handed over surely lasts.
	ticketLife time.Duration
}

// sessionEnds notes that the client's session, if it has one, is about to end.
func (r *recorder) sessionEnds() {
	if !r.session {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range r.keys {
		for _, c := range k.claims {
			if c.by == r && !c.gone {
				c.ended, c.unsure = true, true
			}
		}
	}
}

func (h *history) key(key string) *keyHistory {
	k := h.keys[key]
	if k == nil {
		k = &keyHistory{plain: true}
		h.keys[key] = k
	}
	return k
}

// last returns the owner's newest claim, or nil.
func (k *keyHistory) last(owner string) *claim {
	for _, c := range slices.Backward(k.claims) {
		if c.owner == owner {
			return c
		}
	}
	return nil
}

// granted returns the claim that was granted with this token, or nil.
func (k *keyHistory) granted(token int64) *claim {
	for _, c := range slices.Backward(k.claims) {
		if c.token == token && token != 0 {
			return c
		}
	}
	return nil
}

// valid says whether the claim's grant is known to be valid now.
func (c *claim) valid(now time.Time) bool {
	return c.token != 0 && !c.ended && !c.forced && c.until.After(now)
}

// claim begins a new claim.
func (r *recorder) claim(k *keyHistory, req driver.Request) *claim {
	c := &claim{owner: req.Owner, by: r, mode: req.Mode, limit: req.Limit, floor: k.newest}
	k.claims = append(k.claims, c)
	return c
}

// drift is how much sooner than the store we take a grant to end, for clocks
// that run at different rates.
func drift(ttl time.Duration) time.Duration { return min(ttl/100+time.Millisecond, ttl/2) }

// seen notes that a grant was there when a call returned that began at start,
// when the largest token seen was before. h.mu is held.
func (h *history) seen(k *keyHistory, c *claim, lease driver.Lease, start time.Time, before int64) {
	now := time.Now()
	what := fmt.Sprintf("key %q, owner %q", lease.Key, lease.Owner)
	switch {
	case lease.Token < 1 || lease.Token >= maxToken:
		h.errorf("%s: token %d is not between 1 and 2^53-1", what, lease.Token)
	case c.token == lease.Token:
		// A repetition or a renewal.
	case c.valid(now):
		h.errorf("%s: token changed from %d to %d while the grant was valid", what, c.token, lease.Token)
	case k.granted(lease.Token) != nil:
		h.errorf("%s: token %d was given before, to %q", what, lease.Token, k.granted(lease.Token).owner)
	case lease.Token <= c.floor:
		h.errorf("%s: token %d is not above %d, which was given before the request was made", what, lease.Token, c.floor)
	}
	if k.plain && lease.Token < before {
		h.errorf("%s: token %d is below %d, which was given before the call began", what, lease.Token, before)
	}
	c.token, c.waiting = lease.Token, false
	k.newest = max(k.newest, lease.Token)
	if until := start.Add(lease.TTL - lease.Age - drift(lease.TTL)); until.After(c.until) {
		c.until = until
	}
	h.beside(k, c, what)
}

// beside checks that a grant which is there now can be there beside the others.
// h.mu is held.
func (h *history) beside(k *keyHistory, c *claim, what string) {
	now := time.Now()
	if !c.valid(now) {
		return
	}
	holders := 0
	for _, other := range k.claims {
		if !other.valid(now) {
			continue
		}
		if other.mode == driver.Exclusive {
			holders++
		}
		if other != c && (other.mode != c.mode || other.limit != c.limit) {
			h.errorf("%s: granted %v with limit %d beside a valid %v grant with limit %d of %q",
				what, c.mode, c.limit, other.mode, other.limit, other.owner)
			return
		}
	}
	if c.mode == driver.Exclusive && holders > c.limit {
		h.errorf("%s: granted with token %d while %d others have valid grants, limit %d", what, c.token, holders-1, c.limit)
	}
}

func (r *recorder) acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	r.mu.Lock()
	start := time.Now()
	k := r.key(req.Key)
	if req.Mode != driver.Exclusive || req.Limit != 1 {
		k.plain = false
	}
	c, fresh := k.last(req.Owner), false
	if c == nil || c.ended || c.gone || c.mode != req.Mode || c.limit != req.Limit {
		c, fresh = r.claim(k, req), true
	}
	before, token := k.newest, c.token
	r.mu.Unlock()

	lease, err := r.inner.Acquire(ctx, req)

	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	held, refused := errors.AsType[*driver.HeldError](err)
	switch {
	case err == nil:
		r.checkLease(req, lease)
		if c.token != 0 && c.token != lease.Token && !c.valid(now) {
			// The former grant had run out, and this is another one.
			c = r.claim(k, req)
			c.floor = before
		}
		r.seen(k, c, lease, start, before)
	case refused && c.token != token:
		// The key was handed over after this answer, and the event was faster.
		r.checkHeld(req, held)
	case refused:
		if c.valid(now) {
			r.errorf("key %q: %q was refused though it held the key", req.Key, req.Owner)
		}
		r.checkHeld(req, held)
		if c.token != 0 {
			c, fresh = r.claim(k, req), true
		}
		c.asked, c.ticket = start, held.Ticket
		switch {
		case req.Enqueue:
			c.waiting = true
		case fresh:
			c.gone = true
		}
	case notApplied(err):
		if fresh {
			c.gone = true
		}
	default:
		c.unsure, c.late = true, true
	}
	return lease, err
}

// notApplied says whether a failed request certainly had no effect.
func notApplied(err error) bool {
	return errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) || errors.Is(err, driver.ErrClosed)
}

// checkLease compares a grant with the request. h.mu is held.
func (h *history) checkLease(req driver.Request, l driver.Lease) {
	if l.Key != req.Key || l.Owner != req.Owner || l.Mode != req.Mode {
		h.errorf("key %q, owner %q, %v: the lease says key %q, owner %q, %v", req.Key, req.Owner, req.Mode, l.Key, l.Owner, l.Mode)
	}
	if l.TTL < req.TTL {
		h.errorf("key %q: TTL %v was granted instead of %v", req.Key, l.TTL, req.TTL)
	}
	if l.Age < 0 {
		h.errorf("key %q: age of the lease is %v", req.Key, l.Age)
	}
}

// checkHeld compares a refusal with the request. h.mu is held.
func (h *history) checkHeld(req driver.Request, e *driver.HeldError) {
	if e.Holder == req.Owner {
		h.errorf("key %q: %q was refused because of itself", req.Key, req.Owner)
	}
	if (e.Holder == "") != (e.Token == 0) {
		h.errorf("key %q: the refusal names holder %q with token %d", req.Key, e.Holder, e.Token)
	}
	if e.Position < 0 {
		h.errorf("key %q: place %d in the queue", req.Key, e.Position)
	}
}

func (r *recorder) extend(ctx context.Context, batch []driver.Renewal) {
	r.mu.Lock()
	start := time.Now()
	before := make([]int64, len(batch))
	asked := slices.Clone(batch)
	for i := range batch {
		before[i] = r.key(batch[i].Lease.Key).newest
	}
	r.mu.Unlock()

	r.inner.Extend(ctx, batch)

	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for i := range batch {
		want, got := asked[i].Lease, batch[i].Lease
		k := r.key(want.Key)
		c := k.granted(want.Token)
		if c != nil && c.owner != want.Owner {
			c = nil
		}
		_, lost := errors.AsType[*driver.LostError](batch[i].Err)
		switch {
		case batch[i].Err == nil && (c == nil || c.gone):
			r.errorf("key %q: renewed for %q with token %d, which does not hold it", want.Key, want.Owner, want.Token)
		case batch[i].Err == nil:
			if got.Key != want.Key || got.Owner != want.Owner || got.Token != want.Token {
				r.errorf("key %q: the answer to a renewal is about something else", want.Key)
			}
			if got.TTL < want.TTL {
				r.errorf("key %q: renewed for %v instead of %v", want.Key, got.TTL, want.TTL)
			}
			if !c.ended {
				r.seen(k, c, got, start, before[i])
			}
		case lost && c != nil:
			if c.valid(now) {
				r.errorf("key %q: %q was told of a loss while its grant (token %d) was valid", want.Key, want.Owner, want.Token)
			}
			c.gone = true
		}
	}
}

func (r *recorder) release(ctx context.Context, lease driver.Lease) error {
	r.mu.Lock()
	k := r.key(lease.Key)
	c := k.last(lease.Owner)
	if lease.Token != 0 {
		if c = k.granted(lease.Token); c != nil && c.owner != lease.Owner {
			c = nil
		}
	}
	valid := c != nil && c.valid(time.Now())
	gone := c == nil || c.gone
	if c != nil {
		c.ended = true
		c.releases++
	}
	r.mu.Unlock()

	err := r.inner.Release(ctx, lease)

	r.mu.Lock()
	defer r.mu.Unlock()
	_, lost := errors.AsType[*driver.LostError](err)
	switch {
	case err == nil && lease.Token != 0 && gone:
		r.errorf("key %q: %q released token %d, which it did not hold", lease.Key, lease.Owner, lease.Token)
	case lost && lease.Token == 0:
		r.errorf("key %q: a withdrawal of %q answered %v", lease.Key, lease.Owner, err)
	case lost && valid && !c.forced && c.releases == 1 && c.until.After(time.Now()):
		r.errorf("key %q: %q released token %d while it was valid, and was told of a loss", lease.Key, lease.Owner, lease.Token)
	}
	if c != nil {
		if err == nil || lost {
			c.gone, c.waiting, c.unsure = true, false, c.late
		} else {
			c.unsure = true
		}
	}
	return err
}

func (r *recorder) force(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	f, _ := driver.As[driver.Forcer](r.inner)
	r.mu.Lock()
	k := r.key(key)
	var hit []*claim
	for _, c := range k.claims {
		if c.token != 0 && (token == 0 || c.token == token) {
			c.forced = true
			hit = append(hit, c)
		}
	}
	r.mu.Unlock()

	removed, err := f.ForceRelease(ctx, key, token)

	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		for _, c := range hit {
			c.unsure = true
		}
		return removed, err
	}
	for _, c := range hit {
		c.forced = c.gone
	}
	for _, info := range removed {
		c := k.granted(info.Token)
		if c == nil {
			c = k.last(info.Owner) // a waiter that has not yet seen its grant
		}
		if c == nil || c.gone {
			r.errorf("key %q: took a grant of %q (token %d) away that was not there", key, info.Owner, info.Token)
			continue
		}
		c.forced, c.gone = true, true
	}
	return removed, nil
}

func (r *recorder) listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	n, _ := driver.As[driver.Notifier](r.inner)
	return n.Listen(ctx, manager, func(e driver.Event) {
		if e.Kind == driver.EventGrant {
			r.handedOver(e)
		}
		handle(e)
	})
}

// handedOver notes a grant that came with an event. Package dlm takes it as
// valid from the last request of its owner on, for as long as a ticket lasts.
func (r *recorder) handedOver(e driver.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	lease := e.Lease
	k := r.key(lease.Key)
	c := k.last(lease.Owner)
	switch {
	case c == nil:
		r.errorf("key %q: handed over to %q, which never asked for it", lease.Key, lease.Owner)
	case lease.Token < 1 || lease.Token >= maxToken:
		r.errorf("key %q: handed over to %q with token %d", lease.Key, lease.Owner, lease.Token)
	case c.token == 0 && !c.ended && !c.gone && lease.Token > c.floor:
		c.token, c.waiting = lease.Token, false
		k.newest = max(k.newest, lease.Token)
		if c.ticket == 0 || c.ticket != e.Ticket {
			return // old news
		}
		lasts := lease.TTL
		if r.ticketLife > 0 {
			lasts = min(lasts, r.ticketLife)
		}
		c.until = c.asked.Add(lasts - drift(lasts))
		r.beside(k, c, fmt.Sprintf("key %q, handed over to %q", lease.Key, lease.Owner))
	}
}

// residue compares what is left on a key with what may be left.
func (h *history) residue(info driver.KeyInfo) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := h.key(info.Key)
	for _, holder := range info.Holders {
		c := k.granted(holder.Token)
		if c == nil {
			c = k.last(holder.Owner)
		}
		if c == nil || c.owner != holder.Owner || !c.unsure && (c.gone || c.token != holder.Token && !c.waiting) {
			h.errorf("key %q: a grant of %q (token %d) is left", info.Key, holder.Owner, holder.Token)
		}
	}
	for _, waiter := range info.Waiters {
		if c := k.last(waiter.Owner); c == nil || !c.unsure && (c.gone || !c.waiting) {
			h.errorf("key %q: a ticket of %q is left", info.Key, waiter.Owner)
		}
	}
}

// clean says whether everything on the key has been given up, so that it must
// be free.
func (k *keyHistory) clean() bool {
	return !slices.ContainsFunc(k.claims, func(c *claim) bool { return !c.gone || c.unsure })
}

// waiting is how many owners wait for the key, as far as is known.
func (h *history) waiting(key string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, c := range h.key(key).claims {
		if c.waiting && !c.gone && !c.ended {
			n++
		}
	}
	return n
}

// cleanKeys lists the keys that must be free.
func (h *history) cleanKeys() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var keys []string
	for key, k := range h.keys {
		if k.clean() {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// usedKeys lists all keys.
func (h *history) usedKeys() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := make([]string, 0, len(h.keys))
	for key := range h.keys {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
