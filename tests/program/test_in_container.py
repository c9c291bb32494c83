"""What a rank of a program runs in its container: any POSIX shell tells it who it is, and what it says where it cannot start."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_mp.job import ProgramSpec, resolve_any
from hpc_mp.layout.placement import Degrees, Placement, numbered, place
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run
from hpc_mp.rundir.failures import read_failures
from hpc_mp.rundir.program import axis_variables, rank_variables, read_program, write_program
from hpc_mp.supervisor.in_container import program_script

SHELLS = [["sh"], ["bash"], ["bash", "--posix"], ["busybox", "sh"]]
HOSTS = ("n8", "n7")
TOKEN = "7.1.2"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = create_run(tmp_path / "runs", "a program")
    (made.path / "failures").mkdir(exist_ok=True)
    return made


def write(run: RunDirectory, placement: Placement, *command: str, again: dict[str, str] | None = None, **program: object) -> None:
    spec = resolve_any({"job": {"nodes": 2, "ranks_per_node": 2}, "program": {
        "command": list(command), "directory": str(run.path), **program}}, run.path)
    assert isinstance(spec, ProgramSpec)
    write_program(run.program, spec)
    record = AttemptRecord(TOKEN, 2, HOSTS, "n8", 10001, "s")
    run.program_script.write_text(program_script(read_program(run.program), run, placement, record, again or {}))


def start(run: RunDirectory, host: str, local: int, shell: Sequence[str] = ("sh",),
          **environ: str) -> subprocess.CompletedProcess[str]:
    """As the runtime of the container starts a task there."""
    known = {"PATH": os.environ["PATH"], "HPC_MP_TOKEN": TOKEN, "SLURMD_NODENAME": host, "SLURM_LOCALID": str(local)}
    return subprocess.run([*shell, str(run.program_script)], env=known | environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_who_a_rank_is(run: RunDirectory, shell: list[str]) -> None:
    """The same as outside of containers, for every rank; what the image or the job says goes before what it had."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    placement = numbered(Degrees(tensor=2, data=2), "DPT", "TPD", 2, "block")
    write(run, placement, "env", "-0", again={"NCCL_DEBUG": "WARN"}, axes="DPT", environment={"OWN": "it's\n$x"})
    for seat in placement.ranks:
        done = start(run, HOSTS[seat.node], seat.local_rank, shell, NCCL_DEBUG="of the image", MASTER_ADDR="elsewhere",
                     HPC_MP_SECRET="s", PYTHONUNBUFFERED="")
        found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
        expected = rank_variables(placement, seat.rank, "n8", "10001") | axis_variables(placement, seat.rank, run.placement)
        assert {name: found.get(name) for name in expected} == expected
        assert {name: found.get(name) for name in ("OWN", "NCCL_DEBUG", "HPC_MP_RUN", "HPC_MP_ATTEMPT", "HPC_MP_RESUME",
                                                   "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")} == {
            "OWN": "it's\n$x", "NCCL_DEBUG": "WARN", "HPC_MP_RUN": str(run.path), "HPC_MP_ATTEMPT": "2", "HPC_MP_RESUME": "1",
            "PYTHONUNBUFFERED": "", "PYTHONFAULTHANDLER": "1"}
        assert not {"HPC_MP_SECRET", "HPC_MP_TOKEN"} & found.keys() and not [name for name in found if name.startswith("hpc_mp")]


def test_a_rank_of_an_earlier_attempt_ends(run: RunDirectory) -> None:
    write(run, place(Degrees(data=4), "cluster", 2), "echo", "lives")
    stale = start(run, "n7", 1, HPC_MP_TOKEN="7.0.1")
    assert (stale.returncode, stale.stdout) == (1, "") and "attempt 7.0.1 is no longer the run's current one" in stale.stderr
    assert start(run, "n7", 1).stdout == "lives\n"
    lost = start(run, "n3", 0)
    assert (lost.returncode, lost.stdout) == (2, "") and "host n3, local rank 0: is not the place of a rank" in lost.stderr


@pytest.mark.parametrize(("command", "words"), [
    ("no such program", "program.command[0] = 'no such program': does not exist in the container"),
    ('./a "quoted\\ one"', "program.command[0] = './a \"quoted\\ one\"': does not exist in the container"),
])
def test_what_is_not_in_the_image_is_the_users_to_mend(run: RunDirectory, command: str, words: str) -> None:
    write(run, place(Degrees(data=4), "cluster", 2), command)
    announced = time.time()  # what is older is taken for the end of an earlier start
    done = start(run, "n7", 1)
    assert done.returncode == 2 and words in done.stderr
    (failure,) = read_failures(run, 2)
    assert (failure.kind, failure.rank, failure.node) == ("user", 3, "n7") and failure.time > announced
    assert failure.message.startswith(f"n7: {words}") and "slurm.container_mounts" in failure.message


def test_a_directory_that_the_image_has_not(run: RunDirectory, tmp_path: Path) -> None:
    write(run, place(Degrees(data=4), "cluster", 2), "true", directory=str(tmp_path / "not here"))
    done = start(run, "n8", 0)
    assert done.returncode == 2 and f"program.directory = '{tmp_path}/not here': cannot be entered" in done.stderr
    assert [failure.rank for failure in read_failures(run, 2)] == [0]


def test_nothing_between_shields_the_program_from_signals(run: RunDirectory) -> None:
    write(run, place(Degrees(data=4), "cluster", 2), "sh", "-c", "kill -TERM $$; echo lives")
    assert (start(run, "n8", 0).returncode, start(run, "n8", 0).stdout) == (-15, "")
