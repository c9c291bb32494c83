#!/bin/bash
# The doctor on the node's own disk: it must answer when shared storage does not. Healthagent's program is called by it, not replaced.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"
: "${CYCLECLOUD_SPEC_PATH:=$CYCLECLOUD_PROJECT_PATH/execute}"

own=/usr/local/libexec/hpc-mp
command=$(directory)/current/bin/hpc-mp
chain=$(slurm_directory)/health.sh

if ! timeout 10 test -x "$command"; then
    drop $own/hpc-mp-gate # it would be one of an earlier version
    exit 0                # 10-shared.sh has said why
fi
options=(--install "$own")
[[ ! -e $chain ]] || options+=(--chain "$chain")
if ! timeout 120 "$command" doctor "${options[@]}" >/dev/null; then
    warn "the doctor could not be installed in $own: jobs start on this node unseen"
    drop $own/hpc-mp-gate
    exit 0
fi
say "the doctor is in $own${options[3]:+, before ${options[3]}}"
enabled health || drop $own/hpc-mp-health
if enabled gate; then
    put $own/hpc-mp-gate 755 <"$CYCLECLOUD_SPEC_PATH/files/hpc-mp-gate"
else
    drop $own/hpc-mp-gate
fi

# For the log, and no more: what is wrong now keeps jobs away by the gate.
timeout 120 "$command" doctor --node || warn "the doctor finds this node ill (or could not look): see above"
