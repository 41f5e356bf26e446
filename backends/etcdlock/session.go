package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

// session is a lease that all locks of one TTL share. It is guarded by
// Backend.mu.
//
// It has a key of its own, which goes with it, so that one watch tells of the
// end of all its locks. That key is also the fence: everything that makes a
// ticket names its revision, so that a withdrawal which rewrites it is sure that
// no request from before comes behind it.
type session struct {
	id    clientv3.LeaseID
	class int64
	ttl   time.Duration // as granted
	name  string        // of its own key
	fence int64         // the revision of that key

	sent    time.Time // when the last renewal that was answered was sent
	asked   time.Time // when the last one was sent
	wanted  bool      // a renewal is wanted now
	ended   bool
	entries map[*entry]struct{}
	idle    time.Time // since when it has no entries
}

const (
	// sessionPatience bounds the making of a lease.
	sessionPatience = 5 * time.Second
	// idleLeast is how long a lease is kept that nobody uses.
	idleLeast = time.Minute
	// streamPause is how long a stream that is being opened may be silent before
	// another one is opened beside it.
	streamPause = 200 * time.Millisecond
	// grantPause is the same for a lease.
	grantPause = 500 * time.Millisecond
)

// age is how long the lease has been running. A machine that was suspended is
// noticed by its wall clock; a wall clock that is set back by the other one.
func (s *session) age(now time.Time) time.Duration {
	return max(now.Sub(s.sent), now.Round(0).Sub(s.sent.Round(0)), 0)
}

// usable says whether a lock should be put on the lease. One that has not been
// renewed for long may still live, but has little to give.
func (s *session) usable(now time.Time) bool { return !s.ended && s.age(now) < s.ttl/2 }

// making is a lease that is being made.
type making struct {
	done chan struct{}
	s    *session
	err  error
}

// session returns a lease for a TTL, and makes it if there is none. Its failure
// is certain.
func (b *Backend) session(ctx context.Context, class int64) (*session, error) {
	for {
		b.mu.Lock()
		now := time.Now()
		s := b.sessions[class]
		if s != nil && s.usable(now) {
			s.idle = now
			if s.age(now) > s.ttl/10 {
				b.renew(s)
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
			return nil, fmt.Errorf("%w: etcdlock: waiting for a lease: %w", driver.ErrNotApplied, ctx.Err())
		case <-b.ctx.Done():
			return nil, driver.ErrClosed
		}
	}
}

// make makes a lease and its key.
func (b *Backend) make(class int64, m *making) {
	ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
	defer cancel()
	s, err := b.newSession(ctx, class)
	b.mu.Lock()
	delete(b.making, class)
	if err == nil && b.ended {
		err = driver.ErrClosed
		defer b.revoke(s.id)
	}
	if err == nil {
		if old := b.sessions[class]; old != nil {
			b.retired[old] = struct{}{}
		}
		b.sessions[class], b.byLease[s.id] = s, s
		for _, l := range b.listeners {
			l.watchSession(s)
		}
		b.keeperNudge()
	}
	b.mu.Unlock()
	m.s, m.err = s, err
	close(m.done)
}

func (b *Backend) newSession(ctx context.Context, class int64) (*session, error) {
	if err := b.setup(ctx); err != nil {
		return nil, sure(err)
	}
	return hedged(ctx, len(b.client.Endpoints()), grantPause, func(ctx context.Context) (*session, error) {
		return b.grant(ctx, class)
	}, func(s *session) {
		b.mu.Lock()
		b.task(func() { b.revoke(s.id) })
		b.mu.Unlock()
	})
}

// grant asks for a lease and makes its key.
func (b *Backend) grant(ctx context.Context, class int64) (*session, error) {
	sent := time.Now()
	granted, err := b.client.Grant(ctx, class)
	if err != nil {
		return nil, sure(classify(ctx, err, b.opts.Prefix))
	}
	s := &session{
		id: granted.ID, class: class, ttl: time.Duration(granted.TTL) * time.Second, sent: sent, asked: sent,
		entries: make(map[*entry]struct{}), idle: sent,
	}
	s.name = b.opts.Prefix + sessionSection + strconv.FormatUint(uint64(s.id), 16)
	put, err := b.client.Put(ctx, s.name, formatVersion, clientv3.WithLease(s.id))
	if err != nil {
		b.mu.Lock()
		b.task(func() { b.revoke(s.id) })
		b.mu.Unlock()
		return nil, sure(classify(ctx, err, b.opts.Prefix))
	}
	s.fence = put.Header.Revision
	return s, nil
}

// sure marks a failure before which nothing of the caller's was sent.
func sure(err error) error {
	if certain(err) {
		return err
	}
	return fmt.Errorf("%w: making a lease: %w", driver.ErrNotApplied, err)
}

// revoke ends a lease that is not needed any more, if the server can be reached.
func (b *Backend) revoke(id clientv3.LeaseID) {
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	_, _ = b.client.Revoke(ctx, id) // or it ends by itself
}

// renew asks for a renewal now. The mutex is held.
func (b *Backend) renew(s *session) {
	if !s.wanted && time.Since(s.asked) > s.ttl/20 {
		s.wanted = true
		b.keeperNudge()
	}
}

func (b *Backend) keeperNudge() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// end notes that a lease has ended: all its locks are lost, and its tickets
// gone. The mutex is held.
func (b *Backend) end(s *session) {
	if s.ended {
		return
	}
	s.ended = true
	if b.sessions[s.class] == s {
		delete(b.sessions, s.class)
	}
	delete(b.retired, s)
	delete(b.byLease, s.id)
	for _, l := range b.listeners {
		l.unwatchSession(s)
	}
	for e := range s.entries {
		b.lose(e, driver.ReasonSession)
	}
	// It may be only its key that is gone.
	b.task(func() { b.revoke(s.id) })
}

// attach notes which lease a ticket belongs to. The mutex is held.
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

// due is when a lease has to be renewed. The mutex is held.
func (s *session) due() time.Time {
	if s.wanted {
		return time.Time{}
	}
	return s.asked.Add(s.ttl / 3)
}

// keepAlive renews all leases until the backend is closed. It is one goroutine,
// with one stream.
func (b *Backend) keepAlive() {
	for failures := 0; b.ctx.Err() == nil; {
		// There is nothing to renew without a lease.
		b.mu.Lock()
		idle := len(b.byLease) == 0
		b.mu.Unlock()
		if idle {
			select {
			case <-b.wake:
			case <-b.ctx.Done():
			}
			continue
		}
		if b.keepAliveStream() {
			failures = 0
		}
		failures++
		pause := min(50*time.Millisecond<<min(failures, 5), time.Second)
		select {
		case <-time.After(pause/2 + rand.N(pause)/2):
		case <-b.ctx.Done():
		}
	}
}

// renewal is a request that was sent and not answered yet.
type renewal struct {
	s  *session
	at time.Time
}

// stream is an open stream of renewals.
type stream struct {
	pb.Lease_LeaseKeepAliveClient
	close context.CancelFunc
}

// openStream opens a stream to a member that answers. Its first answer is that
// to the renewal of s.
func (b *Backend) openStream(s *session) (stream, error) {
	ctx, cancel := context.WithTimeout(b.ctx, 2*time.Second)
	defer cancel()
	return hedged(ctx, len(b.client.Endpoints()), streamPause, func(ctx context.Context) (stream, error) {
		// It outlives the call that opens it.
		own, cancel := context.WithCancel(b.ctx)
		opened := false
		defer func() {
			if !opened {
				cancel()
			}
		}()
		giveUp := context.AfterFunc(ctx, cancel)
		c, err := pb.NewLeaseClient(b.client.ActiveConnection()).LeaseKeepAlive(clientv3.WithRequireLeader(own))
		if err != nil {
			return stream{}, err
		}
		at := time.Now()
		var r *pb.LeaseKeepAliveResponse
		if err = c.Send(&pb.LeaseKeepAliveRequest{ID: int64(s.id)}); err == nil {
			r, err = c.Recv()
		}
		if err == nil && r.ID != int64(s.id) {
			err = errors.New("etcdlock: the answer is to another renewal")
		}
		if err != nil || !giveUp() {
			return stream{}, errors.Join(err, ctx.Err())
		}
		b.renewed(renewal{s: s, at: at}, r.TTL)
		opened = true
		return stream{c, cancel}, nil
	}, func(s stream) { s.close() })
}

// keepAliveStream renews leases through one stream until it breaks or stays
// silent for too long. It says whether anything was answered.
func (b *Backend) keepAliveStream() (answered bool) {
	var lead *session
	b.mu.Lock()
	for _, s := range b.byLease {
		lead = s
		break
	}
	b.mu.Unlock()
	if lead == nil {
		return false
	}
	stream, err := b.openStream(lead)
	if err != nil {
		return false
	}
	answered = true
	ctx, cancel := context.WithCancel(b.ctx)
	answers := make(chan *pb.LeaseKeepAliveResponse)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			select {
			case answers <- r:
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() {
		cancel()
		stream.close()
		<-ended
	}()

	var sent []renewal
	timer := time.NewTimer(0)
	defer timer.Stop()
	first := true
	for {
		now := time.Now()
		b.mu.Lock()
		next := now.Add(time.Hour)
		var todo []*session
		for _, s := range b.byLease {
			if b.abandon(s, now) {
				continue
			}
			if due := s.due(); first || !due.After(now) {
				s.asked, s.wanted = now, false
				todo = append(todo, s)
			}
			if due := s.due(); due.Before(next) {
				next = due
			}
		}
		b.mu.Unlock()
		first = false
		for _, s := range todo {
			sent = append(sent, renewal{s: s, at: time.Now()})
			if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(s.id)}); err != nil {
				return answered
			}
		}
		if len(sent) > 0 {
			// A stream that is silent leads to a member that hangs, or to nobody.
			oldest := sent[0]
			limit := oldest.at.Add(min(max(oldest.s.ttl/6, 250*time.Millisecond), 5*time.Second))
			if !limit.After(now) {
				return answered
			}
			if limit.Before(next) {
				next = limit
			}
		}
		timer.Reset(max(time.Until(next), time.Millisecond))
		select {
		case <-b.ctx.Done():
			return answered
		case <-ended:
			return answered
		case <-b.wake:
		case <-timer.C:
		case r := <-answers:
			if len(sent) == 0 || int64(sent[0].s.id) != r.ID {
				return answered
			}
			answered = true
			b.renewed(sent[0], r.TTL)
			sent = sent[1:]
		}
	}
}

// renewed takes the answer to a renewal. A TTL of zero says that the lease is
// gone; the others are not concerned.
func (b *Backend) renewed(r renewal, ttl int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case r.s.ended:
	case ttl <= 0:
		b.end(r.s)
	case r.at.After(r.s.sent):
		r.s.sent = r.at
	}
}

// abandon gives up a lease that nobody has used for long, or that was replaced.
// The mutex is held.
func (b *Backend) abandon(s *session, now time.Time) bool {
	if len(s.entries) > 0 {
		return false
	}
	_, retired := b.retired[s]
	if now.Sub(s.idle) < max(idleLeast, 3*s.ttl) && !(retired && now.Sub(s.idle) > s.ttl) {
		return false
	}
	b.end(s)
	return true
}

// gone says whether an error means that a lease does not exist.
func gone(err error) bool {
	return errors.Is(err, rpctypes.ErrLeaseNotFound) || err != nil && says(err, rpctypes.ErrLeaseNotFound)
}
