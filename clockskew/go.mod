module github.com/go-dlm/dlm/clockskew

go 1.26.0

require (
	github.com/beevik/ntp v1.6.0
	github.com/go-dlm/dlm v0.0.0
)

require (
	golang.org/x/net v0.59.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
)

replace github.com/go-dlm/dlm => ..
