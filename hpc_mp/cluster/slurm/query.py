"""Queries about Slurm itself: is it alive, its version, partitions with their nodes and GPUs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, TimedOut, ask
from hpc_mp.cluster.slurm.nodelist import expand


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Equal nodes of a partition. ``memory`` is in bytes per node; ``gpus`` contains (type, GPUs per node), with None as type if
    the site names none."""

    nodes: tuple[str, ...]
    cpus: int
    memory: int
    gpus: tuple[tuple[str | None, int], ...]

    @property
    def gpu_count(self) -> int:
        return sum(count for _, count in self.gpus)

    @property
    def gpu_type(self) -> str | None:
        """The type of its GPUs; None if the site names none, or a node mixes several."""
        return self.gpus[0][0] if len(self.gpus) == 1 else None


@dataclass(frozen=True, slots=True)
class SlurmPartition:
    """A partition. ``time_limit`` is in Slurm's format (``1-00:00:00``), None without a limit."""

    name: str
    default: bool
    up: bool
    time_limit: str | None
    kinds: tuple[NodeKind, ...]


NO_CONTROLLER = ("contact slurm controller", "Could not establish a configuration source")


def last_line(error: CommandFailed) -> str:
    """Return the last line of a program's error, which is the verdict; earlier lines are details."""
    return str(error).splitlines()[-1]


def why_silent(ask: Runner = ask) -> str | None:
    """Return the reason why no Slurm controller answers within 3 s; None if one answers. An installed ``sbatch`` proves nothing:
    login images carry it without a controller."""
    try:
        answer = ask(("scontrol", "ping"))
    except CommandFailed as error:
        return last_line(error)
    return None if re.search(r"\bis UP\b", answer) else answer.strip() or "scontrol ping prints nothing"


def until_silent(ask: Runner = ask) -> Runner:
    """Return a runner that asks a silent controller only once: later queries of the controller fail at once with the same error.
    A program's own ``--version`` or ``--help`` needs no controller."""
    silent: list[CommandFailed] = []

    def runner(argv: Sequence[str]) -> str:
        alone = tuple(argv[1:]) in (("--version",), ("--help",))
        if silent and not alone:
            raise silent[0]
        try:
            return ask(argv)
        except CommandFailed as error:
            if not alone and (isinstance(error, TimedOut) or any(text in str(error) for text in NO_CONTROLLER)):
                silent.append(error)
            raise
    return runner


def version(ask: Runner = ask) -> tuple[int, int] | None:
    """Return (23, 11) for Slurm 23.11.4; None if unknown. Debian writes ``slurm-wlm 22.05.8``."""
    try:
        match = re.search(r"\b(\d+)\.(\d+)", ask(("scontrol", "--version")))
    except CommandFailed:
        return None
    return (int(match[1]), int(match[2])) if match else None


def partitions(ask: Runner = ask) -> tuple[SlurmPartition, ...]:
    """Return the partitions that the user may see, in Slurm's order. Raises CommandFailed if Slurm does not report them."""
    answer = ask(("sinfo", "--noheader", "--exact", "--format=%P|%a|%l|%c|%m|%G|%N"))
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 6]
    return tuple(_partition([row for row in rows if row[0] == name]) for name in dict.fromkeys(row[0] for row in rows))


def partition_names(ask: Runner = ask) -> tuple[str, ...]:
    """Return the names of all partitions, including those that a site hides and that still take jobs. Raises CommandFailed if
    Slurm does not report them."""
    return tuple(ask(("sinfo", "--noheader", "--all", "--format=%R")).split())


def parse_gres(gres: str) -> tuple[tuple[str, str | None, int], ...]:
    """Parse ``gpu:h100:8(S:0-1),nvme`` to (("gpu", "h100", 8), ("nvme", None, 1))."""
    resources = []
    for item in filter(None, re.sub(r"\([^)]*\)", "", gres).split(",")):
        name, *fields = (field for field in item.split(":") if field != "no_consume")
        count = int(fields.pop()) if fields and fields[-1].isdecimal() else 1
        resources.append((name, fields[0] if fields else None, count))
    return tuple(resources)


def parse_gpus(gres: str) -> tuple[tuple[str | None, int], ...]:
    """Parse ``gpu:h100:8(S:0-1),nvme:1`` to (("h100", 8),), and ``gpu:4`` to ((None, 4),)."""
    return tuple((kind, count) for name, kind, count in parse_gres(gres) if name == "gpu")


def _partition(rows: Sequence[Sequence[str]]) -> SlurmPartition:
    name, available, limit = rows[0][:3]
    return SlurmPartition(
        name=name.removesuffix("*"),
        default=name.endswith("*"),
        up=available == "up",
        time_limit=None if limit in ("infinite", "n/a") else limit,
        kinds=tuple(NodeKind(expand(nodes), int(cpus), int(megabytes) * 2**20, parse_gpus(gres))
                    for _, _, _, cpus, megabytes, gres, nodes in rows if nodes),
    )
