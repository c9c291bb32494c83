"""Programs whose ranks meet through MPI, on a real Slurm with PMIx."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import verdict

HARD = ["a b", "$HOME", ";ls", "'", '"', "new\nline", "é 漢", "--nodes", "", "\\", "*"]
PROGRAM = """
import json, os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
with open(f"said-{comm.rank}", "w") as file:
    json.dump([sys.argv[1:], comm.size, comm.allreduce(comm.rank), os.environ["SLURMD_NODENAME"], dict(os.environ)], file)
if "die" in sys.argv and comm.rank == 2:
    os.kill(os.getpid(), signal.SIGSEGV)
comm.Barrier()
"""


@pytest.fixture
def here(lab: Lab) -> Iterator[Path]:
    pytest.importorskip("mpi4py")
    if lab.run(["srun", "--mpi=pmix", "--ntasks=1", "true"]).returncode:
        pytest.skip("this Slurm has no PMIx plug-in")
    directory = lab.share / f"an MPI program {os.urandom(2).hex()}"
    for path in (directory, directory / "state"):
        path.mkdir()
        path.chmod(0o777)
    (directory / "program.py").write_text(PROGRAM)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def run(lab: Lab, here: Path, *arguments: str) -> RunDirectory:
    words = [sys.executable, "-m", "hpc_mp", "run", "--on", "slurm", "--nodes", "2", "--ranks-per-node", "2", "--wait", "--set",
             "program.start=mpi", "--set", "environment.health=false", "--", sys.executable, "program.py", *arguments]
    done = lab.run(words, user="nobody", timeout=200, cwd=here, environ={"XDG_STATE_HOME": str(here / "state")})
    found = list(here.glob("runs/*/0*"))
    assert found, done.stdout + done.stderr
    return RunDirectory(max(found))


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_ranks_meet_across_nodes(lab: Lab, here: Path) -> None:
    found = run(lab, here, *HARD)
    assert verdict(found).state == "completed", found.srun_log.read_text()  # type: ignore[union-attr]
    said = [json.loads((here / f"said-{rank}").read_text()) for rank in range(4)]
    assert [each[:3] for each in said] == [[HARD, 4, 6]] * 4
    assert [each[3] for each in said] == ["n1", "n1", "n2", "n2"]
    assert not any({"RANK", "MASTER_ADDR", "MASTER_PORT"} & each[4].keys() for each in said)


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_the_rank_that_dies_is_named(lab: Lab, here: Path) -> None:
    found = run(lab, here, "die")
    cause = verdict(found).cause  # type: ignore[union-attr]
    assert cause is not None and (cause.kind, cause.rank, cause.node) == ("crash", 2, "n2"), cause
