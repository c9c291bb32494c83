"""NVLinks: the path from each GPU to each other GPU and NIC, as reported by nvidia-smi; and the managers of their fabric, on
this node and, for memory of other nodes, the IMEX daemon."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hpc_mp.cluster.node.gpu_driver import ask_smi, has_gpus, read_models
from hpc_mp.cluster.node.gpu_pci import count_nvswitches
from hpc_mp.cluster.node.source import NodeSource, Unavailable

STATUS = ("nvidia-smi", "nvlink", "-s")
ERRORS = ("nvidia-smi", "nvlink", "-e")
MATRIX = ("nvidia-smi", "topo", "-m")
NVLINK_PEERS = ("nvidia-smi", "topo", "-p2p", "n")
COUNTERS = "nvlink/"  # prefix of these names among all counters of a machine
_GPU = re.compile(r"GPU (\d+):\s*(.*?)\s*(?:\(UUID: (\S+)\))?$")
_RATE = re.compile(r"Link (\d+):\s*(?:([\d.]+) GB/s|<?inactive>?)\s*$", re.IGNORECASE)
_DARK = re.compile("all links are inactive|not supported|not have or support", re.IGNORECASE)  # a GPU without links in use
_COUNTER = re.compile(r"Link (\d+):\s*(.+?):\s*(\d+)\s*$")
_OF_ERRORS = re.compile(r"(?!FEC).*(Errors|discards|recovery failed)")
_NAME = re.compile(r"(NIC\d+):\s*(\S+)\s*$")
_PAINT = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of a machine."""

    names: Mapping[int, str]  # the GPU's name by index
    # GB/s of each link in one direction, by GPU index and link; None is inactive. A GPU without links has none.
    rates: Mapping[int, Mapping[int, float | None]]
    # text in place of the links, by GPU index, for GPUs that the driver cannot query
    errors: Mapping[int, str] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()  # GPUs without an active link that need none: the only one of the node, or in MIG mode


@dataclass(frozen=True)
class GpuTopology:
    """The output of ``nvidia-smi topo -m``."""

    paths: Mapping[tuple[str, str], str]  # by (row, column), such as ("GPU0", "GPU1"): "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"
    gpus: tuple[str, ...]  # names of the GPU rows, in order
    nics: Mapping[str, str] = field(default_factory=dict)  # device by column, "NIC0" → "mlx5_0"
    alike: bool = True  # True if all pairs of GPUs should have the same path; False if links go from GPU to GPU, without a switch


def read_links(source: NodeSource) -> NvLinks:
    """Read the NVLinks; empty without GPUs. Raises Unavailable."""
    names: dict[int, str] = {}
    rates: dict[int, dict[int, float | None]] = {}
    errors: dict[int, str] = {}
    gpu = None
    for line in (source.answer(STATUS) if has_gpus(source) else "").splitlines():
        if match := _GPU.match(line.strip()):
            gpu = int(match[1])
            names[gpu], rates[gpu] = match[2], {}
        elif (match := _RATE.match(line.strip())) and gpu is not None:
            rates[gpu][int(match[1])] = float(match[2]) if match[2] else None
        elif gpu is not None and line.strip().startswith("NVML: ") and not _DARK.search(line):
            errors[gpu] = line.strip()
    dark = frozenset(gpu for gpu, links in rates.items() if not any(links.values()))
    return NvLinks(names, rates, errors, dark if len(rates) == 1 or not dark else dark & _in_mig(source))


def link_counters(source: NodeSource) -> Iterator[tuple[str, int]]:
    """Yield errors since the driver was loaded: ``nvlink/GPU 0 link 3 CRC Errors`` and their number. Raises Unavailable. FEC
    bins, packet and byte counts are left out, because they count healthy traffic."""
    gpu = None
    for line in (source.answer(ERRORS) if has_gpus(source) else "").splitlines():
        if match := _GPU.match(line.strip()):
            gpu = int(match[1])
        elif (match := _COUNTER.match(line.strip())) and gpu is not None and _OF_ERRORS.match(match[2]):
            yield f"{COUNTERS}GPU {gpu} link {match[1]} {match[2]}", int(match[3])


def read_topology(source: NodeSource) -> GpuTopology | None:
    """Read the topology; None without GPUs. Raises Unavailable."""
    return _of_whole_gpus(source, _topology(source.answer(MATRIX))) if has_gpus(source) else None


def read_peers(source: NodeSource) -> GpuTopology | None:
    """Read for each pair of GPUs if they reach each other's memory over NVLink: "OK", "NS", "CNS" … Raises Unavailable. None if
    no NVSwitches join the GPUs: then some pairs, or all, need not reach each other."""
    switched = any(model.switched for model in read_models(source))
    return _of_whole_gpus(source, _topology(source.answer(NVLINK_PEERS))) if switched else None


def _of_whole_gpus(source: NodeSource, topology: GpuTopology) -> GpuTopology:
    alone = any(way not in ("X", "OK") and not way.startswith("NV") for (gpu, other), way in topology.paths.items()
                if gpu.startswith("GPU") and other.startswith("GPU"))
    cut = {f"GPU{gpu}" for gpu in _in_mig(source)} if alone else set()
    return replace(topology, gpus=tuple(gpu for gpu in topology.gpus if gpu not in cut),
                   alike=all(model.switched for model in read_models(source)),
                   paths={pair: way for pair, way in topology.paths.items() if cut.isdisjoint(pair)})


def _in_mig(source: NodeSource) -> frozenset[int]:
    """Return the indexes of GPUs in MIG mode, which have no NVLink; none if no NVSwitches join the GPUs. Raises Unavailable."""
    answer = ask_smi(source) if any(model.switched for model in read_models(source)) else None
    return frozenset(gpu.index for gpu in (answer.smi.gpus if answer and answer.smi else ())
                     if gpu.says("mig_mode/current_mig") == "Enabled")


def _topology(text: str) -> GpuTopology:
    lines = _PAINT.sub("", text).splitlines()
    head = next((number for number, line in enumerate(lines) if re.match(r"\s+GPU0\b", line)), None)
    if head is None:
        raise Unavailable(f"no matrix in its output: {text.strip()[:60]!r}")
    columns = [name.strip() for name in re.split(r"\t|  +", lines[head].strip())]
    paths: dict[tuple[str, str], str] = {}
    gpus: list[str] = []
    nics: dict[str, str] = {}
    for line in lines[head + 1:]:
        cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else re.split(r"  +", line.strip()))]
        if named := _NAME.match(line.strip()):
            nics[named[1]] = named[2]
        elif cells[0] in columns:
            row = dict(zip(columns, cells[1:], strict=False))
            paths |= {(cells[0], column): way for column, way in row.items() if re.match(r"GPU\d|NIC\d|mlx|rdma|efa|cxi", column)}
            gpus += [cells[0]] if cells[0].startswith("GPU") else []
    nics |= {name: name for name in columns if re.match(r"mlx|rdma|efa|cxi", name)}  # older drivers write the device itself
    return GpuTopology(paths, tuple(gpus), nics)


_MANAGER = ("systemctl", "is-active", "nvidia-fabricmanager")
_IMEX = ("nvidia-imex-ctl", "-H", "-N")
_NODE = re.compile(r"Node #(\d+)\s+[-*]\s+(\S+)\s+[-*]\s+-?\s*(\w+)")


@dataclass(frozen=True)
class NvswitchFabric:
    """The fabric manager and the NVSwitches."""

    manager: str  # systemd's state of nvidia-fabricmanager ("active", "failed", "inactive"); or the reason why it is not known
    nvswitches: int  # number on this node's PCI bus


@dataclass(frozen=True)
class Imex:
    """The state of the IMEX domain."""

    domain: str  # "UP", "DEGRADED", "DOWN" …
    nodes: tuple[tuple[str, str], ...]  # state by address, such as "READY"
    unconnected: tuple[tuple[int, int, str], ...]  # (from, to) pairs that are not "C", with the letter shown instead
    channels: tuple[str, ...]  # device files ``/dev/nvidia-caps-imex-channels/channel*``


def read_fabric(source: NodeSource) -> NvswitchFabric:
    """Read the fabric manager's state. Never raises: the caller judges whether its absence matters."""
    try:
        manager = source.answer(_MANAGER).strip()
    except Unavailable as unseen:  # is-active exits 3 for an inactive service, with its state on stdout
        manager = unseen.out.strip() or "inactive or failed" if unseen.code == 3 else f"unknown: {unseen}"
    return NvswitchFabric(manager, count_nvswitches(source))


def read_imex(source: NodeSource) -> Imex | None:
    """Read the IMEX domain; None if no NVLink leaves the node. Raises Unavailable."""
    if not any(model.rack for model in read_models(source)):
        return None
    text = source.answer(_IMEX)
    domain = re.search(r"Domain State:\s*(\S+)", text)
    if domain is None:
        raise Unavailable(f"nvidia-imex-ctl prints no domain state: {text.strip()[:60]!r}")
    table = text.partition("Nodes From\\To")[2].splitlines()[1:]
    rows = [line.split() for line in table if re.match(r"\s*\d+\s+\S", line)]
    return Imex(
        domain=domain[1],
        nodes=tuple((match[2], match[3]) for match in _NODE.finditer(text)),
        unconnected=tuple((int(row[0]), column, letter) for row in rows for column, letter in enumerate(row[1:])
                          if letter != "C"),
        channels=source.names("/dev/nvidia-caps-imex-channels/channel*"),
    )
