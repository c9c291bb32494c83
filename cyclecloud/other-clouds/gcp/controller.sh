#!/bin/bash
# Each time the controller starts: hpc-mp once, on the storage that it exports to all nodes.
# usage: controller.sh WHEEL DIRECTORY
set -euo pipefail

wheel=$1
directory=$2
installed="$directory/$(basename "$wheel" .whl)"

# The nodes run the same image, so their Python is this one.
python=python3
if command -v apt-get > /dev/null; then
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes python3-venv
else
    dnf install --assumeyes python3.12
    python=python3.12
fi

if [[ ! -e "$installed/complete" ]]; then
    mkdir -p "$installed"
    "$python" -m venv "$installed"
    "$installed/bin/pip" install --no-cache-dir "${wheel}[train]"
    touch "$installed/complete"
fi
ln -sfn "$installed" "$directory/current"
ln -sfn "$directory/current/bin/hpc-mp" /usr/local/bin/hpc-mp
