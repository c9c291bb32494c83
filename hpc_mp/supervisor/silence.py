"""Detection of hangs by silence, for programs whose steps are unknown: the time of each rank's last output."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.line_file import NewLines
from hpc_mp.diagnosis.evidence import Hang
from hpc_mp.diagnosis.lines import LABEL, MPI_PLUGIN_SAYS
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir import RunDirectory

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
