#!/bin/bash
# What Slurm is told: a prolog that keeps jobs off sick nodes, and the doctor beside healthagent's health check. Both are programs on
# the nodes (spec execute); here are only the few lines that call them, and do nothing on nodes without them.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"
: "${CYCLECLOUD_SPEC_PATH:=$CYCLECLOUD_PROJECT_PATH/scheduler}"

slurm=$(slurm_directory)
site=$slurm/site_specific.conf # the last file that slurm.conf includes; cyclecloud-slurm keeps it in upgrades
[[ -e $site ]] || : >"$site"
others=$(mktemp)
trap 'rm -f "$others"' EXIT
outside "$site" slurm >"$others"
lines=()

# Prologs run in reverse order of their names: behind 90-imex_prolog.sh, before healthagent's 10-health_prolog.sh.
if enabled gate; then
    mkdir -p "$slurm/prolog.d"
    put "$slurm/prolog.d/50-hpc-mp-gate.sh" 755 <"$CYCLECLOUD_SPEC_PATH/files/prolog.sh"
    # Without it Slurm holds a job whose prolog has failed until somebody releases it.
    parameters=$(last_value SchedulerParameters "$slurm/slurm.conf" "$others")
    if [[ ,$parameters, != *,nohold_on_prolog_fail,* ]]; then
        lines+=("SchedulerParameters=${parameters:+$parameters,}nohold_on_prolog_fail")
    fi
else
    drop "$slurm/prolog.d/50-hpc-mp-gate.sh"
fi

if enabled health; then
    sed "s|@HEALTHAGENT@|$slurm/health.sh|g" "$CYCLECLOUD_SPEC_PATH/files/health.sh" | put "$slurm/hpc-mp-health" 755
    lines+=("HealthCheckProgram=$slurm/hpc-mp-health")
    interval=$(last_value HealthCheckInterval "$slurm/slurm.conf" "$others")
    if [[ ${interval:-0} == 0 ]]; then # no healthagent
        lines+=("HealthCheckInterval=60")
    fi
else
    drop "$slurm/hpc-mp-health"
fi

printf '%s\n' "${lines[@]}" | block "$site" slurm
for line in "${lines[@]}"; do # slurm.additional.config of the template stands behind site_specific.conf
    if sed '1,/^Include site_specific.conf/d' "$slurm/slurm.conf" | grep -qi "^${line%%=*}="; then
        warn "slurm.additional.config sets ${line%%=*}, too, and wins: make it $line"
    fi
done

# At a first start slurmctld comes after all scripts.
if [[ $changed == yes ]] && timeout 10 scontrol ping &>/dev/null; then
    scontrol reconfigure
    say "slurmctld has read the new settings"
fi
