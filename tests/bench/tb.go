package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/go-dlm/dlm/tests/servers"
)

// processTB stands in for a test: what starts servers wants one. Its end is
// that of the process. It ends once, by the goroutine that has made it.
type processTB struct {
	log io.Writer

	mu       sync.Mutex
	cleanups []func()
}

var _ servers.TB = (*processTB)(nil)

// stopped is what Fatalf and Skipf panic with; run returns it as an error.
type stopped struct{ error }

func (*processTB) Helper() {}

func (p *processTB) Cleanup(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cleanups = append(p.cleanups, f)
}

func (p *processTB) Logf(format string, args ...any) {
	fmt.Fprintf(p.log, format+"\n", args...)
}

func (*processTB) Fatalf(format string, args ...any) { panic(stopped{fmt.Errorf(format, args...)}) }

// Skipf fails: without servers there is nothing to measure.
func (*processTB) Skipf(format string, args ...any) { panic(stopped{fmt.Errorf(format, args...)}) }

// run calls a function that may call Fatalf.
func (*processTB) run(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			s, ok := r.(stopped)
			if !ok {
				panic(r)
			}
			err = errors.Join(err, s.error)
		}
	}()
	return f()
}

// end cleans up, the last first.
func (p *processTB) end() {
	p.mu.Lock()
	list := p.cleanups
	p.cleanups = nil
	p.mu.Unlock()
	for _, f := range slices.Backward(list) {
		f()
	}
}
