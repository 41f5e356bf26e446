module github.com/go-dlm/dlm/observe/promdlm

go 1.26

require github.com/go-dlm/dlm v0.0.0

replace github.com/go-dlm/dlm => ../..
