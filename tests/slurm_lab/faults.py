"""Faults of links and nodes for a running lab, as context managers."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from hpc_mp_lab import conf

from .cluster import Cluster

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
TABLE = "bridge planted"
_numbers = itertools.count(1)


@contextmanager
def _between(plant: Callable[[], object], mend: Callable[[], object]) -> Iterator[None]:
    plant()
    try:
        yield
    finally:
        mend()


def slow_node(lab: Cluster, node: str, rate: str, base: str) -> AbstractContextManager[None]:
    """Set another rate for a node's link than the common ``base`` (see ``Cluster.shape``)."""
    return _between(lambda: lab.shape(rate, [node]), lambda: lab.shape(base, [node]))


@contextmanager
def slow_pair(lab: Cluster, a: str, b: str, rate: str, base: str) -> Iterator[None]:
    """Reduce the rate between two nodes, both ways, below their rate to all other nodes."""
    for sender, receiver in ((a, b), (b, a)):
        port, address = f"p-{receiver}", conf.node_address(lab.number, sender)
        lab.fabric("tc", "qdisc", "replace", "dev", port, "root", "handle", "1:", "htb", "default", "1")
        for number, limit in (("1", base), ("2", rate)):
            lab.fabric("tc", "class", "add", "dev", port, "parent", "1:", "classid", f"1:{number}", "htb", "rate", limit,
                       "burst", "128kb", "cburst", "128kb")
            lab.fabric("tc", "qdisc", "add", "dev", port, "parent", f"1:{number}", "pfifo", "limit", "1000")
        lab.fabric("tc", "filter", "add", "dev", port, "parent", "1:", "protocol", "ip", "u32", "match", "ip", "src",
                   f"{address}/32", "flowid", "1:2")
    try:
        yield
    finally:
        for node in (a, b):
            lab.fabric("tc", "qdisc", "del", "dev", f"p-{node}", "root")
        lab.shape(base, [a, b])


@contextmanager
def slow_uplink(lab: Cluster, leaf: int, rate: str) -> Iterator[None]:
    """Limit the cable between leaf switch ``leaf`` (from 1) and the spine, both ways."""
    ends = (f"up-s{leaf}", f"dn-s{leaf}")
    for end in ends:
        lab.fabric("tc", "qdisc", "replace", "dev", end, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
    try:
        yield
    finally:
        for end in ends:
            lab.fabric("tc", "qdisc", "del", "dev", end, "root")


def loss(lab: Cluster, node: str, percent: float) -> AbstractContextManager[None]:
    """Drop ``percent`` of a node's packets, incoming and outgoing, at the switch."""
    dice = f"numgen random mod 10000 < {round(percent * 100)} drop"
    return _dropping(lab, f"iifname p-{node} {dice}", f"oifname p-{node} {dice}")


def cut_pair(lab: Cluster, a: str, b: str) -> AbstractContextManager[None]:
    one, other = (conf.node_address(lab.number, node) for node in (a, b))
    return _dropping(lab, f"ip saddr {one} ip daddr {other} drop", f"ip saddr {other} ip daddr {one} drop")


def cut_node(lab: Cluster, node: str) -> AbstractContextManager[None]:
    return _between(lambda: lab.link(node, False), lambda: lab.link(node, True))


def small_mtu(lab: Cluster, node: str, mtu: int) -> AbstractContextManager[None]:
    """Set a smaller MTU for a node's interface than for the others."""
    def of(size: int) -> None:
        lab.fabric(*lab.network_of(node), "ip", "link", "set", "eth0", "mtu", str(size))

    return _between(lambda: of(mtu), lambda: of(1500))


@contextmanager
def throttled(lab: Cluster, node: str, share: float) -> Iterator[None]:
    """Limit all processes of a node together to ``share`` of one CPU, by a cgroup of this machine."""
    name = f"slurm-lab-{lab.number}-{node}"
    new = (CGROUPS / "cgroup.controllers").exists()
    top = CGROUPS if new else CGROUPS / "cpu"
    group, quota = top / name, round(share * PERIOD_US)
    if new:
        (top / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir(exist_ok=True)  # a process killed in here may have left it
    try:
        if new:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        _move(lab, node, group)
        yield
    finally:
        _move(lab, node, top)
        group.rmdir()


def why_not_throttled() -> str | None:
    """Return the reason why ``throttled`` cannot work here, as one sentence, or None."""
    if (CGROUPS / "cgroup.controllers").exists():
        works = "cpu" in (CGROUPS / "cgroup.controllers").read_text().split()
    else:
        works = os.access(CGROUPS / "cpu" / "cgroup.procs", os.W_OK)
    return None if works else "a CPU cannot be throttled: this machine has no writable cpu cgroup"


def _move(lab: Cluster, node: str, group: Path) -> None:
    """Move all processes of a node, and thereby those that they start, to a cgroup."""
    for _ in range(2):  # again for processes that were being forked
        for pid in lab.processes(node):
            with suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))


@contextmanager
def _dropping(lab: Cluster, *rules: str) -> Iterator[None]:
    table = f"{TABLE}{next(_numbers)}"
    lab.fabric("nft", "add", "table", *table.split())
    try:
        lab.fabric("nft", "add", "chain", *table.split(), "passing", "{ type filter hook forward priority 0; }")
        for rule in rules:
            lab.fabric("nft", "add", "rule", *table.split(), "passing", *rule.split())
        yield
    finally:
        lab.fabric("nft", "delete", "table", *table.split())
