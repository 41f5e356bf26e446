package etcdlock

import (
	"context"
	"time"
)

// hedged asks until one answers, and asks again beside the questions before if
// there is no answer for a pause. The client sends each request to another
// member, and one that has gone silent does not say so: without this, a question
// is lost with the member that it was sent to. Other requests take turns at the
// members, too, so that one round need not come to each; the next ones are
// slower. What is answered in vain is passed to drop, if that is given.
//
// An error counts only if no other question is under way. A panic of the client is
// an error. To one member nothing is sent twice.
func hedged[T any](ctx context.Context, members int, pause time.Duration, ask func(context.Context) (T, error), drop func(T)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer)
	send := func() {
		go func() {
			var a answer
			a.err = guarded(func() (err error) {
				a.v, err = ask(ctx)
				return err
			})
			answers <- a
		}()
	}
	send()
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for asked, under := 1, 1; ; {
		select {
		case a := <-answers:
			if under--; a.err != nil && under > 0 {
				continue
			}
			cancel()
			for ; under > 0; under-- {
				if late := <-answers; late.err == nil && drop != nil {
					drop(late.v)
				}
			}
			return a.v, a.err
		case <-timer.C:
			if members < 2 || ctx.Err() != nil {
				continue // the timer does not run again
			}
			send()
			asked++
			under++
			if asked%members == 0 {
				pause *= 2
			}
			timer.Reset(pause)
		}
	}
}
