#!/bin/bash
# The place of the shared environment, readable for everybody.
set -euo pipefail
install -d -m 0755 "$(jetpack config hpc_mp.directory /shared/hpc-mp)"
