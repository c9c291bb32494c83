#!/bin/bash
# Where accounting is on: does the database know this cluster?
set -euo pipefail
config=$(scontrol show config)
grep -q '^AccountingStorageType *= accounting_storage/slurmdbd' <<<"$config" || exit 0
name=$(awk '$1 == "ClusterName" { print $3 }' <<<"$config")
timeout 20 sacctmgr -nP show cluster format=cluster | grep -qixF "$name" || { echo "the database does not know the cluster $name" >&2; exit 1; }
