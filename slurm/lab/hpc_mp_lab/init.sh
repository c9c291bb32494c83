#!/bin/bash
# PID 1 of a lab: DIR. Its switches and its controller live in this process's namespaces, its nodes in namespaces below.
# It says "ready" when nodes may boot. When its standard input ends, everything ends and DIR is removed.
set -euo pipefail
dir=$1
source "$(dirname "$0")/mounts.sh"

end() {
    exec >&- # not "ready" yet: then the start failed, and DIR's logs can be read until the input ends
    read -r || true
    exec 2>/dev/null         # the shell would name each process it sees killed
    kill -KILL -- -1 || true # all processes of the lab but this one
    cd /
    for _ in {1..100}; do rm -rf --one-file-system "$dir" && break || sleep 0.05; done
}
trap end EXIT

eventually() { # COMMAND…: until it succeeds
    for _ in {1..600}; do
        if "$@" &>/dev/null; then return; fi
        sleep 0.05
    done
    echo "not within 30 s: $*" >&2
    exit 1
}

read -r # DIR is filled
exec 2>"$dir/log/init.out"

mount --make-rprivate /
if IFS=$'\t' read -r -a system <"$dir/etc/system"; then live_in "${system[@]}"; fi
mount -t proc proc /proc
mount -t tmpfs run /run
mkdir -p /run/netns /run/mysqld
touch /etc/hosts
mount --bind "$dir/etc/hosts" /etc/hosts
if [ -e "$dir/etc/passwd" ]; then mount --bind "$dir/etc/passwd" /etc/passwd; fi
if [ -d /etc/slurm ]; then mount --bind "$dir/etc" /etc/slurm; fi # for what runs without SLURM_CONF
while IFS=$'\t' read -r -a paths; do hide "${paths[@]}"; done <"$dir/etc/hidden"
hostname ctl
cd "$dir"
ip -batch etc/network

export SLURM_CONF=$dir/etc/slurm.conf
if grep -q '^AuthType=auth/munge$' etc/slurm.conf; then
    munged --foreground --socket="$dir/munge/socket" --key-file="$dir/munge/key" --pid-file="$dir/munge/pid" \
        --seed-file="$dir/munge/seed" --log-file="$dir/log/munged.log" &>log/munged.out &
    eventually test -S munge/socket
fi

if [ -s etc/slurmdbd.conf ]; then
    mariadb-install-db --no-defaults --user=root --datadir="$dir/database" --auth-root-authentication-method=normal \
        --skip-test-db &>log/mariadb-install.out
    mariadbd --no-defaults --user=root --datadir="$dir/database" --socket=/run/mysqld/mysqld.sock --pid-file=/run/mariadbd \
        --skip-networking --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=0 &>log/mariadbd.out &
    eventually mariadb --no-defaults --user=root --execute='create database slurm_acct_db'
    slurmdbd -D &>log/slurmdbd.out &
    eventually sacctmgr show cluster
    sacctmgr --immediate --quiet add cluster "$(<etc/name)" >/dev/null
    sacctmgr --immediate --quiet add account acc >/dev/null
    sacctmgr --immediate --quiet add user "$(<etc/users)" account=acc >/dev/null
fi

slurmctld -D &>log/slurmctld.out &
echo ready
