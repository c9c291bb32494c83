"""Facts from NCCL's log, and the meanings of its warnings: the table ``env/nccl-troubles.toml``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from hpc_mp.base.assets import asset_table

Via = Literal["NET", "P2P", "SHM", "COLLNET"]


@dataclass(frozen=True, slots=True)
class NcclChannel:
    """A path from one rank to another; the log does not name the communicator."""

    number: int
    sender: int  # rank; for CollNet both are the rank that wrote the line
    receiver: int
    via: Via  # NET is the network, P2P direct GPU access (NVLink, PCIe), SHM the host's memory, COLLNET reduction in the switches
    how: str  # the network's name ("IB", "Socket", "AWS Libfabric"), or the kind of access ("CUMEM", "IPC")
    device: int | None = None  # the network's device; None for other paths
    gdr: bool = False  # True if the adapter accesses the GPU's memory directly


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error or warning. ``rank``: the latest rank of the process; None if the log does not contain it."""

    kind: str  # of a row in ``env/nccl-troubles.toml``
    host: str
    rank: int | None
    words: str
    hca: str = ""  # adapter of the process that wrote the line ("mlx5_3"); empty if the line names none
    code: int | None = None  # status of a completion, or errno


@dataclass(frozen=True, slots=True)
class NcclTruth:
    """All parsed facts."""

    lines: int = 0  # number of NCCL's lines
    networks: Mapping[str, int] = field(default_factory=dict)  # number of processes by network: {"IB": 16}
    network_hosts: Mapping[str, frozenset[str]] = field(default_factory=dict)  # hosts by network, to name hosts that deviate
    # adapters that NCCL found, by host: ("mlx5_ib0:1/IB", …); for plain sockets the interfaces
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gdr: Mapping[str, bool] = field(default_factory=dict)  # True if NCCL found GPUDirect possible, by adapter
    provider: tuple[str, int | None] | None = None  # provider of the OFI plug-in ("efa"), and the number of adapters it found
    channels: tuple[NcclChannel, ...] = ()  # channels without duplicates
    # host by (ranks of a communicator, rank), the latest for communicators of equal size
    hosts: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ranks: int | None = None  # size of the largest communicator; None if the log does not contain it
    nodes: int | None = None  # of that communicator
    started: frozenset[tuple[int, int]] = frozenset()  # (ranks, rank) of starts in the log
    completed: frozenset[tuple[int, int]] = frozenset()  # and of completed starts
    environment: Mapping[str, str] = field(default_factory=dict)  # NCCL's variables that were set, with their values
    troubles: tuple[Trouble, ...] = ()  # errors and warnings without duplicates

    def between_nodes(self, channel: NcclChannel) -> bool:
        """Return True for a path over the network. NCCL rarely uses it inside a node too: that is assumed only for one node."""
        return channel.via in ("NET", "COLLNET") and self.nodes != 1

    def inside(self, channel: NcclChannel) -> bool:
        """Return True if both ranks are on one node. (MNNVL is NVLink between nodes.)"""
        return channel.how != "MNNVL" and not self.between_nodes(channel)


TABLE = "env/nccl-troubles.toml"
UNKNOWN = "warning"  # kind of the warnings that match no other row
ENDED = "ended"  # kind of those after which NCCL's call returned an error


@cache
def trouble_rows() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows by kind, in order, as the table's head explains them; ``signs`` and ``place`` are compiled patterns."""
    rows = asset_table(TABLE)["trouble"]
    return {row["kind"]: {"means": "", "info": False, "fabrics": [], **row, "place": re.compile(row.get("place", "(?!)")),
                          "signs": re.compile("|".join(f"(?:{sign})" for sign in row["signs"]))} for row in rows}


def trouble_of(place: str, level: str, text: str) -> str | None:
    """Return the kind of a message; None if it is only informative."""
    return next((kind for kind, row in trouble_rows().items() if (level == "WARN" or row["info"])
                 and (row["signs"].search(text) or row["place"].search(place))), None)
