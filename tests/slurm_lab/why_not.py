"""Why a lab cannot run here, in words for whoever reads a skipped test."""

from __future__ import annotations

import os
import shutil
import subprocess

PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""Command → Debian package that has it."""

ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core", "mariadb-install-db": "mariadb-server-core",
              "mariadb": "mariadb-client-core"}  # fmt: skip
"""The same for a lab with accounting."""

PROBE = """
ip link add bridge0 type bridge &&
ip link add cable0 type veth peer name cable1 &&
tc qdisc add dev cable0 root tbf rate 1mbit burst 16kb latency 50ms
"""


def why_not(accounting: bool = False) -> str | None:
    """One sentence, or None when a lab can run."""
    if os.geteuid() != 0:
        return "a Slurm lab needs root (it makes namespaces and network interfaces); you are not root"
    wanted = PACKAGES | (ACCOUNTING if accounting else {})
    missing = dict.fromkeys(package for command, package in wanted.items() if shutil.which(command) is None)
    if missing:
        return f"a Slurm lab needs these Debian packages: apt-get install {' '.join(missing)}"
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "sh", "-c", PROBE]
    probe = subprocess.run(unshare, capture_output=True, text=True)
    if probe.returncode:
        return f"a Slurm lab needs namespaces, bridges and veth interfaces, which this machine refuses: {probe.stderr.strip()}"
    return None
