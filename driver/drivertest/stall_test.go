package drivertest

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestStallsDuring(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := errors.New("boom")
		stalled, err := stallsDuring(func() error {
			time.Sleep(time.Second)
			return boom
		})
		if stalled != 0 || !errors.Is(err, boom) {
			t.Errorf("stallsDuring = %v, %v; nothing stood still", stalled, err)
		}
	})
}

func TestAttempts(t *testing.T) {
	boom := errors.New("boom")
	for _, tt := range []struct {
		name  string
		unit  time.Duration
		errs  []error
		tries int
		want  error
	}{
		{"success", time.Hour, []error{nil}, 1, nil},
		{"failure", time.Hour, []error{boom, nil}, 1, boom},
		{"failure on a machine that stands still", -1, []error{boom, nil}, 2, nil},
		{"failure whatever the machine does", -1, []error{boom, boom, boom, nil}, 3, boom},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tries := 0
			err := attempts(t, func(*testing.T) *Harness { return &Harness{Unit: tt.unit} }, func(*Harness) error {
				tries++
				return tt.errs[tries-1]
			})
			if !errors.Is(err, tt.want) || tries != tt.tries {
				t.Errorf("%v after %d attempts, want %v after %d", err, tries, tt.want, tt.tries)
			}
		})
	}
}
