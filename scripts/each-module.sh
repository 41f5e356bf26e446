#!/usr/bin/env bash
# Runs a command in the directory of every module of the workspace, with the
# workspace switched off.
set -euo pipefail
cd "$(dirname "$0")/.."

go list -m -f '{{.Path}} {{.Dir}}' | while read -r path dir; do
	echo "$path: $*"
	(cd "$dir" && GOWORK=off "$@" </dev/null)
done
