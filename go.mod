module github.com/go-dlm/dlm

go 1.26.0
