#!/usr/bin/env bash
# Runs the conformance suite of one backend: conformance.sh BACKEND COUNT [FLAG...]
set -euo pipefail
cd "$(dirname "$0")/.."

backend=${1:-}
count=${2:-1}
case $backend in
memory) dir=memlock ;;
*) dir=backends/${backend}lock ;;
esac
if [[ -z $backend || ! -d $dir ]]; then
	echo "conformance: no backend '$backend', try B=memory or B=sqlite" >&2
	exit 2
fi
# A suite that is not there must not count as passed.
if ! grep -qs '^func TestConformance(' "$dir"/*_test.go; then
	echo "conformance: $dir has no TestConformance" >&2
	exit 1
fi
set -x
go test "${@:3}" -timeout 60m -count "$count" -run '^TestConformance$' "./$dir"
