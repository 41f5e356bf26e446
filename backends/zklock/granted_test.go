package zklock

import (
	"errors"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/driver"
)

// A session that ends between the answer to a creation and its use leaves nothing
// to be granted.
func TestNothingIsGrantedAfterTheSession(t *testing.T) {
	t.Parallel()
	b := unreached(t)
	r := b.use(recordID{"k", "owner"})
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.session
	r.s, r.name, r.token = s, "x1-0000000000000000-owner-0000000000", 7
	a := acquisition{b: b, s: s, r: r, req: driver.Request{Key: "k", Owner: "owner", TTL: time.Minute}}
	if lease, err := a.granted(); err != nil || lease.Token != 7 {
		t.Errorf("%+v, %v; want a grant with token 7", lease, err)
	}
	b.expired(s)
	if lease, err := a.granted(); !errors.Is(err, errGone) {
		t.Errorf("%+v, %v; want that the node is gone", lease, err)
	}
}

// A call that has made a node and failed later does not say that it had no effect,
// as long as the node is there; a call that has made none does.
func TestNodeThatWasMadeIsNoRefusal(t *testing.T) {
	t.Parallel()
	b := unreached(t)
	r := b.use(recordID{"k", "owner"})
	a := acquisition{b: b, s: b.session, r: r}
	held := &driver.HeldError{}
	for _, c := range []struct {
		name       string
		made       bool
		node       string
		err        error
		wantUnsure bool
	}{
		{"not connected", true, "node", classify(zk.ErrNoServer, ""), true},
		{"no right to look", true, "node", classify(zk.ErrNoAuth, "/dlm"), true},
		{"withdrawn again", true, "", classify(zk.ErrNoServer, ""), false},
		{"made by an earlier call", false, "node", classify(zk.ErrNoAuth, "/dlm"), false},
		{"refused", true, "node", held, false},
		{"granted", true, "node", nil, false},
	} {
		a.made, r.s, r.name = c.made, a.s, c.node
		got := a.outcome(c.err)
		if c.wantUnsure {
			if !errors.Is(got, errNoReply) || errors.Is(got, driver.ErrNotApplied) || errors.Is(got, driver.ErrInvalid) {
				t.Errorf("%s: %v", c.name, got)
			}
		} else if !errors.Is(got, c.err) || errors.Is(got, errNoReply) {
			t.Errorf("%s: %v, want %v", c.name, got, c.err)
		}
	}
}
