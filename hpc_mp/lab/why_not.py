"""Reasons why a cluster cannot run on this machine, each in one sentence."""

import shutil
import subprocess
from collections.abc import Mapping

PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""Command → Debian package that has it."""

ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core", "mariadb-install-db": "mariadb-server-core",
              "mariadb": "mariadb-client-core"}  # fmt: skip
"""The same for a cluster with accounting."""

PROBE = """
ip link add bridge0 type bridge &&
ip link add cable0 type veth peer name cable1 &&
tc qdisc add dev cable0 root tbf rate 1mbit burst 16kb latency 50ms
"""


def missing(commands: Mapping[str, str]) -> list[str]:
    """Return the packages of the missing commands, without duplicates."""
    return list(dict.fromkeys(package for command, package in commands.items() if shutil.which(command) is None))


def refused() -> str | None:
    """Return the kernel's or container's error on namespaces, bridges and shaped cables; None if they are permitted."""
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "sh", "-c", PROBE]
    probe = subprocess.run(unshare, capture_output=True, text=True)
    return (probe.stderr.strip() or f"exit {probe.returncode}") if probe.returncode else None
