#!/bin/bash
# Does the doctor find this node well, and would the gate let a job in, in time?
set -euo pipefail
# shellcheck source=/dev/null
source /etc/profile.d/hpc-mp.sh
hpc-mp doctor node
gate=/usr/local/libexec/hpc-mp/hpc-mp-gate
[[ ! -x $gate ]] || timeout 5 "$gate"
