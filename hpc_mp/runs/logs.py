"""The logs of a run: their files, the ranks whose lines they contain, and the failure that ends them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.line_file import NewLines
from hpc_mp.diagnosis.lines import LABEL
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import RankStart, read_records
from hpc_mp.runs.keepers import keeper

SUPERVISOR = re.compile(r"hpc-mp: (\d\d:\d\d:\d\d .*)")  # in the job script's log; the main log has the same line
# Output of srun --verbose other than the ends of tasks, for which the option is used.
CHATTER = re.compile(r"srun: (defined options$|-{20} -{20}$|[\w()-]+ +: |end of defined options|jobid \d+: nodes|Implicitly |"
                     r"launch/\w+: |launching StepId=|route/|Complete StepId=|Consumable Resources|topology/|\S+: task)")


@dataclass(frozen=True, slots=True)
class LogSource:
    """A log file; with ``task``, only the lines of one task in a node's log. ``mark`` precedes each line. Left out are lines of
    the supervisor that the log ``echo`` also contains, and srun's verbose messages about itself."""

    path: Path
    task: int | None = None
    mark: str = ""
    echo: Path | None = None

    def lines(self, lines: Sequence[str]) -> Iterator[str]:
        echoed = self._echoed() if self.echo is not None and any(map(SUPERVISOR.match, lines)) else frozenset()
        for line in lines:
            if ((match := SUPERVISOR.match(line)) and match[1] in echoed) or CHATTER.match(line):
                continue
            label = LABEL.match(line) if self.task is not None else None
            if self.task is None or (label and int(label[1]) == self.task):
                yield self.mark + (label[2] if label else line)

    def _echoed(self) -> frozenset[str]:
        try:
            return frozenset(self.echo.read_text(encoding="utf-8", errors="replace").splitlines()) if self.echo else frozenset()
        except FileNotFoundError:
            return frozenset()


class Logs:
    """The logs of one attempt; those of earlier attempts are in ``attempts/K/log``. Raises HpcMpError if the attempt does not
    exist."""

    def __init__(self, run: RunDirectory, attempt: int | None) -> None:
        newest = run.attempt()
        self.run, self.attempt = run, attempt or newest
        if not 1 <= self.attempt <= newest:
            raise HpcMpError(f"--attempt {attempt}", f"there are attempts 1 to {newest}", "name one of them")
        self.files = run.of_attempt(self.attempt)
        self._ranks = {start.rank: start for start in read_records(run.ranks, RankStart) if start.attempt == self.attempt}

    def main(self) -> list[LogSource]:
        """Return the logs of rank 0, the launcher, Slurm and srun. Lines that the supervisor writes to two logs appear once."""
        slurm = [LogSource(path, echo=self.files.main_log) for path in keeper(self.run).logs(self.run, self.files)]
        first = self.rank(0) if self.run.program.exists() else []  # our engine writes it to the main log
        return [*slurm, *self._existing([self.files.srun_log]), *first, *self._existing([self.files.main_log])]

    def rank(self, rank: int) -> list[LogSource]:
        """Return the rank's own file, else its lines in that of its node."""
        start = self._ranks.get(rank)
        task = rank if start is None or start.task is None else start.task
        by_node = LogSource(self.files.node_log(start.node if start else ""), task)
        return self._existing([self.files.rank_log(rank)]) or [by_node] * by_node.path.is_file()

    def node(self, node: str) -> list[LogSource]:
        """Return the file of a node, given by its name or its host's, else the files of its ranks."""
        starts = [start for start in self._ranks.values() if node in (start.node, start.host)]
        sources = self._existing([self.files.node_log(name) for name in dict.fromkeys([node, *(start.node for start in starts)])])
        return sources or [LogSource(source.path, mark=f"{start.rank}: ") for start in _by_rank(starts)
                           for source in self._existing([self.files.rank_log(start.rank)])]

    def named(self, key: str) -> str:
        """Return the ranks or nodes (``key``) that this attempt has started, for a message."""
        return ", ".join(map(str, dict.fromkeys(getattr(start, key) for start in _by_rank(self._ranks.values())))) or "none"

    @staticmethod
    def _existing(paths: Sequence[Path]) -> list[LogSource]:
        return [LogSource(path) for path in paths if path.is_file()]


def _by_rank(starts: Iterable[RankStart]) -> list[RankStart]:
    return sorted(starts, key=lambda start: start.rank)


class Follower:
    """Reader of new complete lines in logs."""

    def __init__(self) -> None:
        self._files: dict[LogSource, NewLines] = {}

    def new(self, sources: Sequence[LogSource]) -> Iterator[str]:
        for source in sources:
            file = self._files.setdefault(source, NewLines(source.path))
            yield from source.lines(file.read())
