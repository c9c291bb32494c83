"""A lab from outside: its hosts, switches and cables, and why this machine cannot have one."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp_lab import conf
from hpc_mp_lab.cluster import LabCluster


@dataclass(frozen=True, slots=True)
class Cable:
    """The cable of one node. ``rate``: limit in bit/s in each direction; None: no limit."""

    up: bool
    rate: int | None


@dataclass(frozen=True, slots=True)
class HostView:
    """The view of one node. ``state``: Slurm's state ("idle"); None while the controller does not answer. ``cable``: None unless
    the user is root."""

    name: str
    switch: str
    address: str
    state: str | None
    cable: Cable | None


def host_views(cluster: LabCluster) -> list[HostView]:
    switches, states = _switches(cluster), _states(cluster)
    cables = _cables(cluster) if os.geteuid() == 0 else {}
    return [HostView(name, switches[name], conf.node_address(cluster.number, name), states.get(name), cables.get(name))
            for name in cluster.nodes]


def written(rate: int) -> str:
    """Return a rate in tc's notation."""
    for size, unit in ((10**9, "gbit"), (10**6, "mbit"), (10**3, "kbit")):
        if rate >= size:
            return f"{rate / size:g}{unit}"
    return f"{rate}bit"


def _switches(cluster: LabCluster) -> dict[str, str]:
    lines = (cluster.directory / "etc" / "topology.conf").read_text().splitlines()
    leaves = (dict(word.split("=", 1) for word in line.split()) for line in lines if " Nodes=" in line)
    return {node: leaf["SwitchName"] for leaf in leaves for node in leaf["Nodes"].split(",")}


def _states(cluster: LabCluster) -> dict[str, str]:
    command = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
    output = subprocess.run(command, env=cluster.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    return dict(line.split() for line in output.splitlines())


def _cables(cluster: LabCluster) -> dict[str, Cable]:
    """Read the cables at the switch's end."""
    links = {link["ifname"]: link for link in json.loads(cluster.fabric("ip", "-json", "link", "show"))}
    limits = {queue["dev"]: queue["options"]["rate"] * 8 for queue in json.loads(cluster.fabric("tc", "-json", "qdisc", "show"))
              if queue["kind"] == "tbf"}
    return {name: Cable("UP" in links[f"p-{name}"]["flags"], limits.get(f"p-{name}")) for name in cluster.nodes}


# Command → Debian package that has it; and the same for a cluster with accounting.
PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-client", "munged": "munge", "ip": "iproute2",
            "tc": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux"}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core", "mariadb-install-db": "mariadb-server-core",
              "mariadb": "mariadb-client-core"}
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
