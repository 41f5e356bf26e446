module github.com/go-dlm/dlm/backends/zklock

go 1.26.0

require (
	github.com/go-dlm/dlm v0.0.0
	github.com/go-zookeeper/zk v1.0.4
)

replace github.com/go-dlm/dlm => ../..
