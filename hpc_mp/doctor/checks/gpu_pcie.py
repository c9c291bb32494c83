"""Checks of the PCIe path from the processor to each NVIDIA GPU."""

import re
from collections.abc import Iterator, Mapping, Sequence

from hpc_mp.base.text import counted
from hpc_mp.catalogue import catalogue
from hpc_mp.cluster.node.gpu_driver import SmiAnswer, ask_smi, read_models
from hpc_mp.cluster.node.gpu_pci import Payload, PciGpu, read_gpus, read_payloads
from hpc_mp.cluster.node.kernel_log import KernelMessage, read_log_with_gpus
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well
from hpc_mp.doctor.checks.per_gpu import checks_of_gpus, number, seen, usual_of

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


CHECKS = (
    *checks_of(read_gpus, {"gpu-bus": on_bus}),
    *checks_of(read_lanes, {"gpu-pcie-width": width}),
    *checks_of_gpus({"gpu-pcie-speed": speed}),
    *checks_of(ask_smi, {"gpu-pcie-replay": replays}),
    *checks_of(read_payloads, {"gpu-pcie-payload": payload}),
    *checks_of(read_log_with_gpus, {"gpu-pcie-limited": limited}),
    *checks_of(read_gpus, {"gpu-numa": numa}),
)
