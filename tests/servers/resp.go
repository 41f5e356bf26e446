package servers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// A ReplyError is an error that a server replied, such as
// "MOVED 866 127.0.0.1:16001".
type ReplyError string

func (e ReplyError) Error() string { return string(e) }

// Code returns the first word of the error, such as MOVED.
func (e ReplyError) Code() string {
	code, _, _ := strings.Cut(string(e), " ")
	return code
}

// respConn is a connection that speaks version 2 of the Redis protocol.
type respConn struct {
	net.Conn
	r *bufio.Reader
}

func newRESPConn(c net.Conn) *respConn { return &respConn{Conn: c, r: bufio.NewReader(c)} }

// do sends one command and returns the reply. After an error that is no
// ReplyError the connection is of no more use.
func (c *respConn) do(ctx context.Context, args ...string) (any, error) {
	stop := context.AfterFunc(ctx, func() {
		_ = c.SetDeadline(time.Unix(1, 0)) // long ago: whatever waits fails
	})
	defer stop()
	v, err := c.roundTrip(args)
	if _, replied := errors.AsType[ReplyError](err); err != nil && !replied && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return v, err
}

func (c *respConn) roundTrip(args []string) (any, error) {
	var b []byte
	b = fmt.Appendf(b, "*%d\r\n", len(args))
	for _, arg := range args {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(arg), arg)
	}
	if _, err := c.Write(b); err != nil {
		return nil, err
	}
	v, err := c.read()
	if err != nil {
		return nil, err
	}
	if e, ok := v.(ReplyError); ok {
		return nil, e
	}
	return v, nil
}

// read returns the next value: string, int64, nil, []any or ReplyError.
func (c *respConn) read() (any, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	line, ok := strings.CutSuffix(line, "\r\n")
	if !ok || line == "" {
		return nil, fmt.Errorf("malformed reply %q", line)
	}
	kind, rest := line[0], line[1:]
	switch kind {
	case '+':
		return rest, nil
	case '-':
		return ReplyError(rest), nil
	}
	n, err := strconv.ParseInt(rest, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("malformed reply %q: %w", line, err)
	}
	switch kind {
	case ':':
		return n, nil
	case '$':
		if n < 0 {
			return nil, nil
		}
		b := make([]byte, n+2)
		if _, err := io.ReadFull(c.r, b); err != nil {
			return nil, err
		}
		return string(b[:n]), nil
	case '*':
		if n < 0 {
			return nil, nil
		}
		list := make([]any, n)
		for i := range list {
			if list[i], err = c.read(); err != nil {
				return nil, err
			}
		}
		return list, nil
	}
	return nil, fmt.Errorf("malformed reply %q", line)
}

// pairs makes a map of a list of names and values.
func pairs(v any) map[string]string {
	list, _ := v.([]any)
	m := make(map[string]string, len(list)/2)
	for i := 0; i+1 < len(list); i += 2 {
		m[fmt.Sprint(list[i])] = fmt.Sprint(list[i+1])
	}
	return m
}

// fields makes a map of lines of the form name:value, as INFO has them.
func fields(v any) map[string]string {
	text, _ := v.(string)
	m := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			m[name] = value
		}
	}
	return m
}
