package main

import (
	"context"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
)

// openDLM returns a function that opens n managers, each with a client of its
// own.
func openDLM(n int) func(context.Context, openConfig) (locker, error) {
	return func(_ context.Context, cfg openConfig) (locker, error) {
		var d dlmRow
		for range n {
			m, err := redislock.NewLockManager(newRedisClient(cfg.addrs[0], poolSize), nil, nil)
			if err != nil {
				return nil, err
			}
			d.managers = append(d.managers, m)
		}
		return d, nil
	}
}

// openDLMQuorum opens one manager that needs a majority of the servers.
func openDLMQuorum(_ context.Context, cfg openConfig) (locker, error) {
	m, err := redislock.NewQuorumLockManager(newRedisClients(cfg.addrs), nil, nil)
	if err != nil {
		return nil, err
	}
	return dlmRow{[]*dlm.Manager{m}}, nil
}
