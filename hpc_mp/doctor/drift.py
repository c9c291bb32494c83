"""Configuration drift: traits that should be equal on all nodes of a job, and the nodes that deviate."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from hpc_mp.base.assets import asset_table
from hpc_mp.base.findings import Finding
from hpc_mp.base.text import memory_size, several
from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.host import read_cpus
from hpc_mp.cluster.node.limits import read_limits
from hpc_mp.cluster.node.netdev import ETHERNET, read_interfaces
from hpc_mp.cluster.node.rdma import RdmaFabric, RdmaPort, read_fabric
from hpc_mp.cluster.node.source import NodeSource, fields, maybe
from hpc_mp.environment.versions import distribution

Traits = Mapping[str, str]
PACKAGES = ("torch", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy")
TRAITS: dict[str, dict[str, str]] = asset_table("env/cluster-faults.toml")["drift"]


def traits(source: NodeSource) -> dict[str, str]:
    """Return the traits that this node shows."""
    fabric, gpus = read_fabric(source), Counter(f"{gpu.vendor} {gpu.device}" for gpu in read_gpus(source))
    driver = re.search(r"\b\d{3,}\.[\d.]+\b", maybe(source.text, "/proc/driver/nvidia/version") or "")
    system = fields(maybe(source.text, "/etc/os-release") or "", "=").get("PRETTY_NAME", "").strip('"')
    values = {
        "kernel": maybe(source.text, "/proc/sys/kernel/osrelease") or "",
        "system": system,
        "driver": driver[0] if driver else "",
        "gpus": _counted(gpus),
        "vbios": _vbios(source),
        "cpus": _cpus(source),
        "memory": _memory(source),
        "ports": _counted(Counter(f"{port.rate or 0:g} Gb/s {port.layer}" for port in fabric.ports)),
        "firmware": ", ".join(sorted({f"{adapter.board} {adapter.firmware}" for adapter in fabric.adapters if adapter.board})),
        "partition": _set(fabric, lambda port: f"{port.keys.get(0, 0):#06x}" if port.keys else ""),
        "packet": _set(fabric, lambda port: str(port.mtu or "")),
        "mtu": ", ".join(sorted({str(interface.mtu) for interface in read_interfaces(source)
                                 if interface.kind == ETHERNET and interface.state == "up"})),
        "limits": _limits(source),
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := distribution(name))),
    }
    return {name: value for name, value in values.items() if value}


def drift(nodes: Mapping[str, Traits]) -> Iterator[Finding]:
    """Yield a finding ``drift-TRAIT`` for every trait that at least two nodes show. Its subject is the deviating nodes."""
    for trait, row in TRAITS.items():
        values = {node: node_traits[trait] for node, node_traits in nodes.items() if trait in node_traits}
        counts = Counter(values.values())
        if len(values) < 2:
            continue
        if len(counts) == 1:
            yield Finding(f"drift-{trait}", "ok", "", f"{row['what']}: {next(iter(counts))} on all {len(values)}")
            continue
        usual, count = counts.most_common(1)[0]
        odd = [node for node, value in values.items() if value != usual]
        if count * 2 <= len(values):  # no value has a majority: no node is the odd one
            odd = []
        distribution = "; ".join(f"{value} on {several([node for node in values if values[node] == value])}"
                                 for value, _ in counts.most_common())
        yield Finding(f"drift-{trait}", "warning", several(odd), f"{row['what']}: {distribution}", row["remedy"])


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))


def _set(fabric: RdmaFabric, of: Callable[[RdmaPort], str]) -> str:
    return ", ".join(sorted({value for port in fabric.ports if (value := of(port))}))


def _vbios(source: NodeSource) -> str:
    texts = (maybe(source.text, path) or "" for path in source.names("/proc/driver/nvidia/gpus/*/information"))
    versions = {fields(text).get("Video BIOS", "") for text in texts}
    return ", ".join(sorted(versions - {""}))


def _cpus(source: NodeSource) -> str:
    cpus, text = maybe(read_cpus, source), maybe(source.text, "/proc/cpuinfo")
    return "" if cpus is None or text is None else f"{cpus.online} × {fields(text).get('model name', 'unknown')}"


def _memory(source: NodeSource) -> str:
    """Return the installed memory, rounded to a sixteenth of a power of two: the kernel reports 1 to 2 % less."""
    kib = int(fields(maybe(source.text, "/proc/meminfo") or "").get("MemTotal", "0 kB").split()[0])
    if not kib:
        return ""
    step = 2.0 ** (kib.bit_length() - 5)
    return memory_size(round(1.015 * kib / step) * step * 2**10)


def _limits(source: NodeSource) -> str:
    if (limits := maybe(read_limits, source)) is None:
        return ""
    soft = {name: limits.of[name].soft for name in ("locked memory", "open files") if name in limits.of}
    return ", ".join(f"{name} {'unlimited' if value is None else value}" for name, value in soft.items())

