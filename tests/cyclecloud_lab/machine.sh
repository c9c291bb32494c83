#!/bin/bash
# PID 1 of a machine: NAME DIR SYSTEM PATH…; the paths of this machine are seen there too. Its root is SYSTEM under a layer of its own:
# what it writes, no other machine sees. Shared are /shared and /sched alone, as the scheduler of CycleCloud exports them.
set -euo pipefail
name=$1 dir=$2 system=$3
shift 3
own=$dir/systems/$name
mkdir -p "$own"/{written,work,root}
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$system,upperdir=$own/written,workdir=$own/work" "$own/root"
cd "$own/root"
mkdir -p shared sched wheels old
mount -t tmpfs -o mode=1777 tmp tmp # before the paths, of which some may lie in it
for each; do
    mkdir -p ".$each"
    mount --rbind "$each" ".$each"
done
mount --rbind /dev dev
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 run run
mount -t tmpfs -o mode=1777 shm dev/shm
mount --bind "$dir/wheels" wheels
for each in shared sched; do
    [[ -e $dir/unmounted-$each ]] || mount --bind "$dir/$each" "$each"
done
touch etc/hosts
mount --bind "$dir/hosts" etc/hosts
hostname "$name"
pivot_root . old
umount --lazy old
touch /run/booted
exec &>/dev/null
trap : CHLD # children that lost their parents
while :; do
    sleep 3600 &
    wait $! || true
done
