"""The schema of GPU models and machine types. The data is in ``env/machines``.

This module is packed into the health check: use only the standard library of Python 3.10.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

READ = "2026-01-01"  # types retired by then are gone; later retirements are announced
Row = Mapping[str, Any]  # a figure's name → its value, as in a file
_STRICT = {"extra": "forbid", "strict": True}  # for pydantic, which validates the rows of files


@dataclass(frozen=True)
class GpuModel:
    """One GPU model. A figure that is unpublished or does not apply is None."""

    __pydantic_config__ = _STRICT

    name: str  # part of the driver's name of the GPU; the longest match counts
    title: str = ""  # the common name, with the memory size
    vendor: str = "nvidia"  # ``nvidia``, ``amd``, or ``cpu`` for the processors of one rank
    pci: tuple[str, ...] = ()  # PCI device numbers, as ``0x2330``
    memory_mib: int | None = None  # MiB of device memory that the driver reports
    memory_gbs: float | None = None  # GB/s of that memory
    # dense TFLOP/s by precision: ``fp64``, ``fp32``, ``tf32``, ``bf16``, ``fp16``; of matrix units if they are faster
    peak_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    nvlinks: int = 0  # number of NVLinks (or similar) of one GPU
    nvlink_gbs: float | None = None  # GB/s of one link in one direction, as the driver reports it
    nccl_link_gbs: float | None = None  # GB/s of payload that NCCL reaches on one link in one direction
    nvls_share: float = 0.0  # share of that rate for reductions in the switch; 0 if the switch cannot reduce
    ll_gbs: float | None = None  # maximum GB/s of NCCL's LL protocol inside a node
    mesh: bool = False  # True if each link reaches one other GPU, so that fewer GPUs use fewer links
    bridged: bool = False  # True if the links are on an optional bridge between cards
    per_node: tuple[int, ...] = ()  # numbers of GPUs on the boards that it is sold on; empty if it is sold singly
    switched: bool = False  # True if NVSwitches, set up by a fabric manager, join the GPUs of a node
    rack: bool = False  # True if the NVLinks leave the node; memory of other nodes needs IMEX
    pcie: int | None = None  # generation of the slot; 16 lanes
    host_copy_gbs: float | None = None  # minimum GB/s of a copy from pinned host memory
    processors: int = 132  # that compute at the same time
    reach: tuple[float, float] = (0.75, 0.34)  # shares of the peak that products of matrices, and flash attention, reach
    # products_share, attention_share: measured shares of the peak; wave: numbers of a product that take as long as none more;
    # launch_us: µs of a kernel that computes nothing. All by ``hpc-mp bench kernels``; None: by ``reach`` and ``processors``
    products_share: float | None = None
    attention_share: float | None = None
    wave: float | None = None
    launch_us: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # figure → entry of the sources

    @property
    def board_links(self) -> int:
        """The number of NVLinks that every node with this GPU has: 0 if they need a bridge."""
        return 0 if self.bridged else self.nvlinks

    @property
    def memory(self) -> int | None:
        """Bytes of device memory that the driver reports."""
        return None if self.memory_mib is None else self.memory_mib * 2**20


@dataclass(frozen=True)
class Marks:
    """Criteria that identify a machine type, besides its GPUs. Network criteria only select the environment's profile: a machine
    without its network is still of that type."""

    __pydantic_config__ = _STRICT

    vendor: str  # the firmware's vendor (``/sys/class/dmi/id/sys_vendor``); a regular expression, matched from the beginning
    # the firmware's product name; a regular expression, matched as a whole; empty if GPUs and processor count identify the type
    product: str = ""
    rank: int = 10  # the order in which types are tried, the specific before the general
    # drivers of network interfaces, with the minimum number of each
    drivers: Mapping[str, int] = field(default_factory=dict, hash=False)
    layer: str = ""  # a link layer of an RDMA port: ``InfiniBand``, ``Ethernet``; empty for any
    efa: bool = False  # True if the machine must have Amazon's adapters


@dataclass(frozen=True)
class MachineType:
    """A machine type: a node that a cloud rents out or a site owns."""

    __pydantic_config__ = _STRICT

    # name, title: the owner's name for it; a description
    name: str
    cloud: str  # ``azure``, ``aws``, ``gcp``, or ``site`` for machines on premises
    # vcpus, threads, sockets, numa: logical processors, threads per core, packages, NUMA nodes with processors
    vcpus: int
    # memory_gib, memory_seen_gib: GiB as sold, and as the kernel reports it; the latter None if it includes GPU memory
    memory_gib: int
    numa: int
    arch: str = "x86_64"  # ``x86_64`` or ``arm64``
    title: str = ""
    threads: int = 1
    sockets: int | None = None
    memory_seen_gib: int | None = None
    disks: int | None = None  # the node's own NVMe disks; None if it depends on the image
    # gpus, gpu: the number and the model of its GPUs
    gpus: int = 0
    gpu: GpuModel | None = None
    # links, link_gbs, ll_gbs: as for the GPU model, for machines whose GPUs are connected differently
    links: int | None = None
    link_gbs: float | None = None
    ll_gbs: float | None = None
    # nics, rdma_gbps: number of adapters of the fast network, and Gb/s of one
    nics: int = 0
    rdma: str = ""  # the kind of fast network: HDR, NDR, EFA, RoCE …; empty for none
    rdma_gbps: float = 0
    rdma_optional: bool = False  # True if it is also available without the fast network and is otherwise identical
    hop_us: float = 0.0  # µs that a step between nodes takes beyond NCCL's figure
    nvlink_block: int = 0  # number of machines whose GPUs share one NVLink domain; 0 if each has its own
    nodes_per_leaf: int | None = None  # number of nodes below one leaf switch; None if unpublished
    busbw: float = 0.0  # all-reduce bandwidth in GB/s of a healthy node; 0 if unknown
    fabric: str = ""  # short name for ``--fabric``; types with equal links and NICs may share it
    profile: str = ""  # the profile in ``env/profiles`` for jobs on such nodes
    marks: Marks | None = None  # criteria that identify it; None if it is only known by name
    # generations, placement_group_max, image, quota, twin, retired: for Azure's clusters, see ``env/machines/azure.toml``
    generations: tuple[int, ...] = ()
    placement_group_max: int = 0
    image: str = ""
    quota: str = ""
    twin: str = ""
    retired: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # figure → entry of the sources

    @property
    def judged(self) -> bool:
        """True if enough is known for the doctor to report what a node lacks."""
        return self.sockets is not None

    @property
    def gpu_title(self) -> str:
        """The common name of the GPU model, with its memory size; empty without GPUs."""
        return self.gpu.title if self.gpu else ""

    @property
    def gpu_vendor(self) -> str:
        """The vendor of the GPUs, ``nvidia`` or ``amd``; empty without GPUs."""
        return self.gpu.vendor if self.gpu else ""

    @property
    def quota_vcpus(self) -> int:
        """The vCPUs of a quota that one machine uses. A size with constrained cores (HB120-16rs_v3) counts as its whole machine.
        Sources: Azure's page on constrained sizes (price), github.com/MicrosoftDocs/azure-docs/issues/23017 (quota)."""
        match = re.match(r"Standard_[A-Z]+(\d+)-", self.name)
        return int(match[1]) if match else self.vcpus

    @property
    def is_gone(self) -> bool:
        """True if no such machine can be started any more."""
        return bool(self.retired) and self.retired <= READ


@dataclass(frozen=True)
class Catalogue:
    """GPU models, the longest names first; machine types by lower-case name, the user's own first; descriptions of sources."""

    gpus: Mapping[str, GpuModel]
    machines: Mapping[str, MachineType]
    sources: Mapping[str, str]

    def gpu(self, name: str) -> GpuModel | None:
        """Return the model of a GPU that the driver calls ``name``; None if it is not in the catalogue."""
        return next((model for part, model in self.gpus.items() if part in name), None)

    def machine(self, name: str) -> MachineType | None:
        """Return the machine type of that name, ignoring case."""
        return self.machines.get(name.casefold())

    def of(self, *clouds: str) -> Iterator[MachineType]:
        """Return the machine types of these clouds."""
        return (machine for machine in self.machines.values() if machine.cloud in clouds)


def build(gpus: Mapping[str, Row], machines: Mapping[str, Row], sources: Mapping[str, str]) -> Catalogue:
    """Build a catalogue from complete and validated rows, keyed by name."""
    models = {name: GpuModel(name=name, **_frozen(gpus[name])) for name in sorted(gpus, key=len, reverse=True)}
    types = [_machine(name, row, models) for name, row in machines.items()]
    return Catalogue(models, {machine.name.casefold(): machine for machine in types}, sources)


def _machine(name: str, row: Row, models: Mapping[str, GpuModel]) -> MachineType:
    values = _frozen(row)
    values["gpu"] = models[row["gpu"]] if row.get("gpu") else None
    values["marks"] = Marks(**row["marks"]) if row.get("marks") else None
    return MachineType(name=name, **values)


def _frozen(row: Row) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
