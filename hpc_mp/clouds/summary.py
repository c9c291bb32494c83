"""What a job will see on such a cluster, and what has to be granted before there is one."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass
from typing import Any

from hpc_mp.base.assets import asset
from hpc_mp.base.text import data_rate
from hpc_mp.clouds.request import TOOLS, ClusterRequest, gres

_QUOTAS = "cyclecloud/other-clouds/quotas.toml"


@dataclass(frozen=True, slots=True)
class QuotaNeed:
    """``needed`` of ``unit`` (vcpus or gpus); ``code``: how the cloud's own tools name it, empty if not known."""

    name: str
    code: str
    unit: str
    needed: int
    source: str


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """Of each node unless it says otherwise. ``busbw``: GB/s of an all-reduce (0: not known). ``job``: lines of a job file."""

    cloud: str
    tool: str
    sku: str
    nodes: int
    partition: str
    node_names: str
    gpus: int
    gpu_model: str
    gres: str
    adapters: int
    network: str
    adapter_gbps: int
    vcpus: int
    memory_gib: int
    placement_group: bool
    capacity: str
    quotas: tuple[QuotaNeed, ...]
    profile: str
    fabric: str
    busbw_node: float
    busbw_pair: float
    job: str

    @property
    def needs(self) -> str:
        """All its machines together, whatever a quota counts."""
        gpus = f" and {self.nodes * self.gpus} GPUs" if self.gpus else ""
        return f"{self.nodes * self.vcpus} vCPUs{gpus}"

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def busbw(self) -> str:
        """In words."""
        known = [*([f"{data_rate(self.busbw_node)} in one node"] if self.busbw_node else []),
                 *([f"{data_rate(self.busbw_pair)} between two"] if self.busbw_pair else [])]
        return f"all-reduce busbw of large payloads {' and '.join(known) or 'not known'}"


def summarise(request: ClusterRequest) -> ClusterSummary:
    size = request.size
    return ClusterSummary(
        cloud=size.cloud, tool=TOOLS[size.cloud], sku=size.name, nodes=request.nodes, partition=request.partition,
        node_names=_node_names(request), gpus=size.gpus, gpu_model=size.gpu_title, gres=gres(size), adapters=size.nics,
        network=size.rdma or "Ethernet", adapter_gbps=size.rdma_gbps, vcpus=size.vcpus, memory_gib=size.memory_gib,
        placement_group=request.placement, capacity=request.capacity, quotas=_quotas(request), profile=size.profile,
        fabric=size.fabric, busbw_node=size.busbw, busbw_pair=size.busbw_pair, job=_job(request))


def resource(request: ClusterRequest) -> str:
    """ParallelCluster's name of the machines of a queue: at most 25 letters, digits and hyphens."""
    return request.size.name.partition(".")[0]


def _node_names(request: ClusterRequest) -> str:
    if request.size.cloud == "aws":
        return f"{request.partition}-st-{resource(request)}-[1-{request.nodes}]"
    return f"{request.name}-nodeset-[0-{request.nodes - 1}]"


def _quotas(request: ClusterRequest) -> tuple[QuotaNeed, ...]:
    rows = tomllib.loads(asset(_QUOTAS).read_text(encoding="utf-8"))["quota"]
    each = {"vcpus": request.size.vcpus, "gpus": request.size.gpus}
    fitting = [QuotaNeed(row["name"], row["code"], row["unit"], each[row["unit"]] * request.nodes, row["source"]) for row in rows
               if row["cloud"] == request.size.cloud and re.fullmatch(row["capacity"], request.capacity)
               and re.fullmatch(row["machines"], request.size.name)]
    return tuple(fitting[:1])


def _job(request: ClusterRequest) -> str:
    lines = ["[job]", f"nodes = {request.nodes}",
             *([f"ranks_per_node = {request.size.gpus}"] if request.size.gpus else ['device = "cpu"']),
             "[slurm]", f'partition = "{request.partition}"', "[environment]", f'profile = "{request.size.profile}"']
    return "\n".join(lines) + "\n"
