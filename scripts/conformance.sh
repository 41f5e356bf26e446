#!/usr/bin/env bash
# Runs the conformance suite of one backend: conformance.sh BACKEND COUNT [FLAG...]
set -euo pipefail
cd "$(dirname "$0")/.."

backend=${1:-}
count=${2:-1}
test=TestConformance
case $backend in
memory) dir=memlock ;;
redis) dir=tests/redislock test=TestConformanceSingle ;;
redis-sentinel) dir=tests/redislock test='TestConformanceSentinel.*' ;;
redis-cluster) dir=tests/redislock test='TestConformanceCluster.*' ;;
redis-quorum) dir=tests/redislock test=TestConformanceQuorum ;;
etcd) dir=tests/etcdlock test=TestConformanceSingle ;;
etcd-old) dir=tests/etcdlock test=TestConformanceOld ;;
etcd-three) dir=tests/etcdlock test=TestConformanceThree ;;
consul) dir=tests/consullock test=TestConformanceSingle ;;
consul-three) dir=tests/consullock test=TestConformanceThree ;;
pg) dir=tests/pglock test=TestConformancePg ;;
pg-bouncer) dir=tests/pglock test=TestConformancePgBouncer ;;
pg-sql) dir=tests/pglock test=TestConformancePgSQL ;;
pg-advisory) dir=tests/pglock test=TestConformancePgAdvisory ;;
zk) dir=tests/zklock test='TestConformance(Single|Three)' ;;
*) dir=backends/${backend}lock ;;
esac
if [[ -z $backend || ! -d $dir ]]; then
	echo "conformance: no backend '$backend', see the list in scripts/conformance.sh" >&2
	exit 2
fi
# A suite that is not there must not count as passed.
if ! grep -qsE "^func $test\\(" "$dir"/*_test.go; then
	echo "conformance: $dir has no $test" >&2
	exit 1
fi
set -x
go test "${@:3}" -timeout 60m -count "$count" -run "^$test\$" "./$dir"
