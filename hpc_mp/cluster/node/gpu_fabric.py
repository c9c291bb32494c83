"""Managers of the NVLink fabric: the fabric manager of this node, and the IMEX daemon for memory of other nodes."""

import re
from dataclasses import dataclass

from hpc_mp.cluster.node.gpu_driver import read_models
from hpc_mp.cluster.node.gpu_pci import count_nvswitches
from hpc_mp.cluster.node.source import NodeSource, Unavailable

_MANAGER = ("systemctl", "is-active", "nvidia-fabricmanager")
_IMEX = ("nvidia-imex-ctl", "-H", "-N")
_NODE = re.compile(r"Node #(\d+)\s+[-*]\s+(\S+)\s+[-*]\s+-?\s*(\w+)")


@dataclass(frozen=True)
class NvswitchFabric:
    """The fabric manager and the NVSwitches."""

    manager: str  # systemd's state of nvidia-fabricmanager ("active", "failed", "inactive"); or the reason why it is not known
    nvswitches: int  # number on this node's PCI bus


@dataclass(frozen=True)
class Imex:
    """The state of the IMEX domain."""

    domain: str  # "UP", "DEGRADED", "DOWN" …
    nodes: tuple[tuple[str, str], ...]  # state by address, such as "READY"
    unconnected: tuple[tuple[int, int, str], ...]  # (from, to) pairs that are not "C", with the letter shown instead
    channels: tuple[str, ...]  # device files ``/dev/nvidia-caps-imex-channels/channel*``


def read_fabric(source: NodeSource) -> NvswitchFabric:
    """Read the fabric manager's state. Never raises: the caller judges whether its absence matters."""
    try:
        manager = source.answer(_MANAGER).strip()
    except Unavailable as unseen:  # is-active exits 3 for an inactive service, with its state on stdout
        manager = unseen.out.strip() or "inactive or failed" if unseen.code == 3 else f"unknown: {unseen}"
    return NvswitchFabric(manager, count_nvswitches(source))


def read_imex(source: NodeSource) -> Imex | None:
    """Read the IMEX domain; None if no NVLink leaves the node. Raises Unavailable."""
    if not any(model.rack for model in read_models(source)):
        return None
    text = source.answer(_IMEX)
    domain = re.search(r"Domain State:\s*(\S+)", text)
    if domain is None:
        raise Unavailable(f"nvidia-imex-ctl prints no domain state: {text.strip()[:60]!r}")
    table = text.partition("Nodes From\\To")[2].splitlines()[1:]
    rows = [line.split() for line in table if re.match(r"\s*\d+\s+\S", line)]
    return Imex(
        domain=domain[1],
        nodes=tuple((match[2], match[3]) for match in _NODE.finditer(text)),
        unconnected=tuple((int(row[0]), column, letter) for row in rows for column, letter in enumerate(row[1:])
                          if letter != "C"),
        channels=source.names("/dev/nvidia-caps-imex-channels/channel*"),
    )
