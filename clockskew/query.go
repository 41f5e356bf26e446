package clockskew

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/beevik/ntp"
)

// kissError is the answer of a server that does not want to be asked.
type kissError struct{ code string }

func (e *kissError) Error() string { return fmt.Sprintf("%v (%s)", ntp.ErrKissOfDeath, e.code) }

// query asks a server once. It ends with its context.
func query(ctx context.Context, address string) (answer, error) {
	var stop func() bool
	start := time.Now()
	r, err := ntp.QueryWithOptions(address, ntp.QueryOptions{
		// The context ends before that: it covers the search for the address, too.
		Timeout: maxTimeout + time.Second,
		Dialer: func(_, remote string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, "udp", remote)
			if err == nil {
				stop = context.AfterFunc(ctx, func() { _ = conn.Close() })
			}
			return conn, err
		},
	})
	end := time.Now()
	if stop != nil {
		stop()
	}
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer: %w", ctx.Err())
		}
		return answer{}, err
	}
	if r.IsKissOfDeath() {
		return answer{}, &kissError{r.KissCode}
	}
	if err := r.Validate(); err != nil {
		return answer{}, err
	}
	return valid(r, end.Round(0).Sub(start.Round(0)), end.Sub(start)), nil
}

// valid is what a valid response says, if the query took so long by the wall clock
// and by the monotonic one. If they differ, the clock was set in between, which
// falsifies both the offset and the round trip, each by no more than that.
func valid(r *ntp.Response, wall, monotonic time.Duration) answer {
	set := (wall - monotonic).Abs()
	precision := min(max(r.Precision, 0), time.Second)
	return newAnswer(r.ClockOffset, min(r.RootDistance, far)+min(set, 2*far)+precision)
}

// addressOf returns host and port of a server.
func addressOf(server string) (string, error) {
	host, port, err := net.SplitHostPort(server)
	if err != nil {
		host, port = server, "123"
		if len(server) > 1 && server[0] == '[' && server[len(server)-1] == ']' {
			host = server[1 : len(server)-1]
		}
	}
	switch {
	case host == "" || port == "":
		return "", fmt.Errorf("%q has no host or no port", server)
	case len(server) > 300 || strings.ContainsFunc(server, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return "", fmt.Errorf("%q is not a host", server)
	case strings.ContainsAny(host, "[]/@") || strings.Contains(host, ":") && !isIPv6(host):
		return "", fmt.Errorf("%q is neither host, host:port nor [address]:port", server)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("%q has a wrong port", server)
	}
	return net.JoinHostPort(host, port), nil
}

func isIPv6(host string) bool {
	host, _, _ = strings.Cut(host, "%")
	return net.ParseIP(host) != nil
}
