"""Helpers shared by the tests of the emulator and of the launcher."""

import fcntl
import json
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result
from tables import table

from hpc_mp.base.command import CommandFailed
from hpc_mp.cli.main import cli
from hpc_mp.job import AnySpec, dump_job
from hpc_mp.rundir import Manifest, RunDirectory, create_run, write_json, write_manifest
from hpc_mp.rundir.records import StepMetrics, line_of

MARK = "HPC_MP_TEST_MARK"
JOB = table(__file__, "launching.toml", "job")


@pytest.fixture
def mark() -> Iterator[str]:
    """Yield a word for the environment of all processes of a test. Processes alive ten seconds after it are killed: an error."""
    word = uuid.uuid4().hex
    yield word
    deadline = time.monotonic() + 10
    while (left := marked(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert left == []


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes whose environment carries ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def environment(mark: str, path: Path | None = None, **more: str) -> dict[str, str]:
    """Return our environment with ``mark`` and ``more``, for a process with our import path, preceded by ``path``."""
    return {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(map(str, filter(None, [path, *sys.path]))), **more}


def command(job: Path, overrides: Sequence[str], *options: str) -> list[str]:
    """Return the arguments of the real ``launch`` on emulated nodes, with ``overrides`` of the job file."""
    return [sys.executable, "-m", "hpc_mp", "launch", str(job), "--on", "local", "--json", *options,
            *(word for override in overrides for word in ("--set", override))]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until ``condition`` returns a true value, and return the value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
    return found


def write_job(directory: Path, nodes: int = 2, ranks: int = 2, more: str = "") -> Path:
    (directory / "text.txt").write_text("some text\n" * 100)
    path = directory / "job.toml"
    path.write_text(JOB.format(nodes=nodes, ranks=ranks) + more)
    return path


def the_run(job: Path, number: int = 1) -> RunDirectory:
    return RunDirectory(job.parent / "runs" / "t" / f"{number:04d}")


def make_run(spec: AnySpec, *saved: int, name: str | None = None) -> RunDirectory:
    """Return the next run of a job, as a launch makes it, with complete checkpoints of these steps."""
    run = create_run(Path(spec.job.directory), name or spec.job.name)
    run.job.write_text(dump_job(spec), encoding="utf-8")
    write_json(run.placement, {})
    for step in saved:
        run.checkpoint(step).mkdir()
        write_manifest(run.checkpoint(step), Manifest(step, {}))
    return run


@contextmanager
def held(run: RunDirectory) -> Iterator[int]:
    """Hold the lock of a run, as its launcher does."""
    with open(run.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def call(*words: str | Path) -> Result:
    """Run ``hpc-mp WORDS`` in this process. Exceptions pass."""
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


def said(run: RunDirectory, rank: int, kind: str, time: float, attempt: int = 1) -> None:
    run.failure(attempt, rank).write_text(json.dumps({
        "attempt": attempt, "rank": rank, "node": f"node{rank // 2}", "host": "h", "pid": 1, "time": time, "kind": kind,
        "message": {"user": "x: is wrong. mend it.", "error": "ValueError: boom", "peer": "Connection reset"}[kind],
        "traceback": ""}))


def record(step: int, attempt: int = 1, seconds: float = 1.0, loss: float = 1.0) -> str:
    """Return a line of ``metrics.jsonl``."""
    return line_of(StepMetrics(step, loss, 100 * step, seconds, 100 / seconds, 1.0, 0, attempt=attempt))


def python_program(path: Path, text: str) -> Path:
    """Write an executable that runs ``text`` with this Python, whose path may have blanks, which ``#!`` does not support.

    Its first lines mean "run me with Python" to sh, and a string to Python, as in the programs that pip installs.
    """
    path.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n{text}")
    path.chmod(0o755)
    return path


def executable(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def answers(table: Mapping[str, str]) -> Callable[[Any], str]:
    def ask(argv: Any) -> str:
        return table[argv[0]] if argv[0] in table else silent(argv)
    return ask


def silent(argv: Any) -> str:
    raise CommandFailed(f"{argv[0]} is not on PATH")
