"""What NCCL's log says, as facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Via = Literal["NET", "P2P", "SHM", "COLLNET"]


@dataclass(frozen=True, slots=True)
class NcclChannel:
    """One way from a rank to another; of which communicator, the log does not tell.

    Attributes:
        number: of the channel.
        sender, receiver: ranks; of CollNet both are the rank that says it.
        via: NET is the network, P2P the GPU's own reach (NVLink, PCIe), SHM the host's memory, COLLNET the switches' reduction.
        how: the network's name ("IB", "Socket", "AWS Libfabric"), or the kind of reach ("CUMEM", "IPC").
        device: the network's device; None for others.
        gdr: the adapter reads and writes the GPU's memory itself.
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
    """Something that went wrong. ``rank`` is the latest that this process had; None where the log does not tell.

    Attributes:
        kind: of a row in ``env/nccl-troubles.toml``.
        hca: adapter of the one who says it ("mlx5_3"); empty where the line names none.
        peer: address of the other side; likewise.
        code: status of a completion, or errno.
    """

    kind: str
    host: str
    rank: int | None
    words: str
    hca: str = ""
    peer: str = ""
    code: int | None = None


@dataclass(frozen=True, slots=True)
class NcclTruth:
    """Everything that was understood.

    Attributes:
        lines: how many lines were NCCL's.
        version: of NCCL.
        networks: processes by the network that each uses: {"IB": 16}.
        network_hosts: hosts by network, for the one who does not as the others do.
        adapters: the network's adapters by host, as NCCL found them: ("mlx5_ib0:1/IB", …); one for plain sockets is an interface.
        gdr: by adapter's name, whether NCCL found GPUDirect possible.
        provider: of the OFI plug-in ("efa"), and how many adapters it found.
        channels: each once.
        hosts: by (ranks of a communicator, rank): the latest of those of that size.
        ranks, nodes: of the largest communicator; None where the log does not tell.
        started, completed: (ranks, rank) whose start, and whose completion of it, was seen.
        algorithms: how often (collective, algorithm, protocol) was chosen.
        nvls: multicast of NVSwitches is there; None where the log does not tell.
        dmabuf: GPUs of which NCCL said that they offer DMA-BUF.
        environment: NCCL's variables that were set, with their values.
        troubles: each once.
    """

    lines: int = 0
    version: str | None = None
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
    nvls: bool | None = None
    dmabuf: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()

    def between_nodes(self, channel: NcclChannel) -> bool:
        """Over the network. NCCL falls back to that inside a node too, but rarely: only where there is one node does it count."""
        return channel.via in ("NET", "COLLNET") and self.nodes != 1

    def inside(self, channel: NcclChannel) -> bool:
        """Both ranks are on one node. (MNNVL is NVLink between nodes.)"""
        return channel.how != "MNNVL" and not self.between_nodes(channel)
