package zklock_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/zklock"
	"github.com/go-dlm/dlm/driver"
)

// serve accepts connections and does something with them.
func serve(t *testing.T, f func(net.Conn)) string {
	var config net.ListenConfig
	l, err := config.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f(c)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

func TestServersThatDoNotServe(t *testing.T) {
	for _, c := range []struct {
		name string
		f    func(net.Conn)
		is   zklock.Problem
	}{
		{"closes at once", func(c net.Conn) { c.Close() }, ""},
		{"something else", func(c net.Conn) {
			_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = c.Read(make([]byte, 100))
			c.Close()
		}, zklock.ProblemNotZooKeeper},
	} {
		b, err := zklock.New([]string{serve(t, c.f)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		_, err = b.Acquire(ctx, driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
		if !errors.Is(err, driver.ErrNotApplied) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want that nothing was done within the time", c.name, err)
		}
		if e, ok := errors.AsType[*zklock.ServerError](err); c.is != "" && (!ok || e.Problem != c.is) {
			t.Errorf("%s: %v, want problem %q", c.name, err, c.is)
		}
		cancel()
		findings, err := b.Check(context.Background())
		if err != nil || len(findings) == 0 || findings[0].Severity != driver.SeverityCritical || findings[0].Fix == "" {
			t.Errorf("%s: Check found %+v, %v", c.name, findings, err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}
