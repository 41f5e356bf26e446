// Command flashsale sells a few units of some items to many buyers, who all come
// at once, to several processes.
//
// To sell a unit is to read the stock, to take the payment, and to write the
// new stock. Each purchase does that under the lock of its item, and shows the
// lock's fencing token to the store. With -unsafe there is no lock: then one
// process reads the stock while another one is about to write it, and more is
// sold than there is.
//
// The locks are kept in a file, or with -redis in Redis:
//
//	flashsale -redis redis://127.0.0.1:6379/0 -items 10 -stock 100 -buyers 100000
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/examples/internal/ledger"
	"github.com/go-dlm/dlm/examples/internal/procs"
)

const (
	// ttl is how long the others wait if a process dies in a purchase.
	ttl = 10 * time.Second
	// counters is how many buyers a process serves at a time.
	counters = 8
	// patience bounds what is left to do when the context has ended.
	patience = 5 * time.Second
	// seller is the argument that makes the program one of its processes.
	seller = "seller"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := 0
	if err := run(ctx, os.Args[1:]); err != nil {
		code = 1
		if ctx.Err() == nil { // after a signal there is nothing to say
			fmt.Fprintln(os.Stderr, "flashsale:", err)
		}
	}
	stop()
	os.Exit(code)
}

// sale is what all processes agree on.
type sale struct {
	dir       string
	redis     string // URL, or empty
	processes int
	items     int
	stock     int // units of all items together
	buyers    int
	unsafe    bool
}

// unitsOf is the stock of one item before the sale.
func (s *sale) unitsOf(item int) int {
	units := s.stock / s.items
	if item < s.stock%s.items {
		units++
	}
	return units
}

// unit is the record of a unit that was sold.
type unit struct {
	Buyer int `json:"buyer"`
	Left  int `json:"left"` // the stock after that
}

// tally counts the purchases that were tried.
type tally struct {
	Tried   int `json:"tried"`
	Sold    int `json:"sold"`
	Refused int `json:"refused"` // the stock was gone, or the buyer had a unit
}

func run(ctx context.Context, args []string) error {
	isSeller := len(args) > 0 && args[0] == seller
	if isSeller {
		args = args[1:]
	}
	var s sale
	var number int
	flags := flag.NewFlagSet("flashsale", flag.ExitOnError)
	flags.IntVar(&s.processes, "processes", 8, "how many `processes` sell")
	flags.IntVar(&s.items, "items", 1, "how many `items` are sold")
	flags.IntVar(&s.stock, "stock", 100, "how many `units` of all items together there are")
	flags.IntVar(&s.buyers, "buyers", 5000, "how many `buyers` come; every tenth tries twice, at two processes")
	flags.BoolVar(&s.unsafe, "unsafe", false, "sell without a lock")
	flags.StringVar(&s.redis, "redis", "", "the `URL` of a Redis that keeps the locks (default a file keeps them)")
	flags.StringVar(&s.dir, "dir", "", "an empty `folder` for locks and records (default a temporary one)")
	asJSON := flags.Bool("json", false, "print the result as an object")
	if isSeller {
		flags.IntVar(&number, "number", 0, "which process this is")
	}
	_ = flags.Parse(args) // it exits on errors
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if s.processes < 1 || s.items < 1 || s.stock < 1 || s.buyers < 1 {
		return errors.New("-processes, -items, -stock and -buyers must be at least 1")
	}
	if isSeller {
		return s.sell(ctx, number)
	}
	if s.dir == "" {
		dir, err := os.MkdirTemp("", "dlm-flashsale-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		s.dir = dir
	}
	return s.hold(ctx, *asJSON)
}

// result is what has become of the sale.
type result struct {
	Stock   int     `json:"stock"`
	Buyers  int     `json:"buyers"`
	Doubles int     `json:"doubles"` // buyers that got more than one unit
	Seconds float64 `json:"seconds"`
	tally
}

// hold holds the sale and prints its result.
func (s *sale) hold(ctx context.Context, asJSON bool) error {
	if !asJSON {
		fmt.Printf("%d processes sell %d units of %d items to %d buyers\n", s.processes, s.stock, s.items, s.buyers)
	}
	began := time.Now()
	tally, err := s.start(ctx)
	if err != nil {
		return err
	}
	r := result{Stock: s.stock, Buyers: s.buyers, Seconds: time.Since(began).Seconds(), tally: tally}
	bought := make(map[int]int)
	recorded, possible := 0, 0
	for item := range s.items {
		units, err := s.sold(item)
		if err != nil {
			return err
		}
		recorded += len(units)
		possible += min(s.unitsOf(item), s.comeFor(item))
		for _, u := range units {
			if bought[u.Value.Buyer]++; bought[u.Value.Buyer] == 2 {
				r.Doubles++
			}
		}
	}
	if asJSON {
		if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
			return err
		}
	} else {
		fmt.Printf("%d sold, %d refused, in %.1fs: %.0f purchases tried per second\n",
			r.Sold, r.Refused, r.Seconds, float64(r.Tried)/r.Seconds)
	}
	return r.check(recorded, possible)
}

// check fails if the sale was not right. It is told how many units are on
// record, and how many must be.
func (r *result) check(recorded, want int) error {
	var faults []error
	if recorded != want {
		faults = append(faults, fmt.Errorf("%d units were sold, must be %d", recorded, want))
	}
	if recorded != r.Sold {
		faults = append(faults, fmt.Errorf("%d units are on record, but the processes have sold %d", recorded, r.Sold))
	}
	if r.Doubles > 0 {
		faults = append(faults, fmt.Errorf("%d buyers got more than one unit", r.Doubles))
	}
	return errors.Join(faults...)
}

// start starts the processes, waits for them, and adds up what they say.
func (s *sale) start(ctx context.Context) (sum tally, err error) {
	group, ctx := procs.NewGroup(ctx)
	defer group.Stop()
	outputs := make([]bytes.Buffer, s.processes)
	for i := range outputs {
		cmd, err := procs.Self(ctx, seller,
			"-number", strconv.Itoa(i),
			"-processes", strconv.Itoa(s.processes),
			"-items", strconv.Itoa(s.items),
			"-stock", strconv.Itoa(s.stock),
			"-redis", s.redis,
			"-buyers", strconv.Itoa(s.buyers),
			"-unsafe="+strconv.FormatBool(s.unsafe),
			"-dir", s.dir)
		if err != nil {
			return sum, err
		}
		cmd.Stdout = &outputs[i]
		if err := group.Start(cmd); err != nil {
			return sum, err
		}
	}
	if err := group.Wait(); err != nil {
		return sum, err
	}
	for i := range outputs {
		var t tally
		if err := json.Unmarshal(outputs[i].Bytes(), &t); err != nil {
			return sum, fmt.Errorf("process %d: %w", i, err)
		}
		sum.add(t)
	}
	return sum, nil
}

// sell is the life of one process.
func (s *sale) sell(ctx context.Context, number int) (err error) {
	// The label is what `dlm get item:1` shows.
	cfg := &dlm.LockConfig{Label: fmt.Sprint("seller-", number)}
	locks, err := s.open(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, locks.Close)) }()

	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	buyers := make(chan int)
	tallies := make([]tally, counters)
	var wg sync.WaitGroup
	for i := range tallies {
		wg.Go(func() {
			if err := s.serve(ctx, locks, buyers, &tallies[i]); err != nil {
				fail(err)
			}
		})
	}
	s.queue(ctx, number, buyers)
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var sum tally
	for _, t := range tallies {
		sum.add(t)
	}
	return json.NewEncoder(os.Stdout).Encode(sum)
}

// open opens the store of the locks.
func (s *sale) open(cfg *dlm.LockConfig) (*dlm.Manager, error) {
	if s.redis == "" {
		return sqlitelock.NewLockManager(filepath.Join(s.dir, "locks.db"), cfg, nil)
	}
	opts, err := redis.ParseURL(s.redis)
	if err != nil {
		return nil, err
	}
	return redislock.NewLockManager(redis.NewClient(opts), cfg, nil)
}

// queue sends the buyers that come to one process.
func (s *sale) queue(ctx context.Context, number int, buyers chan<- int) {
	defer close(buyers)
	for buyer := 1; buyer <= s.buyers; buyer++ {
		if buyer%s.processes != number && (buyer%10 != 0 || (buyer+1)%s.processes != number) {
			continue
		}
		select {
		case buyers <- buyer:
		case <-ctx.Done():
			return
		}
	}
}

// serve serves one buyer after another.
func (s *sale) serve(ctx context.Context, locks dlm.LockManager, buyers <-chan int, t *tally) (err error) {
	units := make([]*ledger.Ledger[unit], s.items)
	for item := range units {
		if units[item], err = ledger.Open[unit](s.file(item)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, units[item].Close()) }()
	}
	for buyer := range buyers {
		item := s.wants(buyer)
		sold, err := s.buy(ctx, locks, units[item], item, buyer)
		if err != nil {
			return err
		}
		t.Tried++
		if sold {
			t.Sold++
		} else {
			t.Refused++
		}
	}
	return nil
}

// buy takes the lock for a purchase. It says whether the buyer got a unit.
func (s *sale) buy(
	ctx context.Context, locks dlm.LockManager, units *ledger.Ledger[unit], item, buyer int,
) (sold bool, err error) {
	if s.unsafe {
		return s.trade(ctx, units, item, buyer, 0)
	}
	err = dlm.WithDistributedLock(ctx, locks, fmt.Sprint("item:", item+1), ttl, func(ctx context.Context) (err error) {
		sold, err = s.trade(ctx, units, item, buyer, dlm.LockFromContext(ctx).Token)
		return err
	})
	return sold, err
}

// trade reads the stock, takes the payment, and writes the new stock. Whether
// nobody else does that meanwhile is up to the caller.
func (s *sale) trade(
	ctx context.Context, units *ledger.Ledger[unit], item, buyer int, token int64,
) (sold bool, err error) {
	list, err := units.Read()
	if err != nil {
		return false, err
	}
	left := s.unitsOf(item)
	if n := len(list); n > 0 {
		left = list[n-1].Value.Left
	}
	has := slices.ContainsFunc(list, func(e ledger.Entry[unit]) bool { return e.Value.Buyer == buyer })
	if left == 0 || has {
		return false, nil
	}
	if err := pay(ctx); err != nil {
		return false, err
	}
	if err := units.Append(token, unit{Buyer: buyer, Left: left - 1}); err != nil {
		return false, err
	}
	return true, nil
}

// pay takes the payment, which takes a millisecond. It stops when the context
// ends, which it does if the lock is lost.
func pay(ctx context.Context) error {
	timer := time.NewTimer(time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// sold reads what was sold of an item.
func (s *sale) sold(item int) (list []ledger.Entry[unit], err error) {
	units, err := ledger.Open[unit](s.file(item))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, units.Close()) }()
	return units.Read()
}

func (s *sale) file(item int) string { return filepath.Join(s.dir, fmt.Sprint("units-", item+1)) }

// wants is the item that a buyer wants.
func (s *sale) wants(buyer int) int { return buyer % s.items }

// comeFor is how many buyers want an item.
func (s *sale) comeFor(item int) int {
	n := 0
	for buyer := 1; buyer <= s.buyers; buyer++ {
		if s.wants(buyer) == item {
			n++
		}
	}
	return n
}

// add adds another tally.
func (t *tally) add(other tally) {
	t.Tried += other.Tried
	t.Sold += other.Sold
	t.Refused += other.Refused
}

// finish makes a call that must be made though the context may have ended.
func finish(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return call(ctx)
}
