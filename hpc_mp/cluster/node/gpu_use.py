"""Programs that hold NVIDIA's GPUs."""

import re
from dataclasses import dataclass

from hpc_mp.cluster.node.nvidia_smi import address, failing, number, query
from hpc_mp.cluster.node.source import NodeSource, maybe

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
