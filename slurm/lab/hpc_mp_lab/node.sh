#!/bin/bash
# PID 1 of a node: NAME DIR ADDRESS.
set -euo pipefail
name=$1 dir=$2 address=$3
source "$(dirname "$0")/mounts.sh"

mount --make-rprivate /
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs run /run
mount -t tmpfs -o mode=1777 shm /dev/shm
IFS=$'\t' read -r -a kept <"$dir/etc/kept" || true
hide /tmp "${kept[@]}" # PMIx needs a /tmp of its own
hostname "$name"
ip link set lo up
ip addr replace "$address/24" dev eth0
ip link set eth0 up

cd /
export SLURM_CONF=$dir/etc/slurm.conf
slurmd -D &>>"$dir/log/slurmd.$name.out" &
sleep infinity &
wait
