package zklock

import "time"

// mindPause is how often the minder looks.
const mindPause = 200 * time.Millisecond

// mind looks after what belongs to the session, until the backend is closed.
func (b *Backend) mind() {
	tick := time.NewTicker(min(mindPause, b.opts.SessionTimeout/16))
	defer tick.Stop()
	for {
		select {
		case <-b.closed:
			return
		case <-tick.C:
		}
		b.mu.Lock()
		now, s := time.Now(), b.session
		if now.Sub(b.minded) > max(s.timeout/8, 2*mindPause) {
			b.stalled = now
		}
		b.minded = now
		if b.minding && s.up && now.Sub(b.mindingSince) > max(s.timeout/5, time.Second) && s.wire != nil {
			// The client would notice only after two thirds of the time-out that its
			// server hangs. Another one may serve us in time.
			_ = s.wire.Close()
		}
		if b.minding || !s.up || b.ended {
			b.mu.Unlock()
			continue
		}
		// What takes a request is done beside, so that no stall is seen while the
		// server is slow.
		jobs := b.due(s, now)
		if jobs.any() {
			b.minding, b.mindingSince = true, now
			b.wg.Go(func() {
				jobs.do(b, s)
				b.mu.Lock()
				defer b.mu.Unlock()
				b.minding = false
			})
		}
		b.mu.Unlock()
	}
}

// jobs is what the minder has to do.
type jobs struct {
	beat  bool
	watch []*record
	token []int64
	tidy  []string
	until time.Time // when nothing more is to be watched
}

func (j *jobs) any() bool { return j.beat || len(j.watch) > 0 || len(j.tidy) > 0 }

// due finds out what is to be done. The mutex is held.
func (b *Backend) due(s *session, now time.Time) jobs {
	var j jobs
	used := false
	for _, r := range b.records {
		if r.s != s || r.name == "" {
			continue
		}
		used = true
		if r.leaving || now.Sub(r.since) < mindPause {
			continue
		}
		// Most nodes have gone by now, without the request that this costs. The watch
		// serves the owner, be it a holder or a waiter, and whoever of our own waiters
		// stands behind it.
		if !s.watched(r) {
			j.watch, j.token = append(j.watch, r), append(j.token, r.token)
		}
	}
	n := len(s.proofs)
	j.until = now.Add(s.timeout / 8)
	j.beat = used && (n == 0 || now.Sub(s.proofs[n-1]) >= s.timeout/8)
	for key := range b.tidy {
		delete(b.tidy, key)
		if b.keys[key] == nil {
			j.tidy = append(j.tidy, key)
		}
	}
	return j
}

// do does it. What fails will be due again, or is done by others.
func (j *jobs) do(b *Backend, s *session) {
	if j.beat {
		_ = s.beat()
	}
	_ = inFlight(len(j.watch), func(i int) error {
		if time.Now().After(j.until) {
			return nil // many take long, and the next beat must not wait for them
		}
		return b.watchOwn(s, j.watch[i], j.token[i])
	})
	_ = inFlight(len(j.tidy), func(i int) error {
		// It is refused as long as the key has nodes.
		if err := s.conn.Delete(b.parent(j.tidy[i]), -1); err != nil && !refusal(err) {
			return err
		}
		return nil
	})
}
