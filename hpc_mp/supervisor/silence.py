"""Detection of hangs by silence, for programs with unknown steps, and the recording of stacks before hung ranks end."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.line_file import NewLines
from hpc_mp.cluster.slurm.allocation import one_task_environment
from hpc_mp.cluster.slurm.steps import one_task_per_node
from hpc_mp.diagnosis.evidence import Hang
from hpc_mp.diagnosis.lines import LABEL, MPI_PLUGIN_SAYS
from hpc_mp.diagnosis.stacks import aborted, numbers, read_stacks, sentence_of, standing_apart
from hpc_mp.layout.placement import Placement
from hpc_mp.program.stacks import record_stacks
from hpc_mp.rundir import RunDirectory
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.srun import follow

APART_S = 3.0  # seconds by which the first silent rank must precede the others to be named

TROUBLED_S = 300.0  # seconds of silence from the start that count as a hang if Slurm's MPI plug-in has complained
PAUSE_S = 10.0  # between two calls, normally many per second; or half the limit
SLOW_S = 3.0  # between two calls of a supervisor that was not stopped, on a busy node

Speakers = Callable[[], Collection[int]]
"""Ranks that have printed a line or logged a step since the last call."""


class SilenceWatch:
    """Detector of silence of all ranks.

    Args:
        limit: seconds of silence that count as a hang; 0: never.
        ranks: number of ranks.
        speakers: returns the ranks that have printed a line since the last call.
        on_hang: called once they hang, before they are ended.
        troubled: returns True if a known problem may keep silent ranks from ever printing.

    Attributes:
        hang: the hang, once detected.
    """

    def __init__(self, limit: float, ranks: int, speakers: Speakers, clock: Callable[[], float] = time.monotonic,
                 on_hang: Callable[[], object] = lambda: None, troubled: Callable[[], bool] = lambda: False) -> None:
        self._limit, self._speakers, self._clock, self._on_hang = limit, speakers, clock, on_hang
        self._troubled = troubled
        self._ranks, self._begin, self._polled = ranks, clock(), clock()
        self._last: dict[int, float] = {}
        self.hang: Hang | None = None

    def noticed(self) -> bool:
        """Return True if the ranks hang. To be called repeatedly."""
        now, paused = self._clock(), self._clock() - self._polled
        if paused > min(PAUSE_S, max(SLOW_S, self._limit / 2)):  # this process and the ranks were stopped, for example by Slurm
            self._begin, self._last = self._begin + paused, {rank: time + paused for rank, time in self._last.items()}
        self._polled = now
        self._last |= dict.fromkeys(self._speakers(), now)
        silent = now - max(self._last.values(), default=self._begin)
        limit = min(self._limit, TROUBLED_S) if not self._last and self._troubled() else self._limit
        if self.hang is None and limit and silent >= limit:
            first = self._first()
            self.hang = Hang(silent, first, first)
            self._on_hang()
        return self.hang is not None

    @property
    def seconds(self) -> float:
        """Seconds that the ranks have run, as of the last call."""
        return self._polled - self._begin

    @property
    def speakers(self) -> Collection[int]:
        """Ranks that have printed a line."""
        return self._last.keys()

    def _first(self) -> int | None:
        """Return the rank that fell silent before all others; None if some ranks have never printed."""
        if len(self._last) < self._ranks or self._ranks == 1:
            return 0 if self._ranks == 1 else None
        first, second = sorted(self._last, key=self._last.__getitem__)[:2]
        return first if self._last[second] - self._last[first] >= APART_S else None


def rank_files(run: RunDirectory, ranks: int) -> Speakers:
    """Return the speakers if each rank has its own log."""
    return grown([*((rank, run.rank_log(rank)) for rank in range(ranks)), (0, run.metrics)])


def grown(files: Sequence[tuple[int, Path]]) -> Speakers:
    """Return the ranks with a file that has grown; rank 0 records the steps of ``hpc_mp.log``."""
    sizes = {path: _size(path) for _, path in files}

    def speakers() -> list[int]:
        grown = [(rank, path, size) for rank, path in files if (size := _size(path)) != sizes[path]]
        sizes.update((path, size) for _, path, size in grown)
        return [rank for rank, _, _ in grown]

    return speakers


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


class NodeLogs:
    """The speakers if srun writes a log per node, with the task number before each line. ``troubled``: True if Slurm's MPI
    plug-in has complained in a log."""

    def __init__(self, run: RunDirectory, placement: Placement, hosts: Sequence[str]) -> None:
        self._files = {host: NewLines(run.node_log(host)) for host in dict.fromkeys(hosts)}
        self._ranks = {host: [place.rank for place in placement.ranks if hosts[place.node] == host] for host in self._files}
        self._logged = grown([(0, run.metrics)])
        self.troubled = False

    def __call__(self) -> list[int]:
        """Return the ranks that have printed a line or logged a step since the last call."""
        lines = [(host, line) for host, file in self._files.items() for line in file.read()]
        slurms = [line for _, line in lines if MPI_PLUGIN_SAYS.search(line)]
        self.troubled = self.troubled or bool(slurms)
        tasks = {(host, int(label[1])) for host, line in lines if (label := LABEL.match(line)) and line not in slurms}
        printed = [self._ranks[host][task % len(self._ranks[host])] for host, task in tasks]  # in blocks of equal size
        return [*printed, *self._logged()]


MODULE = "hpc_mp.program.stacks"
MEET_S = 8.0  # until all nodes have been queried: ranks without a known stack then get SIGABRT, on all nodes at once
AT_MOST_S = 20.0  # for the step: a lost node does not answer, and must not delay the verdict


def record_on_all_nodes(attempt: AttemptContext) -> None:
    """Start a step that records the stacks of all ranks, and ends the ranks that write them only as they die."""
    words = [sys.executable, "-P", "-m", MODULE, str(attempt.run.path), str(attempt.record.attempt), str(time.time() + MEET_S)]
    argv = one_task_per_node(attempt.command, attempt.spec.job.nodes, words)
    if argv is None:  # mpirun's ranks: only those on this host are visible
        record_stacks(attempt.run, attempt.record.attempt)
    else:
        follow(argv, one_task_environment(attempt.environ), attempt.run.srun_log, None, at_most=AT_MOST_S)


def add_what_logs_say(run: RunDirectory, lines: Callable[[int], Sequence[str]]) -> None:
    """Copy stacks that ranks wrote to their logs at SIGABRT to the stack files. ``lines``: returns the last lines of a rank's
    log."""
    for stack in read_stacks(run):
        output = aborted(lines(stack.rank)) if not stack.frames else ()
        if output:
            head = f"rank {stack.rank}, pid {stack.pid}, {stack.state}: output at SIGABRT"
            with open(run.rank_stack(stack.rank), "a", encoding="utf-8") as file:
                file.write("\n".join((head, *output, "")))


def explained(hang: Hang, run: RunDirectory) -> Hang:
    """Return the hang with the findings from the stacks."""
    stacks = read_stacks(run)
    apart = standing_apart(stacks, hang.first)
    rank = apart if apart is not None else hang.rank
    return replace(hang, rank=rank, stands=sentence_of(stacks, rank))


def where(run: RunDirectory) -> str:
    """Return the location of the stacks, for the log."""
    ranks = [stack.rank for stack in read_stacks(run)]
    name = f"{run.rank_stack.pattern.partition('{')[0]}*"
    return f"stacks of {numbers(ranks)}: {name}" if ranks else "no stacks of its ranks were recorded"
