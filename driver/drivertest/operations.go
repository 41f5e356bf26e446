package drivertest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// opBytes is how many bytes stand for one operation.
const opBytes = 3

// Operations runs a few hundred random operations on the store, one after
// another, and compares every answer with that of a model of the contract. The
// same seed gives the same operations. Time passes in few and coarse steps, in
// which everything expires.
//
// Where the contract leaves a choice, the model leaves it too.
func Operations(t *testing.T, seed uint64, open func(t *testing.T) *Harness) {
	t.Helper()
	const count = 400
	rnd := rand.New(rand.NewPCG(seed, 0))
	script := make([]byte, count*opBytes)
	for i := range script {
		script[i] = byte(rnd.Uint32())
	}
	if err := attempts(t, open, func(h *Harness) error { return operate(t, h, script) }); err != nil {
		t.Errorf("seed %d: %v", seed, err)
	}
}

// operate runs the operations that a byte string stands for.
func operate(t testing.TB, h *Harness, script []byte) error {
	e := newEnv(t, h)
	o := newOperator(e)
	err := e.protect(func() {
		for len(script) >= opBytes {
			o.step(script[0], script[1], script[2])
			script = script[opBytes:]
		}
	})
	if err != nil {
		err = fmt.Errorf("%w\nafter:\n%s", err, strings.Join(o.log, "\n"))
	}
	return errors.Join(err, e.finish())
}

// operator applies operations to a store and to a model.
type operator struct {
	*env
	model   *model
	start   time.Time
	clients []*client
	leases  map[string]known // what each owner knows of each key
	steps   int              // how often time has passed
	log     []string
}

// known is the last grant that an owner saw.
type known struct {
	lease  driver.Lease
	number int // in the model
}

const (
	opOwners = 5
	opMargin = 150 * time.Millisecond
	// maxSteps bounds how often time passes where that takes time.
	maxSteps = 2
)

func newOperator(e *env) *operator {
	o := &operator{env: e, start: time.Now(), leases: make(map[string]known)}
	life := e.props.LivenessWindow / 4 * 3
	if life == 0 {
		life = 1000 * time.Hour // tickets of a living session do not lapse
	}
	o.model = newModel(life)
	for range 3 {
		o.clients = append(o.clients, e.open())
	}
	return o
}

// tick brings the model's clock up to date, after waiting until nothing is
// about to end. Where time is exact there is no doubt.
func (o *operator) tick() {
	o.model.now = time.Since(o.start)
	if o.h.exact {
		return
	}
	for {
		until := o.model.doubt(opMargin)
		if until == 0 {
			return
		}
		pass(o.start.Add(until))
		o.model.now = time.Since(o.start)
	}
}

// step is one operation: what, by whom on which key, and a detail.
func (o *operator) step(what, who, detail byte) {
	owner := fmt.Sprintf("o%d", int(who)%opOwners)
	key := o.keyFor(int(who) / opOwners)
	cl := o.clients[int(detail)%len(o.clients)]
	if o.bySession() {
		cl = o.clients[int(who)%opOwners%len(o.clients)] // an owner belongs to a session
	}
	o.tick()
	switch what % 16 {
	case 0, 1, 2, 3, 4, 5:
		o.acquire(cl, key, owner, detail)
	case 6, 7:
		o.extend(cl, key, owner, detail)
	case 8, 9, 10:
		o.release(cl, key, owner)
	case 11:
		o.withdraw(cl, key, owner)
	case 12:
		o.force(cl, key, owner, detail)
	case 13:
		o.reopen(int(detail) % len(o.clients))
	default:
		o.pause(detail)
	}
	o.tick()
	o.compare(o.clients[0], key)
}

// keyFor gives one of three keys: an exclusive one, one with readers, and one
// with permits.
func (o *operator) keyFor(n int) string {
	switch n % 3 {
	case 1:
		if o.props.SharedMode {
			return "shared"
		}
	case 2:
		if o.props.Permits {
			return "permits"
		}
	}
	return "exclusive"
}

func (o *operator) note(format string, args ...any) {
	o.log = append(o.log, fmt.Sprintf("%10v  ", o.model.now)+fmt.Sprintf(format, args...))
	o.log = o.log[max(0, len(o.log)-30):]
}

// bySession says whether grants or tickets last as long as their sessions. Where time
// is real, nothing is then left to run out.
func (o *operator) bySession() bool { return o.props.SessionLeases || o.props.LivenessWindow == 0 }

// ttl is a TTL that outlasts the tickets. Where time is exact, it may also be
// shorter than they are.
func (o *operator) ttl(detail byte) time.Duration {
	ttl := max(2*time.Second, 10*o.unit, o.props.LivenessWindow)
	switch {
	case o.h.exact:
		// Nothing ends at the very moment of an operation: operations come at
		// whole milliseconds.
		ttl = time.Duration(1+int(detail)*int(detail)/8)*time.Millisecond + time.Microsecond
	case o.bySession():
		ttl = o.long // a busy machine may take longer than the other one
	}
	return ttl
}

func (o *operator) acquire(cl *client, key, owner string, detail byte) {
	req := driver.Request{Key: key, Owner: owner, TTL: o.ttl(detail), Limit: 1, Enqueue: detail%4 != 0}
	// What an owner does with a key does not change.
	switch key {
	case "shared":
		if owner < "o3" {
			req.Mode = driver.Shared
		}
	case "permits":
		req.Limit = 2
		if owner == "o4" {
			req.Limit = 3
		}
	}
	if o.model.at(key).ticket(owner) != nil {
		req.Enqueue = true
	}
	settled := o.model.settled(key)
	want := o.model.acquire(req)
	lease, err := cl.acquire(req)
	o.note("acquire %s by %s, %v, limit %d, ttl %v, enqueue %v: token %d, %v; model %+v", key, owner, req.Mode, req.Limit, req.TTL, req.Enqueue, lease.Token, err, want)

	held, refused := errors.AsType[*driver.HeldError](err)
	limit, mismatch := errors.AsType[*driver.LimitError](err)
	switch {
	case want.granted != 0:
		if err != nil {
			o.fatalf("refused: %w", err)
		}
		k := known{lease, want.granted}
		if before := o.leases[key+owner]; before.number == k.number && before.lease.Token != lease.Token {
			o.fatalf("the token changed from %d to %d", before.lease.Token, lease.Token)
		}
		o.leases[key+owner] = k
	case want.limit != 0:
		if !mismatch || limit.Have != want.limit || limit.Want != req.Limit {
			o.fatalf("%v, want a LimitError: have %d, want %d", err, want.limit, req.Limit)
		}
	case !refused:
		o.fatalf("%v, want a HeldError", err)
	default:
		if o.props.FairQueue && (o.h.exact || settled && o.model.settled(key)) && held.Position != want.position {
			o.fatalf("place %d, want %d", held.Position, want.position)
		}
		if held.Holder != "" && o.model.at(key).grant(held.Holder) == nil {
			o.fatalf("the refusal names %q, which does not hold the key", held.Holder)
		}
	}
}

// reasons checks the reason of a loss where there is no doubt about it.
func (o *operator) reason(err error, key string) {
	lost, ok := errors.AsType[*driver.LostError](err)
	if !ok {
		o.fatalf("%v, want a LostError", err)
	}
	if !o.h.exact && !o.model.settled(key) {
		return
	}
	want := driver.ReasonGone
	if len(o.model.at(key).grants) > 0 {
		want = driver.ReasonTaken
	}
	if lost.Reason != want && lost.Reason != driver.ReasonExpired {
		o.fatalf("reason %q, want %q", lost.Reason, want)
	}
}

func (o *operator) extend(cl *client, key, owner string, detail byte) {
	k, ok := o.leases[key+owner]
	if !ok {
		k.lease = driver.Lease{Key: key, Owner: owner, Token: 1 << 50}
	}
	ttl := o.ttl(detail)
	want := o.model.extend(key, owner, k.number, ttl)
	_, err := cl.extend(k.lease, ttl)
	o.note("extend %s by %s, token %d, ttl %v: %v; model %v", key, owner, k.lease.Token, ttl, err, want)
	if want && err != nil {
		o.fatalf("not renewed: %w", err)
	}
	if !want {
		o.reason(err, key)
	}
}

func (o *operator) release(cl *client, key, owner string) {
	k, ok := o.leases[key+owner]
	if !ok {
		k.lease = driver.Lease{Key: key, Owner: owner, Token: 1 << 50}
	}
	want := o.model.release(key, owner, k.number)
	err := cl.release(k.lease)
	o.note("release %s by %s, token %d: %v; model %v", key, owner, k.lease.Token, err, want)
	if want && err != nil {
		o.fatalf("not released: %w", err)
	}
	if !want {
		o.reason(err, key)
	}
}

func (o *operator) withdraw(cl *client, key, owner string) {
	o.model.withdraw(key, owner)
	err := cl.release(driver.Lease{Key: key, Owner: owner})
	o.note("withdraw from %s by %s: %v", key, owner, err)
	if err != nil {
		o.fatalf("not withdrawn: %w", err)
	}
}

func (o *operator) force(cl *client, key, owner string, detail byte) {
	f, ok := driver.As[driver.Forcer](cl.backend)
	if !ok || !o.h.exact && !o.model.settled(key) {
		return
	}
	var token int64
	number := 0
	if k := o.leases[key+owner]; detail%2 == 0 {
		if k.number == 0 {
			return
		}
		token, number = k.lease.Token, k.number
	}
	want := o.model.force(key, number)
	removed, err := f.ForceRelease(o.within(o.patience), key, token)
	o.note("force %s, token %d: %+v, %v; model %v", key, token, removed, err, want)
	if err != nil {
		o.fatalf("not released by force: %w", err)
	}
	var owners []string
	for _, info := range removed {
		owners = append(owners, info.Owner)
	}
	if !slices.Equal(owners, want) {
		o.fatalf("removed %q, want %q", owners, want)
	}
}

// reopen replaces a client by another one.
func (o *operator) reopen(n int) {
	if o.bySession() {
		return // its grants would go with it
	}
	o.note("client %d is replaced", n)
	if err := o.clients[n].backend.Close(); err != nil {
		o.fatalf("Close: %w", err)
	}
	o.clients[n] = o.open()
}

// pause lets time pass.
func (o *operator) pause(detail byte) {
	if o.h.exact {
		d := time.Duration(1+int(detail)*int(detail)/16) * time.Millisecond
		time.Sleep(d)
		o.note("%v pass", d)
		return
	}
	if o.steps == maxSteps || detail > 8 || o.bySession() {
		return
	}
	o.steps++
	o.note("everything ends")
	pass(o.start.Add(o.model.end() + opMargin + 1))
}

// compare checks what the store says of a key.
func (o *operator) compare(cl *client, key string) {
	info, ok := cl.inspect(key)
	if !ok {
		return
	}
	k := o.model.at(key)
	var want, got []string
	for _, g := range k.grants {
		want = append(want, g.owner)
	}
	if o.h.exact {
		want = append(want, "|")
	}
	for _, t := range o.model.live(k) {
		want = append(want, t.owner)
	}
	for i, h := range info.Holders {
		got = append(got, h.Owner)
		if o.h.exact && i < len(k.grants) && h.Remaining != k.grants[i].expires-o.model.now {
			o.fatalf("%q has %v left on %q, want %v", h.Owner, h.Remaining, key, k.grants[i].expires-o.model.now)
		}
	}
	if o.h.exact {
		got = append(got, "|")
	}
	for _, w := range info.Waiters {
		got = append(got, w.Owner)
	}
	// Holders come before waiters, so whether the head of the queue has been
	// given the key or not makes no difference.
	if !o.props.FairQueue {
		slices.Sort(want)
		slices.Sort(got)
	}
	if !slices.Equal(want, got) {
		o.fatalf("%q is held and waited for by %q, want %q", key, got, want)
	}
	if limit := o.model.limit(k, ""); o.h.exact && info.Limit != limit {
		o.fatalf("%q is in use with limit %d, want %d", key, info.Limit, limit)
	}
}
