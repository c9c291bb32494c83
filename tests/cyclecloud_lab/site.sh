#!/bin/bash
# PID 1 of the lab: DIR. The network's switch is here, machines are in namespaces below. When its standard input ends, all ends.
set -euo pipefail
dir=$1
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 systems "$dir/systems" # what machines write on their own disks
ip link set lo up
ip link add switch type bridge
ip addr add 10.78.0.254/24 dev switch
ip link set switch up
echo ready
read -r || true
