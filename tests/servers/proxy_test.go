package servers_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

// echo is a server that sends back what it gets, and at the end of that "bye".
// received gets all that arrived on a connection when it ends, and how it ended.
type echo struct {
	net.Listener
	received chan received
}

type received struct {
	bytes string
	err   error
}

func startEcho(t *testing.T) *echo {
	t.Helper()
	var c net.ListenConfig
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &echo{Listener: l, received: make(chan received, 100)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { e.serve(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return e
}

func (e *echo) serve(c net.Conn) {
	defer c.Close()
	var all bytes.Buffer
	_, err := io.Copy(io.MultiWriter(c, &all), c)
	if err == nil {
		_, err = io.WriteString(c, "bye")
	}
	e.received <- received{all.String(), err}
}

// client is a connection to a proxy.
type client struct {
	t *testing.T
	*net.TCPConn
	r *bufio.Reader
}

func dial(t *testing.T, addr string) *client {
	t.Helper()
	var d net.Dialer
	c, err := d.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &client{t, c.(*net.TCPConn), bufio.NewReader(c)}
}

func (c *client) send(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		c.t.Errorf("sending %q: %v", text, err)
	}
}

// expect reads what must come.
func (c *client) expect(want string) {
	c.t.Helper()
	b := make([]byte, len(want))
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		c.t.Error(err)
	}
	if _, err := io.ReadFull(c.r, b); err != nil || string(b) != want {
		c.t.Fatalf("got %q, %v; want %q", b, err, want)
	}
}

// silent checks that nothing comes.
func (c *client) silent() {
	c.t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(30 * time.Millisecond)); err != nil {
		c.t.Error(err)
	}
	var timeout net.Error
	if b, err := c.r.ReadByte(); !errors.As(err, &timeout) || !timeout.Timeout() {
		c.t.Fatalf("got %q, %v; want silence", b, err)
	}
}

// end returns how the stream from the server ends.
func (c *client) end() error {
	c.t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		c.t.Error(err)
	}
	rest, err := io.ReadAll(c.r)
	if len(rest) > 0 {
		c.t.Errorf("%q before the end", rest)
	}
	return err
}

func wait[T any](t *testing.T, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatal("nothing arrives")
		panic("unreachable")
	}
}

func TestProxyPasses(t *testing.T) {
	t.Parallel()
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	c := dial(t, p.Addr())
	c.send("hello")
	c.expect("hello")
	if n := p.Conns(); n != 1 {
		t.Errorf("Conns = %d", n)
	}
	// The end of one direction leaves the other open.
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	c.expect("bye")
	if err := c.end(); err != nil {
		t.Errorf("end: %v", err)
	}
	if got := wait(t, e.received); got != (received{"hello", nil}) {
		t.Errorf("the server got %q, %v", got.bytes, got.err)
	}
	eventually(t, "the connection is forgotten", func() bool { return p.Conns() == 0 })
}

func TestProxyHold(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name     string
		hold     func(*servers.Proxy)
		executed bool
	}{
		{"up", func(p *servers.Proxy) { p.Hold(servers.Up) }, false},
		{"down", func(p *servers.Proxy) { p.Hold(servers.Down) }, true},
		{"both", (*servers.Proxy).Blackhole, false},
	}
	r := servers.StartRedis(t, nil)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := servers.StartProxy(t, r.Addr())
			open := dial(t, p.Addr())
			open.send("PING\r\n")
			open.expect("+PONG\r\n")
			tt.hold(p)
			later := dial(t, p.Addr())
			open.send("SET " + tt.name + " 1\r\n")
			later.send("PING\r\n")
			if tt.executed {
				eventually(t, "the command is carried out", func() bool { return r.MustDo("GET", tt.name) == "1" })
			}
			open.silent()
			later.silent()
			if got := r.MustDo("GET", tt.name); (got == "1") != tt.executed {
				t.Errorf("while held: GET = %v", got)
			}
			p.Resume()
			open.expect("+OK\r\n")
			later.expect("+PONG\r\n")
			if got := r.MustDo("GET", tt.name); got != "1" {
				t.Errorf("afterwards: GET = %v", got)
			}
		})
	}
}

// What a client sent before it went away arrives in the end.
func TestProxyLateWrite(t *testing.T) {
	t.Parallel()
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	for _, connected := range []bool{true, false} {
		var c *client
		if connected {
			c = dial(t, p.Addr())
			c.send("a")
			c.expect("a")
		}
		p.Hold(servers.Up)
		if !connected {
			c = dial(t, p.Addr())
			c.send("a")
		}
		c.send("late")
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if n := p.Conns(); n != 1 && connected {
			t.Errorf("Conns = %d", n)
		}
		p.Resume()
		if got := wait(t, e.received); got.bytes != "alate" {
			t.Errorf("connected %t: the server got %q, %v", connected, got.bytes, got.err)
		}
		eventually(t, "the connection is forgotten", func() bool { return p.Conns() == 0 })
	}
}

func TestProxyDelay(t *testing.T) {
	t.Parallel()
	const up, down = 60 * time.Millisecond, 40 * time.Millisecond
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	c := dial(t, p.Addr())
	c.send("x")
	c.expect("x")
	p.Delay(servers.Up, up)
	p.Delay(servers.Down, down)
	began := time.Now()
	for _, s := range []string{"a", "b", "c"} {
		c.send(s)
	}
	c.expect("abc")
	// Each byte is late, but they are under way together.
	if d := time.Since(began); d < up+down {
		t.Errorf("there and back in %v", d)
	}
	// Less delay applies at once to what is under way.
	p.Delay(servers.Up, time.Hour)
	c.send("d")
	c.silent()
	p.Delay(servers.Up, 0)
	p.Delay(servers.Down, 0)
	c.expect("d")
	// The end of the stream is delayed too.
	p.Delay(servers.Up, up)
	began = time.Now()
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	c.expect("bye")
	if d := time.Since(began); d < up {
		t.Errorf("the end arrives after %v", d)
	}
}

func TestProxyReset(t *testing.T) {
	t.Parallel()
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	c := dial(t, p.Addr())
	c.send("a")
	c.expect("a")
	p.Hold(servers.Up)
	c.send("lost")
	p.Reset()
	if err := c.end(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
	if got := wait(t, e.received); got.bytes != "a" || !errors.Is(got.err, syscall.ECONNRESET) {
		t.Errorf("the server got %q, %v", got.bytes, got.err)
	}
	if n := p.Conns(); n != 0 {
		t.Errorf("Conns = %d", n)
	}
	p.Resume()
	c = dial(t, p.Addr())
	c.send("b")
	c.expect("b")
}

func TestProxyRefuse(t *testing.T) {
	t.Parallel()
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	c := dial(t, p.Addr())
	c.send("a")
	c.expect("a")
	p.Refuse()
	if err := c.end(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
	for range 3 {
		var d net.Dialer
		c, err := d.DialContext(t.Context(), "tcp", p.Addr())
		if err == nil {
			_, err = c.Read(make([]byte, 1))
			c.Close()
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a new client sees %v", err)
		}
	}
	p.Resume()
	c = dial(t, p.Addr())
	c.send("b")
	c.expect("b")
}

// The server's faults reach the client.
func TestProxyServerFaults(t *testing.T) {
	t.Parallel()
	r := servers.StartRedis(t, nil)
	p := servers.StartProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.send("PING\r\n")
	c.expect("+PONG\r\n")
	p.Hold(servers.Down)
	r.Kill()
	c.silent() // its death is held as well
	p.Resume()
	if err := c.end(); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
	if err := dial(t, p.Addr()).end(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a client of a dead server sees %v", err)
	}
	r.Restart()
	c = dial(t, p.Addr())
	c.send("PING\r\n")
	c.expect("+PONG\r\n")
}

// A client's RST is a RST for the server.
func TestProxyClientReset(t *testing.T) {
	t.Parallel()
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	c := dial(t, p.Addr())
	c.send("a")
	c.expect("a")
	if err := c.SetLinger(0); err != nil {
		t.Error(err)
	}
	c.Close()
	if got := wait(t, e.received); got.bytes != "a" || !errors.Is(got.err, syscall.ECONNRESET) {
		t.Errorf("the server got %q, %v", got.bytes, got.err)
	}
}

func TestProxyClose(t *testing.T) {
	t.Parallel()
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	c := dial(t, p.Addr())
	c.send("a")
	c.expect("a")
	p.Blackhole()
	c.send("b")
	p.Close()
	p.Close()
	if err := c.end(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
	var d net.Dialer
	if c, err := d.DialContext(t.Context(), "tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v, %v", c, err)
	}
}

// Many connections, much data and every fault that loses nothing: all arrives, in
// order.
func TestProxyStress(t *testing.T) {
	t.Parallel()
	e := startEcho(t)
	p := servers.StartProxy(t, e.Addr().String())
	data := make([]byte, 2<<20)
	_, _ = rand.Read(data)
	ctx, cancel := context.WithCancel(t.Context())
	var clients, faults sync.WaitGroup
	for range 4 {
		c := dial(t, p.Addr())
		clients.Go(func() {
			if _, err := c.Write(data); err != nil {
				t.Error(err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Error(err)
			}
		})
		clients.Go(func() {
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, append(bytes.Clone(data), "bye"...)) {
				t.Errorf("%d bytes of %d came back, or not the same: %v", len(got), len(data), err)
			}
		})
	}
	faults.Go(func() {
		for ctx.Err() == nil {
			p.Blackhole()
			p.Delay(servers.Up, time.Millisecond)
			p.Resume()
			p.Hold(servers.Down)
			p.Delay(servers.Up, 0)
			p.Resume()
			p.Conns()
			time.Sleep(time.Millisecond)
		}
	})
	clients.Wait()
	cancel()
	faults.Wait()
}
