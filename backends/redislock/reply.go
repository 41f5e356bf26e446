package redislock

import (
	"fmt"
	"strconv"
	"time"
)

// fields reads the parts of a reply one after another, and keeps the first
// failure.
type fields struct {
	list []any
	err  error
}

func (f *fields) next() any {
	if len(f.list) == 0 {
		f.fail("too short")
		return nil
	}
	v := f.list[0]
	f.list = f.list[1:]
	return v
}

func (f *fields) fail(format string, args ...any) {
	if f.err == nil {
		f.err = fmt.Errorf("redislock: strange reply: "+format, args...)
	}
}

func (f *fields) int() int64 {
	switch v := f.next().(type) {
	case int64:
		return v
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			f.fail("%q is no number", v)
		}
		return n
	default:
		f.fail("%v is no number", v)
		return 0
	}
}

func (f *fields) micros() time.Duration { return time.Duration(f.int()) * time.Microsecond }

func (f *fields) string() string {
	v, ok := f.next().(string)
	if !ok {
		f.fail("no text")
	}
	return v
}

func (f *fields) array() []any {
	v, ok := f.next().([]any)
	if !ok {
		f.fail("no list")
	}
	return v
}
