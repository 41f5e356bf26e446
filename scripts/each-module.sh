#!/usr/bin/env bash
# Runs a command in the directory of every module of the workspace, with the
# workspace switched off.
set -euo pipefail
cd "$(dirname "$0")/.."

go list -m -f '{{.Dir}}' | while IFS= read -r dir; do
	echo "${dir#"$PWD"/}: $*"
	(cd "$dir" && GOWORK=off "$@" </dev/null)
done
