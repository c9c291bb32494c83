"""All that is known of a failed attempt of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hpc_mp.layout.placement import RankPlace
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.failures import RankFailure
from hpc_mp.rundir.standings import Standing

LABEL = re.compile(r"^ *(\d+): (.*)$")  # of srun --label: the number of the task


@dataclass(frozen=True, slots=True)
class Hang:
    """No rank has printed anything for ``seconds``.

    Attributes:
        rank: the cause; None where nobody can tell.
        first: the rank that fell silent before all others; None where nobody can tell.
        stands: who stands where, by their stacks; empty where nobody knows.
        time: unix seconds at which it was noticed; what ranks end with later is our doing.
    """

    seconds: float
    rank: int | None
    first: int | None = None
    stands: str = ""
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        """Without who: the wording of failures says that."""
        first = "it was the first to fall silent, and " if self.rank is not None and self.rank == self.first else ""
        stands = self.stands and f": {self.stands}"
        return f"{first}no rank has printed a line for {self.seconds:.0f} s (program.silent_limit){stands}"


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All of it.

    Attributes:
        code: of srun, as ``subprocess`` gives it.
        failures: of ranks.
        standings: of ranks that stood still when they were last seen.
        srun: lines of srun, slurmstepd and the job's script, in the order they were written.
        logs: lines by host: what the ranks of a node said last, each with its task's number in front.
        kernel: lines by host: of its kernel and cgroup.
        states: by host, as sinfo writes them ("idle", "down*").
        places: by rank.
        hosts: of the job, by node of the placement.
        here: the host of this program.
        pids: rank by (host, process id).
        largest: the task of greatest memory, where Slurm's accounting knows it.
        resident: bytes of memory by rank, as each wrote last.
        run: whose logs they are.
        hang: of a program whose ranks were ended for their silence.
        unended: hosts of a program that did not tell of the ends of their tasks when srun ended its step.
        axes: whether a program's ranks have coordinates, as it has said how it numbers them.
        program: whether ranks are somebody's program, whose words may speak of anything.
        by_mpirun: whether mpirun starts the ranks, each with a log of its own, in a task of srun on every node.
        of_node: whether each of them is the one command of a node, which numbers its ranks itself.
        by_mpi: whether Slurm's PMIx or PMI tells the ranks who they are: it ends the step when one of them does.
        job: Slurm's number of it, and ``user`` that of whose it is.
    """

    code: int = 1
    failures: tuple[RankFailure, ...] = ()
    standings: tuple[Standing, ...] = ()
    srun: tuple[str, ...] = ()
    logs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernel: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[int, RankPlace] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    here: str | None = None
    pids: Mapping[tuple[str, int], int] = field(default_factory=dict)
    largest: int | None = None
    resident: Mapping[int, int] = field(default_factory=dict)
    run: RunDirectory | None = None
    hang: Hang | None = None
    unended: tuple[str, ...] = ()
    program: bool = False
    axes: bool = False
    of_node: bool = False
    by_mpirun: bool = False
    by_mpi: bool = False
    job: str | None = None
    user: int | None = None

    def ranks_on(self, host: str | None) -> list[int]:
        """Return the ranks that the placement puts on a host, by local rank."""
        found = [place for place in self.places.values() if place.node < len(self.hosts) and self.hosts[place.node] == host]
        return [place.rank for place in sorted(found, key=lambda place: place.local_rank)]

    def rank_of(self, host: str | None, task: int | None) -> int | None:
        """The rank that a task of Slurm is: tasks are dealt in blocks, equally many to every node (slurm/job.sbatch.j2)."""
        ranks = self.ranks_on(host)
        return ranks[task % len(ranks)] if ranks and task is not None else None

    def task_of(self, rank: int) -> int:
        """The number before a rank's lines: Slurm's of its task, or its own where each rank has a log of its own."""
        return rank if self.by_mpirun else _tasks(self)[rank]

    def said_by(self, host: str, task: int) -> Sequence[str]:
        """Return the lines of a task, without the numbers before them."""
        return _by_task(self).get((host, task), ())


@lru_cache(maxsize=2)
def _tasks(evidence: Evidence) -> dict[int, int]:
    seats = sorted(evidence.places.values(), key=lambda place: (place.node, place.local_rank))
    return {place.rank: task for task, place in enumerate(seats)}


@lru_cache(maxsize=2)
def _by_task(evidence: Evidence) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], list[str]] = {}
    for host, lines in evidence.logs.items():
        for label in filter(None, map(LABEL.match, lines)):
            if not label[2].startswith("slurmstepd"):  # it speaks of the node, with the number of its first task
                found.setdefault((host, int(label[1])), []).append(label[2])
    return found
