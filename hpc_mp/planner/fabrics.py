"""What links and NICs carry, from ``env/fabrics.toml``, which has the sources of every figure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError

ASSET = "env/fabrics.toml"


@dataclass(frozen=True, slots=True)
class Fabric:
    """Nodes of one kind and what connects them; rates in GB/s of payload in one direction.

    Attributes:
        gpu: regular expression of the driver's name of the GPU.
        gpus, nics: of a node. ``domain``: GPUs that NVLink reaches, where that is more than a node's.
        links, link: NVLinks (or the like) of a GPU, and the rate of one. ``mesh``: each reaches one other GPU.
        nvls: share of the links' rate when the switch adds up; 0: it cannot.
        nic: rate of one. hop: µs of a step between nodes beyond NCCL's figure.
        ll: GB/s at most of protocol LL inside a node.
    """

    name: str
    title: str
    gpu: str
    gpus: int
    links: int
    link: float
    nics: int
    nic: float
    ll: float
    nvls: float = 0.0
    mesh: bool = False
    domain: int = 0
    hop: float = 0.0


@dataclass(frozen=True, slots=True)
class Protocol:
    """An algorithm with one of NCCL's protocols.

    Attributes:
        base, inside, between: µs of its start, of a step inside a node, and of one between nodes.
        share: of the bandwidth, that is left for data.
        fill: µs until its pipeline is full.
        most: GB/s busbw between nodes.
    """

    algorithm: str
    protocol: str
    base: float
    inside: float
    between: float
    share: float
    fill: float
    most: float


@dataclass(frozen=True, slots=True)
class Model:
    """NCCL: shares of the NICs' rate that rings and trees reach, and of a ring's rate in a tree's chain inside a node."""

    nic_ring: float
    nic_tree: float
    tree_inside: float
    protocols: tuple[Protocol, ...]


@dataclass(frozen=True, slots=True)
class Tcp:
    """gloo and MPI between hosts; the fields are those of ``[tcp]``."""

    payload: float
    step: float
    gloo_reduce_scatter: float
    gloo_crossing: float


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(asset(ASSET).read_text(encoding="utf-8"))


@cache
def fabrics() -> dict[str, Fabric]:
    return {name: Fabric(name=name, **values) for name, values in _data()["fabric"].items()}


def fabric(name: str) -> Fabric:
    """Raises HpcMpError for a name that ``env/fabrics.toml`` has not."""
    if name not in fabrics():
        raise HpcMpError(f"--fabric {name}", f"is none of {', '.join(fabrics())}", f"name one of them, or add yours to {ASSET}")
    return fabrics()[name]


@cache
def model() -> Model:
    data = _data()["nccl"]
    protocols = (Protocol(**{"fill": 0.0, "most": float("inf")} | row) for row in data["protocols"])
    return Model(data["nic_ring"], data["nic_tree"], data["tree_inside"], tuple(protocols))


@cache
def tcp() -> Tcp:
    return Tcp(**_data()["tcp"])
