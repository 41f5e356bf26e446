package servers

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// Direction is one of the two ways through a [Proxy].
type Direction int

// The directions.
const (
	Up   Direction = iota // client to server
	Down                  // server to client
)

// Proxy passes TCP connections on to a server and makes faults on demand. Bytes
// are never dropped, only held or delayed, so that what a client sent before a
// fault still arrives after it, and a connection that heals is in order. The end
// of a stream is held and delayed like the bytes before it, and closing one
// direction leaves the other one open. Only a reset loses what is under way.
//
// Faults apply to open connections and to those still to come. All methods are
// safe for concurrent use.
type Proxy struct {
	listener net.Listener
	target   string
	cancel   context.CancelFunc // ends dialing
	wg       sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change of what follows
	hold    [2]bool
	delay   [2]time.Duration
	refuse  bool
	closed  bool
	links   map[*link]struct{}
}

// StartProxy starts a proxy for a server at the address target. It is closed at
// the end of the test.
func StartProxy(tb TB, target string) *Proxy {
	tb.Helper()
	l, err := listen("127.0.0.1:0")
	if err != nil {
		tb.Fatalf("servers: starting a proxy: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{
		listener: l,
		target:   target,
		cancel:   cancel,
		changed:  make(chan struct{}),
		links:    map[*link]struct{}{},
	}
	tb.Cleanup(p.Close)
	p.wg.Go(func() { p.accept(ctx) })
	return p
}

// Addr returns the address that clients connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Hold keeps the bytes of one direction until Resume: a request that is held is
// carried out late, a reply that is held leaves its outcome unknown. While Up is
// held, new connections are accepted and reach the server after Resume.
func (p *Proxy) Hold(d Direction) { p.change(func() { p.hold[d] = true }) }

// Blackhole holds both directions.
func (p *Proxy) Blackhole() { p.change(func() { p.hold = [2]bool{true, true} }) }

// Resume ends Hold, Blackhole and Refuse. Delays stay.
func (p *Proxy) Resume() {
	p.change(func() {
		p.hold = [2]bool{}
		p.refuse = false
	})
}

// Delay makes the bytes of one direction arrive a time t after they were sent,
// those under way included; 0 ends it.
func (p *Proxy) Delay(d Direction, t time.Duration) { p.change(func() { p.delay[d] = t }) }

// Reset cuts all connections: client and server get a RST, and what is held or
// under way is lost. New connections are not affected.
func (p *Proxy) Reset() { p.change(p.cutAll) }

// Refuse cuts all connections as Reset does, and until Resume every new one too.
func (p *Proxy) Refuse() {
	p.change(func() {
		p.refuse = true
		p.cutAll()
	})
}

// Close cuts all connections, stops listening and waits until nothing of the
// proxy is left running. Further calls have no effect.
func (p *Proxy) Close() {
	p.change(func() {
		p.closed = true
		p.cutAll()
	})
	p.cancel()
	_ = p.listener.Close() // fails only if it is closed
	p.wg.Wait()
}

// Conns returns the number of clients' connections that are open, or whose end
// has not reached the server yet.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// change changes the state and lets all waiting pumps look at it.
func (p *Proxy) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	close(p.changed)
	p.changed = make(chan struct{})
}

// cutAll cuts all connections; p.mu is held.
func (p *Proxy) cutAll() {
	for l := range p.links {
		l.cut = true
		reset(l.client)
		reset(l.server)
	}
	clear(p.links)
}

// A link is a client's connection and the one to the server that belongs to it.
type link struct {
	client *net.TCPConn
	server *net.TCPConn // nil before it is made

	cut bool // guarded by Proxy.mu
}

// reset closes a connection by RST.
func reset(c *net.TCPConn) {
	if c == nil {
		return
	}
	_ = c.SetLinger(0) // fails only if it is closed
	_ = c.Close()
}

func (p *Proxy) accept(ctx context.Context) {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return // it is closed
		}
		l := &link{client: c.(*net.TCPConn)}
		p.mu.Lock()
		no := p.refuse || p.closed
		if !no {
			p.links[l] = struct{}{}
		}
		p.mu.Unlock()
		if no {
			reset(l.client)
			continue
		}
		p.wg.Go(func() { p.serve(ctx, l) })
	}
}

// serve carries one connection from its beginning to its end.
func (p *Proxy) serve(ctx context.Context, l *link) {
	if !p.pass(l, Up, time.Time{}) {
		return
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", p.target)
	if err != nil {
		p.end(l, reset)
		return
	}
	server := c.(*net.TCPConn)
	p.mu.Lock()
	l.server = server
	cut := l.cut
	p.mu.Unlock()
	if cut {
		reset(server)
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() { p.pump(l, Up, l.client, server) })
	wg.Go(func() { p.pump(l, Down, server, l.client) })
	wg.Wait()
	// Both streams have ended and been passed on, or the link is cut.
	p.end(l, func(c *net.TCPConn) { _ = c.Close() })
}

// end closes the connections of a link that is not closed yet.
func (p *Proxy) end(l *link, closeConn func(*net.TCPConn)) {
	p.change(func() {
		if l.cut {
			return
		}
		l.cut = true
		delete(p.links, l)
		closeConn(l.client)
		closeConn(l.server)
	})
}

// A parcel is what was read at once.
type parcel struct {
	bytes []byte
	err   error // how the stream ended
	at    time.Time
}

const (
	// queued is how many parcels one direction of a link holds before the sender
	// feels it, apart from what the kernel holds.
	queued = 128
	// atOnce is how much is read at once.
	atOnce = 8 << 10
)

// pump passes the bytes of one direction on, and then the end of the stream.
func (p *Proxy) pump(l *link, d Direction, src, dst *net.TCPConn) {
	queue := make(chan parcel, queued)
	var wg sync.WaitGroup
	wg.Go(func() { fill(queue, src) })
	defer wg.Wait()
	for next := range queue {
		if !p.pass(l, d, next.at) {
			break
		}
		switch {
		case next.err == nil:
			if _, err := dst.Write(next.bytes); err != nil {
				// Nobody takes the rest of this direction. The other one goes on:
				// what a client sent before it went away must still arrive.
				_ = src.CloseRead()
			}
		case errors.Is(next.err, io.EOF):
			_ = dst.CloseWrite() // fails only if it is closed
		default:
			p.end(l, reset) // a RST is passed on as such
		}
	}
	for range queue {
		// The link is cut, and src is closed: its reader ends.
	}
}

// fill reads until the end of a stream.
func fill(queue chan<- parcel, src net.Conn) {
	defer close(queue)
	b := make([]byte, atOnce)
	for {
		n, err := src.Read(b)
		now := time.Now()
		if n > 0 {
			queue <- parcel{bytes: bytes.Clone(b[:n]), at: now}
		}
		if err != nil {
			queue <- parcel{err: err, at: now}
			return
		}
	}
}

// pass waits until what was read at a time may be passed on in a direction. It
// returns false if the link has been cut.
func (p *Proxy) pass(l *link, d Direction, at time.Time) bool {
	for {
		p.mu.Lock()
		cut, hold, changed := l.cut, p.hold[d], p.changed
		wait := time.Until(at.Add(p.delay[d]))
		p.mu.Unlock()
		switch {
		case cut:
			return false
		case hold:
			<-changed
		case wait <= 0:
			return true
		default:
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-changed:
			}
			t.Stop()
		}
	}
}
