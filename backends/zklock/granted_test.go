package zklock

import (
	"errors"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// A session that ends between the answer to a creation and its use leaves nothing
// to be granted.
func TestNothingIsGrantedAfterTheSession(t *testing.T) {
	t.Parallel()
	b, err := New([]string{"127.0.0.1:1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
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
