#!/bin/bash
# OnNodeConfigured of the head node: hpc-mp once, on shared storage, and the doctor before every job.
# usage: head-node.sh WHEEL DIRECTORY      WHEEL: s3://… of hpc-mp's wheel, DIRECTORY: on shared storage
set -euo pipefail

wheel=$1
directory=$2
installed="$directory/$(basename "$wheel" .whl)"

apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes python3-venv

if [[ ! -e "$installed/complete" ]]; then
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    aws s3 cp "$wheel" "$download/"
    mkdir -p "$installed"
    python3 -m venv "$installed"
    "$installed/bin/pip" install --no-cache-dir "$download/$(basename "$wheel")[train]"
    touch "$installed/complete"
fi
ln -sfn "$installed" "$directory/current"
ln -sfn "$directory/current/bin/hpc-mp" /usr/local/bin/hpc-mp

# slurm.conf's Prolog is ParallelCluster's: all files of this directory. A node that fails it is drained, its job queued again.
prologs=/opt/slurm/etc/scripts/prolog.d
mkdir -p "$prologs"
cat > "$prologs/50_hpc_mp_doctor" <<'PROLOG'
#!/bin/bash
exec /usr/local/libexec/hpc-mp-health
PROLOG
chmod 755 "$prologs/50_hpc_mp_doctor"
