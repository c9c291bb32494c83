#!/bin/bash
# Is accounting on, and does it answer? hpc-mp works without; sacct, limits and shares do not. cyclecloud-slurm sets it up
# (slurm.accounting.enabled and its neighbours): here it is only looked at.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"

slurm=$(slurm_directory)
kept=$(last_value AccountingStorageType "$slurm/slurm.conf" "$slurm"/{accounting,site_specific}.conf)
if [[ $kept != accounting_storage/slurmdbd ]]; then
    warn "accounting is off: no sacct, no limits per user. To have it, give the cluster a database: slurm.accounting.enabled, .url, .user, .password"
elif ! timeout 10 scontrol ping &>/dev/null; then
    say "accounting is on; slurmctld starts after this script, and tests/accounting.sh then asks whether the database answers"
elif cluster=$(last_value ClusterName "$slurm/slurm.conf") && timeout 20 sacctmgr -nP show cluster format=cluster | grep -qixF "$cluster"; then
    say "accounting is on, and knows the cluster $cluster"
else
    warn "accounting is on, and the database does not know the cluster $cluster: see /var/log/slurmctld/slurmdbd.log"
fi
