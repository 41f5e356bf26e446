package clockskew

import (
	"context"
	"time"

	"github.com/beevik/ntp"
)

// Answer is what a stand-in for a server says.
type Answer struct {
	Offset, Distance time.Duration
	Err              error
}

// SetQuery replaces the question to a server.
func (c *Checker) SetQuery(ask func(ctx context.Context, address string) Answer) {
	c.query = func(ctx context.Context, address string) (answer, error) {
		a := ask(ctx, address)
		return newAnswer(a.Offset, a.Distance), a.Err
	}
}

// Valid is what a response is taken for.
func Valid(r *ntp.Response, wall, monotonic time.Duration) Answer {
	a := valid(r, wall, monotonic)
	return Answer{Offset: a.offset, Distance: a.distance}
}

// Kiss is the answer of a server that does not want to be asked.
func Kiss(code string) Answer { return Answer{Err: &kissError{code}} }

// Judge returns what a check would make of these answers.
func Judge(answers []Answer, servers, need int, limit time.Duration) Result {
	r := Result{Time: time.Now(), Asked: servers}
	var list []answer
	for _, a := range answers {
		list = append(list, newAnswer(a.Offset, a.Distance))
	}
	r.judge(list, servers, need, limit)
	return r
}
