package clockskew_test

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/beevik/ntp"

	"github.com/go-dlm/dlm/clockskew"
	"github.com/go-dlm/dlm/driver/drivertest"
)

// ntpServer is a server on this machine that speaks RFC 5905 as a test wants it.
type ntpServer struct {
	shift  time.Duration              // of its clock
	silent bool                       // no answer at all
	late   bool                       // no answer before the test is over
	asked  func()                     // called for every question, unless nil
	change func(packet []byte) []byte // of what it says, or nil
}

// start serves until the test ends, and returns the address.
func (s ntpServer) start(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 512)
		for {
			n, from, err := conn.ReadFromUDP(buf)
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				return
			}
			if n < 48 || buf[0]&7 != 3 {
				t.Errorf("not a client's packet: % x", buf[:n])
				continue
			}
			received := s.now()
			if s.asked != nil {
				s.asked()
			}
			if s.silent {
				continue
			}
			if s.late {
				<-t.Context().Done()
			}
			p := make([]byte, 48)
			p[0] = 4<<3 | 4                              // version 4, mode server
			p[1] = 2                                     // stratum
			p[2] = 6                                     // poll
			p[3] = 0xec                                  // precision, 2^-20 s
			binary.BigEndian.PutUint32(p[4:], 1<<16/100) // root delay, 10ms
			binary.BigEndian.PutUint32(p[8:], 1<<16/200) // root dispersion, 5ms
			copy(p[12:], "\x7f\x00\x00\x01")             // reference
			binary.BigEndian.PutUint64(p[16:], received-1<<32)
			copy(p[24:32], buf[40:48])
			binary.BigEndian.PutUint64(p[32:], received)
			binary.BigEndian.PutUint64(p[40:], s.now())
			if s.change != nil {
				p = s.change(p)
			}
			if _, err := conn.WriteToUDP(p, from); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		wg.Wait()
	})
	return conn.LocalAddr().String()
}

// now is the server's clock as NTP writes it: seconds since 1900, with 32 bits
// behind the point.
func (s ntpServer) now() uint64 {
	now := time.Now().Add(s.shift)
	const from1900 = 2_208_988_800
	return uint64(now.Unix()+from1900)<<32 | uint64(now.Nanosecond())<<32/1e9
}

func TestProtocol(t *testing.T) {
	t.Parallel()
	patch := func(at int, bytes ...byte) func([]byte) []byte {
		return func(p []byte) []byte {
			copy(p[at:], bytes)
			return p
		}
	}
	ok := ntpServer{}
	shifted := ntpServer{shift: time.Hour}
	behind := ntpServer{shift: -time.Hour}
	silent := ntpServer{silent: true}
	for _, c := range []struct {
		name    string
		servers []ntpServer
		opts    clockskew.Options
		verdict clockskew.Verdict
		offset  time.Duration // give or take Bound
		answers int
		errs    []string // of the servers that gave no valid answer
		is      error    // the first of them
	}{
		{"one", []ntpServer{ok}, clockskew.Options{}, clockskew.Fine, 0, 1, nil, nil},
		{"three", []ntpServer{ok, ok, ok}, clockskew.Options{}, clockskew.Fine, 0, 3, nil, nil},
		{"a clock that is behind", []ntpServer{shifted, shifted, shifted}, clockskew.Options{}, clockskew.Skewed, time.Hour, 3, nil, nil},
		{"a clock that is ahead", []ntpServer{behind, behind, behind}, clockskew.Options{}, clockskew.Skewed, -time.Hour, 3, nil, nil},
		{"far behind", []ntpServer{{shift: 20 * 365 * 24 * time.Hour}}, clockskew.Options{}, clockskew.Skewed, 20 * 365 * 24 * time.Hour, 1, nil, nil},
		{"within a wide limit", []ntpServer{shifted}, clockskew.Options{MaxOffset: 2 * time.Hour}, clockskew.Fine, time.Hour, 1, nil, nil},
		{"a bound too wide", []ntpServer{ok}, clockskew.Options{MaxOffset: 5 * ms}, clockskew.Unknown, 0, 1, nil, nil},
		{"a liar", []ntpServer{ok, shifted, ok}, clockskew.Options{}, clockskew.Fine, 0, 3, nil, nil},
		{"a liar and one silent", []ntpServer{ok, shifted, silent}, clockskew.Options{Timeout: 300 * ms}, clockskew.Unknown, 30 * time.Minute, 2, []string{"no answer"}, context.DeadlineExceeded},
		{"one silent", []ntpServer{ok, silent, ok}, clockskew.Options{Timeout: 300 * ms}, clockskew.Fine, 0, 2, []string{"no answer"}, context.DeadlineExceeded},
		{"too slow", []ntpServer{ok, {late: true}, ok}, clockskew.Options{Timeout: 300 * ms}, clockskew.Fine, 0, 2, []string{"no answer"}, context.DeadlineExceeded},
		{"two silent", []ntpServer{silent, ok, silent}, clockskew.Options{Timeout: 300 * ms}, clockskew.Unknown, 0, 1, []string{"no answer", "no answer"}, context.DeadlineExceeded},
		{"kiss of death", []ntpServer{{change: func(p []byte) []byte { return patch(12, []byte("RATE")...)(patch(1, 0)(p)) }}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"kiss of death received (RATE)"}, nil},
		{"wrong origin", []ntpServer{{change: patch(24, 1, 2, 3, 4, 5, 6, 7, 8)}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"match"}, ntp.ErrServerResponseMismatch},
		{"not synchronized", []ntpServer{{change: patch(0, 3<<6|4<<3|4)}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"leap"}, ntp.ErrInvalidLeapSecond},
		{"stratum 16", []ntpServer{{change: patch(1, 16)}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"stratum"}, ntp.ErrInvalidStratum},
		{"not a server", []ntpServer{{change: patch(0, 4<<3|3)}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"mode"}, ntp.ErrInvalidMode},
		{"dispersed", []ntpServer{{change: patch(8, 0, 20, 0, 0)}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"dispersion"}, ntp.ErrInvalidDispersion},
		{"backwards", []ntpServer{{change: patch(40, 1, 2, 3, 4)}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"backwards"}, ntp.ErrServerTickedBackwards},
		{"short", []ntpServer{{change: func(p []byte) []byte { return p[:47] }}}, clockskew.Options{}, clockskew.Unknown, 0, 0, []string{"invalid"}, ntp.ErrInvalidTime},
		{"coarse", []ntpServer{{change: patch(3, 1)}}, clockskew.Options{}, clockskew.Unknown, 0, 1, nil, nil},
		{"little admitted, wide delay", []ntpServer{{change: patch(4, 0, 10, 0, 0)}}, clockskew.Options{}, clockskew.Unknown, 0, 1, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var addresses []string
			for _, s := range c.servers {
				addresses = append(addresses, s.start(t))
			}
			r := check(t, checker(t, addresses, &c.opts))
			if r.Verdict != c.verdict || r.Answers != c.answers || r.Asked != len(addresses) || (r.Offset-c.offset).Abs() > r.Bound {
				t.Errorf("%v: %v, %+v", r.Verdict, r, r)
			}
			if r.Answers > 0 && r.Bound < 9*ms { // half the root delay, and the dispersion
				t.Errorf("the bound is only %v", r.Bound)
			}
			if len(r.Errors) != len(c.errs) {
				t.Fatalf("errors %v, want %q", r.Errors, c.errs)
			}
			for i, e := range r.Errors {
				if !strings.Contains(e.Error(), c.errs[i]) || !strings.HasPrefix(e.Error(), e.Server+": ") {
					t.Errorf("%v, want %q", e, c.errs[i])
				}
			}
			if c.is != nil && !errors.Is(r.Errors[0], c.is) {
				t.Errorf("%v does not match %v", r.Errors[0], c.is)
			}
		})
	}
}

// TestCheckIsGivenUp has a server that does not answer and a patience beyond the
// test's: the end of the context must end the check, and leave nothing behind.
func TestCheckIsGivenUp(t *testing.T) {
	drivertest.CheckLeaks(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	address := ntpServer{silent: true, asked: cancel}.start(t)
	c := checker(t, []string{address}, &clockskew.Options{Timeout: 30 * time.Second})
	start := time.Now()
	if _, err := c.Check(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("took %v", took)
	}
}

func TestNoSuchServer(t *testing.T) {
	t.Parallel()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	address := conn.LocalAddr().String()
	_ = conn.Close()
	r := check(t, checker(t, []string{address}, &clockskew.Options{Timeout: time.Second}))
	if r.Verdict != clockskew.Unknown || r.Answers != 0 || len(r.Errors) != 1 {
		t.Errorf("%+v", r)
	}
}

// TestClockIsSet has somebody set the clock between question and answer.
func TestClockIsSet(t *testing.T) {
	t.Parallel()
	const there, back = 30 * ms, 10 * ms
	for _, set := range []time.Duration{0, ms, -ms, 10 * time.Second, -10 * time.Second, 90 * 365 * 24 * time.Hour} {
		// The clock is right at first, and set forward by so much before the answer.
		offset := (there + (-set - back)) / 2
		roundTrip := max(there+back+set, 0)
		a := clockskew.Valid(&ntp.Response{ClockOffset: offset, RootDistance: roundTrip / 2, Precision: ms}, there+back+set, there+back)
		truth := max(-set, -50*365*24*time.Hour) // as far as offsets go
		if (a.Offset - truth).Abs() > a.Distance {
			t.Errorf("set by %v: the right offset is %v, but %v give or take %v", set, truth, a.Offset, a.Distance)
		}
		if set == 0 && a.Distance != (there+back)/2+ms {
			t.Errorf("distance %v", a.Distance)
		}
	}
}
