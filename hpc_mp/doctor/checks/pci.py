"""Checks of PCI: the path from the processor to each NVIDIA GPU, and the path between adapters and GPUs: links, bridges, the
IOMMU, drivers for direct transfers."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from hpc_mp.base.text import counted, several
from hpc_mp.catalogue import catalogue
from hpc_mp.cluster.node.gpu_driver import SmiAnswer, ask_smi, read_models
from hpc_mp.cluster.node.gpu_pci import Payload, PciGpu, read_gpus, read_payloads
from hpc_mp.cluster.node.kernel_log import KernelMessage, read_log_with_gpus
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.cluster.node.pci import Bridges, Direct, Link, Rails, read_bridges, read_direct, read_links, read_rails
from hpc_mp.cluster.node.rdma import RdmaAdapter
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well
from hpc_mp.doctor.checks.per_gpu import checks_of_gpus, number, seen, usual_of

_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_BRIDGE = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d")
_DMABUF_KERNEL = (5, 12)  # the first kernel whose verbs support DMA-BUF


def nic_links(pci_links: tuple[Link, ...]) -> Iterator[Judgement]:
    for link in pci_links:
        if not link.answers:
            yield Judgement("error", "its registers read as all ones: it has fallen off the bus",
                            f"{link.device} ({link.address})",
                            "power the machine off and on; if it happens again, reseat the adapter or have it replaced")
        if link.width is None or link.max_width is None:
            continue
        narrow = link.width < link.max_width
        slow = link.speed is not None and link.max_speed is not None and link.speed < link.max_speed
        speed = "" if link.speed is None or link.max_speed is None else f", {link.speed:g} of {link.max_speed:g} GT/s"
        yield Judgement("warning" if narrow or slow else "ok", f"{link.width} of {link.max_width} lanes{speed}",
                        f"{link.device} ({link.address})")


def redirecting(bridges: Bridges) -> Iterator[Judgement]:
    if not bridges.gpus or bridges.virtual:
        return
    if isinstance(bridges.redirecting, Unavailable):
        raise bridges.redirecting
    if bridges.redirecting:
        yield Judgement("warning", f"access control redirects in {len(bridges.redirecting)} PCI bridges of a "
                        "machine that is not virtual: transfers between GPUs and adapters go through the root, slowly, or hang",
                        several(bridges.redirecting))
    else:
        yield Judgement("ok", "no PCI bridge above a GPU or adapter redirects")


def translated(bridges: Bridges) -> Iterator[Judgement]:
    if not bridges.gpus or bridges.virtual:
        return
    bad = [address for address, domain in bridges.domains.items() if domain != "identity"]
    if bad:
        yield Judgement("warning",
                        f"the IOMMU translates the addresses of {len(bad)} GPUs and adapters (type {bridges.domains[bad[0]]})",
                        several(bad))
    else:
        state = f"lets all {len(bridges.domains)} pass" if bridges.domains else "is off"
        yield Judgement("ok", f"the IOMMU {state}")


def nic_numa(rails: Rails) -> Iterator[Judgement]:
    if rails.nodes < 2:
        return
    for adapter in rails.fabric.adapters:
        if adapter.address and any(port in rails.fabric.ports for port in adapter.ports):
            valid = adapter.numa is not None
            where = f"memory node {adapter.numa}" if valid else f"which of {rails.nodes} memory nodes is near is not known"
            yield Judgement("ok" if valid else "warning", where, adapter.name)


def nearest(rails: Rails) -> Iterator[Judgement]:
    adapters = [adapter for adapter in rails.fabric.adapters if adapter.address
                and any(port in rails.fabric.ports for port in adapter.ports)]
    if not adapters or not rails.gpus or any(gpu.numa is None for gpu in rails.gpus):
        return
    for gpu in rails.gpus:
        near = [adapter.name for adapter in adapters if _is_near(rails, gpu.bus, gpu.numa, adapter)]
        yield Judgement("ok" if near else "warning",
                        f"near it: {', '.join(near)}" if near else f"no adapter at its PCI switch or memory node {gpu.numa}",
                        f"GPU {gpu.bus}")


def _is_near(rails: Rails, bus: str, numa: int | None, adapter: RdmaAdapter) -> bool:
    """Return True if both are below one PCI bridge or at one memory node."""
    gpu_path, adapter_path = rails.above[bus].split("/"), rails.above[adapter.address].split("/")
    shared = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(gpu_path, adapter_path, strict=False))]
    return _BRIDGE.fullmatch(shared[-1]) is not None or numa == adapter.numa


def direct(facts: Direct) -> Iterator[Judgement]:
    if not facts.gpus or not facts.fabric.ports:
        return
    if isinstance(facts.modules, Unavailable):
        raise facts.modules
    peer = [name for name in _PEER_MODULES if name in facts.modules]
    if peer:
        yield Judgement("ok", f"{peer[0]} is loaded")
    elif facts.open_driver and facts.kernel >= _DMABUF_KERNEL:
        yield Judgement("ok", f"DMA-BUF: the open driver on kernel {facts.kernel[0]}.{facts.kernel[1]}")
    else:
        why = "the driver is not the open one" if facts.open_driver is False else "no driver is loaded" \
            if facts.open_driver is None else f"kernel {facts.kernel[0]}.{facts.kernel[1]} is older than 5.12"
        yield Judgement("error",
                        f"no nvidia_peermem, and no DMA-BUF ({why}): data between GPUs of two nodes would go through main memory")


def copies(facts: Direct) -> Iterator[Judgement]:
    if facts.gpus and facts.copy_library:
        if isinstance(facts.modules, Unavailable):
            raise facts.modules
        loaded = "gdrdrv" in facts.modules
        yield Judgement("ok" if loaded else "warning",
                        "gdrdrv is loaded" if loaded else "GDRCopy's library is installed, its module gdrdrv is not loaded")


NICS = (
    *checks_of(read_links, {"nic-pcie": nic_links}),
    *checks_of(read_rails, {"nic-numa": nic_numa, "nic-gpu": nearest}),
    *checks_of(read_bridges, {"pci-acs": redirecting, "pci-iommu": translated}),
    *checks_of(read_direct, {"gdr-module": direct, "gdrcopy": copies}),
)


MOST_REPLAYS = 8.0  # packets a minute (the policy of NVIDIA's DCGM)
BUSY = 5.0  # % of utilisation above which a link should run at full speed
LEAST_PAYLOAD = 256  # bytes; 128 is the firmware's fallback
_LIMITED = re.compile(r"(?:nvidia|pci) ([0-9a-f]{4,}:[0-9a-f:.]+): [\d.]+ Gb/s available PCIe bandwidth, limited by "
                      r"[\d.]+ GT/s PCIe x(\d+) link at (\S+) \(capable of [\d.]+ Gb/s with [\d.]+ GT/s PCIe x(\d+) link\)")


def on_bus(gpus: Sequence[PciGpu]) -> Iterator[Judgement]:
    mine = _nvidia(gpus)
    lost = (Judgement("error", "its PCI registers read as all ones: it has fallen off the bus", gpu.bus)
            for gpu in mine if not gpu.answers)
    yield from or_well(lost, f"{counted(len(mine), 'GPU')} answer on the PCI bus" if mine else "")


def read_lanes(source: NodeSource) -> tuple[tuple[PciGpu, ...], bool]:
    """Return the GPUs, and True if a model's board gives every GPU all its lanes."""
    return read_gpus(source), any(model.per_node for model in read_models(source))


def width(gpus: tuple[Sequence[PciGpu], bool]) -> Iterator[Judgement]:
    """Check the lanes of each GPU. Unlike the speed they do not drop when idle: fewer lanes mean a bad contact or riser. Cards
    may be in slots with fewer lanes than they have, as in many cloud machines. Then all have the same number."""
    mine = [gpu for gpu in _nvidia(gpus[0]) if gpu.width and gpu.max_width]
    widest = max((gpu.width or 0 for gpu in mine), default=0)
    short = [gpu for gpu in mine if (gpu.width or 0) < min(gpu.max_width or 0, widest if not gpus[1] else 16)]
    for gpu in short:
        yield Judgement("error", f"{gpu.width} lanes of {gpu.max_width}", gpu.bus)
    if mine and not short:
        least = min((gpu.width or 0) / (gpu.max_width or 1) for gpu in mine)
        slots = "all their lanes" if least == 1 else f"{widest} lanes each; they have more, and the slots have not, it seems"
        yield Judgement("ok", f"{counted(len(mine), 'GPU')} with {slots}")
    elif _nvidia(gpus[0]) and not mine:
        yield Judgement("unknown", "the kernel shows no link width here (a virtual machine)")


def numa(gpus: Sequence[PciGpu]) -> Iterator[Judgement]:
    mine = _nvidia(gpus)
    lost = [gpu.bus for gpu in mine if gpu.numa is None]
    if lost and len(lost) < len(mine):
        yield Judgement("warning", "the kernel knows no NUMA node for it, and does for the others", ", ".join(lost))
    elif lost:
        yield Judgement("unknown", "the kernel knows no NUMA node for any GPU")
    elif mine:
        nodes = [str(gpu.numa) for gpu in mine]
        yield Judgement("ok", f"GPUs by bus address are on NUMA nodes {' '.join(nodes)}")


def speed(gpu: GpuReport) -> Judgement | None:
    paths = "pci/pci_gpu_link_info/pcie_gen"
    current, highest = number(gpu, f"{paths}/current_link_gen"), number(gpu, f"{paths}/max_link_gen")
    able, model = gpu.number(f"{paths}/max_device_link_gen"), catalogue().gpu(gpu.name)
    if able is not None and model and model.pcie and highest < min(able, model.pcie):
        return Judgement("warning", f"the slot allows PCIe {highest:.0f}, the GPU is able to {able:.0f}")
    busy = gpu.number("utilization/gpu_util") or 0.0
    if current < highest and busy >= BUSY:
        return Judgement("error", f"PCIe {current:.0f} of {highest:.0f} while {busy:.0f} % busy")
    return None


def replays(answer: SmiAnswer) -> Iterator[Judgement]:
    """Check the rate of replayed packets: a few in weeks are harmless."""
    counts = {str(gpu): count for gpu in seen(answer).gpus if (count := gpu.number("pci/replay_counter")) is not None}
    minutes = max((answer.uptime or 0) / 60, 1)
    bad = (Judgement("error", f"{count:.0f} packets repeated since boot, {count / minutes:.0f} a minute", gpu)
           for gpu, count in counts.items() if count / minutes > MOST_REPLAYS)
    if answer.uptime:
        yield from or_well(bad, "hardly any PCIe packet was repeated" if counts else "")


def payload(payloads: Mapping[str, Payload]) -> Iterator[Judgement]:
    usual = usual_of([str(size.used) for size in payloads.values()])
    bad = (Judgement("warning",
                     f"MaxPayload {size.used} bytes; most have {usual or 'other values'}, it is able to {size.able or 'untold'}",
                     bus) for bus, size in payloads.items()
           if size.used < LEAST_PAYLOAD <= (size.able or LEAST_PAYLOAD) or (usual and size.used < int(usual)))
    yield from or_well(bad, f"MaxPayload {usual} bytes on all GPUs" if payloads else "")


def limited(lines: Sequence[KernelMessage]) -> Iterator[Judgement]:
    """Check the kernel log for missing lanes. Its speeds are ignored: the link is idle when the kernel compares them."""
    narrow = {match[1]: match for line in lines if (match := _LIMITED.search(line.text)) and int(match[2]) < int(match[4])}
    bad = (Judgement("warning", f"the kernel saw {match[2]} lanes of {match[4]} at {match[3]}", bus)
           for bus, match in narrow.items())
    yield from or_well(bad, "no GPU with lanes missing in the kernel's log" if lines else "")


def _nvidia(gpus: Sequence[PciGpu]) -> list[PciGpu]:
    return [gpu for gpu in gpus if gpu.vendor == "nvidia"]


GPUS = (
    *checks_of(read_gpus, {"gpu-bus": on_bus}),
    *checks_of(read_lanes, {"gpu-pcie-width": width}),
    *checks_of_gpus({"gpu-pcie-speed": speed}),
    *checks_of(ask_smi, {"gpu-pcie-replay": replays}),
    *checks_of(read_payloads, {"gpu-pcie-payload": payload}),
    *checks_of(read_log_with_gpus, {"gpu-pcie-limited": limited}),
    *checks_of(read_gpus, {"gpu-numa": numa}),
)
