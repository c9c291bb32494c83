#!/bin/bash
# Does hpc-mp run, and has Slurm read what the scripts wrote?
set -euo pipefail
# shellcheck source=/dev/null
source /etc/profile.d/hpc-mp.sh
hpc-mp --version
slurm=$(dirname "$(readlink -f /etc/slurm/slurm.conf)")
config=$(scontrol show config)
if [[ -e $slurm/hpc-mp-health ]]; then
    grep -q "^HealthCheckProgram *= $slurm/hpc-mp-health$" <<<"$config" || { echo "Slurm calls another HealthCheckProgram" >&2; exit 1; }
fi
if [[ -e $slurm/prolog.d/50-hpc-mp-gate.sh ]]; then
    grep -q '^SchedulerParameters *=.*nohold_on_prolog_fail' <<<"$config" || { echo "a refused job would be held" >&2; exit 1; }
fi
