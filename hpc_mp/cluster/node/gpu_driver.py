"""The driver of NVIDIA's GPUs, as seen in the kernel, in the file system, and in the result of nvidia-smi; and the programs
that hold the GPUs."""

import re
from dataclasses import dataclass

from hpc_mp.catalogue import GpuModel, MachineType, catalogue
from hpc_mp.cluster.node.gpu_pci import count_nvswitches, read_gpus, read_machine_type
from hpc_mp.cluster.node.nvidia_smi import QUERY, SmiReport, address, failing, number, parse_smi, query, split_smi
from hpc_mp.cluster.node.source import NodeSource, Unavailable, fields, maybe, uptime

LIST = ("nvidia-smi", "--list-gpus")
_INFORMATION = "/proc/driver/nvidia/gpus/*/information"
_LIBRARIES = tuple(f"{folder}/libnvidia-ml.so.*" for folder in (
    "/usr/lib/*", "/usr/lib", "/usr/lib64", "/usr/lib64/nvidia", "/usr/lib/nvidia*", "/usr/local/nvidia/lib64",
    "/run/nvidia/driver/usr/lib/*"))
_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_LIBRARY = re.compile(r"libnvidia-ml\.so\.(\d{3,}\.\d[\d.]*)$")
_CONFINING = re.compile(r"/job_|/docker|/kubepods|/libpod|/lxc")
_NO_GPU = SmiReport("", 0, ())


@dataclass(frozen=True)
class SmiAnswer:
    """The result of nvidia-smi."""

    code: int | None  # exit code; None if there is none (absent, too slow) or it is lost
    words: str  # error text of the program or of the attempt to start it; it may accompany an answer
    smi: SmiReport | None  # its answer; None if it gave none. A machine without any NVIDIA GPU counts as an answer with no GPUs.
    uptime: float | None = None  # seconds since boot; None if the kernel does not show it
    confined: bool = False  # True if a job's or container's cgroup may hide GPUs that are attached


@dataclass(frozen=True)
class GpuDriver:
    """The GPUs and their driver, as seen by several sources."""

    on_bus: tuple[str, ...]  # PCI addresses of all NVIDIA GPUs
    taken: tuple[str, ...]  # addresses of GPUs that the driver has taken (``/proc/driver/nvidia/gpus``)
    excluded: tuple[str, ...]  # addresses of GPUs that the driver is configured to ignore
    listed: int | None  # GPUs that nvidia-smi lists; None if it gives no list
    complaint: str  # its other output, beside the list or instead of it
    nodes: tuple[str, ...]  # the device files: ``nvidia0``, ``nvidiactl``, ``nvidia-uvm`` …
    loaded: str | None  # version of the running module; None if none runs
    libraries: tuple[str, ...]  # versions of libnvidia-ml on this file system, from their file names
    kind: MachineType | None  # the cloud's machine type, if known; None also if its GPUs are AMD's
    nvswitches: int  # number of NVSwitches on the PCI bus
    confined: bool  # True if this process is in a job's or container's cgroup, which may hide GPUs from it


def ask_smi(source: NodeSource) -> SmiAnswer:
    """Run nvidia-smi for its complete answer. Raises Unavailable if the answer cannot be read."""
    failed = None
    try:
        answer = source.answer(QUERY)
    except Unavailable as unseen:
        if not has_gpus(source):
            return SmiAnswer(None, str(unseen), _NO_GPU)
        answer, failed = unseen.out, unseen
    document, around = split_smi(answer)
    if failed is not None and not document:
        return SmiAnswer(failed.code, " ".join(str(failed).splitlines()), None)
    return SmiAnswer(failed.code if failed else 0, around, parse_smi(document or answer), maybe(uptime, source),
                     _confined(source))


def read_models(source: NodeSource) -> tuple[GpuModel, ...]:
    """Return the models, if known, of the GPUs that the driver has taken."""
    models = (fields(maybe(source.text, path) or "").get("Model", "") for path in source.names(_INFORMATION))
    return tuple(model for name in models if (model := catalogue().gpu(name)))


def read_driver(source: NodeSource) -> GpuDriver:
    """Read the state of the driver. Never raises: a missing part belongs to the answer."""
    excluded = {address(path.split("/")[-2]): bool(re.search(r"GPU Excluded:\s*Yes", maybe(source.text, path) or ""))
                for path in source.names(_INFORMATION)}
    listed, complaint = _list(source) if has_gpus(source) else (None, "no GPU, no driver")
    return GpuDriver(
        on_bus=_on_bus(source),
        taken=tuple(bus for bus, left_alone in excluded.items() if not left_alone),
        excluded=tuple(bus for bus, left_alone in excluded.items() if left_alone),
        listed=listed,
        complaint=complaint,
        nodes=tuple(path[len("/dev/"):] for path in source.names("/dev/nvidia*")),
        loaded=_version(source, "/proc/driver/nvidia/version") or _version(source, "/sys/module/nvidia/version"),
        libraries=tuple(sorted({match[1] for pattern in _LIBRARIES for path in source.names(pattern)
                                if (match := _LIBRARY.search(path))})),
        kind=None if any(gpu.vendor == "amd" for gpu in read_gpus(source)) else read_machine_type(source),
        nvswitches=count_nvswitches(source),
        confined=_confined(source),
    )


def has_gpus(source: NodeSource) -> bool:
    """Return True if this machine shows any trace of an NVIDIA GPU."""
    return bool(source.names("/dev/nvidiactl") or source.names("/proc/driver/nvidia/version") or _on_bus(source))


def _list(source: NodeSource) -> tuple[int | None, str]:
    """Return the number of GPUs that nvidia-smi lists, and its other output: about an unreachable GPU, or why it lists none."""
    try:
        lines = source.answer(LIST).splitlines()
    except Unavailable as unseen:
        return None, str(unseen)
    others = (line for line in lines if not re.match(r"GPU \d+:|\s|$", line))  # MIG instances of a GPU are indented
    return sum(bool(re.match(r"GPU \d+:", line)) for line in lines), "; ".join(others)


def _confined(source: NodeSource) -> bool:
    return bool(_CONFINING.search(maybe(source.text, "/proc/self/cgroup") or ""))


def _on_bus(source: NodeSource) -> tuple[str, ...]:
    return tuple(gpu.bus for gpu in read_gpus(source) if gpu.vendor == "nvidia")


def _version(source: NodeSource, path: str) -> str | None:
    match = _VERSION.search(maybe(source.text, path) or "")
    return match[1] if match else None


_GPUS = ("index", "pci.bus_id", "memory.used")
_APPS = ("gpu_bus_id", "pid", "process_name")
_JOB = re.compile(r"/job_\d+|/slurm[^\n]*/s\w+/")  # a job's cgroup, by number and (26.05 on) by Slurm's own id
_CONTAINER = ("/.dockerenv", "/run/.containerenv")


@dataclass(frozen=True)
class Holder:
    """A program on a GPU. ``state`` is the kernel's letter, None if the process is not visible; ``is_job`` likewise."""

    gpu: str
    pid: int
    name: str
    state: str | None
    is_job: bool | None


@dataclass(frozen=True)
class Holders:
    """The use of the GPUs."""

    gpus: tuple[tuple[str, float], ...]  # (GPU, MiB in use)
    failed: tuple[tuple[str, str], ...]  # (GPU, the driver's error text in place of its MiB)
    holders: tuple[Holder, ...]  # programs on them
    slurm: bool  # True if this is a Slurm node (a slurmd runs here)
    hidden: bool  # True if this is a container, where other users' programs are not visible


def read_holders(source: NodeSource) -> Holders:
    """Read the programs on the GPUs; nothing without a driver. Raises Unavailable."""
    if not source.names("/dev/nvidiactl"):
        return Holders((), (), (), False, False)
    rows = [(address(row["pci.bus_id"]), row) for row in query(source, "gpu", _GPUS)]
    names = {bus: f"GPU {row['index']} ({bus})" for bus, row in rows}
    apps = [(address(app["gpu_bus_id"]), app) for app in query(source, "compute-apps", _APPS)]
    return Holders(
        gpus=tuple((names[bus], number(row["memory.used"]) or 0.0) for bus, row in rows),
        failed=tuple((names[bus], message) for bus, row in rows if (message := failing(row["memory.used"]))),
        holders=tuple(_holder(source, names.get(bus, bus), int(app["pid"]), app["process_name"])
                      for bus, app in apps if app["pid"].isdigit()),
        slurm=any(maybe(source.text, path) == "slurmd" for path in source.names("/proc/[0-9]*/comm")),
        hidden=any(source.names(path) for path in _CONTAINER),
    )


def _holder(source: NodeSource, gpu: str, pid: int, name: str) -> Holder:
    state = re.search(r"^State:\s*(\w)", maybe(source.text, f"/proc/{pid}/status") or "", re.MULTILINE)
    cgroup = maybe(source.text, f"/proc/{pid}/cgroup")
    return Holder(gpu, pid, name.rpartition("/")[2], state[1] if state else None, bool(_JOB.search(cgroup)) if cgroup else None)
