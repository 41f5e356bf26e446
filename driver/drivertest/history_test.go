package drivertest

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// fake answers what it is told to.
type fake struct {
	answers []fakeAnswer
	now     int
}

type fakeAnswer struct {
	lease   driver.Lease
	err     error
	event   driver.Event
	removed []driver.HolderInfo
}

func (f *fake) next() fakeAnswer {
	f.now++
	return f.answers[f.now-1]
}

func (f *fake) Acquire(context.Context, driver.Request) (driver.Lease, error) {
	a := f.next()
	return a.lease, a.err
}

func (f *fake) Extend(_ context.Context, batch []driver.Renewal) {
	for i := range batch {
		a := f.next()
		batch[i] = driver.Renewal{Lease: a.lease, Err: a.err}
	}
}

func (f *fake) Release(context.Context, driver.Lease) error { return f.next().err }
func (f *fake) Properties() driver.Properties               { return driver.Properties{} }
func (f *fake) Close() error                                { return nil }

func (f *fake) Listen(_ context.Context, _ string, handle func(driver.Event)) error {
	handle(f.next().event)
	return nil
}

func (f *fake) ForceRelease(context.Context, string, int64) ([]driver.HolderInfo, error) {
	a := f.next()
	return a.removed, a.err
}

// TestHistory checks what the recorder complains of, and what not.
func TestHistory(t *testing.T) {
	type call struct {
		op     Op
		owner  string
		token  int64
		change func(*driver.Request)
		wait   time.Duration // before the call
		answer fakeAnswer
	}
	grant := func(owner string, token int64) fakeAnswer {
		return fakeAnswer{lease: driver.Lease{Key: "k", Owner: owner, Token: token, TTL: time.Minute}}
	}
	changed := func(a fakeAnswer, change func(*driver.Lease)) fakeAnswer {
		change(&a.lease)
		return a
	}
	held := func(holder string, token int64) fakeAnswer {
		return fakeAnswer{err: &driver.HeldError{Holder: holder, Token: token}}
	}
	lost := fakeAnswer{err: &driver.LostError{Key: "k", Reason: driver.ReasonGone}}
	shared := func(r *driver.Request) { r.Mode = driver.Shared }
	two := func(r *driver.Request) { r.Limit = 2 }
	acquire := func(owner string, a fakeAnswer) call { return call{op: OpAcquire, owner: owner, answer: a} }
	release := func(owner string, token int64, a fakeAnswer) call {
		return call{op: OpRelease, owner: owner, token: token, answer: a}
	}
	extend := func(owner string, token int64, a fakeAnswer) call {
		return call{op: OpExtend, owner: owner, token: token, answer: a}
	}
	event := func(owner string, token int64) call {
		return call{op: OpListen, answer: fakeAnswer{event: driver.Event{
			Kind: driver.EventGrant, Lease: driver.Lease{Key: "k", Owner: owner, Token: token, TTL: time.Minute},
		}}}
	}
	force := func(owner string, token int64) call {
		return call{op: OpForce, token: token, answer: fakeAnswer{removed: []driver.HolderInfo{{Owner: owner, Token: token}}}}
	}
	with := func(c call, change func(*driver.Request)) call { c.change = change; return c }
	after := func(d time.Duration, c call) call { c.wait = d; return c }
	sharedLease := func(l *driver.Lease) { l.Mode = driver.Shared }
	for _, tt := range []struct {
		name  string
		calls []call
		want  string // part of the complaint, or empty
	}{
		{"one after the other", []call{
			acquire("a", grant("a", 1)), release("a", 1, fakeAnswer{}), acquire("b", grant("b", 2)), acquire("b", grant("b", 2)), extend("b", 2, grant("b", 2)),
			release("b", 2, fakeAnswer{}), release("b", 2, lost),
		}, ""},
		{"refused, then granted after an expiry", []call{
			acquire("a", grant("a", 1)), acquire("b", held("a", 1)), after(time.Minute, acquire("b", grant("b", 2))), extend("a", 1, lost),
		}, ""},
		{"another grant of the same owner", []call{acquire("a", grant("a", 1)), after(time.Minute, acquire("a", grant("a", 2)))}, ""},
		{"handed over", []call{
			acquire("a", grant("a", 1)), acquire("b", held("a", 1)), release("a", 1, fakeAnswer{}), event("b", 2), acquire("b", grant("b", 2)),
		}, ""},
		{"permits", []call{with(acquire("a", grant("a", 1)), two), with(acquire("b", grant("b", 2)), two)}, ""},
		{"readers", []call{
			with(acquire("a", changed(grant("a", 1), sharedLease)), shared), with(acquire("b", changed(grant("b", 2), sharedLease)), shared),
		}, ""},
		{"forced", []call{acquire("a", grant("a", 1)), force("a", 1), acquire("b", grant("b", 2)), extend("a", 1, lost)}, ""},
		{"forced without effect", []call{
			acquire("a", grant("a", 1)), {op: OpForce, token: 7}, acquire("a", grant("a", 1)), extend("a", 1, grant("a", 1)),
		}, ""},

		{"token zero", []call{acquire("a", grant("a", 0))}, "token 0 is not between"},
		{"token too large", []call{acquire("a", grant("a", 1<<53))}, "is not between"},
		{"token of a valid grant changes", []call{acquire("a", grant("a", 1)), acquire("a", grant("a", 2))}, "token changed from 1 to 2"},
		{"token given twice", []call{acquire("a", grant("a", 1)), release("a", 1, fakeAnswer{}), acquire("b", grant("b", 1))}, "token 1 was given before"},
		{"token falls", []call{acquire("a", grant("a", 5)), release("a", 5, fakeAnswer{}), acquire("b", grant("b", 4))}, "token 4 is not above 5"},
		{"token of a permit falls", []call{with(acquire("a", grant("a", 5)), two), with(acquire("b", grant("b", 4)), two)}, "token 4 is not above 5"},
		{"an old grant comes back", []call{
			acquire("a", grant("a", 1)), after(time.Minute, acquire("b", grant("b", 2))), after(time.Minute, extend("a", 1, grant("a", 1))),
		}, "token 1 is below 2"},
		{"two holders", []call{acquire("a", grant("a", 1)), acquire("b", grant("b", 2))}, "while 1 others have valid grants"},
		{"two holders by a renewal", []call{
			acquire("a", grant("a", 1)), after(50*time.Second, extend("a", 1, grant("a", 1))), after(20*time.Second, acquire("b", grant("b", 2))),
		}, "while 1 others have valid grants"},
		{"three permits of two", []call{
			with(acquire("a", grant("a", 1)), two), with(acquire("b", grant("b", 2)), two), with(acquire("c", grant("c", 3)), two),
		}, "while 2 others have valid grants"},
		{"a reader beside a writer", []call{
			acquire("a", grant("a", 1)), with(acquire("b", changed(grant("b", 2), sharedLease)), shared),
		}, "granted shared with limit 1 beside a valid exclusive grant"},
		{"limits mixed", []call{acquire("a", grant("a", 1)), with(acquire("b", grant("b", 2)), two)}, "with limit 2 beside a valid exclusive grant with limit 1"},
		{"a holder is refused", []call{acquire("a", grant("a", 1)), acquire("a", held("b", 2))}, "refused though it held the key"},
		{"a lease of another key", []call{acquire("a", changed(grant("a", 1), func(l *driver.Lease) { l.Key = "x" }))}, `the lease says key "x"`},
		{"a lease of another mode", []call{acquire("a", changed(grant("a", 1), sharedLease))}, "the lease says"},
		{"a TTL that is too short", []call{acquire("a", changed(grant("a", 1), func(l *driver.Lease) { l.TTL-- }))}, "was granted instead of 1m0s"},
		{"an age below zero", []call{acquire("a", changed(grant("a", 1), func(l *driver.Lease) { l.Age = -1 }))}, "age of the lease is -1ns"},
		{"refused because of itself", []call{acquire("a", held("a", 1))}, "refused because of itself"},
		{"a holder without a token", []call{acquire("a", held("b", 0))}, `names holder "b" with token 0`},
		{"a place below zero", []call{acquire("a", fakeAnswer{err: &driver.HeldError{Position: -1}})}, "place -1 in the queue"},
		{"a stranger is renewed", []call{acquire("a", grant("a", 1)), extend("b", 1, grant("b", 1))}, "which does not hold it"},
		{"a released grant is renewed", []call{acquire("a", grant("a", 1)), release("a", 1, fakeAnswer{}), extend("a", 1, grant("a", 1))}, "which does not hold it"},
		{"a lost grant is renewed", []call{acquire("a", grant("a", 1)), after(time.Minute, extend("a", 1, lost)), extend("a", 1, grant("a", 1))}, "which does not hold it"},
		{"a renewal of something else", []call{acquire("a", grant("a", 1)), extend("a", 1, grant("x", 1))}, "is about something else"},
		{"a renewal that is too short", []call{
			acquire("a", grant("a", 1)), extend("a", 1, changed(grant("a", 1), func(l *driver.Lease) { l.TTL-- })),
		}, "renewed for"},
		{"a valid grant is called lost", []call{acquire("a", grant("a", 1)), extend("a", 1, lost)}, "was told of a loss while its grant"},
		{"a valid grant is called lost by its release", []call{acquire("a", grant("a", 1)), release("a", 1, lost)}, "while it was valid, and was told of a loss"},
		{"a release of nothing", []call{release("a", 1, fakeAnswer{})}, "which it did not hold"},
		{"a release of a stranger's grant", []call{acquire("a", grant("a", 1)), release("b", 1, fakeAnswer{})}, "which it did not hold"},
		{"a second release", []call{acquire("a", grant("a", 1)), release("a", 1, fakeAnswer{}), release("a", 1, fakeAnswer{})}, "which it did not hold"},
		{"a withdrawal that is a loss", []call{release("a", 0, lost)}, "a withdrawal of \"a\" answered"},
		{"forced what was not there", []call{force("a", 1)}, "that was not there"},
		{"handed over to nobody", []call{event("a", 1)}, "which never asked for it"},
		{"handed over with token zero", []call{acquire("a", held("b", 1)), event("a", 0)}, "with token 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fake{}
				h := newHistory()
				b, _ := h.record(f)
				ctx := t.Context()
				for _, c := range tt.calls {
					f.answers = append(f.answers, c.answer)
					time.Sleep(c.wait)
					lease := driver.Lease{Key: "k", Owner: c.owner, Token: c.token, TTL: time.Minute}
					switch c.op {
					case OpAcquire:
						req := driver.Request{Key: "k", Owner: c.owner, TTL: time.Minute, Limit: 1, Enqueue: true}
						if c.change != nil {
							c.change(&req)
						}
						_, _ = b.Acquire(ctx, req)
					case OpExtend:
						b.Extend(ctx, []driver.Renewal{{Lease: lease}})
					case OpRelease:
						_ = b.Release(ctx, lease)
					case OpListen:
						_ = notifier(b).Listen(ctx, "m", func(driver.Event) {})
					case OpForce:
						forcer, _ := driver.As[driver.Forcer](b)
						_, _ = forcer.ForceRelease(ctx, "k", c.token)
					}
				}
				switch err := h.err(); {
				case tt.want == "" && err != nil:
					t.Errorf("complains of what is right: %v", err)
				case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
					t.Errorf("complains of %v, want %q", err, tt.want)
				}
			})
		})
	}
}

func TestResidue(t *testing.T) {
	var none fakeAnswer
	for _, tt := range []struct {
		name    string
		answers []fakeAnswer // to Acquire and to a withdrawal
		enqueue bool
		info    driver.KeyInfo
		want    string
	}{
		{
			"a holder may be left",
			[]fakeAnswer{{lease: driver.Lease{Key: "k", Owner: "a", Token: 1, TTL: time.Minute}}},
			true,
			driver.KeyInfo{Holders: []driver.HolderInfo{{Owner: "a", Token: 1}}},
			"",
		},
		{"a waiter may be left", []fakeAnswer{{err: &driver.HeldError{}}}, true, driver.KeyInfo{Waiters: []driver.WaiterInfo{{Owner: "a"}}}, ""},
		{
			"a waiter may have become a holder",
			[]fakeAnswer{{err: &driver.HeldError{}}},
			true,
			driver.KeyInfo{Holders: []driver.HolderInfo{{Owner: "a", Token: 9}}},
			"",
		},
		{
			"after a failure anything may be left",
			[]fakeAnswer{{err: ErrFault}},
			true,
			driver.KeyInfo{Holders: []driver.HolderInfo{{Owner: "a", Token: 9}}},
			"",
		},
		{
			"a released grant is left",
			[]fakeAnswer{{lease: driver.Lease{Key: "k", Owner: "a", Token: 1, TTL: time.Minute}}, none},
			true,
			driver.KeyInfo{Holders: []driver.HolderInfo{{Owner: "a", Token: 1}}},
			`a grant of "a" (token 1) is left`,
		},
		{
			"a withdrawn ticket is left",
			[]fakeAnswer{{err: &driver.HeldError{}}, none},
			true,
			driver.KeyInfo{Waiters: []driver.WaiterInfo{{Owner: "a"}}},
			`a ticket of "a" is left`,
		},
		{
			"a refused try is left",
			[]fakeAnswer{{err: &driver.HeldError{}}},
			false,
			driver.KeyInfo{Waiters: []driver.WaiterInfo{{Owner: "a"}}},
			`a ticket of "a" is left`,
		},
		{
			"what was not applied is left",
			[]fakeAnswer{{err: driver.ErrNotApplied}},
			true,
			driver.KeyInfo{Holders: []driver.HolderInfo{{Owner: "a", Token: 1}}},
			`a grant of "a" (token 1) is left`,
		},
		{
			"a stranger holds",
			[]fakeAnswer{{err: &driver.HeldError{}}},
			true,
			driver.KeyInfo{Holders: []driver.HolderInfo{{Owner: "x", Token: 1}}},
			`a grant of "x" (token 1) is left`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &fake{answers: tt.answers}
			h := newHistory()
			b, _ := h.record(f)
			_, _ = b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1, Enqueue: tt.enqueue})
			if len(tt.answers) > 1 {
				_ = b.Release(t.Context(), driver.Lease{Key: "k", Owner: "a"})
			}
			tt.info.Key = "k"
			h.residue(tt.info)
			switch err := h.err(); {
			case tt.want == "" && err != nil:
				t.Errorf("complains of what is right: %v", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("complains of %v, want %q", err, tt.want)
			}
		})
	}
}
