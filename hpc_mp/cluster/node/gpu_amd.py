"""AMD GPUs: only recognised and counted, and their memory errors read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.source import NodeSource, maybe

_RAS = re.compile(r"\b(ue|ce)\s*:\s*(\d+)")


@dataclass(frozen=True)
class AmdGpus:
    """The AMD GPUs of a machine."""

    on_bus: tuple[str, ...]  # PCI addresses
    compute: int  # number of nodes of ``/sys/class/kfd`` with compute units, which ROCm can use
    driver: str | None  # version of amdgpu; None if it is not loaded
    uncorrected: Mapping[tuple[str, str], int]  # errors by PCI address and unit ("umc" is memory), since the driver was loaded


def read_amd(source: NodeSource) -> AmdGpus:
    """Read the AMD GPUs. Never raises: a missing part belongs to the answer."""
    buses = tuple(gpu.bus for gpu in read_gpus(source) if gpu.vendor == "amd")
    return AmdGpus(
        on_bus=buses,
        compute=sum(_has_units(source, path) for path in source.names("/sys/class/kfd/kfd/topology/nodes/*/properties")),
        driver=maybe(source.text, "/sys/module/amdgpu/version")  # a driver that comes with the kernel has no version
        or ("the kernel's" if source.names("/sys/module/amdgpu") else None),
        uncorrected={(bus, path.rpartition("/")[2][:-len("_err_count")]): count for bus in buses
                     for path in source.names(f"/sys/bus/pci/devices/{bus}/ras/*_err_count")
                     if (count := _errors(source, path)) is not None},
    )


def _has_units(source: NodeSource, path: str) -> bool:
    match = re.search(r"simd_count (\d+)", maybe(source.text, path) or "")
    return bool(match and int(match[1]))


def _errors(source: NodeSource, path: str) -> int | None:
    return {kind: int(count) for kind, count in _RAS.findall(maybe(source.text, path) or "")}.get("ue")
