package drivertest

import (
	"slices"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// model is the contract of package driver as a sequential program: what a
// store must answer if nothing happens at the same time. It knows no tokens;
// it gives every grant a number of its own.
type model struct {
	now  time.Duration
	life time.Duration // of a ticket that is not refreshed
	next int           // number of the next grant
	keys map[string]*modelKey
}

type modelKey struct {
	grants []modelGrant // by rising number; none has expired
	queue  []modelTicket
}

type modelGrant struct {
	number    int
	owner     string
	mode      driver.Mode
	limit     int
	expires   time.Duration
	confirmed bool // its owner knows of it
}

type modelTicket struct {
	owner   string
	mode    driver.Mode
	limit   int
	ttl     time.Duration
	expires time.Duration
}

// modelAnswer is what the model expects of a request.
type modelAnswer struct {
	granted  int // the number of the grant, or 0
	limit    int // the limit in force, if that is why it was refused
	position int // the place in the queue
}

func newModel(life time.Duration) *model {
	return &model{life: life, next: 1, keys: make(map[string]*modelKey)}
}

// at returns a key without what is over at this moment.
func (m *model) at(key string) *modelKey {
	k := m.keys[key]
	if k == nil {
		k = &modelKey{}
		m.keys[key] = k
	}
	k.grants = slices.DeleteFunc(k.grants, func(g modelGrant) bool { return g.expires <= m.now })
	// A ticket that has lapsed may come back to its place for as long again.
	k.queue = slices.DeleteFunc(k.queue, func(t modelTicket) bool { return t.expires+m.life <= m.now })
	return k
}

func (k *modelKey) grant(owner string) *modelGrant {
	for i := range k.grants {
		if k.grants[i].owner == owner {
			return &k.grants[i]
		}
	}
	return nil
}

func (k *modelKey) ticket(owner string) *modelTicket {
	for i := range k.queue {
		if k.queue[i].owner == owner {
			return &k.queue[i]
		}
	}
	return nil
}

// live lists the tickets that have not lapsed.
func (m *model) live(k *modelKey) []modelTicket {
	return slices.DeleteFunc(slices.Clone(k.queue), func(t modelTicket) bool { return t.expires <= m.now })
}

// limit is the limit in force for a new request of this owner, or 0.
func (m *model) limit(k *modelKey, owner string) int {
	for _, g := range k.grants {
		return g.limit
	}
	for _, t := range m.live(k) {
		if t.owner != owner {
			return t.limit
		}
	}
	return 0
}

// fits says whether another grant can be made beside those that there are.
func (k *modelKey) fits(mode driver.Mode, limit int) bool {
	readers, others := 0, 0
	for _, g := range k.grants {
		if g.mode == driver.Shared {
			readers++
		} else {
			others++
		}
	}
	if mode == driver.Shared {
		return others == 0
	}
	return readers == 0 && others < limit
}

// serve gives the key to those at the head of the queue. Only the caller's own
// grant is confirmed.
func (m *model) serve(k *modelKey, caller string) {
	for _, t := range m.live(k) {
		if !k.fits(t.mode, t.limit) {
			return
		}
		g := modelGrant{number: m.next, owner: t.owner, mode: t.mode, limit: t.limit, expires: m.now + t.ttl, confirmed: t.owner == caller}
		if !g.confirmed {
			g.expires = min(g.expires, t.expires)
		}
		m.next++
		k.grants = append(k.grants, g)
		k.queue = slices.DeleteFunc(k.queue, func(q modelTicket) bool { return q.owner == t.owner })
	}
}

func (m *model) acquire(req driver.Request) modelAnswer {
	k := m.at(req.Key)
	if g := k.grant(req.Owner); g != nil {
		g.confirmed = true
		g.expires = max(g.expires, m.now+req.TTL)
		number := g.number
		m.serve(k, "")
		return modelAnswer{granted: number}
	}
	if have := m.limit(k, req.Owner); have != 0 && have != req.Limit {
		return modelAnswer{limit: have}
	}
	t := k.ticket(req.Owner)
	if t == nil {
		k.queue = append(k.queue, modelTicket{owner: req.Owner})
		t = &k.queue[len(k.queue)-1]
	}
	t.mode, t.limit, t.ttl, t.expires = req.Mode, req.Limit, req.TTL, m.now+m.life
	m.serve(k, req.Owner)
	if g := k.grant(req.Owner); g != nil {
		return modelAnswer{granted: g.number}
	}
	if !req.Enqueue {
		k.queue = slices.DeleteFunc(k.queue, func(t modelTicket) bool { return t.owner == req.Owner })
		return modelAnswer{}
	}
	return modelAnswer{position: 1 + slices.IndexFunc(m.live(k), func(t modelTicket) bool { return t.owner == req.Owner })}
}

// held says whether the owner has the grant with this number.
func (m *model) held(key, owner string, number int) bool {
	g := m.at(key).grant(owner)
	return g != nil && g.number == number
}

func (m *model) extend(key, owner string, number int, ttl time.Duration) bool {
	if !m.held(key, owner, number) {
		return false
	}
	g := m.at(key).grant(owner)
	g.confirmed = true
	g.expires = max(g.expires, m.now+ttl)
	return true
}

func (m *model) release(key, owner string, number int) bool {
	if !m.held(key, owner, number) {
		return false
	}
	m.withdraw(key, owner)
	return true
}

func (m *model) withdraw(key, owner string) {
	k := m.at(key)
	k.grants = slices.DeleteFunc(k.grants, func(g modelGrant) bool { return g.owner == owner })
	k.queue = slices.DeleteFunc(k.queue, func(t modelTicket) bool { return t.owner == owner })
	m.serve(k, "")
}

// force removes the grant with this number, or all if it is 0.
func (m *model) force(key string, number int) (removed []string) {
	k := m.at(key)
	k.grants = slices.DeleteFunc(k.grants, func(g modelGrant) bool {
		if number != 0 && g.number != number {
			return false
		}
		removed = append(removed, g.owner)
		return true
	})
	m.serve(k, "")
	return removed
}

// settled says whether every grant of the key is known to its owner. Until
// then stores may differ in whether the head of the queue holds the key, or
// only nobody else can have it.
func (m *model) settled(key string) bool {
	k := m.at(key)
	for _, g := range k.grants {
		if !g.confirmed {
			return false
		}
	}
	t := m.live(k)
	return len(t) == 0 || !k.fits(t[0].mode, t[0].limit)
}

// doubt returns a moment after now until which stores may differ, because
// something ends within the margin around now, or because a ticket has lapsed
// and may or may not have lost its place. It returns 0 if there is no doubt.
func (m *model) doubt(margin time.Duration) time.Duration {
	var until time.Duration
	near := func(end time.Duration) {
		if end-margin < m.now && m.now <= end+margin {
			until = max(until, end+margin+1)
		}
	}
	for key := range m.keys {
		k := m.at(key)
		for _, g := range k.grants {
			near(g.expires)
		}
		for _, t := range k.queue {
			near(t.expires)
			if t.expires <= m.now {
				until = max(until, t.expires+m.life+margin+1)
			}
		}
	}
	return until
}

// end is when the last of all grants and tickets is over.
func (m *model) end() time.Duration {
	end := m.now
	for _, k := range m.keys {
		for _, g := range k.grants {
			end = max(end, g.expires)
		}
		for _, t := range k.queue {
			end = max(end, t.expires+m.life)
		}
	}
	return end
}
