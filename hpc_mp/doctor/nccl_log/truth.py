"""Facts from NCCL's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Via = Literal["NET", "P2P", "SHM", "COLLNET"]


@dataclass(frozen=True, slots=True)
class NcclChannel:
    """A path from one rank to another; the log does not name the communicator.

    Attributes:
        number: number of the channel.
        sender, receiver: ranks; for CollNet both are the rank that wrote the line.
        via: NET is the network, P2P direct GPU access (NVLink, PCIe), SHM the host's memory, COLLNET reduction in the switches.
        how: the network's name ("IB", "Socket", "AWS Libfabric"), or the kind of access ("CUMEM", "IPC").
        device: the network's device; None for other paths.
        gdr: True if the adapter accesses the GPU's memory directly.
    """

    number: int
    sender: int
    receiver: int
    via: Via
    how: str
    device: int | None = None
    gdr: bool = False


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error or warning. ``rank``: the latest rank of the process; None if the log does not contain it.

    Attributes:
        kind: kind of a row in ``env/nccl-troubles.toml``.
        hca: adapter of the process that wrote the line ("mlx5_3"); empty if the line names none.
        code: status of a completion, or errno.
    """

    kind: str
    host: str
    rank: int | None
    words: str
    hca: str = ""
    code: int | None = None


@dataclass(frozen=True, slots=True)
class NcclTruth:
    """All parsed facts.

    Attributes:
        lines: number of NCCL's lines.
        networks: number of processes by network: {"IB": 16}.
        network_hosts: hosts by network, to name hosts that deviate.
        adapters: adapters that NCCL found, by host: ("mlx5_ib0:1/IB", …); for plain sockets the interfaces.
        gdr: True if NCCL found GPUDirect possible, by adapter.
        provider: provider of the OFI plug-in ("efa"), and the number of adapters it found.
        channels: channels without duplicates.
        hosts: host by (ranks of a communicator, rank), the latest for communicators of equal size.
        ranks, nodes: size of the largest communicator; None if the log does not contain it.
        started, completed: (ranks, rank) of starts and of completed starts in the log.
        algorithms: number of choices by (collective, algorithm, protocol).
        environment: NCCL's variables that were set, with their values.
        troubles: errors and warnings without duplicates.
    """

    lines: int = 0
    networks: Mapping[str, int] = field(default_factory=dict)
    network_hosts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gdr: Mapping[str, bool] = field(default_factory=dict)
    provider: tuple[str, int | None] | None = None
    channels: tuple[NcclChannel, ...] = ()
    hosts: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ranks: int | None = None
    nodes: int | None = None
    started: frozenset[tuple[int, int]] = frozenset()
    completed: frozenset[tuple[int, int]] = frozenset()
    algorithms: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()

    def between_nodes(self, channel: NcclChannel) -> bool:
        """Return True for a path over the network. NCCL rarely uses it inside a node too: that is assumed only for one node."""
        return channel.via in ("NET", "COLLNET") and self.nodes != 1

    def inside(self, channel: NcclChannel) -> bool:
        """Return True if both ranks are on one node. (MNNVL is NVLink between nodes.)"""
        return channel.how != "MNNVL" and not self.between_nodes(channel)
