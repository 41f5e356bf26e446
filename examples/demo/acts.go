package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/go-dlm/dlm/examples/internal/ledger"
	"github.com/go-dlm/dlm/examples/internal/procs"
)

// slack is how late something may happen on a busy machine.
const slack = 2 * time.Second

// run returns the command line that runs a part of this program under a lock.
func (d *demo) run(key, part string, args ...string) []string {
	line := []string{filepath.Join(d.programs, "dlm"), "--backend", d.url(), "run", "--quiet", key, "--", d.self, part}
	return append(line, args...)
}

// turns shows that processes take turns, in the order of their arrival.
func (d *demo) turns(ctx context.Context) error {
	const key, workers = "report", 5
	path := filepath.Join(d.dir, "steps")
	fmt.Printf("%d processes are to write the same report, one at a time\n", workers)
	fmt.Printf("  as in: dlm --backend %s run %s -- ./worker 1\n", d.url(), key)

	// The demo itself has the lock until all of them have arrived.
	lock, err := d.locks.AcquireLock(ctx, key, 10*time.Second)
	if err != nil {
		return err
	}
	group, ctx := procs.NewGroup(ctx)
	defer group.Stop()
	var arrived []string
	for i := range workers {
		worker := strconv.Itoa(i + 1)
		line := d.run(key, "report", path, worker)
		cmd := procs.Command(ctx, line[0], line[1:]...)
		cmd.Stdout = os.Stdout
		if err := group.Start(cmd); err != nil {
			return err
		}
		if err := d.queued(ctx, key, i+1); err != nil {
			return err
		}
		fmt.Printf("  worker %s waits\n", worker)
		arrived = append(arrived, worker)
	}
	if err := lock.Release(ctx); err != nil {
		return err
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return d.judgeTurns(path, arrived)
}

// judgeTurns compares what the workers have noted with the order in which they
// arrived.
func (d *demo) judgeTurns(path string, arrived []string) (err error) {
	steps, err := ledger.Open[step](path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, steps.Close()) }()
	list, err := steps.Read()
	if err != nil {
		return err
	}
	var served []string
	inside, most, higher, last := 0, 0, 0, int64(0)
	for _, e := range list {
		if !e.Value.Begin {
			inside--
			continue
		}
		inside++
		most = max(most, inside)
		served = append(served, strconv.Itoa(e.Value.Worker))
		if e.Token > last {
			higher++
		}
		last = e.Token
	}
	want, got := strings.Join(arrived, " "), strings.Join(served, " ")
	d.table.add(row{"processes get the lock in order of arrival", want, got, got == want})
	d.table.add(row{"processes that hold it at one time, at most", "1", strconv.Itoa(most), most == 1 && inside == 0})
	d.table.add(row{
		"fencing tokens that are above the one before", strconv.Itoa(len(arrived)), strconv.Itoa(higher),
		higher == len(arrived),
	})
	return nil
}

// deaths shows what becomes of locks, and of commands, when somebody dies.
func (d *demo) deaths(ctx context.Context) error {
	fmt.Println("processes are killed")
	if err := d.deadHolder(ctx); err != nil {
		return err
	}
	return d.deadCommand(ctx)
}

// deadHolder shows that the lock of a holder that is killed goes to the next
// one when its time to live is over, and not before.
func (d *demo) deadHolder(ctx context.Context) error {
	const key, ttl = "payment:42", 3 * time.Second
	fmt.Printf("  one process holds a lock with a time to live of %v, another one waits for it\n", ttl)
	hold := []string{"hold", d.file(), key, ttl.String()}
	holder, err := start(ctx, d.self, hold...)
	if err != nil {
		return err
	}
	defer holder.stop()
	token, err := holder.number()
	if err != nil {
		return err
	}
	fmt.Printf("  process %d has the lock, with token %d\n", holder.cmd.Process.Pid, token)
	next, err := start(ctx, d.self, hold...)
	if err != nil {
		return err
	}
	defer next.stop()
	if err := d.queued(ctx, key, 1); err != nil {
		return err
	}
	fmt.Printf("  process %d waits\n", next.cmd.Process.Pid)

	if err := holder.kill(); err != nil {
		return err
	}
	killed := time.Now()
	info, err := d.locks.GetLock(ctx, key)
	if err != nil {
		return err
	}
	if len(info.Holders) != 1 || info.Holders[0].Token != token {
		return fmt.Errorf("%s is held by %v, not by the process that was killed", key, info.Holders)
	}
	left := info.Holders[0].Remaining
	fmt.Printf("  process %d is killed (SIGKILL); the lock is still its own for %v\n", holder.cmd.Process.Pid, round(left))
	nextToken, err := next.number()
	if err != nil {
		return err
	}
	took := time.Since(killed)
	fmt.Printf("  process %d has the lock, with token %d\n", next.cmd.Process.Pid, nextToken)

	d.table.add(row{
		"holder is killed: the next one waits until its time is over",
		fmt.Sprintf("%v to %v", round(left), round(left+slack)), round(took).String(), took >= left && took <= left+slack,
	})
	d.table.add(row{
		"and has a higher fencing token", "above " + strconv.FormatInt(token, 10), strconv.FormatInt(nextToken, 10),
		nextToken > token,
	})
	return next.end()
}

// deadCommand shows that no command goes on when the `dlm run` that has started
// it, and that renews its lock, is killed.
func (d *demo) deadCommand(ctx context.Context) error {
	line := d.run("backup", "idle")
	run, err := start(ctx, line[0], line[1:]...)
	if err != nil {
		return err
	}
	defer run.stop()
	command, err := run.number()
	if err != nil {
		return err
	}
	fmt.Printf("  dlm (process %d) runs a command (process %d)\n", run.cmd.Process.Pid, command)
	killed := time.Now()
	if err := run.kill(); err != nil {
		return err
	}
	err = run.gone(slack)
	measured := round(time.Since(killed)).String()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		measured = "not yet"
	case err != nil:
		return err
	}
	fmt.Printf("  dlm is killed (SIGKILL); its command dies with it: %s\n", measured)
	d.table.add(row{"dlm is killed: the command that it runs dies too", "within " + slack.String(), measured, err == nil})
	return nil
}

// flashSale shows that several processes sell no more than there is.
func (d *demo) flashSale(ctx context.Context) error {
	const processes, stock, buyers = 8, 100, 1000
	fmt.Printf("%d processes sell %d units to %d buyers\n", processes, stock, buyers)
	type result struct {
		Sold    int     `json:"sold"`
		Doubles int     `json:"doubles"`
		Seconds float64 `json:"seconds"`
	}
	sell := func(dir string, more ...string) (r result, err error) {
		dir = filepath.Join(d.dir, dir)
		if err := os.Mkdir(dir, 0o700); err != nil {
			return r, err
		}
		var out, messages bytes.Buffer
		cmd := procs.Command(ctx, filepath.Join(d.programs, "flashsale"), append([]string{
			"-json", "-dir", dir, "-processes", strconv.Itoa(processes), "-stock", strconv.Itoa(stock), "-buyers", strconv.Itoa(buyers),
		}, more...)...)
		cmd.Stdout, cmd.Stderr = &out, &messages
		// It fails if the sale was not correct, which the table shows.
		failed := cmd.Run()
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			return r, fmt.Errorf("%w: %s", errors.Join(failed, err), &messages)
		}
		return r, nil
	}
	without, err := sell("unsafe", "-unsafe")
	if err != nil {
		return err
	}
	fmt.Printf("  without locks, in %.1fs: %d units are sold, %d buyers get more than one\n",
		without.Seconds, without.Sold, without.Doubles)
	with, err := sell("safe")
	if err != nil {
		return err
	}
	fmt.Printf("  with locks, in %.1fs: %d units are sold, %d buyers get more than one\n", with.Seconds, with.Sold, with.Doubles)
	d.table.add(row{
		fmt.Sprintf("units that %d processes sell of %d", processes, stock), strconv.Itoa(min(stock, buyers)),
		strconv.Itoa(with.Sold), with.Sold == min(stock, buyers),
	})
	d.table.add(row{"buyers that get more than one", "0", strconv.Itoa(with.Doubles), with.Doubles == 0})
	return nil
}

// round makes a duration readable.
func round(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(100 * time.Microsecond)
	}
	return d.Round(10 * time.Millisecond)
}
