#!/bin/bash
# Each time a compute node starts: limits, Google's NCCL plug-in where there is RoCE, the doctor on the node's own disk.
# usage: compute-node.sh roce|plain
set -euo pipefail

network=$1

mkdir -p /etc/systemd/system/slurmd.service.d
cat > /etc/systemd/system/slurmd.service.d/hpc-mp.conf <<'UNIT'
[Service]
LimitMEMLOCK=infinity
LimitNOFILE=1048576
UNIT
systemctl daemon-reload

if [[ $network == roce && ! -e /usr/local/gib/scripts/set_nccl_env.sh ]]; then
    keys=/usr/share/keyrings
    curl --fail --silent --show-error https://us-apt.pkg.dev/doc/repo-signing-key.gpg | gpg --dearmor --yes -o "$keys/google-ar.gpg"
    curl --fail --silent --show-error https://packages.cloud.google.com/apt/doc/apt-key.gpg | gpg --dearmor --yes -o "$keys/google.gpg"
    echo "deb [signed-by=$keys/google.gpg] http://packages.cloud.google.com/apt apt-transport-artifact-registry-stable main" \
        > /etc/apt/sources.list.d/artifact-registry.list
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes apt-transport-artifact-registry
    echo "deb [signed-by=$keys/google-ar.gpg] ar+https://us-apt.pkg.dev/projects/gce-ai-infra gpudirect-gib-apt main" \
        > /etc/apt/sources.list.d/gib.list
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes nccl-gib
    apt-mark hold nccl-gib
fi
if [[ $network == roce ]]; then
    systemctl enable --now nvidia-persistenced.service
fi

# On Rocky Linux, the image for trying things out, hpc-mp runs on a Python that is not there yet.
command -v apt-get > /dev/null || dnf install --assumeyes python3.12

# The controller installs hpc-mp into /opt/apps, which it exports: on the first start of a cluster this takes some minutes.
for _ in $(seq 120); do
    if [[ -x /opt/apps/hpc-mp/current/bin/hpc-mp ]]; then
        break
    fi
    sleep 10
done
ln -sfn /opt/apps/hpc-mp/current/bin/hpc-mp /usr/local/bin/hpc-mp
/usr/local/bin/hpc-mp doctor install /usr/local/libexec
