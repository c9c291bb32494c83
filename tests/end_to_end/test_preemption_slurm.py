"""Preemption on a real Slurm, with and without a grace time, where it queues jobs again and where it cancels them: nothing that
ranks have saved is lost, nothing is called complete that is not, and the end is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_jobs import emulated, losses, submit, until, write_job
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import known_history
from hpc_mp.rundir.outcome import verdict

STEPS, HELD = 120, 15  # the step at which ranks wait until all jobs have come so far
PROGRAM = """
import json, os, signal, sys, time
how = sys.argv[1]
rank = int(os.environ.get("PMIX_RANK") or os.environ.get("RANK") or os.environ["SLURM_PROCID"])
saved = f"saved-{rank}"
value, done = json.load(open(saved)) if os.path.exists(saved) else (rank + 1.0, 0)
def save():
    with open(saved + ".new", "w") as file:
        json.dump([value, done], file)
    os.replace(saved + ".new", saved)
asked = []
if how == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif how != "dies":
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if "mpi" in sys.argv:
    from mpi4py import MPI
while done < STEPS:
    while done == HELD and not asked and not os.path.exists("../go"):
        time.sleep(0.1)
    time.sleep(0.25)
    value, done = value * 1.01 + done, done + 1
    with open(f"steps-{rank}", "a") as file:
        file.write(f"{done}\\n")
    if asked:
        time.sleep(1 + 4 * (rank == 0 and "slow" in sys.argv))
        save()
        print("saved", flush=True)
        if "mpi" in sys.argv:
            MPI.COMM_WORLD.Barrier()  # else mpirun ends those that still save
            MPI.Finalize()
        os._exit(int(how))
    if done % 10 == 0:
        save()
save()
"""
# The one command of a node starts its ranks, and passes on what it gets.
NODE = """
import os, signal, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "program.py", *sys.argv[1:]],
                          env={**os.environ, "RANK": str(2 * int(os.environ["NODE_RANK"]) + at)}) for at in range(2)]
for number in (signal.SIGTERM,):
    signal.signal(number, lambda number, frame: None)
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
HOWS = ("0", "1", "75", "dies", "ignores")
SAVES = ("0", "1", "75")  # at SIGTERM, and end with that code
FORMS: dict[str, tuple[str, ...]] = {
    "rank": (),
    "node": ("--set", "program.start=node"),
    "mpi": ("--set", "program.start=mpi"),
    "mpirun": ("--set", "program.start=mpi", "--set", "slurm.mpi=mpirun"),
}
KINDS = {"r0": ("REQUEUE", 0), "r20": ("REQUEUE", 20), "c0": ("CANCEL", 0), "c20": ("CANCEL", 20)}


@pytest.fixture(scope="module")
def preempting() -> Iterator[Lab]:
    """For each kind of preemption a partition of two hosts, and one that goes before all others."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    settings = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30", "SlurmdTimeout": "60",
                "MessageTimeout": "30", "BatchStartTimeout": "60"}
    lab = Lab(2 * len(KINDS), overrides=settings, patience=60)
    lab.node = "CPUs=16 RealMemory=4000"  # for all programs at the same time
    with lab:
        for number, (name, (mode, grace)) in enumerate(KINDS.items()):
            lab.run(["scontrol", "create", f"PartitionName={name}", f"Nodes={hosts(number)}", f"PreemptMode={mode}",
                     f"GraceTime={grace}"], check=True)
        lab.run(["scontrol", "create", "PartitionName=better", "Nodes=ALL", "PriorityTier=10", "PreemptMode=OFF"], check=True)
        yield lab


def hosts(number: int) -> str:
    return f"n[{2 * number + 1}-{2 * number + 2}]"


def preempt(lab: Lab, kinds: Sequence[str]) -> None:
    for number, kind in enumerate(KINDS):
        if kind in kinds:
            lab.sbatch("--partition=better", "--nodes=2", f"--nodelist={hosts(number)}", "--exclusive", "--mem=100",
                       "--output=/dev/null", "--wrap=sleep 2")


@dataclass(frozen=True)
class Cell:
    """A program that ends at SIGTERM in one way, in a partition of one kind."""

    here: Path
    how: str
    kind: str
    ranks: int

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(max(self.here.glob("runs/*/0*")))

    def steps(self, rank: int) -> list[int]:
        path = self.here / f"steps-{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def logs(self) -> str:
        files = [*self.run.path.glob("slurm-*.log"), *self.run.path.rglob("log/srun.log"), *self.run.path.rglob("log/node-*.log")]
        said = (f"== {path}\n{path.read_text(errors='replace')[-2500:]}" for path in files)
        return "\n".join((f"{self.how} in {self.kind}", *said))


def undisturbed(rank: int) -> list[float]:
    value = rank + 1.0
    for done in range(STEPS):
        value = value * 1.01 + done
    return [value, STEPS]


def start(lab: Lab, share: Path, form: str, how: str, kind: str, slow: bool = False) -> Cell:
    here = share / f"{form} {how} {kind}"
    here.mkdir()
    (here / "program.py").write_text(f"STEPS, HELD = {STEPS}, {HELD}\n{PROGRAM}")
    (here / "node.py").write_text(NODE)
    per_node = 2 if form == "node" else 1
    more = [*(["slow"] if slow else []), *(["mpi"] if form.startswith("mpi") else [])]
    words = [sys.executable, "-m", "hpc_mp", "run", "--on", "slurm", "--nodes", "2", "--ranks-per-node", str(per_node),
             *FORMS[form],
             "--set", f"slurm.partition={kind}", "--set", "program.resumes=true", "--set", "environment.health=false",
             "--set", "slurm.extra.exclusive=false", "--set", "slurm.extra.mem=50", "--set", "slurm.extra.cpus-per-task=1",
             "--", sys.executable, "node.py" if form == "node" else "program.py", how, *more]
    done = lab.run(words, cwd=here, timeout=200, environ={"XDG_STATE_HOME": str(here / "state")})
    assert done.returncode == 0, done.stdout + done.stderr
    return Cell(here, how, kind, 2 * per_node)


def check_end(cell: Cell) -> None:
    """Each rank has computed what an undisturbed one computes; if it saves at SIGTERM, no step twice."""
    for rank in range(cell.ranks):
        assert json.loads((cell.here / f"saved-{rank}").read_text()) == undisturbed(rank), cell.logs()
        assert sorted(set(cell.steps(rank))) == list(range(1, STEPS + 1)), cell.logs()
        if cell.how in SAVES:
            assert cell.steps(rank) == list(range(1, STEPS + 1)), f"rank {rank} lost what it had saved\n{cell.logs()}"


def check_stop(lab: Lab, cell: Cell) -> None:
    """The verdict on a job that Slurm has cancelled, and the way to go on, which is then gone."""
    until(lambda: verdict(cell.run) is not None, f"the verdict\n{cell.logs()}", 30)
    ended = verdict(cell.run)
    assert ended is not None and ended.state == "stopped", cell.logs()
    assert ended.cause is not None and ended.cause.message == "Slurm preempted the job", ended
    said = lab.run([sys.executable, "-m", "hpc_mp", "status", str(cell.run.path)]).stdout
    assert "Slurm preempted the job" in said and "--resume" in said, said
    log = "".join(path.read_text() for path in cell.run.path.glob("slurm-*.log"))
    assert "stopped: Slurm preempted the job; it continues from its saved state; not requeued" in log, log
    done = lab.run([sys.executable, "-m", "hpc_mp", "launch", str(cell.run.job), "--resume"], timeout=200, cwd=cell.here)
    assert done.returncode == 0, done.stdout + done.stderr


def preempt_all(lab: Lab, cells: Sequence[Cell]) -> None:
    """Preempt the cells once all have begun, and see each to an end that is that of an undisturbed run."""
    for cell in cells:
        until(lambda cell=cell: all(HELD in cell.steps(rank) for rank in range(cell.ranks)), "some steps", 200)  # type: ignore[misc]
    preempt(lab, [cell.kind for cell in cells])
    (cells[0].here.parent / "go").touch()
    for cell in cells:
        until(lambda cell=cell: known_history(cell.run) or verdict(cell.run), f"the first end\n{cell.logs()}", 150)  # type: ignore[misc]
        [first, *_] = known_history(cell.run)
        assert (first.kind, first.departed) == ("stopped", "Slurm preempted the job"), f"{first}\n{cell.logs()}"
        if first.action != "requeue":
            assert cell.kind.startswith("c"), f"{first}\n{cell.logs()}"
            check_stop(lab, cell)
    for cell in cells:
        until(lambda cell=cell: verdict(cell.run) is not None, f"the end\n{cell.logs()}", 250)  # type: ignore[misc]
        assert verdict(cell.run).state == "completed", cell.logs()  # type: ignore[union-attr]
        check_end(cell)


@pytest.fixture
def share(preempting: Lab) -> Iterator[Path]:
    directory = preempting.share / f"preempted {os.urandom(2).hex()}"
    directory.mkdir()
    yield directory
    preempting.run(["scancel", "--user=root"])


@pytest.mark.timeout(300)
def test_a_program_that_saves_is_preempted(preempting: Lab, share: Path) -> None:
    """Within the grace time Slurm tells its ranks alone; one of them needs longer to save than the other."""
    cells = [start(preempting, share, "rank", "0", "r20"), start(preempting, share, "rank", "1", "c20", slow=True)]
    preempt_all(preempting, cells)


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMS)
def test_every_program_in_every_preemption(preempting: Lab, share: Path, form: str) -> None:
    preempt_all(preempting, [start(preempting, share, form, how, kind) for how in HOWS for kind in KINDS])


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_our_own_engine_in_every_preemption(preempting: Lab, share: Path) -> None:
    lab = preempting
    layout = ("job.nodes=2", "job.ranks_per_node=1", "parallel.zero=1", "train.steps=400", "checkpoint.every=50")
    jobs = {kind: write_job(share / kind) for kind in KINDS}
    expected = emulated(jobs["r0"], layout)
    runs = {kind: submit(lab, job, (*layout, f"slurm.partition={kind}"))[0] for kind, job in jobs.items()}
    until(lambda: all(run.metrics.exists() and run.metrics.read_text().count("\n") > 5 for run in runs.values()), "steps", 200)
    preempt(lab, list(KINDS))
    for kind, run in runs.items():
        until(lambda run=run: known_history(run), "the first end", 150)  # type: ignore[misc]
        first = known_history(run)[0]
        assert (first.kind, first.departed) == ("stopped", "Slurm preempted the job") and first.step > 5, first
        if first.action != "requeue":
            check_stop_of_engine(lab, kind, run)
    for run in runs.values():
        until(lambda run=run: verdict(run) is not None, "the end", 300)  # type: ignore[misc]
        assert verdict(run).state == "completed" and losses(run.path) == expected  # type: ignore[union-attr]


def check_stop_of_engine(lab: Lab, kind: str, run: RunDirectory) -> None:
    until(lambda: verdict(run) is not None, "the verdict", 30)
    ended = verdict(run)
    assert kind.startswith("c") and ended is not None and ended.state == "stopped", ended
    log = "".join(path.read_text() for path in run.path.glob("slurm-*.log"))
    assert "stopped: Slurm preempted the job; step " in log and "is saved; not requeued" in log, log
    done = lab.run([sys.executable, "-m", "hpc_mp", "launch", str(run.job), "--resume"], timeout=200, cwd=run.path)
    assert done.returncode == 0, done.stdout + done.stderr
