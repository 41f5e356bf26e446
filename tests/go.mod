module github.com/go-dlm/dlm/tests

go 1.26.0

require (
	github.com/bsm/redislock v0.9.4
	github.com/go-dlm/dlm v0.0.0
	github.com/go-dlm/dlm/backends/pglock v0.0.0
	github.com/go-dlm/dlm/backends/redislock v0.0.0
	github.com/go-redsync/redsync/v4 v4.18.1
	github.com/jackc/pgx/v5 v5.13.0
	github.com/redis/go-redis/v9 v9.23.0
	github.com/redis/rueidis v1.0.79
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/jackc/pgpassfile v1.0.0 // indirect
	github.com/jackc/pgservicefile v0.0.0-20240606120523-5a60cdf6a761 // indirect
	github.com/jackc/puddle/v2 v2.2.3 // indirect
	go.uber.org/atomic v1.12.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
	golang.org/x/text v0.41.0 // indirect
)

replace (
	github.com/go-dlm/dlm => ../
	github.com/go-dlm/dlm/backends/pglock => ../backends/pglock
	github.com/go-dlm/dlm/backends/redislock => ../backends/redislock
)
