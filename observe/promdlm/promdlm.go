package promdlm

import (
	"fmt"
	"math"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-dlm/dlm"
)

const namespace = "dlm"

// Options configures a [Collector]. A nil *Options means the defaults, and so
// does the zero value of each field. It is copied when the collector is made.
type Options struct {
	// KeyClass sorts a key into a class, which becomes the label "class", such
	// as "payment" for "payment:42". It must be safe for concurrent use and
	// give the same key the same class every time. An empty class, and a call
	// that panics, count as "other". Defaults to no such label.
	KeyClass func(key string) string
	// MaxClasses bounds the classes: once there are as many, every further one
	// counts as "other". It has no effect without KeyClass. Defaults to 100.
	MaxClasses int
	// LatencyBuckets are the upper bounds, in seconds and rising, of the
	// acquisition and the wait histogram. Defaults to 0.5ms up to 60s.
	LatencyBuckets []float64
	// HoldBuckets are those of the hold histogram. Defaults to 1ms up to 6h.
	HoldBuckets []float64
	// MarginBuckets are those of the renewal margin histogram. Defaults to
	// 10ms up to 5m.
	MarginBuckets []float64
}

const defaultMaxClasses = 100

var (
	defaultLatencyBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60}
	defaultHoldBuckets    = []float64{.001, .01, .1, .5, 1, 5, 15, 60, 300, 900, 3600, 21600}
	defaultMarginBuckets  = []float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 60, 300}
)

// Collector counts the events of managers. It is safe for concurrent use.
type Collector struct {
	classes *classifier // nil without Options.KeyClass

	acquisition, wait, hold, margin                           *prometheus.HistogramVec
	acquired, released, lost, extensions, conflicts, timeouts *prometheus.CounterVec
	errors, storeErrors, forced                               *prometheus.CounterVec
	held, waiting                                             *gauge

	all []prometheus.Collector
}

var (
	_ prometheus.Collector = (*Collector)(nil)
	_ dlm.Observer         = (*Collector)(nil)
)

// New makes a collector, which is not registered yet. Its error matches
// [dlm.ErrInvalid] and names the option that is wrong.
func New(opts *Options) (*Collector, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.MaxClasses < 0 {
		return nil, fmt.Errorf("%w: Options.MaxClasses is %d, must not be negative", dlm.ErrInvalid, o.MaxClasses)
	}
	if o.MaxClasses == 0 {
		o.MaxClasses = defaultMaxClasses
	}
	latency, err := buckets("LatencyBuckets", o.LatencyBuckets, defaultLatencyBuckets)
	if err != nil {
		return nil, err
	}
	hold, err := buckets("HoldBuckets", o.HoldBuckets, defaultHoldBuckets)
	if err != nil {
		return nil, err
	}
	margin, err := buckets("MarginBuckets", o.MarginBuckets, defaultMarginBuckets)
	if err != nil {
		return nil, err
	}

	c := &Collector{}
	if o.KeyClass != nil {
		c.classes = newClassifier(o.KeyClass, o.MaxClasses)
	}
	// byKey names the labels of what belongs to a key; class comes last.
	byKey := func(labels ...string) []string {
		labels = append([]string{"backend"}, labels...)
		if c.classes != nil {
			labels = append(labels, "class")
		}
		return labels
	}
	counter := func(name, help string, labels []string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
		c.all = append(c.all, v)
		return v
	}
	histogram := func(name, help string, bounds []float64, labels []string) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: name, Help: help, Buckets: bounds,
		}, labels)
		c.all = append(c.all, v)
		return v
	}
	gauge := func(name, help string, labels []string) *gauge {
		v := newGauge(prometheus.BuildFQName(namespace, "", name), help, labels)
		c.all = append(c.all, v)
		return v
	}

	c.acquisition = histogram("lock_acquisition_duration_seconds",
		"Time from the call to the lock, for calls that got one.", latency, byKey("waited"))
	c.wait = histogram("lock_wait_seconds",
		"Time spent in a queue, whether or not a lock came of it.", latency, byKey("mode"))
	c.hold = histogram("lock_hold_seconds",
		"Time from the grant of a lock to its release or loss.", hold, byKey("mode"))
	c.margin = histogram("lock_renewal_margin_seconds",
		"How far the deadline of a lock still was when it was renewed.", margin, byKey())
	c.acquired = counter("locks_acquired_total", "Locks granted.", byKey("mode"))
	c.released = counter("locks_released_total", "Locks released.", byKey("mode"))
	c.lost = counter("locks_lost_total", "Locks lost without being released.", byKey("reason"))
	c.extensions = counter("lock_extensions_total", "Locks renewed.", byKey())
	c.conflicts = counter("lock_conflicts_total", "Acquisitions refused because the key was held.", byKey())
	c.timeouts = counter("lock_timeouts_total", "Acquisitions given up because their context ended while waiting.", byKey())
	c.forced = counter("lock_forced_releases_total", "Locks removed by an operator.", byKey())
	c.errors = counter("lock_errors_total",
		"Acquisitions, renewals and releases that failed.", []string{"backend", "operation", "kind"})
	c.storeErrors = counter("lock_store_errors_total",
		"Failed calls to the store.", []string{"backend", "operation", "kind"})
	c.held = gauge("locks_held", "Locks held now.", byKey("mode"))
	c.waiting = gauge("locks_waiting", "Calls waiting in a queue now.", byKey("mode"))
	return c, nil
}

// buckets checks the bounds of a histogram and applies the default.
func buckets(field string, bounds, def []float64) ([]float64, error) {
	if len(bounds) == 0 {
		return def, nil
	}
	last := math.Inf(-1)
	for _, b := range bounds {
		// A NaN is not above anything.
		if !(b > last) || math.IsInf(b, 0) {
			return nil, fmt.Errorf("%w: Options.%s is %v, must be finite and rise", dlm.ErrInvalid, field, bounds)
		}
		last = b
	}
	return append([]float64(nil), bounds...), nil
}

// Describe implements [prometheus.Collector].
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range c.all {
		v.Describe(ch)
	}
}

// Collect implements [prometheus.Collector].
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	for _, v := range c.all {
		v.Collect(ch)
	}
}

// Observe implements [dlm.Observer]. It never blocks for long, and keeps
// nothing of the event.
func (c *Collector) Observe(e dlm.Event) {
	backend := clean(e.Backend)
	var class string
	// byKey gives the label values of what belongs to the event's key, in the
	// order of the labels.
	byKey := func(values ...string) []string {
		values = append([]string{backend}, values...)
		if c.classes != nil {
			if class == "" {
				class = c.classes.class(e.Key)
			}
			values = append(values, class)
		}
		return values
	}
	mode := e.Mode.String()
	switch e.Kind {
	case dlm.EventAcquired:
		l := byKey(mode)
		c.acquired.WithLabelValues(l...).Inc()
		if first := c.held.add(1, l); first {
			// The increase of a series that begins at one is not seen.
			for _, r := range reasons {
				c.lost.WithLabelValues(byKey(string(r))...)
			}
		}
		c.acquisition.WithLabelValues(byKey(strconv.FormatBool(e.Waited))...).Observe(e.Duration.Seconds())
	case dlm.EventAcquireFailed:
		switch failure(e.Err) {
		case conflict:
			c.conflicts.WithLabelValues(byKey()...).Inc()
		case timeout:
			c.timeouts.WithLabelValues(byKey()...).Inc()
		default:
			c.errors.WithLabelValues(backend, "acquire", kind(e.Err)).Inc()
		}
	case dlm.EventWaiting:
		c.waiting.add(1, byKey(mode))
	case dlm.EventWaitEnded:
		l := byKey(mode)
		c.waiting.add(-1, l)
		c.wait.WithLabelValues(l...).Observe(e.Duration.Seconds())
	case dlm.EventReleased:
		l := byKey(mode)
		c.released.WithLabelValues(l...).Inc()
		c.held.add(-1, l)
		c.hold.WithLabelValues(l...).Observe(e.Duration.Seconds())
		if e.Err != nil {
			c.errors.WithLabelValues(backend, "release", kind(e.Err)).Inc()
		}
	case dlm.EventLost:
		l := byKey(mode)
		c.lost.WithLabelValues(byKey(reason(e.Reason))...).Inc()
		c.held.add(-1, l)
		c.hold.WithLabelValues(l...).Observe(e.Duration.Seconds())
	case dlm.EventExtended:
		l := byKey()
		c.extensions.WithLabelValues(l...).Inc()
		c.margin.WithLabelValues(l...).Observe(e.Margin.Seconds())
	case dlm.EventExtendFailed:
		c.errors.WithLabelValues(backend, "extend", kind(e.Err)).Inc()
	case dlm.EventStoreError:
		c.storeErrors.WithLabelValues(backend, operation(e.Op), kind(e.Err)).Inc()
	case dlm.EventForced:
		c.forced.WithLabelValues(byKey()...).Inc()
	}
}

// gauge counts up and down. Unlike [prometheus.GaugeVec] it is never shown
// below zero: the events of one lock come from two goroutines, and a scrape
// may see the end of a lock before its start.
type gauge struct {
	desc   *prometheus.Desc
	labels int

	values sync.Map // [maxLabels]string to *atomic.Int64
}

// maxLabels is the most labels that a gauge has: backend, mode, class.
const maxLabels = 3

func newGauge(name, help string, labels []string) *gauge {
	return &gauge{desc: prometheus.NewDesc(name, help, labels, nil), labels: len(labels)}
}

// add adds n, and says whether these labels were new.
func (g *gauge) add(n int64, labels []string) (first bool) {
	var key [maxLabels]string
	copy(key[:], labels)
	v, ok := g.values.Load(key)
	if !ok {
		v, ok = g.values.LoadOrStore(key, new(atomic.Int64))
	}
	v.(*atomic.Int64).Add(n)
	return !ok
}

func (g *gauge) Describe(ch chan<- *prometheus.Desc) { ch <- g.desc }

func (g *gauge) Collect(ch chan<- prometheus.Metric) {
	g.values.Range(func(k, v any) bool {
		key := k.([maxLabels]string)
		n := max(v.(*atomic.Int64).Load(), 0)
		ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, float64(n), key[:g.labels]...)
		return true
	})
}
