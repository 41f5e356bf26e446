module github.com/go-dlm/dlm/cmd/dlm

go 1.26.0

require (
	github.com/creack/pty v1.1.24
	github.com/go-dlm/dlm v0.0.0
	github.com/go-dlm/dlm/backends/redislock v0.0.0
	github.com/go-dlm/dlm/backends/sqlitelock v0.0.0
	github.com/go-dlm/dlm/backends/zklock v0.0.0
	github.com/redis/go-redis/v9 v9.23.0
	github.com/spf13/cobra v1.10.2
	golang.org/x/sys v0.49.0
	modernc.org/sqlite v1.62.0
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/dustin/go-humanize v1.1.0 // indirect
	github.com/go-zookeeper/zk v1.0.4 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
	github.com/mattn/go-isatty v0.0.24 // indirect
	github.com/ncruces/go-strftime v1.1.0 // indirect
	github.com/remyoudompheng/bigfft v0.0.0-20230129092748-24d4a6f8daec // indirect
	github.com/spf13/pflag v1.0.9 // indirect
	go.uber.org/atomic v1.12.0 // indirect
	modernc.org/libc v1.80.1 // indirect
	modernc.org/mathutil v1.7.1 // indirect
	modernc.org/memory v1.12.1 // indirect
)

replace github.com/go-dlm/dlm => ../..

replace github.com/go-dlm/dlm/backends/redislock => ../../backends/redislock

replace github.com/go-dlm/dlm/backends/sqlitelock => ../../backends/sqlitelock

replace github.com/go-dlm/dlm/backends/zklock => ../../backends/zklock
