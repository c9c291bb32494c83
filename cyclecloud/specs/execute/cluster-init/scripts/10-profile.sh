#!/bin/bash
# The environment profile of this node array, where jobs find it.
set -euo pipefail
install -d -m 0755 /etc/hpc-mp
jetpack config hpc_mp.profile "" > /etc/hpc-mp/profile
