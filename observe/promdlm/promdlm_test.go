package promdlm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/observe/promdlm"
)

// setup returns a collector in a registry that checks what it collects.
func setup(t *testing.T, opts *promdlm.Options) (*promdlm.Collector, *prometheus.Registry) {
	t.Helper()
	c, err := promdlm.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(c); err != nil {
		t.Fatal(err)
	}
	return c, reg
}

// value adds up the series of a metric that have these labels, given as name
// and value in turn: the values of counters and gauges, the counts of
// histograms.
func value(t *testing.T, g prometheus.Gatherer, name string, labels ...string) float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if has(m, labels) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

func has(m *dto.Metric, labels []string) bool {
	for pair := range slices.Chunk(labels, 2) {
		if !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool {
			return l.GetName() == pair[0] && l.GetValue() == pair[1]
		}) {
			return false
		}
	}
	return true
}

// oneOfEach has every kind of event.
func oneOfEach() []dlm.Event {
	conflict := &dlm.LockConflictError{Key: "payment:42", Holder: "x"}
	events := []dlm.Event{
		{Kind: dlm.EventAcquired, Duration: 2 * time.Millisecond},
		{Kind: dlm.EventWaiting},
		{Kind: dlm.EventWaitEnded, Duration: 300 * time.Millisecond},
		{Kind: dlm.EventAcquired, Waited: true, Duration: 400 * time.Millisecond},
		{Kind: dlm.EventWaiting, Mode: dlm.Shared},
		{Kind: dlm.EventAcquired, Mode: dlm.Shared, Duration: time.Millisecond},
		{Kind: dlm.EventAcquireFailed, Err: conflict},
		{Kind: dlm.EventAcquireFailed, Err: fmt.Errorf("%w: %w", context.DeadlineExceeded, conflict)},
		{Kind: dlm.EventAcquireFailed, Err: fmt.Errorf("%w: %w", dlm.ErrClosed, conflict)},
		{Kind: dlm.EventExtended, Margin: 6 * time.Second},
		{Kind: dlm.EventExtendFailed, Margin: time.Second, Err: io.EOF},
		{Kind: dlm.EventReleased, Duration: 3 * time.Second},
		{Kind: dlm.EventReleased, Duration: 3 * time.Second, Mode: dlm.Shared, Err: dlm.ErrIndeterminate},
		{Kind: dlm.EventLost, Duration: time.Minute, Reason: dlm.ReasonTaken},
		{Kind: dlm.EventStoreError, Op: "withdraw", Err: context.DeadlineExceeded},
		{Kind: dlm.EventForced},
		{Kind: 99},
	}
	for i := range events {
		events[i].Backend, events[i].Key = "memory", "payment:42"
	}
	return events
}

func TestExposition(t *testing.T) {
	t.Parallel()
	c, _ := setup(t, &promdlm.Options{
		LatencyBuckets: []float64{.01, 1}, HoldBuckets: []float64{10}, MarginBuckets: []float64{5},
	})
	for _, e := range oneOfEach() {
		c.Observe(e)
	}
	const want = `
# HELP dlm_lock_acquisition_duration_seconds Time from the call to the lock, for calls that got one.
# TYPE dlm_lock_acquisition_duration_seconds histogram
dlm_lock_acquisition_duration_seconds_bucket{backend="memory",waited="false",le="0.01"} 2
dlm_lock_acquisition_duration_seconds_bucket{backend="memory",waited="false",le="1"} 2
dlm_lock_acquisition_duration_seconds_bucket{backend="memory",waited="false",le="+Inf"} 2
dlm_lock_acquisition_duration_seconds_sum{backend="memory",waited="false"} 0.003
dlm_lock_acquisition_duration_seconds_count{backend="memory",waited="false"} 2
dlm_lock_acquisition_duration_seconds_bucket{backend="memory",waited="true",le="0.01"} 0
dlm_lock_acquisition_duration_seconds_bucket{backend="memory",waited="true",le="1"} 1
dlm_lock_acquisition_duration_seconds_bucket{backend="memory",waited="true",le="+Inf"} 1
dlm_lock_acquisition_duration_seconds_sum{backend="memory",waited="true"} 0.4
dlm_lock_acquisition_duration_seconds_count{backend="memory",waited="true"} 1
# HELP dlm_lock_conflicts_total Acquisitions refused because the key was held.
# TYPE dlm_lock_conflicts_total counter
dlm_lock_conflicts_total{backend="memory"} 1
# HELP dlm_lock_errors_total Acquisitions, renewals and releases that failed.
# TYPE dlm_lock_errors_total counter
dlm_lock_errors_total{backend="memory",kind="closed",operation="acquire"} 1
dlm_lock_errors_total{backend="memory",kind="indeterminate",operation="release"} 1
dlm_lock_errors_total{backend="memory",kind="unreachable",operation="extend"} 1
# HELP dlm_lock_extensions_total Locks renewed.
# TYPE dlm_lock_extensions_total counter
dlm_lock_extensions_total{backend="memory"} 1
# HELP dlm_lock_forced_releases_total Locks removed by an operator.
# TYPE dlm_lock_forced_releases_total counter
dlm_lock_forced_releases_total{backend="memory"} 1
# HELP dlm_lock_hold_seconds Time from the grant of a lock to its release or loss.
# TYPE dlm_lock_hold_seconds histogram
dlm_lock_hold_seconds_bucket{backend="memory",mode="exclusive",le="10"} 1
dlm_lock_hold_seconds_bucket{backend="memory",mode="exclusive",le="+Inf"} 2
dlm_lock_hold_seconds_sum{backend="memory",mode="exclusive"} 63
dlm_lock_hold_seconds_count{backend="memory",mode="exclusive"} 2
dlm_lock_hold_seconds_bucket{backend="memory",mode="shared",le="10"} 1
dlm_lock_hold_seconds_bucket{backend="memory",mode="shared",le="+Inf"} 1
dlm_lock_hold_seconds_sum{backend="memory",mode="shared"} 3
dlm_lock_hold_seconds_count{backend="memory",mode="shared"} 1
# HELP dlm_lock_renewal_margin_seconds How far the deadline of a lock still was when it was renewed.
# TYPE dlm_lock_renewal_margin_seconds histogram
dlm_lock_renewal_margin_seconds_bucket{backend="memory",le="5"} 0
dlm_lock_renewal_margin_seconds_bucket{backend="memory",le="+Inf"} 1
dlm_lock_renewal_margin_seconds_sum{backend="memory"} 6
dlm_lock_renewal_margin_seconds_count{backend="memory"} 1
# HELP dlm_lock_store_errors_total Failed calls to the store.
# TYPE dlm_lock_store_errors_total counter
dlm_lock_store_errors_total{backend="memory",kind="deadline",operation="withdraw"} 1
# HELP dlm_lock_timeouts_total Acquisitions given up because their context ended while waiting.
# TYPE dlm_lock_timeouts_total counter
dlm_lock_timeouts_total{backend="memory"} 1
# HELP dlm_lock_wait_seconds Time spent in a queue, whether or not a lock came of it.
# TYPE dlm_lock_wait_seconds histogram
dlm_lock_wait_seconds_bucket{backend="memory",mode="exclusive",le="0.01"} 0
dlm_lock_wait_seconds_bucket{backend="memory",mode="exclusive",le="1"} 1
dlm_lock_wait_seconds_bucket{backend="memory",mode="exclusive",le="+Inf"} 1
dlm_lock_wait_seconds_sum{backend="memory",mode="exclusive"} 0.3
dlm_lock_wait_seconds_count{backend="memory",mode="exclusive"} 1
# HELP dlm_locks_acquired_total Locks granted.
# TYPE dlm_locks_acquired_total counter
dlm_locks_acquired_total{backend="memory",mode="exclusive"} 2
dlm_locks_acquired_total{backend="memory",mode="shared"} 1
# HELP dlm_locks_held Locks held now.
# TYPE dlm_locks_held gauge
dlm_locks_held{backend="memory",mode="exclusive"} 0
dlm_locks_held{backend="memory",mode="shared"} 0
# HELP dlm_locks_lost_total Locks lost without being released.
# TYPE dlm_locks_lost_total counter
dlm_locks_lost_total{backend="memory",reason="closed"} 0
dlm_locks_lost_total{backend="memory",reason="expired"} 0
dlm_locks_lost_total{backend="memory",reason="gone"} 0
dlm_locks_lost_total{backend="memory",reason="max-hold"} 0
dlm_locks_lost_total{backend="memory",reason="session"} 0
dlm_locks_lost_total{backend="memory",reason="taken"} 1
# HELP dlm_locks_released_total Locks released.
# TYPE dlm_locks_released_total counter
dlm_locks_released_total{backend="memory",mode="exclusive"} 1
dlm_locks_released_total{backend="memory",mode="shared"} 1
# HELP dlm_locks_waiting Calls waiting in a queue now.
# TYPE dlm_locks_waiting gauge
dlm_locks_waiting{backend="memory",mode="exclusive"} 0
dlm_locks_waiting{backend="memory",mode="shared"} 1
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestLint(t *testing.T) {
	t.Parallel()
	for _, opts := range []*promdlm.Options{nil, {KeyClass: func(string) string { return "payment" }}} {
		c, reg := setup(t, opts)
		for _, e := range oneOfEach() {
			c.Observe(e)
		}
		problems, err := testutil.GatherAndLint(reg)
		if err != nil {
			t.Error(err)
		}
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

func TestEveryEventCountsOnce(t *testing.T) {
	t.Parallel()
	conflict := &dlm.LockConflictError{Key: "k"}
	for _, tt := range []struct {
		name  string
		event dlm.Event
		want  string // the only counter that moves
	}{
		{"acquired", dlm.Event{Kind: dlm.EventAcquired}, "dlm_locks_acquired_total"},
		{"refused", dlm.Event{Kind: dlm.EventAcquireFailed, Err: conflict}, "dlm_lock_conflicts_total"},
		{"given up", dlm.Event{Kind: dlm.EventAcquireFailed, Err: fmt.Errorf("%w: %w", conflict, context.Canceled)}, "dlm_lock_timeouts_total"},
		{"given up before it was known to be held", dlm.Event{Kind: dlm.EventAcquireFailed, Err: context.Canceled}, "dlm_lock_errors_total"},
		{"given up, and something may be left", dlm.Event{
			Kind: dlm.EventAcquireFailed,
			Err:  fmt.Errorf("%w: %w; %w", conflict, context.Canceled, dlm.ErrIndeterminate),
		}, "dlm_lock_timeouts_total"},
		{"failed", dlm.Event{Kind: dlm.EventAcquireFailed, Err: io.EOF}, "dlm_lock_errors_total"},
		{"failed without a reason", dlm.Event{Kind: dlm.EventAcquireFailed}, "dlm_lock_errors_total"},
		{"waiting", dlm.Event{Kind: dlm.EventWaiting}, ""},
		{"wait ended", dlm.Event{Kind: dlm.EventWaitEnded}, ""},
		{"released", dlm.Event{Kind: dlm.EventReleased}, "dlm_locks_released_total"},
		{"lost", dlm.Event{Kind: dlm.EventLost, Reason: dlm.ReasonGone, Err: &dlm.LostError{}}, "dlm_locks_lost_total"},
		{"extended", dlm.Event{Kind: dlm.EventExtended}, "dlm_lock_extensions_total"},
		{"not extended", dlm.Event{Kind: dlm.EventExtendFailed, Err: io.EOF}, "dlm_lock_errors_total"},
		{"store error", dlm.Event{Kind: dlm.EventStoreError, Op: "list", Err: io.EOF}, "dlm_lock_store_errors_total"},
		{"forced", dlm.Event{Kind: dlm.EventForced}, "dlm_lock_forced_releases_total"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, reg := setup(t, nil)
			c.Observe(tt.event)
			families, err := reg.Gather()
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range families {
				if f.GetType() != dto.MetricType_COUNTER {
					continue
				}
				want := 0.0
				if f.GetName() == tt.want {
					want = 1
				}
				if got := value(t, reg, f.GetName()); got != want {
					t.Errorf("%s is %v, want %v", f.GetName(), got, want)
				}
			}
			if tt.want != "" && value(t, reg, tt.want) != 1 {
				t.Errorf("%s did not move", tt.want)
			}
		})
	}
}

func TestKinds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		want string
		err  error
	}{
		{"invalid", &dlm.LimitError{Want: 2, Have: 3}},
		{"unsupported", fmt.Errorf("no permits: %w", errors.ErrUnsupported)},
		{"closed", &dlm.Error{Op: "acquire", Err: dlm.ErrClosed}},
		{"indeterminate", fmt.Errorf("%w: %w", dlm.ErrIndeterminate, context.DeadlineExceeded)},
		{"unreachable", fmt.Errorf("%w: %w", dlm.ErrNotApplied, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED})},
		{"unreachable", &net.DNSError{Name: "db"}},
		{"unreachable", fmt.Errorf("read: %w", io.ErrUnexpectedEOF)},
		{"not_applied", fmt.Errorf("%w: %w", dlm.ErrNotApplied, context.Canceled)},
		{"canceled", context.Canceled},
		{"deadline", context.DeadlineExceeded},
		{"other", errors.New("disk full")},
		{"other", nil},
	} {
		c, reg := setup(t, nil)
		c.Observe(dlm.Event{Kind: dlm.EventStoreError, Backend: "memory", Op: "acquire", Err: tt.err})
		if value(t, reg, "dlm_lock_store_errors_total", "kind", tt.want) != 1 {
			t.Errorf("%v is not of kind %s", tt.err, tt.want)
		}
	}
}

func TestFixedSets(t *testing.T) {
	t.Parallel()
	c, reg := setup(t, nil)
	for i := range 1000 {
		odd := strconv.Itoa(i)
		c.Observe(dlm.Event{Kind: dlm.EventLost, Reason: dlm.LostReason(odd)})
		c.Observe(dlm.Event{Kind: dlm.EventStoreError, Op: odd, Err: errors.New(odd)})
	}
	if got := value(t, reg, "dlm_locks_lost_total", "reason", "other"); got != 1000 {
		t.Errorf("%v losses for other reasons, want 1000", got)
	}
	if got := value(t, reg, "dlm_lock_store_errors_total", "operation", "other", "kind", "other"); got != 1000 {
		t.Errorf("%v errors of other operations, want 1000", got)
	}
}

// Series must not grow with keys and owners, however odd they are.
func TestCardinality(t *testing.T) {
	t.Parallel()
	const many, few, owners = 100_000, 1_000, 1_000
	life := func(c *promdlm.Collector, i int) {
		key := fmt.Sprintf("key:%d:\xff\x00\n\"{}é\u202e", i)
		owner := fmt.Sprintf("owner\xfe%d", i%owners)
		for _, e := range []dlm.Event{
			{Kind: dlm.EventWaiting},
			{Kind: dlm.EventWaitEnded},
			{Kind: dlm.EventAcquired, Waited: true},
			{Kind: dlm.EventExtended},
			{Kind: dlm.EventReleased},
		} {
			e.Backend, e.Key, e.Value, e.Token = "memory", key, owner, int64(i)
			c.Observe(e)
		}
	}
	const perClass = 4 + 3 + 2 + 6 // histograms, counters, gauges, reasons
	for _, tt := range []struct {
		name    string
		opts    *promdlm.Options
		keys    int
		classes int
	}{
		{"no classes", nil, many, 1},
		{"default bound", &promdlm.Options{KeyClass: func(key string) string { return key }}, many, 101},
		{"own bound", &promdlm.Options{KeyClass: func(key string) string { return key }, MaxClasses: 3}, few, 4},
		{"few classes", &promdlm.Options{KeyClass: func(key string) string { return key[:4] }}, few, 1},
		{"empty classes", &promdlm.Options{KeyClass: func(string) string { return "" }}, few, 1},
		{"a classifier that panics", &promdlm.Options{KeyClass: func(key string) string { return strings.Split(key, "/")[1] }}, few, 1},
		{"long classes", &promdlm.Options{
			KeyClass: func(key string) string { return strings.Repeat("é", 300) + key }, MaxClasses: 5,
		}, few, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, reg := setup(t, tt.opts)
			for i := range tt.keys {
				life(c, i)
			}
			families, err := reg.Gather()
			if err != nil {
				t.Fatal(err)
			}
			series := 0
			for _, f := range families {
				series += len(f.GetMetric())
				for _, m := range f.GetMetric() {
					for _, l := range m.GetLabel() {
						v := l.GetValue()
						if !utf8.ValidString(v) || len(v) > 128 || strings.ContainsAny(v, "\x00\n\u202e\ufffd") {
							t.Errorf("%s has the label %s=%q", f.GetName(), l.GetName(), v)
						}
					}
				}
			}
			if want := tt.classes * perClass; series != want {
				t.Errorf("%d series, want %d", series, want)
			}
			if got := value(t, reg, "dlm_locks_acquired_total"); got != float64(tt.keys) {
				t.Errorf("%v locks acquired, want %d", got, tt.keys)
			}
			if got := value(t, reg, "dlm_locks_held"); got != 0 {
				t.Errorf("%v locks held, want 0", got)
			}
		})
	}
}

// The gauges must be right at rest after any mixture of events, and never
// below zero on the way, though a loss may be told before the grant.
func TestGaugesUnderChaos(t *testing.T) {
	t.Parallel()
	const goroutines, lives = 8, 2_000
	c, reg := setup(t, &promdlm.Options{KeyClass: func(key string) string { return key[:2] }, MaxClasses: 5})
	stop := make(chan struct{})
	var scraper, workers sync.WaitGroup
	scraper.Go(func() {
		for {
			families, err := reg.Gather()
			if err != nil {
				t.Error(err)
				return
			}
			for _, f := range families {
				for _, m := range f.GetMetric() {
					if m.GetGauge().GetValue() < 0 {
						t.Errorf("%s is %v", f.GetName(), m.GetGauge().GetValue())
						return
					}
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	var mu sync.Mutex
	count := make(map[dlm.EventKind]int)
	for range goroutines {
		workers.Go(func() {
			mine := make(map[dlm.EventKind]int)
			for i := range lives {
				base := dlm.Event{Backend: "memory", Key: fmt.Sprintf("%02d:%d", rand.N(20), i), Mode: dlm.Mode(rand.N(2))}
				var events []dlm.EventKind
				if rand.N(2) == 0 {
					events = append(events, dlm.EventWaiting, dlm.EventWaitEnded)
				}
				if rand.N(4) == 0 {
					events = append(events, dlm.EventAcquireFailed)
				} else {
					end := dlm.EventReleased
					if rand.N(3) == 0 {
						end = dlm.EventLost
					}
					events = append(events, dlm.EventAcquired, dlm.EventExtended, dlm.EventExtendFailed, end)
				}
				// One in ten is told in the wrong order.
				if rand.N(10) == 0 {
					rand.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
				}
				for _, kind := range events {
					e := base
					e.Kind = kind
					switch kind {
					case dlm.EventLost:
						e.Reason = dlm.ReasonExpired
					case dlm.EventAcquireFailed, dlm.EventExtendFailed:
						e.Err = io.EOF
					}
					c.Observe(e)
					mine[kind]++
				}
			}
			mu.Lock()
			defer mu.Unlock()
			for kind, n := range mine {
				count[kind] += n
			}
		})
	}
	workers.Wait()
	close(stop)
	scraper.Wait()
	for _, tt := range []struct {
		metric string
		labels []string
		want   int
	}{
		{"dlm_locks_held", nil, 0},
		{"dlm_locks_waiting", nil, 0},
		{"dlm_locks_acquired_total", nil, count[dlm.EventAcquired]},
		{"dlm_locks_released_total", nil, count[dlm.EventReleased]},
		{"dlm_locks_lost_total", []string{"reason", "expired"}, count[dlm.EventLost]},
		{"dlm_lock_extensions_total", nil, count[dlm.EventExtended]},
		{"dlm_lock_errors_total", []string{"operation", "acquire"}, count[dlm.EventAcquireFailed]},
		{"dlm_lock_errors_total", []string{"operation", "extend"}, count[dlm.EventExtendFailed]},
		{"dlm_lock_acquisition_duration_seconds", nil, count[dlm.EventAcquired]},
		{"dlm_lock_hold_seconds", nil, count[dlm.EventReleased] + count[dlm.EventLost]},
		{"dlm_lock_wait_seconds", nil, count[dlm.EventWaitEnded]},
		{"dlm_lock_renewal_margin_seconds", nil, count[dlm.EventExtended]},
	} {
		if got := value(t, reg, tt.metric, tt.labels...); got != float64(tt.want) {
			t.Errorf("%s%q is %v, want %d", tt.metric, tt.labels, got, tt.want)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		opts promdlm.Options
		want string
	}{
		{"negative bound", promdlm.Options{MaxClasses: -1}, "MaxClasses"},
		{"falling", promdlm.Options{LatencyBuckets: []float64{2, 1}}, "LatencyBuckets"},
		{"repeated", promdlm.Options{HoldBuckets: []float64{1, 1}}, "HoldBuckets"},
		{"not a number", promdlm.Options{MarginBuckets: []float64{math.NaN()}}, "MarginBuckets"},
		{"infinite", promdlm.Options{MarginBuckets: []float64{1, math.Inf(1)}}, "MarginBuckets"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, err := promdlm.New(&tt.opts)
			if c != nil || !errors.Is(err, dlm.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("New: %v, %v; want an error about %s", c, err, tt.want)
			}
		})
	}
	bounds := []float64{1, 2}
	c, reg := setup(t, &promdlm.Options{LatencyBuckets: bounds})
	bounds[0] = 7
	c.Observe(dlm.Event{Kind: dlm.EventAcquired, Duration: 1500 * time.Millisecond})
	if got := value(t, reg, "dlm_lock_acquisition_duration_seconds"); got != 1 {
		t.Errorf("%v acquisitions after the caller changed its buckets, want 1", got)
	}
}
