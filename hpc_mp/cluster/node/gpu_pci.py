"""GPUs and NVSwitches on the PCI bus, and their settings from ``lspci``; and the catalogue's machine type of this node, which
the firmware and the GPUs show. AMD's GPUs are only recognised and counted, and their memory errors read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType, catalogue
from hpc_mp.cluster.node.source import NodeSource, Unavailable, firmware, maybe

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D and display controllers; processing accelerators (AMD Instinct)
_NVSWITCH_CLASS = "0x0680"
_ONES = 63  # lanes if all bits of the register are set: the device does not answer


@dataclass(frozen=True, kw_only=True)
class PciLink:
    """The link of a device. Speeds in GT/s and widths in lanes are None if the kernel does not show them (in some VMs)."""

    # speed, max_speed: current speed, and the highest that both slot and device support
    speed: float | None
    max_speed: float | None
    # width, max_width: likewise
    width: int | None
    max_width: int | None
    answers: bool  # False if the device reads as all ones: it has fallen off the bus


@dataclass(frozen=True, kw_only=True)
class PciGpu(PciLink):
    """One GPU on the bus."""

    bus: str  # its address, ``0000:c6:00.0``
    vendor: str  # "nvidia" or "amd"
    device: str  # the vendor's number, ``0x2330``
    numa: int | None  # nearest memory node; None if unknown


@dataclass(frozen=True)
class Payload:
    """Bytes per PCIe packet: ``used`` as set, ``able`` as supported by the device."""

    used: int
    able: int | None


def read_gpus(source: NodeSource) -> tuple[PciGpu, ...]:
    """Return all GPUs on the bus, by address."""
    return tuple(_gpu(source, path, _VENDORS[vendor]) for path, vendor in _devices(source)
                 if vendor in _VENDORS and _text(source, f"{path}/class").startswith(_GPU_CLASSES))


def count_nvswitches(source: NodeSource) -> int:
    """Return the number of NVSwitches on the bus. The switches of a virtual machine's GPUs may be invisible to it."""
    return sum(vendor == "0x10de" and _text(source, f"{path}/class").startswith(_NVSWITCH_CLASS)
               for path, vendor in _devices(source))


def read_payloads(source: NodeSource) -> Mapping[str, Payload]:
    """Return payloads by PCI address of NVIDIA's GPUs. Raises Unavailable; the kernel shows these settings only to root."""
    if not any(gpu.vendor == "nvidia" for gpu in read_gpus(source)):
        return {}
    text = source.answer(("lspci", "-D", "-vv", "-d", "10de:"))
    payloads = {}
    for block in re.split(r"\n(?=\S)", text):
        header = re.match(r"([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d) (?:3D|VGA|Display)", block)
        sizes = re.findall(r"Dev(Cap|Ctl):.*?MaxPayload (\d+) bytes", block, re.DOTALL)
        values = {kind: int(size) for kind, size in sizes}
        if header and "Ctl" in values:
            payloads[header[1]] = Payload(values["Ctl"], values.get("Cap"))
    if not payloads:
        raise Unavailable("lspci -vv shows MaxPayload only to root")
    return payloads


def read_link(source: NodeSource, path: str) -> PciLink:
    """Return the link of the device at a path of ``/sys/bus/pci/devices``."""
    speed, max_speed, width, max_width = (_number(_text(source, f"{path}/{name}")) for name in (
        "current_link_speed", "max_link_speed", "current_link_width", "max_link_width"))
    return PciLink(speed=speed, max_speed=max_speed, width=_lanes(width), max_width=_lanes(max_width), answers=width != _ONES)


def _devices(source: NodeSource) -> list[tuple[str, str]]:
    return [(path.rpartition("/")[0], _text(source, path)) for path in source.names("/sys/bus/pci/devices/*/vendor")]


def _gpu(source: NodeSource, path: str, vendor: str) -> PciGpu:
    numa = _number(_text(source, f"{path}/numa_node"))
    return PciGpu(
        bus=path.rpartition("/")[2],
        vendor=vendor,
        device=_text(source, f"{path}/device"),
        numa=None if numa is None or numa < 0 else int(numa),
        **vars(read_link(source, path)),
    )


def _text(source: NodeSource, path: str) -> str:
    return maybe(source.text, path) or ""


def _number(text: str) -> float | None:
    match = re.match(r"-?\d+(?:\.\d+)?", text)
    return float(match[0]) if match else None


def _lanes(value: float | None) -> int | None:
    return int(value) if value and value != _ONES else None


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
        compute=sum(re.search(r"simd_count 0*[1-9]", maybe(source.text, path) or "") is not None
                    for path in source.names("/sys/class/kfd/kfd/topology/nodes/*/properties")),
        driver=maybe(source.text, "/sys/module/amdgpu/version")  # a driver that comes with the kernel has no version
        or ("the kernel's" if source.names("/sys/module/amdgpu") else None),
        uncorrected={(bus, path.rpartition("/")[2][:-len("_err_count")]): int(count) for bus in buses
                     for path in source.names(f"/sys/bus/pci/devices/{bus}/ras/*_err_count")
                     if (count := dict(_RAS.findall(maybe(source.text, path) or "")).get("ue"))},
    )


def read_machine_type(source: NodeSource) -> MachineType | None:
    """Return the machine type by firmware and GPUs, never by host name; None if the catalogue cannot identify it.

    If the firmware names no machine type, as on Azure, it is identified by the model of its GPUs and a minimum of processors:
    smaller sizes have fewer GPUs of the same model.
    """
    vendor, product = firmware(source)
    candidates = [kind for kind in catalogue().machines.values()
                  if kind.judged and kind.marks is not None and re.match(kind.marks.vendor, vendor)]
    if not candidates:
        return None
    devices = {gpu.device for gpu in read_gpus(source)}
    processors = len(source.names("/sys/devices/system/cpu/cpu[0-9]*"))
    ranked = sorted(candidates, key=lambda kind: kind.marks.rank if kind.marks is not None else 0)
    return next((kind for kind in ranked if (
        re.fullmatch(kind.marks.product, product) if kind.marks is not None and kind.marks.product
        else kind.gpu is not None and not devices.isdisjoint(kind.gpu.pci) and processors >= kind.vcpus)), None)
