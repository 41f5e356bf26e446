package b

import (
	"database/sql"
	"os/exec"
)

func run(db *sql.DB) error {
	db.Exec("x") // want "must not be called"
	return exec.Command("x").Run()
}
