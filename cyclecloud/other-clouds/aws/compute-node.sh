#!/bin/bash
# OnNodeConfigured of a compute node: limits, and the doctor on the node's own disk.
# usage: compute-node.sh DIRECTORY      DIRECTORY: where head-node.sh installed hpc-mp
set -euo pipefail

directory=$1

# NCCL pins memory and opens many files: for jobs (slurmd's limits) and for shells (limits.d).
mkdir -p /etc/systemd/system/slurmd.service.d
cat > /etc/systemd/system/slurmd.service.d/hpc-mp.conf <<'UNIT'
[Service]
LimitMEMLOCK=infinity
LimitNOFILE=1048576
UNIT
cat > /etc/security/limits.d/99-hpc-mp.conf <<'LIMITS'
* - memlock unlimited
* - nofile 1048576
LIMITS
systemctl daemon-reload
systemctl try-restart slurmd

ln -sfn "$directory/current/bin/hpc-mp" /usr/local/bin/hpc-mp
hpc-mp doctor install /usr/local/libexec
