#!/bin/bash
# Locked memory (RDMA needs it without a limit) and open files, of users who log in and of slurmd. Login nodes count too: Slurm hands
# the limits of the shell that submits on to the job. The stack is left alone: unlimited, threads get 2 MiB, too little for NCCL.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"

most=$(</proc/sys/fs/nr_open) # with more than the kernel allows nobody could log in
most=$((most < 1048576 ? most : 1048576))
soft=$((most < 131072 ? most : 131072))

put /etc/security/limits.d/90-hpc-mp.conf 644 <<END
# Written by the cluster-init of hpc-mp. "*" is not root.
*    -    memlock unlimited
root -    memlock unlimited
*    soft nofile  $soft
*    hard nofile  $most
root soft nofile  $soft
root hard nofile  $most
END

command -v slurmd >/dev/null || exit 0
changed=no
put /etc/systemd/system/slurmd.service.d/90-hpc-mp.conf 644 <<END
# Written by the cluster-init of hpc-mp: the limits of jobs, before Slurm hands on those of the submitting shell.
[Service]
LimitMEMLOCK=infinity
LimitNOFILE=$most
END
if [[ $changed == yes && -d /run/systemd/system ]]; then
    systemctl daemon-reload
fi

# CycleCloud starts slurmd after all scripts. One that runs already (the script is run again by hand) keeps its limits, and is not
# restarted here: cyclecloud-slurm starts it with -b, which tells Slurm of a reboot and costs the node's jobs.
pid=$(pgrep -xo slurmd || true)
if [[ -n $pid ]] && awk -v most="$most" '/^Max locked memory/ && $5 != "unlimited" { low = 1 } /^Max open files/ && $5 < most { low = 1 }
    END { exit !low }' "/proc/$pid/limits"; then
    warn "slurmd runs with lower limits; when the node has no jobs: systemctl restart slurmd"
fi
