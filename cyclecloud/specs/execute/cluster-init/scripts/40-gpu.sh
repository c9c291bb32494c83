#!/bin/bash
# What a platform wants of the kernel, where its image leaves it to others: GB200 and GB300 need nvidia-peermem for GPUDirect.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"

if [[ $(profile) != azure-gb200 ]]; then
    drop /etc/modules-load.d/hpc-mp.conf
    exit 0
fi
put /etc/modules-load.d/hpc-mp.conf 644 <<<"nvidia-peermem"
modprobe nvidia-peermem || warn "nvidia-peermem cannot be loaded: data of GPUs goes through the host's memory"
