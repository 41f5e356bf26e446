package pglock

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// patience is for what only a fault makes long.
const patience = 10 * time.Second

// peer is the server's end of a wire.
type peer struct {
	*testing.T
	w      *wire
	server *pgproto3.Backend
	heard  chan string
	broken chan error
}

func newPeer(t *testing.T) *peer {
	client, server := net.Pipe()
	p := &peer{T: t, server: pgproto3.NewBackend(server, server), heard: make(chan string, 10), broken: make(chan error, 10)}
	hc := &pgconn.HijackedConn{Conn: client, Frontend: pgproto3.NewFrontend(client, client)}
	p.w = newWire(hc, time.Now(), func(s string) { p.heard <- s }, func(err error) { p.broken <- err })
	t.Cleanup(func() {
		server.Close()
		p.w.fail(errLeft)
		p.w.wg.Wait()
	})
	return p
}

// takes reads n calls and returns the names of their statements.
func (p *peer) takes(n int) []string {
	p.Helper()
	var names []string
	for n > 0 {
		msg, err := p.server.Receive()
		if err != nil {
			p.Fatal(err)
		}
		switch m := msg.(type) {
		case *pgproto3.Bind:
			names = append(names, m.PreparedStatement)
		case *pgproto3.Sync:
			n--
		}
	}
	return names
}

func (p *peer) says(messages ...pgproto3.BackendMessage) {
	p.Helper()
	for _, m := range messages {
		p.server.Send(m)
	}
	if err := p.server.Flush(); err != nil {
		p.Fatal(err)
	}
}

func value(text string) []pgproto3.BackendMessage {
	return []pgproto3.BackendMessage{
		&pgproto3.BindComplete{}, &pgproto3.DataRow{Values: [][]byte{[]byte(text), nil}}, &pgproto3.CommandComplete{},
		&pgproto3.ReadyForQuery{TxStatus: 'I'},
	}
}

func refusal(severity string) *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: severity, SeverityUnlocalized: severity, Code: "55P03", Message: "no"}
}

func within[T any](t *testing.T, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatal("it never came")
		var none T
		return none
	}
}

// Calls are answered in order, each for itself, with notifications in between.
func TestWireAnswers(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	before := p.w.proven()
	a, b, c := p.w.start("a"), p.w.start("b", int64(1), "x", []byte{2}), p.w.start("c")
	if names := p.takes(3); !slices.Equal(names, []string{"a", "b", "c"}) {
		t.Errorf("sent %q", names)
	}
	if p.w.head() != a {
		t.Error("the first call is not the oldest")
	}
	p.says(&pgproto3.NotificationResponse{Payload: "early"})
	p.says(value("1")...)
	p.says(&pgproto3.NoticeResponse{}, &pgproto3.BindComplete{}, &pgproto3.DataRow{Values: [][]byte{[]byte("x")}}, refusal("ERROR"), &pgproto3.ReadyForQuery{})
	p.says(value("3")...)
	for _, r := range []*reply{a, b, c} {
		within(t, r.done)
	}
	if within(t, p.heard) != "early" {
		t.Error("the notification is another one")
	}
	if a.err != nil || len(a.rows) != 1 || string(a.rows[0][0]) != "1" || a.rows[0][1] != nil {
		t.Errorf("%v, %v", a.rows, a.err)
	}
	if state(b.err) != "55P03" || b.rows != nil {
		t.Errorf("%v, %v", b.rows, b.err)
	}
	if c.err != nil || string(c.rows[0][0]) != "3" {
		t.Errorf("%v, %v", c.rows, c.err)
	}
	if !p.w.proven().After(before) || p.w.proven() != c.sent || p.w.head() != nil {
		t.Error("the last answer is no proof")
	}
}

// Whatever ends the connection ends the calls, of unknown outcome if they were
// sent; and who lost something knows it before them.
func TestWireEnds(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*peer){
		"session ended":       func(p *peer) { p.says(refusal("FATAL")) },
		"answer to nothing":   func(p *peer) { p.says(value("1")...); p.says(&pgproto3.ReadyForQuery{}) },
		"closed":              func(p *peer) { p.w.fail(errSilent) },
		"client has panicked": func(p *peer) { p.w.notified = nil; p.says(&pgproto3.NotificationResponse{}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPeer(t)
			r := p.w.start("a")
			p.takes(1)
			end(p)
			err := within(t, p.broken)
			within(t, r.done)
			if name != "answer to nothing" && (!errors.Is(r.err, errCut) || errors.As(r.err, new(unsentError)) || !strings.Contains(r.err.Error(), err.Error())) {
				t.Errorf("the call: %v, the connection: %v", r.err, err)
			}
			late := p.w.start("b")
			within(t, late.done)
			if !errors.As(late.err, new(unsentError)) {
				t.Errorf("after the end: %v, which was not sent", late.err)
			}
			p.w.fail(errLeft)
			if len(p.broken) != 0 {
				t.Error("the end was told twice")
			}
		})
	}
}

// A server that reads nothing does not hold up whoever sends.
func TestWireDoesNotBlock(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 1000 {
			p.w.start("a", strings.Repeat("x", 1000))
		}
	}()
	within(t, done)
	p.w.leave(errLeft)
	if err := within(t, p.broken); !errors.Is(err, errLeft) {
		t.Error(err)
	}
}
