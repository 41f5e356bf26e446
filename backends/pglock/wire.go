package pglock

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// errCut says that a connection was lost, and with it the answers to what had been
// sent.
var errCut = errors.New("pglock: the connection was lost")

// wire is a connection that calls share. They are sent one behind the other without
// waiting for each other, each as a transaction of its own, and answered in that
// order; notifications come in between. A lone call waits for nobody.
type wire struct {
	conn  net.Conn
	front *pgproto3.Frontend // reads, and only for the reader
	// notified gets what comes on the channels that are listened to, and broken why
	// the connection has ended, once. Neither may block.
	notified func(payload string)
	broken   func(error)
	wg       sync.WaitGroup
	wake     chan struct{} // has room for one
	quit     chan struct{} // closed when the connection has ended

	mu    sync.Mutex
	out   []byte   // what the writer is to send
	spare []byte   // what it has sent, to be used again
	sent  []*reply // not yet answered
	last  time.Time
	proof time.Time
	err   error
}

// reply is the answer to a call.
type reply struct {
	sent time.Time
	done chan struct{} // closed when rows and err are set
	rows []row
	err  error
}

// newWire takes a connection over from the client library.
func newWire(hc *pgconn.HijackedConn, proof time.Time, notified func(string), broken func(error)) *wire {
	w := &wire{
		conn: hc.Conn, front: hc.Frontend, notified: notified, broken: broken,
		wake: make(chan struct{}, 1), quit: make(chan struct{}), last: proof, proof: proof,
	}
	_ = w.conn.SetDeadline(time.Time{}) // it fails if the connection has broken, which reading shows
	w.wg.Go(w.write)
	w.wg.Go(w.read)
	return w
}

// start sends a call of a prepared statement.
func (w *wire) start(name string, args ...any) *reply {
	p := newParams(args)
	bind := pgproto3.Bind{PreparedStatement: name, ParameterFormatCodes: p.formats, Parameters: p.values}
	r := &reply{done: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		r.err = unsentError{fmt.Errorf("%w: %w", errCut, w.err)}
		close(r.done)
		return r
	}
	out, err := bind.Encode(w.out)
	if err == nil {
		out, err = (&pgproto3.Execute{}).Encode(out)
	}
	if err == nil {
		out, err = (&pgproto3.Sync{}).Encode(out)
	}
	if err != nil {
		r.err = unsentError{err}
		close(r.done)
		return r
	}
	w.out = out
	r.sent = time.Now()
	w.last = r.sent
	w.sent = append(w.sent, r)
	select {
	case w.wake <- struct{}{}:
	default:
	}
	return r
}

// ask makes a call and waits for its answer, or for the end of the connection.
func (w *wire) ask(name string, args ...any) ([]row, error) {
	r := w.start(name, args...)
	<-r.done
	return r.rows, r.err
}

func (w *wire) write() {
	for {
		select {
		case <-w.wake:
		case <-w.quit:
			return
		}
		w.mu.Lock()
		out := w.out
		if len(out) > 0 {
			w.out, w.spare = w.spare[:0], nil
		}
		w.mu.Unlock()
		if len(out) == 0 {
			continue
		}
		if _, err := w.conn.Write(out); err != nil {
			w.fail(err)
			return
		}
		w.mu.Lock()
		w.spare = out
		w.mu.Unlock()
	}
}

func (w *wire) read() {
	defer func() {
		if p := recover(); p != nil {
			w.fail(fmt.Errorf("pglock: the client library panicked: %v", p))
		}
	}()
	for {
		msg, err := w.front.Receive()
		if err != nil {
			w.fail(err)
			return
		}
		switch m := msg.(type) {
		case *pgproto3.NotificationResponse:
			w.notified(m.Payload)
		case *pgproto3.DataRow:
			if r := w.head(); r != nil {
				r.rows = append(r.rows, copyRow(m.Values))
			}
		case *pgproto3.ErrorResponse:
			err := pgconn.ErrorResponseToPgError(m)
			r := w.head()
			if r == nil || err.SeverityUnlocalized == "FATAL" || err.SeverityUnlocalized == "PANIC" {
				// It ends the session, and is not about a call.
				w.fail(err)
				return
			}
			r.rows, r.err = nil, err
		case *pgproto3.ReadyForQuery:
			if !w.answered() {
				w.fail(errStrange)
				return
			}
		}
	}
}

// head is the call that is being answered, or will be next, or nil.
func (w *wire) head() *reply {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sent) == 0 {
		return nil
	}
	return w.sent[0]
}

// answered ends the call that is being answered.
func (w *wire) answered() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sent) == 0 {
		return false
	}
	r := w.sent[0]
	w.sent[0] = nil
	w.sent = w.sent[1:]
	w.proof = r.sent
	close(r.done)
	return true
}

// copyRow copies values out of the buffer of the connection.
func copyRow(values [][]byte) row {
	size := 0
	for _, v := range values {
		size += len(v)
	}
	buf := make([]byte, 0, size)
	cells := make(row, len(values))
	for i, v := range values {
		if v != nil {
			n := len(buf)
			buf = append(buf, v...)
			cells[i] = buf[n:len(buf):len(buf)]
		}
	}
	return cells
}

// fail ends the connection. What is not answered then remains unanswered.
func (w *wire) fail(err error) {
	w.mu.Lock()
	if w.err != nil {
		w.mu.Unlock()
		return
	}
	w.err = err
	left := w.sent
	w.sent, w.out = nil, nil
	w.mu.Unlock()
	// Whoever loses a lock is to know before anything else.
	w.broken(err)
	close(w.quit)
	closeNow(w.conn)
	for _, r := range left {
		r.rows, r.err = nil, fmt.Errorf("%w: %w", errCut, err)
		close(r.done)
	}
}

// closeNow closes a connection without a word to the other side, which can take
// time over TLS.
func closeNow(conn net.Conn) {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	_ = conn.Close() // it is not needed any more
}

// leave ends the connection as the protocol wants it, if that is soon done.
func (w *wire) leave(err error) {
	w.mu.Lock()
	if w.err == nil {
		if out, err := (&pgproto3.Terminate{}).Encode(w.out); err == nil {
			w.out = out
		}
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
	w.mu.Unlock()
	timer := time.NewTimer(closePatience)
	defer timer.Stop()
	select {
	case <-w.quit:
	case <-timer.C:
	}
	w.fail(err)
	w.wg.Wait()
}

// quietSince is when something was last sent.
func (w *wire) quietSince() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last
}

// proven is the last moment at which something was sent that the server has
// answered.
func (w *wire) proven() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.proof
}
