"""The look at ranks that hang, on one machine: by py-spy where it is there, by SIGABRT where it is not; and no core is left."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_mp.diagnosis.stacks import read_stacks
from hpc_mp.program import stacks
from hpc_mp.program.stacks import rank_of, record_stacks
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.supervisor.hang_stacks import add_what_logs_say

HANGS = "import sys, time\ndef next_batch():\n    print('begins', flush=True)\n    time.sleep(60)\nnext_batch()\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path, "x")


@pytest.fixture
def ranks(run: RunDirectory, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that hang, the second one's Python a child of a shell."""
    file = tmp_path / "train.py"
    file.write_text(HANGS)
    started = []
    for rank, command in enumerate(([sys.executable, file], ["bash", "-c", '"$@"; exit 3', "-", sys.executable, file])):
        environ = {**os.environ, "RANK": str(rank), "HPC_MP_RUN": str(run.path), "HPC_MP_ATTEMPT": "1", "PYTHONFAULTHANDLER": "1"}
        with run.rank_log(rank).open("w") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        started.append(process)
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("environ", "rank"), [
    ({"RANK": "3", "NODE_RANK": "1", "SLURM_PROCID": "3"}, 3), ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_STEP_ID": "0"}, 2),
    ({"SLURM_PROCID": "5"}, 5), ({"NODE_RANK": "1", "SLURM_PROCID": "1"}, None), ({}, None),
])
def test_who_a_process_is(environ: dict[str, str], rank: int | None) -> None:
    assert rank_of(environ) == rank


def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TOOL", "no-such-py-spy")


def test_without_py_spy_by_sigabrt(run: RunDirectory, ranks: list[subprocess.Popen[str]], tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    without_py_spy(monkeypatch)
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_CORE, (1 << 20, resource.prlimit(rank.pid, resource.RLIMIT_CORE)[1]))
    assert record_stacks(run, 1) == [0, 1]
    assert [rank.wait(10) for rank in ranks] == [-6, 3]
    add_what_logs_say(run, lambda rank: run.rank_log(rank).read_text().splitlines())
    assert [str(stack) for stack in read_stacks(run)] == ["train.py:4 in next_batch"] * 2
    assert not list(tmp_path.glob("core*"))


@pytest.mark.skipif(shutil.which(stacks.TOOL, path=f"{os.environ['PATH']}:{Path(sys.executable).parent}") is None,
                    reason="py-spy is not installed")
def test_with_py_spy_they_live_on(run: RunDirectory, ranks: list[subprocess.Popen[str]]) -> None:
    assert record_stacks(run, 1) == [0, 1]
    assert [str(stack) for stack in read_stacks(run)] == ["train.py:4 in next_batch"] * 2
    assert [rank.poll() for rank in ranks] == [None, None]


def test_other_attempts_and_runs_are_none_of_its_business(
        run: RunDirectory, ranks: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_py_spy(monkeypatch)
    assert record_stacks(run, 2) == [] and record_stacks(create_run(tmp_path, "y"), 1) == []
    assert [rank.poll() for rank in ranks] == [None, None] and read_stacks(run) == []
