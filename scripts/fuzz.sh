#!/usr/bin/env bash
# Runs every fuzz test of the workspace for a while: fuzz.sh DURATION
set -euo pipefail
cd "$(dirname "$0")/.."

duration=${1:-30s}
found=0
while IFS=: read -r file line; do
	name=${line#func }
	name=${name%%(*}
	found=1
	echo "$file: $name"
	go test -run '^$' -fuzz "^$name\$" -fuzztime "$duration" "./$(dirname "$file")" </dev/null
done < <(find . -name '*_test.go' -exec grep -Ho '^func Fuzz[A-Za-z0-9_]*(' {} +)
if [[ $found == 0 ]]; then
	echo "no fuzz tests"
fi
