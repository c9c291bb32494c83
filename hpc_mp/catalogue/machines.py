"""What is known of a GPU model and of a type of machine. Data lies in ``env/machines``; this is its form.

Packed into the health check: the standard library of Python 3.10 alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

READ = "2026-01-01"  # what a cloud had retired by then is gone, what is retired later is announced
Row = Mapping[str, Any]  # a figure's name → its value, as in a file
_STRICT = {"extra": "forbid", "strict": True}  # of pydantic, which checks the rows of files


@dataclass(frozen=True)
class GpuModel:
    """One GPU model. A figure that nobody has published, or that does not apply, is None.

    Attributes:
        name: part of the name that the driver gives the GPU; the longest that fits counts.
        title: as people write it, with its memory.
        vendor: ``nvidia`` or ``amd``.
        pci: PCI device numbers, as ``0x2330``.
        memory_mib: MiB of device memory that the driver shows.
        memory_gbs: GB/s of that memory.
        peak_tflops: dense TFLOP/s by precision: ``fp64``, ``fp32``, ``tf32``, ``bf16``, ``fp16``; of matrix units where
            they are faster.
        power_w: W, the most that the vendor allows.
        nvlinks: NVLinks (or the like) of one GPU.
        nvlink_gbs: GB/s of one link in one direction, as the driver shows it.
        nccl_link_gbs: GB/s of payload that NCCL reaches on one link in one direction.
        nvls_share: share of that rate when the switch adds up; 0: it cannot.
        ll_gbs: GB/s that NCCL's protocol LL reaches at most inside a node.
        mesh: each link reaches one other GPU, so fewer GPUs use fewer links.
        bridged: the links are on a bridge between cards, which a card need not have.
        per_node: GPUs of the boards that it is sold on; empty where it is sold singly.
        switched: the GPUs of a node are joined by NVSwitches, which a fabric manager sets up.
        rack: the NVLinks leave the node; memory of other nodes needs IMEX.
        pcie: generation of the slot; 16 lanes.
        host_copy_gbs: GB/s that a copy from pinned host memory reaches at least.
        sources: figure → entry of the sources.
    """

    __pydantic_config__ = _STRICT

    name: str
    title: str = ""
    vendor: str = "nvidia"
    pci: tuple[str, ...] = ()
    memory_mib: int | None = None
    memory_gbs: float | None = None
    peak_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    power_w: float | None = None
    nvlinks: int = 0
    nvlink_gbs: float | None = None
    nccl_link_gbs: float | None = None
    nvls_share: float = 0.0
    ll_gbs: float | None = None
    mesh: bool = False
    bridged: bool = False
    per_node: tuple[int, ...] = ()
    switched: bool = False
    rack: bool = False
    pcie: int | None = None
    host_copy_gbs: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def board_links(self) -> int:
        """NVLinks that are there whoever built the node: none where a bridge carries them."""
        return 0 if self.bridged else self.nvlinks

    @property
    def memory(self) -> int | None:
        """Bytes of device memory that the driver shows."""
        return None if self.memory_mib is None else self.memory_mib * 2**20


@dataclass(frozen=True)
class Marks:
    """By what a machine of a type is known, besides its GPUs. The network's marks tell the environment's profile alone: a machine
    whose network is gone is still that machine.

    Attributes:
        vendor: of the firmware (``/sys/class/dmi/id/sys_vendor``); a regular expression from its beginning.
        product: what the firmware calls the machine; a regular expression of the whole; empty: its GPUs and the number
            of its processors tell.
        rank: types are tried in this order: the special before the general.
        drivers: of network interfaces, and how many of them at least.
        layer: a link layer of an RDMA port: ``InfiniBand``, ``Ethernet``; empty: any.
        efa: it must show Amazon's adapters.
    """

    __pydantic_config__ = _STRICT

    vendor: str
    product: str = ""
    rank: int = 10
    drivers: Mapping[str, int] = field(default_factory=dict, hash=False)
    layer: str = ""
    efa: bool = False


@dataclass(frozen=True)
class MachineType:
    """A node as a cloud rents it out or a site has bought it.

    Attributes:
        name, title: as its owner calls it; in words.
        cloud: ``azure``, ``aws``, ``gcp``, or ``site`` for machines that stand somewhere.
        vcpus, threads, sockets, numa: logical processors, threads of a core, packages, NUMA nodes that have processors.
        memory_gib, memory_seen_gib: GiB as sold, and as the kernel shows it; the latter None where it counts GPUs' memory too.
        disks: NVMe disks of the node's own; None where it depends on the image.
        arch: ``x86_64`` or ``arm64``.
        gpus, gpu: how many, and which.
        links, link_gbs, ll_gbs: as of the GPU model, for machines whose GPUs are joined otherwise.
        nics, rdma_gbps: adapters of the fast network, and Gb/s of one.
        rdma: its kind: HDR, NDR, EFA, RoCE …; empty: none.
        rdma_optional: it may be had without the fast network, and looks the same otherwise.
        hop_us: µs that a step between nodes takes beyond NCCL's figure.
        nvlink_block: machines whose GPUs share one NVLink domain; 0: each its own.
        nodes_per_leaf: nodes below one leaf switch; None where it is not published.
        busbw, busbw_pair: GB/s, all-reduce of a healthy node, and of two; 0: not known.
        fabric: short name for ``--fabric``; types whose links and NICs are alike may share it.
        profile: of ``env/profiles``, for jobs on such nodes.
        marks: by what one is known; None: by its name only.
        generations, placement_group_max, image, quota, twin, retired: of Azure's clusters, see ``env/machines/azure.toml``.
        sources: figure → entry of the sources.
    """

    __pydantic_config__ = _STRICT

    name: str
    cloud: str
    vcpus: int
    memory_gib: int
    numa: int
    arch: str = "x86_64"
    title: str = ""
    threads: int = 1
    sockets: int | None = None
    memory_seen_gib: int | None = None
    disks: int | None = None
    gpus: int = 0
    gpu: GpuModel | None = None
    links: int | None = None
    link_gbs: float | None = None
    ll_gbs: float | None = None
    nics: int = 0
    rdma: str = ""
    rdma_gbps: int = 0
    rdma_optional: bool = False
    hop_us: float = 0.0
    nvlink_block: int = 0
    nodes_per_leaf: int | None = None
    busbw: float = 0.0
    busbw_pair: float = 0.0
    fabric: str = ""
    profile: str = ""
    marks: Marks | None = None
    generations: tuple[int, ...] = ()
    placement_group_max: int = 0
    image: str = ""
    quota: str = ""
    twin: str = ""
    retired: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def judged(self) -> bool:
        """Whether enough is known of it for the doctor to say what a node of it lacks."""
        return self.sockets is not None

    @property
    def gpu_title(self) -> str:
        """The GPU model as people write it, with its memory; empty without GPUs."""
        return self.gpu.title if self.gpu else ""

    @property
    def gpu_vendor(self) -> str:
        """``nvidia``, ``amd``; empty without GPUs."""
        return self.gpu.vendor if self.gpu else ""

    @property
    def quota_vcpus(self) -> int:
        """What one machine takes of a quota: a size with constrained cores, as HB120-16rs_v3, is counted as its whole machine.

        Azure's page on constrained sizes says so of the price, github.com/MicrosoftDocs/azure-docs/issues/23017 of the quota.
        """
        whole = re.match(r"Standard_[A-Z]+(\d+)-", self.name)
        return int(whole[1]) if whole else self.vcpus

    @property
    def is_v100(self) -> bool:
        return self.gpu_title.startswith("V100")

    @property
    def is_gone(self) -> bool:
        """Whether no such machine can be started any more."""
        return bool(self.retired) and self.retired <= READ


@dataclass(frozen=True)
class Catalogue:
    """GPU models, the longest names first; types of machine by name in lower case, a user's own first; sources, in words."""

    gpus: Mapping[str, GpuModel]
    machines: Mapping[str, MachineType]
    sources: Mapping[str, str]

    def gpu(self, name: str) -> GpuModel | None:
        """The model of a GPU that the driver calls ``name``; None for one that is not in the catalogue."""
        return next((model for part, model in self.gpus.items() if part in name), None)

    def machine(self, name: str) -> MachineType | None:
        """By name, whatever its case."""
        return self.machines.get(name.casefold())

    def of(self, *clouds: str) -> Iterator[MachineType]:
        """The machine types of these clouds."""
        return (each for each in self.machines.values() if each.cloud in clouds)


def build(gpus: Mapping[str, Row], machines: Mapping[str, Row], sources: Mapping[str, str]) -> Catalogue:
    """From rows that are complete and checked, keyed by name."""
    models = {name: GpuModel(name=name, **_frozen(gpus[name])) for name in sorted(gpus, key=len, reverse=True)}
    types = [_machine(name, row, models) for name, row in machines.items()]
    return Catalogue(models, {each.name.casefold(): each for each in types}, sources)


def _machine(name: str, row: Row, models: Mapping[str, GpuModel]) -> MachineType:
    values = _frozen(row)
    values["gpu"] = models[row["gpu"]] if row.get("gpu") else None
    values["marks"] = Marks(**row["marks"]) if row.get("marks") else None
    return MachineType(name=name, **values)


def _frozen(row: Row) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
