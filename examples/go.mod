module github.com/go-dlm/dlm/examples

go 1.26.0

require github.com/go-dlm/dlm v0.0.0
require github.com/go-dlm/dlm/backends/sqlitelock v0.0.0

replace github.com/go-dlm/dlm => ..
replace github.com/go-dlm/dlm/backends/sqlitelock => ../backends/sqlitelock
