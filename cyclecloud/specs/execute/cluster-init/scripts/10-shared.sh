#!/bin/bash
# Waits for the shared environment that the scheduler installs. Without shared storage no job can run here: then the node fails, with
# a word. Without the environment on it the node works, and only hpc-mp is missing.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"

place=$(directory)
patience=$(setting patience 300)
[[ $patience =~ ^[0-9]+$ ]] || die "hpc_mp.patience = $patience is no number of seconds"

ready() { timeout 10 test -x "$place/current/bin/hpc-mp"; } # a dead file server answers never

mounted() { # is it, or a directory above it, on a file system of its own?
    local path=$place
    until [[ $path == / ]]; do
        if timeout 10 mountpoint -q "$path"; then return 0; fi
        path=$(dirname "$path")
    done
    return 1
}

wait_for() { # COMMAND…: until it succeeds
    local end=$((SECONDS + patience))
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 1
    done
}

if ! ready; then
    say "waiting for $place, up to $patience s"
    wait_for mounted || ready || die "no file system is mounted at $place or above it after $patience s: look at the cluster's shared storage, its mount in /etc/fstab, and the network's rules for it (NFS: port 2049)"
    if ! wait_for ready; then
        warn "$place/current is not there after $patience s: look at the scheduler's 10-environment.sh. This node has no hpc-mp, no gate and no doctor"
        exit 0
    fi
fi

# The environment's own interpreter is the system's, and must be on every node under the same path.
python=$(sed -n 's/^executable = //p' "$place/current/pyvenv.cfg")
if [[ ! -x $python ]] && ! install_python "$(basename "$python")"; then
    warn "$place/current needs $python, which is not here and could not be installed: put it into the node's image"
fi
