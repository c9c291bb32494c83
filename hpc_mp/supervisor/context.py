"""The supervised run and its attempt, as one value for all parts of the supervisor."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from hpc_mp.base.line_file import append_lines
from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.diagnosis.lines import OURS
from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.layout.placement import Placement, RankPlace
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, read_attempt
from hpc_mp.rundir.rank_env import emulated_node
from hpc_mp.rundir.records import RankStart, RankStatus, line_of, write_record


@dataclass(frozen=True, slots=True)
class SupervisedRun:
    """A run, before an attempt of it begins. ``allocation``: Slurm's allocation; None outside of Slurm. ``command``: the command
    that starts the ranks, ``srun …`` or ``mpirun …``; it can also query nodes. If empty, nodes are not queried."""

    run: RunDirectory
    spec: AnySpec
    placement: Placement
    allocation: Allocation | None
    command: Sequence[str] = ()

    @property
    def job_id(self) -> str | None:
        """The id of the Slurm job; None outside of Slurm."""
        return self.allocation.job_id if self.allocation else None

    def say(self, text: str) -> None:
        """Write a line to the log of the job script and to that of the run."""
        line = f"{datetime.now():%H:%M:%S} {text}"
        with suppress(OSError):
            print(f"{OURS}{line}", flush=True)
        append_lines(self.run.main_log, [line])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext(SupervisedRun):
    """A run and its active attempt. ``record``: the input of its ranks: number, token, hosts, rendezvous address. ``host_order``:
    reason for the order of its hosts. ``base_environ``: the job script's environment, with the changes of the job's profile."""

    record: AttemptRecord
    host_order: str
    base_environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def environ(self) -> dict[str, str]:
        """The environment of every process that is started for this attempt."""
        meeting = {"MASTER_ADDR": self.record.address} if self.record.address else {}  # else the launcher sets it
        return {**self.base_environ, TOKEN: self.record.token, **meeting, "MASTER_PORT": str(self.record.port)}

    @property
    def by_mpirun(self) -> bool:
        """True if mpirun starts the ranks, possibly in tasks of srun. Each rank then has its own log."""
        return not self.record.hosts or (isinstance(self.spec, ProgramSpec) and self.spec.by_mpirun)

    def seats(self) -> tuple[tuple[str, ...], tuple[RankPlace, ...]]:
        """Return the hosts, and every rank's place with the number of its host as its node. If only mpirun knows the hosts, the
        ranks' own records are used. A rank without a record gets the name of its node."""
        places, noted = self.placement.ranks, self.run.rank_host
        if self.record.hosts:
            return self.record.hosts, tuple(places)
        named = {int(noted.values(path)[0]): path.read_text(encoding="utf-8") for path in noted.found()}
        by_node = {place.node: named[place.rank] for place in places if named.get(place.rank)}
        of_rank = [named.get(place.rank) or by_node.get(place.node) or emulated_node(place.node) for place in places]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(of_rank))}
        return tuple(numbers), tuple(replace(place, node=numbers[host]) for place, host in zip(places, of_rank, strict=True))

    def is_current(self) -> bool:
        """Return True if no later attempt has begun. An attempt on a node that Slurm believed dead may still run; it must not
        change anything."""
        if read_attempt(self.run.attempt_record).token == self.record.token:
            return True
        print(f"hpc-mp: attempt {self.record.attempt} ({self.record.token}) is no longer the run's current one", flush=True)
        return False

    def has_failed(self) -> bool:
        """Return True if a rank has recorded a failure."""
        return bool(self.run.failure.found(self.record.attempt))


def say_begun(run: RunDirectory, attempt: int, places: Sequence[RankPlace], hosts: Sequence[str], device: str,
              token: str = "", began: float | None = None) -> None:
    """Write a line for every rank to ``ranks.jsonl``, and their phase. ``hosts``: host of each node of the places. Tasks are
    distributed to them in blocks. ``began``: unix seconds; None: now."""
    seats = sorted(places, key=lambda place: (place.node, place.local_rank))
    tasks = {place.rank: task for task, place in enumerate(seats)}
    append_lines(run.ranks, [line_of(RankStart(
        attempt, place.rank, hosts[place.node], hosts[place.node], began or time.time(), local_rank=place.local_rank, dp=place.dp,
        token=token, device=device, task=tasks[place.rank])) for place in places])
    say_phase(run, attempt, "running")


def say_ended(run: RunDirectory, attempt: int, state: str) -> None:
    """Write the end of the attempt, as a rank 0 of our own engine does."""
    say_phase(run, attempt, "done" if state == "completed" else state)


def say_phase(run: RunDirectory, attempt: int, phase: str, detail: str = "") -> None:
    """Write the phase of the attempt, as a rank 0 of our own engine does."""
    with suppress(OSError):  # a full disk must not stop a program
        write_record(run.status, RankStatus(attempt, phase, detail, time=time.time()))
