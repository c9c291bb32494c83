#!/bin/bash
# Containers (pyxis and enroot, which cyclecloud-slurm installs): are they whole, and do they see the InfiniBand adapters?
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"

plug=/etc/slurm/plugstack.conf.d/pyxis.conf
conf=/etc/enroot/enroot.conf
[[ -e $plug ]] || exit 0

library=$(awk '$1 == "required" || $1 == "optional" { print $2; exit }' "$plug")
[[ -e $library ]] || warn "$plug names $library, which is not there: srun --container-image fails on this node"
command -v enroot >/dev/null || warn "pyxis is set up and enroot is missing: srun --container-image fails on this node"

# With ENROOT_RESTRICT_DEV y, cyclecloud-slurm's default, containers have no /dev/infiniband/uverbs*, and NCCL falls back to
# sockets without a word. What a job may open is still what its control group grants (ConstrainDevices).
shopt -s nullglob
adapters=(/sys/class/infiniband/*)
if [[ -e $conf && ${#adapters[@]} != 0 ]]; then
    {
        awk '$1 != "ENROOT_RESTRICT_DEV" && $1 != "MELLANOX_VISIBLE_DEVICES"' "$conf"
        printf '%s\n' "ENROOT_RESTRICT_DEV n" "MELLANOX_VISIBLE_DEVICES all"
    } | put "$conf" "$(stat -c %a "$conf")"
fi
