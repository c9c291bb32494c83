"""Where everything of a run lies, and how runs are numbered, found and resumed.

``DIRECTORY/NAME/0001`` holds one run::

    job.toml         the resolved job            placement.json   which rank is where
    job.sbatch       the rendered script         ranks.jsonl      attempt, rank, host, pid, coordinates
    metrics.jsonl    one line per step           checkpoints/     step-00000010/ ...
    log/main.log     rank 0, failures            log/rank-00003.log, log/memory-00003
    trace/           rank-00003.json: actions as executed and memory of one rank
    failures/        attempt-1-rank-00003.json: why a rank ended
    waits/           attempt-1-rank-00003.json: where a rank stands that does not move, and whom it waits for
    outcome.json     the verdict: what became of the run
    attempts/K/      job.toml, placement.json, outcome.json and log/ of earlier attempts
    attempt.json     the current attempt on Slurm  history.jsonl   how earlier starts ended
    cluster.json     rates between nodes, by which the hosts are put in order
    stop             made by whoever wants the run to save and stop
    report.html      the pictures
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.errors import HpcMpError

PRIVATE = 0o700  # logs and samples are the user's own: nobody else reads a run directory


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The names inside one run directory."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.toml"

    @property
    def placement(self) -> Path:
        return self.path / "placement.json"

    @property
    def measured(self) -> Path:
        """What the doctor had measured on the cluster when the job was launched."""
        return self.path / "cluster.json"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def main_log(self) -> Path:
        return self.log / "main.log"

    @property
    def attempt_record(self) -> Path:
        return self.path / "attempt.json"

    @property
    def environment(self) -> Path:
        """Which archive of the Python environment nodes unpack, with ``environment.stage``."""
        return self.path / "environment.json"

    @property
    def stop(self) -> Path:
        """The trigger file: once it is there, ranks save at the next step and stop, and nothing queues them again."""
        return self.path / "stop"

    def node_log(self, host: str) -> Path:
        """What the ranks of one node of a Slurm job say, each line with its rank in front."""
        return self.log / f"node-{host}.log"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def cache(self) -> Path:
        """Tokenizers and token files, shared by all runs under the same ``job.directory``."""
        return self.path.parent.parent / ".cache"

    def rank_log(self, rank: int) -> Path:
        return self.log / f"rank-{rank:05d}.log"

    def memory(self, rank: int) -> Path:
        """How many bytes of the host's memory a rank holds, or held last."""
        return self.log / f"memory-{rank:05d}"

    def trace(self, rank: int) -> Path:
        return self.path / "trace" / f"rank-{rank:05d}.json"

    def failure(self, attempt: int, rank: int) -> Path:
        return self.path / "failures" / f"attempt-{attempt}-rank-{rank:05d}.json"

    def failures(self, attempt: int | None = None) -> Iterator[Path]:
        """The records of ranks that have ended; ``attempt``: None for those of all attempts."""
        return self.path.glob(f"failures/attempt-{'*' if attempt is None else attempt}-rank-*.json")

    def standing(self, attempt: int, rank: int) -> Path:
        """Where a rank stands that does not move, and whom it waits for."""
        return self.path / "waits" / f"attempt-{attempt}-rank-{rank:05d}.json"

    def standings(self, attempt: int) -> Iterator[Path]:
        return self.path.glob(f"waits/attempt-{attempt}-rank-*.json")

    @property
    def outcome(self) -> Path:
        """The verdict: what became of the run. Once it is there, it is the only answer."""
        return self.path / "outcome.json"

    def put_away(self, attempt: int) -> Path:
        """Where an earlier attempt's files lie."""
        return self.path / "attempts" / str(attempt)

    def attempt(self) -> int:
        """The number of the current attempt, from 1: one more than those put away."""
        return 1 + sum(1 for _ in (self.path / "attempts").glob("[0-9]*"))


def create_run(directory: Path, name: str) -> RunDirectory:
    """Make the next free ``directory/name/NNNN`` (mode 700) with its sub-directories.

    Raises:
        HpcMpError: when the directory cannot be written.
    """
    base = directory / name
    try:
        base.mkdir(parents=True, exist_ok=True)
        number = max((int(p.name) for p in _numbered(base)), default=0) + 1
        while True:
            path = base / f"{number:04d}"
            try:
                path.mkdir(mode=PRIVATE)
                break
            except FileExistsError:  # another launch took this number in between
                number += 1
        for sub in ("checkpoints", "log", "trace", "failures", "attempts"):
            (path / sub).mkdir(mode=PRIVATE)
    except OSError as error:
        raise HpcMpError(f"job.directory = {directory}", f"cannot be written ({error.strerror})",
                         "choose a directory on a file system that all nodes share and that you may write") from None
    return RunDirectory(path)


def find_run(path: Path) -> RunDirectory:
    """``path`` itself when it is a run directory, else the newest run below ``DIRECTORY/NAME``.

    Raises:
        HpcMpError: when there is none.
    """
    path = path.resolve()
    if _is_run(path):
        return RunDirectory(path)
    runs = [run for run in _numbered(path) if _is_run(run)]
    if not runs:
        raise HpcMpError(f"run {path}", "is neither a run directory nor holds numbered runs",
                         "give DIRECTORY/NAME/0001, or DIRECTORY/NAME for the newest run of a job")
    return RunDirectory(max(runs, key=lambda run: int(run.name)))


def prepare_resume(run: RunDirectory) -> int:
    """Put the attempt that was away to ``attempts/K/``: copies of what it was told, and its logs; returns the new one's number.

    A rank of that attempt that still lives, on a node that was cut off, goes on writing into the logs put away.

    Raises:
        HpcMpError: when the run directory cannot be written; it is then as it was.
    """
    attempt = run.attempt()
    aside = run.put_away(attempt)
    try:
        aside.mkdir(mode=PRIVATE, parents=True)
        for name in (run.job, run.placement, run.script, run.outcome):
            if name.exists():
                shutil.copy2(name, aside / name.name)
        run.log.rename(aside / run.log.name)
        run.log.mkdir(mode=PRIVATE)
    except OSError as error:
        if not run.log.exists():
            (aside / run.log.name).rename(run.log)
        shutil.rmtree(aside, ignore_errors=True)
        raise HpcMpError(f"run {run.path}", f"cannot be written ({error.strerror})", "make room on its file system") from None
    return attempt + 1


def _is_run(path: Path) -> bool:
    """A job file alone may be its author's own, in the directory that he launches it from."""
    return (path / "job.toml").is_file() and (path / "placement.json").is_file()


def _numbered(base: Path) -> list[Path]:
    try:
        return [Path(e.path) for e in os.scandir(base) if e.name.isdigit() and e.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
