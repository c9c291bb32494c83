"""All evidence on a failed attempt of a run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hpc_mp.diagnosis.lines import LABEL, TaskEnd
from hpc_mp.layout.placement import RankPlace
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.failures import RankFailure
from hpc_mp.rundir.outcome import STOPPED
from hpc_mp.rundir.standings import Standing


@dataclass(frozen=True, slots=True)
class Hang:
    """Silence of all ranks for ``seconds``."""

    seconds: float
    rank: int | None  # the cause; None if it cannot be determined
    first: int | None = None  # the rank that fell silent before all others; None if it cannot be determined
    stands: str = ""  # the positions of the ranks by their stacks; empty if unknown
    time: float = field(default_factory=time.time)  # unix seconds of the detection; later ends of ranks are caused by us

    def __str__(self) -> str:
        """Return the description without its subject, which the wording of failures adds."""
        first = "it was the first to fall silent, and " if self.rank is not None and self.rank == self.first else ""
        stands = self.stands and f": {self.stands}"
        return f"{first}no rank has printed a line for {self.seconds:.0f} s (program.silent_limit){stands}"


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All evidence on one attempt."""

    code: int = 1  # srun's exit code, as from subprocess
    failures: tuple[RankFailure, ...] = ()  # failures recorded for ranks
    standings: tuple[Standing, ...] = ()  # positions of ranks that were stalled when last seen
    srun: tuple[str, ...] = ()  # lines of srun, slurmstepd and the job script, in the order of writing
    # lines by host: last output of the node's ranks, with the task number before each line
    logs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernel: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # lines by host, from its kernel and cgroup
    states: Mapping[str, str] = field(default_factory=dict)  # state by host, as sinfo writes it ("idle", "down*")
    places: Mapping[int, RankPlace] = field(default_factory=dict)  # place by rank
    hosts: tuple[str, ...] = ()  # hosts of the job, by node of the placement
    supervisor_host: str | None = None  # host of the supervisor
    pids: Mapping[tuple[str, int], int] = field(default_factory=dict)  # rank by (host, process id)
    largest: int | None = None  # the task with the most memory, if Slurm's accounting knows it
    resident: Mapping[int, int] = field(default_factory=dict)  # bytes of memory by rank, as last reported by each
    run: RunDirectory | None = None  # the run of these logs
    hang: Hang | None = None  # the hang of a program whose ranks were ended for their silence
    unended: tuple[str, ...] = ()  # hosts of a program that did not report the ends of their tasks when srun ended its step
    program: bool = False  # True if the ranks run the user's program, whose output may mention anything
    axes: bool = False  # True if a program's ranks have coordinates, because its job declares their numbering
    of_node: bool = False  # True if each rank is the one command of a node, which numbers its ranks itself
    by_mpirun: bool = False  # True if mpirun starts the ranks, each with its own log, in a task of srun on every node
    by_mpi: bool = False  # True if Slurm's PMIx or PMI gives the ranks their numbers; it ends the step when a rank aborts
    job: str | None = None  # Slurm's job number
    user: int | None = None  # the number of the job's user

    def ranks_on(self, host: str | None) -> list[int]:
        """Return the ranks that the placement puts on a host, by local rank."""
        places = [place for place in self.places.values() if place.node < len(self.hosts) and self.hosts[place.node] == host]
        return [place.rank for place in sorted(places, key=lambda place: place.local_rank)]

    def rank_of(self, host: str | None, task: int | None) -> int | None:
        """Return the rank of a Slurm task: tasks are distributed in blocks, equally to all nodes (slurm/job.sbatch.j2)."""
        ranks = self.ranks_on(host)
        return ranks[task % len(ranks)] if ranks and task is not None else None

    def task_of(self, rank: int) -> int:
        """Return the number before a rank's lines: its Slurm task number, or its rank if each rank has its own log."""
        return rank if self.by_mpirun else _tasks(self)[rank]

    def host_of_task(self, task: int) -> str | None:
        """Return the host of a Slurm task; None for a task that the job does not have."""
        return next((self.hosts[self.places[rank].node] for rank, number in _tasks(self).items() if number == task), None)

    def is_silent(self, end: TaskEnd, rank: int | None) -> bool:
        """Return True if a task gave up without a record of its reason."""
        return end.code is not None and end.code > 0 and end.code != STOPPED and not any(
            failure.node == end.host if rank is None else failure.rank == rank for failure in self.failures)

    def lines_of_task(self, host: str, task: int) -> Sequence[str]:
        """Return the lines of a task, without the numbers before them."""
        return _by_task(self).get((host, task), ())


@lru_cache(maxsize=2)
def _tasks(evidence: Evidence) -> dict[int, int]:
    seats = sorted(evidence.places.values(), key=lambda place: (place.node, place.local_rank))
    return {place.rank: task for task, place in enumerate(seats)}


@lru_cache(maxsize=2)
def _by_task(evidence: Evidence) -> dict[tuple[str, int], list[str]]:
    by_task: dict[tuple[str, int], list[str]] = {}
    for host, lines in evidence.logs.items():
        for label in filter(None, map(LABEL.match, lines)):
            if not label[2].startswith("slurmstepd"):  # it reports on the node, with the number of its first task
                by_task.setdefault((host, int(label[1])), []).append(label[2])
    return by_task
