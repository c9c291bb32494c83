"""Rates of the links and NICs of a node, from the catalogue of machines; and NCCL's protocols, from ``env/collectives.toml``."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.catalogue import MachineType, catalogue

ASSET = "env/collectives.toml"
_BITS = 8


@dataclass(frozen=True, slots=True)
class Fabric:
    """Nodes of one type and their connections; rates in GB/s of payload in one direction.

    Attributes:
        name, title: short name, or that of the machine; in words.
        gpu: name of the GPU model.
        gpus, nics: number per node. ``domain``: GPUs that NVLink reaches, if that is more than a node's.
        links, link: NVLinks (or the like) of a GPU, and the rate of one. ``mesh``: True if each reaches one other GPU.
        nvls: share of the links' rate when the switch adds up; 0: it cannot.
        nic: rate of one NIC. hop: µs of a step between nodes beyond NCCL's figure; of gloo: µs of any step.
        ll: limit of protocol LL inside a node in GB/s. ``gloo``: True if ranks are on CPUs, which NCCL does not join.
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
    gloo: bool = False


@dataclass(frozen=True, slots=True)
class Protocol:
    """An algorithm with one of NCCL's protocols."""

    algorithm: str
    protocol: str
    # base, inside, between: µs of its start, of a step inside a node, and of a step between nodes
    base: float
    inside: float
    between: float
    share: float  # share of the bandwidth that is left for data
    fill: float  # µs until its pipeline is full
    most: float  # limit of busbw between nodes in GB/s


@dataclass(frozen=True, slots=True)
class NcclModel:
    """NCCL: shares of the NICs' rate that rings and trees reach, and of a ring's rate in a tree's chain inside a node."""

    nic_ring: float
    nic_tree: float
    tree_inside: float
    protocols: tuple[Protocol, ...]


@dataclass(frozen=True, slots=True)
class TcpModel:
    """Parameters of gloo between hosts; the fields are those of ``[tcp]``."""

    payload: float
    step: float
    gloo_reduce_scatter: float
    gloo_crossing: float


def fabric_of(machine: MachineType) -> Fabric | None:
    """Return the fabric of such nodes; None if the rates of its GPUs' links are unknown."""
    gpu = machine.gpu
    if gpu is None:
        return None
    link, ll = machine.link_gbs or gpu.nccl_link_gbs, machine.ll_gbs or gpu.ll_gbs
    if link is None or ll is None:
        return None
    return Fabric(machine.fabric or machine.name, machine.title, gpu.name, machine.gpus, machine.links or gpu.nvlinks, link,
                  machine.nics, machine.rdma_gbps / _BITS, ll, gpu.nvls_share, gpu.mesh, machine.gpus * machine.nvlink_block,
                  machine.hop_us, gpu.vendor == "cpu")


def fabrics() -> tuple[Fabric, ...]:
    """Return the fabrics with a short name: the measured ones, and those that users name."""
    return tuple(_named(short=True))


def fabric(name: str) -> Fabric:
    """Return the fabric of that short name, else of the machine of that name, case-insensitive. Raises HpcMpError if the
    catalogue has none."""
    match = next((row for row in (*fabrics(), *_named(short=False)) if row.name.casefold() == name.casefold()), None)
    if match is None:
        names = ", ".join(dict.fromkeys(row.name for row in fabrics()))
        raise HpcMpError(f"--fabric {name}", f"is not one of {names}, nor a machine of the catalogue with known links",
                         "name one of them, or add a row for your machine: see env/README.md")
    return match


def _named(short: bool) -> Iterator[Fabric]:
    machines = (machine for machine in catalogue().machines.values() if bool(machine.fabric) is short)
    return (candidate for machine in machines if (candidate := fabric_of(machine)) is not None)


@cache
def nccl_model() -> NcclModel:
    data = asset_table(ASSET)["nccl"]
    protocols = (Protocol(**{"fill": 0.0, "most": float("inf")} | row) for row in data["protocols"])
    return NcclModel(data["nic_ring"], data["nic_tree"], data["tree_inside"], tuple(protocols))


@cache
def tcp_model() -> TcpModel:
    return TcpModel(**asset_table(ASSET)["tcp"])
