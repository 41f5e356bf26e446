module github.com/go-dlm/dlm/secure

go 1.26.0

require (
	github.com/go-dlm/dlm v0.0.0
	golang.org/x/time v0.15.0
)

replace github.com/go-dlm/dlm => ..
