#!/usr/bin/env bash
# Installs the servers that tests start as child processes, those that are
# missing, with apt-get. The services of the packages are not started; one that
# runs already is left alone. Those that are no packages are built. It says nothing
# if there is nothing to do.
set -euo pipefail

# Where they cannot be built, tests skip them, or fail if they must not.
(cd "$(dirname "$0")/.." && go run ./tests/servers/buildservers) ||
	echo "install-servers: not all servers could be built" >&2

# The program or file that tests look for, and the Debian package that has it.
# Some programs are where only their own tools look for them.
servers='
redis-server    redis-server
redis-sentinel  redis-sentinel
etcd            etcd-server
postgres        postgresql
pgbouncer       pgbouncer
mariadbd        mariadb-server
java            openjdk-17-jre-headless
/usr/share/java/zookeeper.jar  libzookeeper-java
'
elsewhere='/usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/sbin'

there() {
	local dir
	command -v "$1" >/dev/null && return
	for dir in $elsewhere; do
		[[ -x $dir/$1 ]] && return
	done
	return 1
}

packages=()
while read -r program package; do
	if [[ -n $program && ! -e $program ]] && ! there "$program"; then
		packages+=("$package")
	fi
done <<<"$servers"
if [[ ${#packages[@]} == 0 ]]; then
	exit 0
fi

# Where nothing can be installed, tests skip what they cannot start, or fail if
# they must not skip it: that is for them to say.
if ! command -v apt-get >/dev/null; then
	echo "install-servers: there is no apt-get here; install what has these Debian packages: ${packages[*]}" >&2
	exit 0
fi
as_root=()
if [[ $(id -u) != 0 ]]; then
	if ! command -v sudo >/dev/null; then
		echo "install-servers: neither root nor sudo; have these packages installed: ${packages[*]}" >&2
		exit 0
	fi
	as_root=(sudo)
fi

# With this policy no package starts a service. The one that is there, if any,
# comes back afterwards, whatever happens.
policy=/usr/sbin/policy-rc.d
saved=$policy.before-install-servers
restore() {
	"${as_root[@]}" rm -f "$policy"
	if [[ -e $saved || -L $saved ]]; then
		"${as_root[@]}" mv "$saved" "$policy"
	fi
}
trap restore EXIT
trap 'exit 1' HUP INT TERM
# What is saved already was left by a run that was killed: it is the real one.
if [[ (-e $policy || -L $policy) && ! -e $saved && ! -L $saved ]]; then
	"${as_root[@]}" mv "$policy" "$saved"
fi
"${as_root[@]}" rm -f "$policy"
printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
"${as_root[@]}" chmod 755 "$policy"

echo "install-servers: installing ${packages[*]}"
# Another source of packages that is out of order is no reason to give up.
"${as_root[@]}" apt-get -qq update ||
	echo "install-servers: the lists of packages are not all up to date" >&2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install -y --no-install-recommends "${packages[@]}"
