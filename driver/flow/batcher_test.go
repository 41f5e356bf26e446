package flow

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm/driver"
)

const (
	// delay is how long a request of these tests takes.
	delay = 5 * time.Millisecond
	most  = 10
	// maxUnderWay is how many requests are on their way before calls wait.
	maxUnderWay = 2
)

// call is a call of a test.
type call struct {
	name string
	done chan struct{}
}

// store notes the requests that it gets: the names of calls, several in
// parentheses.
type store struct {
	*Batcher[*call]
	getReady time.Duration     // how long a request takes before the calls are taken
	hang     map[string]func() // what is to be done with a request before it ends
	sent     []string          // guarded by mu
}

func newStore() *store {
	s := &store{hang: make(map[string]func())}
	s.Batcher = NewBatcher(most, maxUnderWay, func(take func() []*call) {
		time.Sleep(s.getReady)
		batch := take()
		var names []string
		for _, c := range batch {
			names = append(names, c.name)
		}
		if len(batch) > 0 {
			s.carryOut(names)
		}
		for _, c := range batch {
			close(c.done)
		}
	})
	return s
}

func (s *store) carryOut(names []string) {
	note := strings.Join(names, " ")
	if len(names) > 1 {
		note = "(" + note + ")"
	}
	s.mu.Lock()
	s.sent = append(s.sent, note)
	s.mu.Unlock()
	time.Sleep(delay)
	if f := s.hang[note]; f != nil {
		f()
	}
}

// enter begins a call about the key that is the first letter of its name.
func (s *store) enter(t *testing.T, name string) *call {
	t.Helper()
	c := &call{name, make(chan struct{})}
	end, err := s.Enter(name[:1], c)
	if err != nil {
		t.Fatal(err)
	}
	if end != nil {
		go func() {
			s.carryOut([]string{name})
			end()
			close(c.done)
		}()
	}
	synctest.Wait()
	return c
}

// busy has as many requests on their way as there may be.
func (s *store) busy(t *testing.T) {
	t.Helper()
	for i := range maxUnderWay {
		s.enter(t, fmt.Sprint(i))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = nil
}

func (s *store) want(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.sent, want) {
		t.Errorf("sent %q, want %q", s.sent, want)
	}
}

func TestBatcher(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, s *store)
	}{
		{"lone calls go alone, at once", func(t *testing.T, s *store) {
			for range 3 {
				start := time.Now()
				<-s.enter(t, "a").done
				if d := time.Since(start); d != delay {
					t.Errorf("it took %v", d)
				}
			}
			s.want(t, "a", "a", "a")
		}},
		{"calls that meet share a request", func(t *testing.T, s *store) {
			s.busy(t)
			calls := []*call{s.enter(t, "a"), s.enter(t, "b"), s.enter(t, "c")}
			s.want(t)
			for _, c := range calls {
				<-c.done
			}
			s.want(t, "(a b c)")
		}},
		{"those who have met are expected to meet again", func(t *testing.T, s *store) {
			s.busy(t)
			one, two := s.enter(t, "a"), s.enter(t, "b")
			<-one.done
			<-two.done
			<-s.enter(t, "c").done
			<-s.enter(t, "d").done
			s.want(t, "(a b)", "c", "d")
		}},
		{"a key is not in a request twice, and nobody waits for the one after", func(t *testing.T, s *store) {
			s.busy(t)
			one, two := s.enter(t, "a1"), s.enter(t, "b")
			again := s.enter(t, "a2")
			s.want(t, "a2")
			<-one.done
			<-two.done
			<-again.done
			s.want(t, "a2", "(a1 b)")
			time.Sleep(2 * crowd)
			s.busy(t)
			<-s.enter(t, "a3").done // the key is not taken to be in the queue any more
			s.want(t, "a3")
		}},
		{"a request is bounded", func(t *testing.T, s *store) {
			s.busy(t)
			var calls []*call
			for i := range 2*most + 1 {
				calls = append(calls, s.enter(t, string(rune('A'+i))))
			}
			for _, c := range calls {
				<-c.done
			}
			s.want(t, "(A B C D E F G H I J)", "(K L M N O P Q R S T)", "U")
		}},
		{"requests that hang do not hold up others for long", func(t *testing.T, s *store) {
			over := make(chan struct{})
			for i := range maxUnderWay {
				s.hang[fmt.Sprint(i)] = func() { <-over }
			}
			s.busy(t)
			start := time.Now()
			<-s.enter(t, "a").done
			if d := time.Since(start); d != stalled+delay {
				t.Errorf("it took %v", d)
			}
			close(over)
			s.want(t, "a")
		}},
		{"a call is withdrawn until it is taken", func(t *testing.T, s *store) {
			s.getReady = delay
			s.busy(t)
			a, b, c := s.enter(t, "a"), s.enter(t, "b"), s.enter(t, "c")
			if !s.Withdraw(a) || s.Withdraw(a) {
				t.Error("it is not withdrawn, or twice")
			}
			time.Sleep(delay + delay/2) // the request is being made ready
			if !s.Withdraw(b) {
				t.Error("not withdrawn while the request is made ready")
			}
			<-c.done
			if s.Withdraw(c) {
				t.Error("withdrawn after it was sent")
			}
			s.want(t, "c")
			<-s.enter(t, "a").done
		}},
		{"all are withdrawn", func(t *testing.T, s *store) {
			s.getReady = delay
			s.busy(t)
			a := s.enter(t, "a")
			time.Sleep(delay + delay/2)
			if !s.Withdraw(a) {
				t.Error("not withdrawn")
			}
			time.Sleep(delay)
			s.want(t)
			<-s.enter(t, "b").done
			s.want(t, "b")
		}},
		{"closing", func(t *testing.T, s *store) {
			s.busy(t)
			a, b := s.enter(t, "a"), s.enter(t, "b")
			time.Sleep(delay) // they are on their way
			s.want(t, "(a b)")
			s.enter(t, "c")
			d, e := s.enter(t, "d"), s.enter(t, "e")
			if left := s.Close(); !slices.Equal(left, []*call{d, e}) {
				t.Errorf("%d calls are left, want two", len(left))
			}
			s.Wait()
			<-a.done
			<-b.done
			s.want(t, "(a b)", "c")
			if _, err := s.Enter("d", &call{}); !errors.Is(err, driver.ErrClosed) {
				t.Errorf("%v", err)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newStore()
				tc.run(t, s)
				time.Sleep(delay) // of calls that are sent alone
				s.Close()
				s.Wait()
			})
		})
	}
}
