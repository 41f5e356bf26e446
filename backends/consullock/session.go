package consullock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// session is a session of Consul that all locks of one class of TTLs share. It
// is guarded by Backend.mu.
//
// It has a key of its own, which goes with it. That key is a fence: everything
// that makes a ticket names its index, so that a withdrawal which rewrites it is
// sure that no request from before comes behind it.
type session struct {
	id    string
	class time.Duration // its TTL
	name  string        // of its own key
	fence uint64        // the index of that key

	sent    time.Time     // when the last renewal that was answered was sent
	wake    chan struct{} // of the goroutine that renews it; has room for one
	ctx     context.Context
	cancel  context.CancelFunc
	ended   bool
	entries map[*entry]struct{}
	idle    time.Time // since when it has no entries
}

const (
	// sessionPatience bounds the making of a session.
	sessionPatience = 5 * time.Second
	// idleLeast is how long a session is kept that nobody uses.
	idleLeast = time.Minute
	// sessionWait is how long a question for the end of a session waits.
	sessionWait = 30 * time.Second
)

// age is how long ago the session was surely alive. A machine that was suspended
// is noticed by its wall clock; a wall clock that is set back by the other one.
func (s *session) age(now time.Time) time.Duration {
	return max(now.Sub(s.sent), now.Round(0).Sub(s.sent.Round(0)), 0)
}

// usable says whether a lock should be put on the session. One that has not been
// renewed for long may still live, but has little to give.
func (s *session) usable(now time.Time) bool { return !s.ended && s.age(now) < s.class/2 }

// lacks is how much of a TTL that begins at a moment the session is not sure to
// last.
func (s *session) lacks(from time.Time, ttl time.Duration) time.Duration {
	return max(ttl-(s.class-s.age(from)), 0)
}

// good says whether a session does for a lock with this TTL.
func good(s *session, ttl time.Duration) bool {
	return s != nil && s.class >= min(ttl, maxSession) && s.usable(time.Now())
}

// making is a session that is being made.
type making struct {
	done chan struct{}
	err  error
}

// session returns a session of a class, and makes it if there is none. Its
// failure is certain.
func (b *Backend) session(ctx context.Context, class time.Duration) (*session, error) {
	for {
		b.mu.Lock()
		now := time.Now()
		s := b.sessions[class]
		if s != nil && s.usable(now) {
			s.idle = now
			if s.age(now) > s.class/10 {
				nudge(s.wake)
			}
			b.mu.Unlock()
			return s, nil
		}
		m := b.making[class]
		if b.ended {
			b.mu.Unlock()
			return nil, driver.ErrClosed
		}
		if m == nil {
			m = &making{done: make(chan struct{})}
			b.making[class] = m
			b.task(func() { b.make(class, m) })
		}
		b.mu.Unlock()
		select {
		case <-m.done:
			if m.err != nil {
				return nil, m.err
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: consullock: waiting for a session: %w", driver.ErrNotApplied, ctx.Err())
		case <-b.ctx.Done():
			return nil, driver.ErrClosed
		}
	}
}

// make makes a session and its key.
func (b *Backend) make(class time.Duration, m *making) {
	ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
	defer cancel()
	s, err := b.newSession(ctx, class)
	b.mu.Lock()
	delete(b.making, class)
	if err == nil && b.ended {
		err = driver.ErrClosed
		defer b.destroy(s.id)
	}
	if err == nil {
		b.sessions[class], b.byID[s.id] = s, s
		b.task(func() { b.keep(s) })
		b.task(func() { b.watchSession(s) })
	}
	b.mu.Unlock()
	m.err = err
	close(m.done)
}

func (b *Backend) newSession(ctx context.Context, class time.Duration) (*session, error) {
	if err := b.setup(ctx); err != nil {
		return nil, sure(err)
	}
	s := &session{class: class, sent: time.Now(), wake: make(chan struct{}, 1), entries: make(map[*entry]struct{})}
	s.idle = s.sent
	err := b.call(ctx, func(ctx context.Context) error {
		// The client's method would leave out a delay of zero, and then it is 15s.
		in := map[string]any{
			"Name": "dlm", "TTL": class.String(), "Behavior": api.SessionBehaviorDelete,
			"LockDelay": b.opts.LockDelay.String(), "NodeChecks": []string{},
		}
		var out struct{ ID string }
		_, err := b.client.Raw().Write("/v1/session/create", in, &out, (&api.WriteOptions{}).WithContext(ctx))
		s.id = out.ID
		return err
	})
	if err != nil {
		return nil, sure(err)
	}
	if s.id == "" {
		return nil, problem(ProblemNotConsul, nil, "it made a session without an ID")
	}
	s.name = b.opts.Prefix + sessionSection + s.id
	results, no, err := b.txn(ctx, []*api.KVTxnOp{{Verb: api.KVLock, Key: s.name, Session: s.id, Value: []byte("1")}})
	if err == nil && no != nil {
		err = fmt.Errorf("consullock: the session's key: %s", no.says)
	}
	if err == nil && (len(results) != 1 || results[0].KV == nil) {
		err = b.hidden()
	}
	if err != nil {
		b.mu.Lock()
		b.task(func() { b.destroy(s.id) })
		b.mu.Unlock()
		return nil, sure(err)
	}
	s.fence = results[0].KV.ModifyIndex
	s.ctx, s.cancel = context.WithCancel(b.ctx)
	return s, nil
}

// sure marks a failure before which nothing of the caller's was sent.
func sure(err error) error {
	if certain(err) {
		return err
	}
	return fmt.Errorf("%w: making a session: %w", driver.ErrNotApplied, err)
}

// destroy ends a session that is not needed any more, if the server can be
// reached.
func (b *Backend) destroy(id string) {
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	_ = b.call(ctx, func(ctx context.Context) error { // or it ends by itself
		_, err := b.client.Session().Destroy(id, (&api.WriteOptions{}).WithContext(ctx))
		return err
	})
}

// keep renews a session until it has ended, every quarter of its TTL, and sooner
// if it is wanted.
func (b *Backend) keep(s *session) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for failures := 0; ; {
		b.mu.Lock()
		pause := s.class/4 - s.age(time.Now())
		b.mu.Unlock()
		if failures > 0 {
			pause = min(50*time.Millisecond<<min(failures, 6), s.class/20)
			pause = pause/2 + rand.N(pause)
		}
		timer.Reset(max(pause, 0))
		select {
		case <-s.ctx.Done():
			return
		case <-timer.C:
		case <-s.wake:
			if failures > 0 {
				continue
			}
		}
		b.mu.Lock()
		over := b.abandon(s, time.Now())
		b.mu.Unlock()
		if over {
			return
		}
		ctx, cancel := context.WithTimeout(s.ctx, max(min(s.class/6, 3*time.Second), 250*time.Millisecond))
		err := b.renew(ctx, s)
		cancel()
		failures++
		if err == nil {
			failures = 0
		}
	}
}

// renew renews a session.
func (b *Backend) renew(ctx context.Context, s *session) error {
	sent := time.Now()
	gone := false
	err := b.call(ctx, func(ctx context.Context) error {
		entry, _, err := b.client.Session().Renew(s.id, (&api.WriteOptions{}).WithContext(ctx))
		if err != nil || entry != nil {
			return err
		}
		// One that has just become the leader may not know of the session yet, and
		// answers nonetheless.
		entry, _, err = b.client.Session().Info(s.id, consistent(ctx))
		if err == nil && entry != nil {
			err = errors.New("the leader did not know the session yet")
		}
		gone = err == nil
		return err
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case gone:
		b.end(s)
	case err == nil && sent.After(s.sent):
		s.sent = sent
	}
	return err
}

// fresh renews a session that has not just been renewed. If that fails, it is as
// old as before.
func (b *Backend) fresh(ctx context.Context, s *session) {
	b.mu.Lock()
	old := !s.ended && s.age(time.Now()) > s.class/10
	b.mu.Unlock()
	if old {
		_ = b.renew(ctx, s)
	}
}

// watchSession waits for the end of a session.
func (b *Backend) watchSession(s *session) {
	var index uint64
	for failures := 0; s.ctx.Err() == nil; {
		ctx, cancel := context.WithTimeout(s.ctx, sessionWait+sessionWait/16+3*time.Second)
		var entry *api.SessionEntry
		var meta *api.QueryMeta
		err := guard(ctx, func(ctx context.Context) (err error) {
			entry, meta, err = b.client.Session().Info(s.id, (&api.QueryOptions{WaitIndex: index, WaitTime: sessionWait}).WithContext(ctx))
			return err
		})
		cancel()
		switch {
		case err != nil:
			failures++
			sleep(s.ctx, backoff(failures))
			continue
		case entry == nil:
			// It may be a new leader that does not know the session yet.
			ctx, cancel := context.WithTimeout(s.ctx, sessionPatience)
			_ = b.renew(ctx, s) // or it is asked again
			cancel()
			sleep(s.ctx, backoff(1))
		}
		failures = 0
		if meta.LastIndex < index {
			index = 0
		} else {
			index = meta.LastIndex
		}
	}
}

// backoff is how long to wait after some failures in a row.
func backoff(failures int) time.Duration {
	d := min(25*time.Millisecond<<min(failures, 6), time.Second)
	return d/2 + rand.N(d)
}

// sleep waits for a time or the end of the context.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// end notes that a session has ended: all its locks are lost, and its tickets
// gone. The mutex is held.
func (b *Backend) end(s *session) {
	if s.ended {
		return
	}
	s.ended = true
	s.cancel()
	if b.sessions[s.class] == s {
		delete(b.sessions, s.class)
	}
	delete(b.byID, s.id)
	for e := range s.entries {
		b.lose(e, driver.ReasonSession)
	}
}

// attach notes which session a ticket belongs to. The mutex is held.
func (b *Backend) attach(e *entry, s *session) {
	if e.session == s {
		return
	}
	if old := e.session; old != nil {
		delete(old.entries, e)
		old.idle = time.Now()
	}
	e.session = s
	if s != nil {
		s.entries[e] = struct{}{}
	}
}

// abandon gives up a session that nobody has used for long, or that was
// replaced. The mutex is held.
func (b *Backend) abandon(s *session, now time.Time) bool {
	if s.ended || len(s.entries) > 0 {
		return s.ended
	}
	retired := b.sessions[s.class] != s
	if now.Sub(s.idle) < max(idleLeast, 3*s.class) && !(retired && now.Sub(s.idle) > s.class) {
		return false
	}
	b.end(s)
	b.task(func() { b.destroy(s.id) })
	return true
}

// refence moves the fences of sessions in whose name requests may be on their
// way, and returns what there is of the lock afterwards: none of them can add to
// that any more.
func (b *Backend) refence(ctx context.Context, e *entry) (state, error) {
	for {
		b.mu.Lock()
		var s *session
		for u := range e.unsure {
			if u.ended {
				delete(e.unsure, u)
				continue
			}
			s = u
		}
		b.mu.Unlock()
		if s == nil {
			return b.read(ctx, e.key)
		}
		results, no, err := b.txn(ctx, []*api.KVTxnOp{
			{Verb: api.KVCheckSession, Key: s.name, Session: s.id},
			{Verb: api.KVSet, Key: s.name, Value: stamp()},
		})
		if err != nil {
			return state{}, err
		}
		b.mu.Lock()
		if no != nil {
			b.end(s)
		} else if len(results) > 0 && results[len(results)-1].KV != nil {
			s.fence = max(s.fence, results[len(results)-1].KV.ModifyIndex)
			delete(e.unsure, s)
		}
		b.mu.Unlock()
	}
}

// fenced finds out why a transaction met another fence than it named.
func (b *Backend) fenced(ctx context.Context, s *session) error {
	var kv *api.KVPair
	err := b.call(ctx, func(ctx context.Context) (err error) {
		kv, _, err = b.client.KV().Get(s.name, consistent(ctx))
		return err
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err != nil:
		return sure(err)
	case kv == nil || kv.Session != s.id:
		b.end(s)
		b.task(func() { b.destroy(s.id) })
	default:
		s.fence = max(s.fence, kv.ModifyIndex)
	}
	return nil
}

// setup looks at the agent unless that was done. If it does not do for locks, it
// fails, and the next call looks again.
func (b *Backend) setup(ctx context.Context) error {
	b.mu.Lock()
	looked := b.looked
	b.mu.Unlock()
	if looked {
		return nil
	}
	info, err := b.self(ctx)
	switch {
	case is(err, ProblemPermission):
		// It may not be asked; then less is found out.
	case err != nil:
		return err
	case older(info.version, oldest):
		return problem(ProblemTooOld, nil, "Consul %s, must be %s or later", info.version, oldest)
	}
	b.mu.Lock()
	b.looked = true
	b.mu.Unlock()
	return nil
}

// agentInfo is what an agent says of itself.
type agentInfo struct {
	version, datacenter, node string
	server                    bool
}

func (b *Backend) self(ctx context.Context) (agentInfo, error) {
	var out struct {
		Config struct {
			Datacenter, NodeName, Version string
			Server                        bool
		}
	}
	err := b.call(ctx, func(ctx context.Context) error {
		_, err := b.client.Raw().Query("/v1/agent/self", &out, (&api.QueryOptions{}).WithContext(ctx))
		if status, ok := errors.AsType[api.StatusError](err); ok && status.Code == http.StatusForbidden {
			return err
		}
		if err == nil && out.Config.Version == "" {
			return problem(ProblemNotConsul, nil, "it does not say its version")
		}
		return err
	})
	c := out.Config
	return agentInfo{version: c.Version, datacenter: c.Datacenter, node: c.NodeName, server: c.Server}, err
}
