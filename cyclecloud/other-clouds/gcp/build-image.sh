#!/bin/bash
# While the image of all nodes is built: Slurm, limits. NVIDIA's driver is in the base image and stays as it is.
# usage: build-image.sh RELEASE      RELEASE: of GoogleCloudPlatform/slurm-gcp
set -euo pipefail

release=$1

# The driver's packages belong together: an update of some of them breaks all.
mapfile -t driver < <(dpkg-query --show --showformat='${Package}\n' 'nvidia-*' 'libnvidia-*' 2>/dev/null || true)
if [[ ${#driver[@]} -gt 0 ]]; then
    apt-mark hold "${driver[@]}"
fi

cat > /var/tmp/slurm_vars.json <<'JSON'
{"reboot": false, "install_cuda": false, "install_ompi": true, "install_lustre": false, "install_managed_lustre": true,
 "install_gcsfuse": true, "allow_kernel_upgrades": false, "monitoring_agent": "cloud-ops"}
JSON
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes git python3-venv ibverbs-utils
ansible-pull --url https://github.com/GoogleCloudPlatform/slurm-gcp --checkout "$release" --inventory localhost, --limit localhost \
    --connection=local --extra-vars @/var/tmp/slurm_vars.json ansible/playbook.yml

# NCCL pins memory and opens many files. The stack is left alone: unlimited, threads get 2 MiB, too little for NCCL.
cat > /etc/security/limits.d/99-hpc-mp.conf <<'LIMITS'
* - memlock unlimited
* - nofile 1048576
LIMITS
