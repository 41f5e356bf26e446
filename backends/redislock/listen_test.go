package redislock_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
)

func TestParseEvent(t *testing.T) {
	t.Parallel()
	lease := driver.Lease{Key: "k", Owner: "me", Token: 12, TTL: 5 * time.Microsecond}
	shared := lease
	shared.Mode = driver.Shared
	name := driver.Lease{Key: "k", Owner: "me"}
	for _, tt := range []struct {
		name, text string
		want       driver.Event
	}{
		{"grant", "g 11 12 5 x1 2 medlm:{k}", driver.Event{Kind: driver.EventGrant, Ticket: 11, Lease: lease}},
		{"grant of a permit", "g 11 12 5 x30 2 medlm:{k}", driver.Event{Kind: driver.EventGrant, Ticket: 11, Lease: lease}},
		{"shared grant", "g 11 12 5 s1 2 medlm:{k}", driver.Event{Kind: driver.EventGrant, Ticket: 11, Lease: shared}},
		{"wake", "w 11 12 5 x1 2 medlm:{k}", driver.Event{Kind: driver.EventWake, Lease: name}},
		{"loss", "l 0 12 5 x1 2 medlm:{k}", driver.Event{Kind: driver.EventLost, Lease: name}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := redislock.ParseEvent("dlm:", tt.text)
			if err != nil {
				t.Fatal(err)
			}
			if tt.want.Kind == driver.EventLost {
				lost, ok := errors.AsType[*driver.LostError](got.Err)
				if !ok || lost.Key != "k" || lost.Token != 12 {
					t.Errorf("the loss is %v", got.Err)
				}
				got.Err = nil
			}
			if got != tt.want {
				t.Errorf("got %+v\nwant %+v", got, tt.want)
			}
		})
	}
}

// Owners and keys may contain anything.
func TestParseEventOfAwkwardNames(t *testing.T) {
	t.Parallel()
	for _, key := range awkward {
		for _, owner := range append([]string{"", "1 dlm:{x}", "a b 3 "}, awkward...) {
			text := fmt.Sprintf("g 1 2 3 x1 %d %s%s", len(owner), owner, redislock.RecordKey("dlm:", key))
			e, err := redislock.ParseEvent("dlm:", text)
			if err != nil || e.Lease.Key != key || e.Lease.Owner != owner {
				t.Fatalf("%q: %+v, %v", text, e, err)
			}
		}
	}
}

func TestParseStrangeEvent(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", " ", "      ", "g", "g 11 12 5 x1 2", "g 11 12 5 x1 2 ", "g 11 12 5 x1 2 me", "g 11 12 5 x1 3 medlm:{k}",
		"g 11 12 5 x1 -1 medlm:{k}", "g 11 12 5 x1 99 medlm:{k}", "g 11 12 5 x1 9223372036854775807 medlm:{k}",
		"g a 12 5 x1 2 medlm:{k}", "g 11 a 5 x1 2 medlm:{k}", "g 11 12 a x1 2 medlm:{k}", "g 11 12 5 x 2 medlm:{k}",
		"g 11 12 5 y1 2 medlm:{k}", "g 11 12 5 x1 a medlm:{k}", "z 11 12 5 x1 2 medlm:{k}", " 11 12 5 x1 2 medlm:{k}",
		"g 11 12 5 x1 2 meother:{k}", "g 11 12 5 x1 2 medlm:{k}:q", "g 99999999999999999999 12 5 x1 2 medlm:{k}",
	} {
		if e, err := redislock.ParseEvent("dlm:", text); err == nil {
			t.Errorf("%q is read as %+v", text, e)
		}
	}
}

func FuzzParseEvent(f *testing.F) {
	f.Add("g 11 12 5 x1 2 medlm:{k}")
	f.Add("w 0 0 0 s1 0 dlm:{%25}")
	f.Add("l -1 9 9 x30 1  dlm:{ }")
	f.Fuzz(func(t *testing.T, text string) {
		e, err := redislock.ParseEvent("dlm:", text)
		if err != nil {
			return
		}
		if e.Lease.Key == "" || e.Kind == 0 {
			t.Errorf("%q is read as %+v", text, e)
		}
		if !strings.HasSuffix(text, e.Lease.Owner+redislock.RecordKey("dlm:", e.Lease.Key)) {
			t.Errorf("%q is read as %+v", text, e)
		}
	})
}
