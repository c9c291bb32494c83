#!/bin/bash
# The command that writes Slurm's topology. It is not run here: before there are nodes there is no topology, and with the plug-in
# switched on and no topology.conf slurmctld does not start.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"
: "${CYCLECLOUD_SPEC_PATH:=$CYCLECLOUD_PROJECT_PATH/scheduler}"

put /usr/local/sbin/hpc-mp-topology 755 <"$CYCLECLOUD_SPEC_PATH/files/hpc-mp-topology"
kind=$(setting topology off)
if [[ $kind != off ]]; then
    say "once all nodes of the partition $(setting partition hpc) run: hpc-mp-topology (as root) makes Slurm's topology, a $kind"
fi
