"""From a process to the program, in a container too: who it is, what it finds, and what it says where it cannot become it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tables import table

from hpc_mp.base.exit_codes import ending
from hpc_mp.job import ProgramSpec, resolve_any
from hpc_mp.layout.placement import Degrees, Placement, numbered, place, to_dict
from hpc_mp.program.rank import DEFAULTS, environment
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, write_attempt, write_json
from hpc_mp.rundir.failures import read_failures
from hpc_mp.rundir.program import ProgramCommand, axis_variables, rank_variables, read_program, run_variables, write_program
from hpc_mp.supervisor.in_container import program_script

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = create_run(tmp_path / "runs", "a program")
    write_json(made.placement, to_dict(place(Degrees(data=4), "cluster", 2)))
    (made.path / "failures").mkdir(exist_ok=True)
    return made


def give(run: RunDirectory, command: Sequence[str], environment: dict[str, str] | None = None, start: str = "rank") -> None:
    directory = run.path.parent / "a directory"
    directory.mkdir(exist_ok=True)
    spec = resolve_any({"job": {"ranks_per_node": 2}, "program": {
        "command": list(command), "directory": str(directory), "environment": environment or {}, "start": start}}, run.path)
    assert isinstance(spec, ProgramSpec)
    write_program(run.program, spec)


def start(run: RunDirectory, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-m", "hpc_mp.program", str(run.path)], capture_output=True, text=True,
                          env={**os.environ, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **environ}, timeout=60)


def test_who_a_rank_is_and_where_it_runs(run: RunDirectory) -> None:
    give(run, [sys.executable, "-c", SHOW, "a b", "$HOME;", "'\"", "new\nline", "é"], {"OWN": "$x\n"})
    done = start(run, MASTER_ADDR="n1", MASTER_PORT="4711", HPC_MP_SECRET="s", HPC_MP_ASKED="1", OMP_NUM_THREADS="3")
    arguments, environ, directory = json.loads(done.stdout)
    assert arguments == ["a b", "$HOME;", "'\"", "new\nline", "é"] and directory == str(run.path.parent / "a directory")
    assert environ["PWD"] == directory and run.program.stat().st_mode & 0o077 == 0, "it may hold passwords"
    assert {name: environ.get(name) for name in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "NODE_RANK": "1",
        "MASTER_ADDR": "n1", "MASTER_PORT": "4711"}
    assert environ["HPC_MP_RUN"] == str(run.path) and environ["HPC_MP_ATTEMPT"] == "1" and "HPC_MP_RESUME" not in environ
    assert environ["OWN"] == "$x\n" and environ["OMP_NUM_THREADS"] == "3"
    assert not {"HPC_MP_SECRET", "HPC_MP_ASKED", "HPC_MP_TOKEN"} & environ.keys()


def test_a_later_attempt_is_told_to_resume(run: RunDirectory) -> None:
    run.put_away(1).mkdir()
    give(run, [sys.executable, "-c", SHOW])
    _, environ, _ = json.loads(start(run).stdout)
    assert (environ["HPC_MP_ATTEMPT"], environ["HPC_MP_RESUME"]) == ("2", "1")


def test_on_slurm_the_place_says_which_rank_it_is(run: RunDirectory) -> None:
    """Whatever the number of the task is; and a rank of an earlier attempt ends."""
    write_attempt(run.attempt_record, AttemptRecord("7.1.2", 2, ("n8", "n7"), "n8", 10001, "s"))
    give(run, [sys.executable, "-c", SHOW])
    slurm = {"HPC_MP_TOKEN": "7.1.2", "SLURMD_NODENAME": "n7", "SLURM_LOCALID": "0", "SLURM_PROCID": "0",
             "MASTER_ADDR": "n8", "MASTER_PORT": "10001"}
    _, environ, _ = json.loads(start(run, **slurm).stdout)
    assert (environ["RANK"], environ["NODE_RANK"], environ["HPC_MP_RESUME"]) == ("2", "1", "1")
    stale = start(run, **{**slurm, "HPC_MP_TOKEN": "7.0.1"})
    assert stale.returncode == 1 and "no longer the run's current one" in stale.stderr and stale.stdout == ""


def test_nothing_of_ours_shields_the_program_from_signals(run: RunDirectory) -> None:
    """The job script has SIGTERM ignored, and blocked, until a program can take it."""
    give(run, [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('lives')"])
    shielded = ('import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, '
                '[signal.SIGTERM]); os.execv(sys.executable, [sys.executable, "-P", "-m", "hpc_mp.program", sys.argv[1]])')
    done = subprocess.run([sys.executable, "-c", shielded, str(run.path)], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), ending(done.returncode)


@pytest.mark.parametrize(("command", "words"), table(__file__, "rank.toml", "not_started"))
def test_a_program_that_cannot_be_started_is_the_users_to_mend(run: RunDirectory, command: list[str], words: str) -> None:
    give(run, command)
    directory = run.path.parent / "a directory"
    for name, text, mode in (("text", "x", 0o644), ("no-magic", "x\n", 0o755), ("bad-magic", "#!/no/such/sh\n", 0o755)):
        (directory / name).write_text(text)
        (directory / name).chmod(mode)
    done = start(run, SLURMD_NODENAME="n2")
    assert done.returncode == 2 and words in done.stderr
    (failure,) = read_failures(run)
    assert (failure.kind, failure.rank, failure.node) == ("user", 3, "n2") and words in failure.message
    assert failure.message.startswith("n2: program.command[0] = ")


def test_a_directory_that_is_not_there(run: RunDirectory) -> None:
    give(run, ["true"])
    (run.path.parent / "a directory").rmdir()
    done = start(run)
    assert done.returncode == 2 and "cannot be entered (No such file or directory)" in done.stderr
    assert [failure.kind for failure in read_failures(run)] == ["user"]


def test_what_goes_before_what_in_the_environment() -> None:
    program = ProgramCommand(("x",), "/", {"A": "own", "PYTHONUNBUFFERED": "0"})
    found = environment(program, {"RANK": "1"}, {"A": "job's", "B": "job's", "HPC_MP_TOKEN": "7", "SLURMD_NODENAME": "n1"})
    assert found == DEFAULTS | {"A": "own", "B": "job's", "RANK": "1", "PYTHONUNBUFFERED": "0", "SLURMD_NODENAME": "n1"}
    assert "SLURMD_NODENAME" not in environment(program, {}, {"HPC_MP_EMULATED": "1", "SLURMD_NODENAME": "node1"})


@pytest.mark.parametrize(("start", "variables", "told"), table(__file__, "rank.toml", "mpiruns"))
def test_an_mpirun_in_the_command_of_a_node_may_start_its_ranks(start: str, variables: dict[str, str],
                                                                told: list[str | None]) -> None:
    program = ProgramCommand(("mpirun",), "/", {}, ranks_per_node=8 if start == "node" else None)
    found = environment(program, {}, variables)
    assert [found.get("SLURM_OVERLAP"), found.get("SLURM_TASKS_PER_NODE")] == told
    assert environment(replace(program, environment={"SLURM_OVERLAP": "0"}), {}, variables)["SLURM_OVERLAP"] == "0"


def test_ranks_of_nodes_that_are_not_full() -> None:
    placement = place(Degrees(data=3), "cluster", 2)
    found = [rank_variables(placement, rank, "h", "1") for rank in range(3)]
    assert [each["LOCAL_WORLD_SIZE"] for each in found] == ["2", "2", "1"]
    assert [each["GROUP_RANK"] for each in found] == ["0", "0", "1"]
    assert run_variables(Path("/r"), 1) == {"HPC_MP_RUN": "/r", "HPC_MP_ATTEMPT": "1"}


def test_a_rank_does_not_load_what_validates_job_files() -> None:
    """Every rank of every node reads from one file server what is imported here, before the program itself begins."""
    loaded = subprocess.run([sys.executable, "-P", "-c", "import hpc_mp.program.rank, sys; print(*sys.modules)"],
                            capture_output=True, text=True, check=True).stdout.split()
    assert "hpc_mp.program.rank" in loaded and not [name for name in loaded if name.startswith(("hpc_mp.job", "torch"))]


SHELLS = [["sh"], ["bash"], ["bash", "--posix"], ["busybox", "sh"]]
HOSTS = ("n8", "n7")
TOKEN = "7.1.2"


def write(run: RunDirectory, placement: Placement, *command: str, again: dict[str, str] | None = None, **program: object) -> None:
    spec = resolve_any({"job": {"nodes": 2, "ranks_per_node": 2}, "program": {
        "command": list(command), "directory": str(run.path), **program}}, run.path)
    assert isinstance(spec, ProgramSpec)
    write_program(run.program, spec)
    record = AttemptRecord(TOKEN, 2, HOSTS, "n8", 10001, "s")
    run.program_script.write_text(program_script(read_program(run.program), run, placement, record, again or {}))


def begun(run: RunDirectory, host: str, local: int, shell: Sequence[str] = ("sh",),
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
        done = begun(run, HOSTS[seat.node], seat.local_rank, shell, NCCL_DEBUG="of the image", MASTER_ADDR="elsewhere",
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
    stale = begun(run, "n7", 1, HPC_MP_TOKEN="7.0.1")
    assert (stale.returncode, stale.stdout) == (1, "") and "attempt 7.0.1 is no longer the run's current one" in stale.stderr
    assert begun(run, "n7", 1).stdout == "lives\n"
    lost = begun(run, "n3", 0)
    assert (lost.returncode, lost.stdout) == (2, "") and "host n3, local rank 0: is not the place of a rank" in lost.stderr


@pytest.mark.parametrize(("command", "words"), table(__file__, "rank.toml", "not_in_the_image"))
def test_what_is_not_in_the_image_is_the_users_to_mend(run: RunDirectory, command: str, words: str) -> None:
    write(run, place(Degrees(data=4), "cluster", 2), command)
    announced = time.time()  # what is older is taken for the end of an earlier start
    done = begun(run, "n7", 1)
    assert done.returncode == 2 and words in done.stderr
    (failure,) = read_failures(run, 2)
    assert (failure.kind, failure.rank, failure.node) == ("user", 3, "n7") and failure.time > announced
    assert failure.message.startswith(f"n7: {words}") and "slurm.container_mounts" in failure.message


def test_a_directory_that_the_image_has_not(run: RunDirectory, tmp_path: Path) -> None:
    write(run, place(Degrees(data=4), "cluster", 2), "true", directory=str(tmp_path / "not here"))
    done = begun(run, "n8", 0)
    assert done.returncode == 2 and f"program.directory = '{tmp_path}/not here': cannot be entered" in done.stderr
    assert [failure.rank for failure in read_failures(run, 2)] == [0]


def test_nothing_between_shields_the_program_from_signals(run: RunDirectory) -> None:
    write(run, place(Degrees(data=4), "cluster", 2), "sh", "-c", "kill -TERM $$; echo lives")
    assert (begun(run, "n8", 0).returncode, begun(run, "n8", 0).stdout) == (-15, "")
