package pglock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/go-dlm/dlm/driver"
)

// statementTime is how long the server of these tests takes.
const statementTime = 5 * time.Millisecond

// fakeDatabase answers shared statements: each call gets its text back, unless that
// begins with "no".
type fakeDatabase struct {
	free   chan struct{} // a place for each connection
	broken error         // of each attempt to connect
	hook   func()        // called by each of them
	answer func(ctx context.Context, rows []row) ([]row, error)
	sent   []string
}

func (d *fakeDatabase) careful() {}
func (d *fakeDatabase) direct()  {}

func (d *fakeDatabase) connect(ctx context.Context) (session, error) {
	if d.hook != nil {
		d.hook()
	}
	select {
	case d.free <- struct{}{}:
		if d.broken != nil {
			<-d.free
			return nil, unsentError{d.broken}
		}
		return fakeSession{d}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type fakeSession struct{ d *fakeDatabase }

func (s fakeSession) run(context.Context, string) error { return nil }
func (s fakeSession) pid() uint32                       { return 0 }
func (s fakeSession) release()                          { <-s.d.free }

func (s fakeSession) query(ctx context.Context, _ *statement, args []any) ([]row, error) {
	text := args[0].(string)
	s.d.sent = append(s.d.sent, text)
	var rows []row
	for i, ask := range slices.Backward(strings.Split(text, ",")) {
		if !strings.HasPrefix(ask, "no") {
			rows = append(rows, row{fmt.Append(nil, i+1), []byte(ask)})
		}
	}
	select {
	case <-time.After(statementTime):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if s.d.answer != nil {
		return s.d.answer(ctx, rows)
	}
	return rows, nil
}

// shareRig is a sharer whose requests are all under way, so that further calls meet.
type shareRig struct {
	*testing.T
	sharer
	db   *fakeDatabase
	ends []func()
}

// answered is what became of a call.
type answered struct {
	row   row
	alone bool
	err   error
}

func newShareRig(t *testing.T, connections int) *shareRig {
	t.Helper()
	r := &shareRig{T: t, db: &fakeDatabase{free: make(chan struct{}, connections)}}
	opts := Options{}
	r.init(newCalls(r.db, &opts), &statement{}, 1)
	for i := range maxUnderWay {
		_, end, err := r.do(t.Context(), fmt.Sprint(i), "", "lone")
		if end == nil {
			t.Fatalf("a lone call does not go alone: %v", err)
		}
		r.ends = append(r.ends, end)
	}
	return r
}

// call begins a call about a key of its own, of an owner of the same name.
func (r *shareRig) call(ctx context.Context, ask string) <-chan answered {
	r.Helper()
	done := make(chan answered, 1)
	go func() {
		row, end, err := r.do(ctx, ask, ask, ask)
		if end != nil {
			end()
		}
		done <- answered{row, end != nil, err}
	}()
	synctest.Wait()
	return done
}

// begin has the calls sent that have met.
func (r *shareRig) begin() {
	for _, end := range r.ends {
		end()
	}
	r.ends = nil
	synctest.Wait()
}

// busy takes all connections, and idle gives them back.
func (r *shareRig) busy() {
	for range cap(r.db.free) {
		r.db.free <- struct{}{}
	}
}

func (r *shareRig) idle() {
	for range cap(r.db.free) {
		<-r.db.free
	}
}

func (r *shareRig) want(done <-chan answered, text string, alone bool) {
	r.Helper()
	a := <-done
	if a.err != nil || a.alone != alone || !alone && string(a.row[0]) != text {
		r.Errorf("%q, alone: %v, %v, want %q, %v", a.row, a.alone, a.err, text, alone)
	}
}

// wantError checks whether the error says that nothing was done.
func (r *shareRig) wantError(done <-chan answered, certain bool, target error) {
	r.Helper()
	if a := <-done; a.alone || !errors.Is(a.err, target) || errors.Is(a.err, driver.ErrNotApplied) != certain {
		r.Errorf("%+v, want %v, certain: %v", a, target, certain)
	}
}

func TestSharer(t *testing.T) {
	t.Parallel()
	strange := func(r *shareRig, extra row) {
		r.db.answer = func(_ context.Context, rows []row) ([]row, error) { return append(rows, extra), nil }
		a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
		r.begin()
		r.wantError(a, false, errStrange)
		r.wantError(b, false, errStrange)
	}
	for _, tc := range []struct {
		name string
		run  func(r *shareRig)
	}{
		{"each gets its own answer, and who gets none goes alone", func(r *shareRig) {
			a, b, c := r.call(r.Context(), "a"), r.call(r.Context(), "not"), r.call(r.Context(), "c")
			r.begin()
			r.want(a, "a", false)
			r.want(b, "", true)
			r.want(c, "c", false)
			if !slices.Equal(r.db.sent, []string{"a,not,c"}) {
				r.Errorf("sent %q", r.db.sent)
			}
		}},
		{"what has no effect is made alone", func(r *shareRig) {
			r.db.answer = func(context.Context, []row) ([]row, error) { return nil, &pgconn.PgError{Code: "55P03"} }
			a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
			r.begin()
			r.want(a, "", true)
			r.want(b, "", true)
		}},
		{"what is wrong with the server is told to all", func(r *shareRig) {
			r.db.answer = func(context.Context, []row) ([]row, error) { return nil, &pgconn.PgError{Code: stateNoFunction} }
			a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
			r.begin()
			r.wantError(a, false, driver.ErrInvalid)
			r.wantError(b, false, driver.ErrInvalid)
		}},
		{"one that has met nobody goes alone", func(r *shareRig) {
			a := r.call(r.Context(), "a")
			r.begin()
			r.want(a, "", true)
			if len(r.db.sent) > 0 {
				r.Errorf("sent %q", r.db.sent)
			}
		}},
		{"a broken connection is an unknown outcome of all", func(r *shareRig) {
			r.db.answer = func(context.Context, []row) ([]row, error) { return nil, errCut }
			a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
			r.begin()
			r.wantError(a, false, errCut)
			r.wantError(b, false, errCut)
		}},
		{"no connection", func(r *shareRig) {
			r.db.broken = errCut
			a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
			r.begin()
			r.want(a, "", true)
			r.want(b, "", true)
		}},
		{"no connection soon", func(r *shareRig) {
			r.busy()
			a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
			start := time.Now()
			r.begin()
			r.want(a, "", true)
			r.want(b, "", true)
			if d := time.Since(start); d != gatherPatience {
				r.Errorf("they went alone after %v", d)
			}
			r.idle()
		}},
		{"a hook that panics while a connection is made", func(r *shareRig) {
			r.db.hook = func() { panic("broken hook") }
			a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
			r.begin()
			r.want(a, "", true)
			r.want(b, "", true)
		}},
		{"an answer that is to more calls than there are", func(r *shareRig) { strange(r, row{[]byte("3"), []byte("c")}) }},
		{"an answer without a place", func(r *shareRig) { strange(r, row{[]byte("0"), []byte("a")}) }},
		{"an answer whose place is no number", func(r *shareRig) { strange(r, row{[]byte("x"), []byte("a")}) }},
		{"an empty row", func(r *shareRig) { strange(r, row{}) }},
		{"given up while there is no connection", func(r *shareRig) {
			r.busy()
			ctx, cancel := context.WithCancel(r.Context())
			a, b, c := r.call(ctx, "a"), r.call(r.Context(), "b"), r.call(r.Context(), "c")
			r.begin()
			cancel()
			r.wantError(a, true, context.Canceled)
			r.idle()
			r.want(b, "b", false)
			r.want(c, "c", false)
			if !slices.Equal(r.db.sent, []string{"b,c"}) {
				r.Errorf("sent %q", r.db.sent)
			}
		}},
		{"given up after it was sent: a withdrawal waits, the others are served", func(r *shareRig) {
			ctx, cancel := context.WithCancel(r.Context())
			a, b := r.call(ctx, "a"), r.call(r.Context(), "b")
			r.begin()
			start := time.Now()
			cancel()
			r.wantError(a, false, context.Canceled)
			if d := time.Since(start); d != 0 {
				r.Errorf("it came back after %v", d)
			}
			if err := r.calls.await(r.Context(), "a"); err != nil {
				r.Error(err)
			}
			if d := time.Since(start); d != statementTime {
				r.Errorf("the withdrawal went on after %v", d)
			}
			r.want(b, "b", false)
		}},
		{"a statement is ended when all have left it for long", func(r *shareRig) {
			r.db.answer = func(ctx context.Context, _ []row) ([]row, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			one, cancelOne := context.WithCancel(r.Context())
			two, cancelTwo := context.WithCancel(r.Context())
			a, b := r.call(one, "a"), r.call(two, "b")
			r.begin()
			cancelOne()
			r.wantError(a, false, context.Canceled)
			time.Sleep(2 * adriftPatience)
			synctest.Wait()
			if len(r.db.free) == 0 {
				r.Error("the statement was ended for one who waits")
			}
			start := time.Now()
			cancelTwo()
			r.wantError(b, false, context.Canceled)
			if err := r.calls.await(r.Context(), "b"); err != nil {
				r.Error(err)
			}
			if d := time.Since(start); d != adriftPatience {
				r.Errorf("it was ended after %v", d)
			}
		}},
		{"closing", func(r *shareRig) {
			r.db.answer = func(ctx context.Context, _ []row) ([]row, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			a, b := r.call(r.Context(), "a"), r.call(r.Context(), "b")
			r.begin()
			time.Sleep(statementTime)
			c, d, e := r.call(r.Context(), "c"), r.call(r.Context(), "d"), r.call(r.Context(), "e")
			r.calls.close()
			r.close()
			r.wantError(a, false, context.Canceled)
			r.wantError(b, false, context.Canceled)
			for _, done := range []<-chan answered{c, d, e} {
				if got := <-done; got.err == nil && !got.alone {
					r.Errorf("%+v after closing", got)
				}
			}
			if _, _, err := r.do(r.Context(), "f", "f", "f"); !errors.Is(err, driver.ErrClosed) {
				r.Errorf("%v", err)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newShareRig(t, 2)
				tc.run(r)
				r.begin()
				r.calls.close()
				r.close()
			})
		})
	}
}
