#!/bin/bash
# GPUs and InfiniBand need pinned memory: say so in the log where this node does not grant it.
set -euo pipefail
grep -rqsE 'memlock[[:space:]]+unlimited' /etc/security/limits.d || echo "memlock is limited on this node" >&2
