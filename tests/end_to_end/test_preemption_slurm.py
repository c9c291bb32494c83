"""Preemption on a real Slurm, with and without a grace time, where it queues jobs again and where it cancels them: nothing that
ranks have saved is lost, nothing is called complete that is not, and the end is that of an undisturbed run."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab_runs import hpc_mp, logs_of, submitted, until_ended
from slurm_jobs import emulated, losses, steps, submit, until, write_job
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not
from tables import table

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import known_history

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
FORMS: dict[str, tuple[str, ...]] = table(__file__, "preemption_slurm.toml", "forms")
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


@dataclass(frozen=True)
class Cell:
    """A run in a partition of one kind: whether it has begun, and the check of its end, which is that of an undisturbed run.

    goes_on: a pattern of what a cancelled run says of its state.
    """

    run: RunDirectory
    kind: str
    begun: Callable[[], bool]
    check: Callable[[], None]
    goes_on: str


def start(lab: Lab, share: Path, form: str, how: str, kind: str, slow: bool = False) -> Cell:
    """Submit a program that ends at SIGTERM in one way."""
    here = share / f"{form} {how} {kind}"
    here.mkdir()
    (here / "program.py").write_text(f"STEPS, HELD = {STEPS}, {HELD}\n{PROGRAM}")
    (here / "node.py").write_text(NODE)
    per_node = 2 if form == "node" else 1
    more = [*(["slow"] if slow else []), *(["mpi"] if form.startswith("mpi") else [])]
    settings = (f"slurm.partition={kind}", "program.resumes=true", "slurm.extra.exclusive=false", "slurm.extra.mem=50",
                "slurm.extra.cpus-per-task=1")
    command = [sys.executable, "node.py" if form == "node" else "program.py", how, *more]
    run = submitted(lab, here, command, *FORMS[form], *(word for each in settings for word in ("--set", each)), per_node=per_node)
    ranks = range(2 * per_node)
    return Cell(run, kind, lambda: all(HELD in steps_of(here, rank) for rank in ranks),
                lambda: check_ranks(here, ranks, how, logs_of(run)), "it continues from its saved state")


def steps_of(here: Path, rank: int) -> list[int]:
    path = here / f"steps-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check_ranks(here: Path, ranks: Sequence[int], how: str, logs: str) -> None:
    """Check that each rank has computed what an undisturbed one computes; if it saves at SIGTERM, no step twice."""
    for rank in ranks:
        value = rank + 1.0
        for done in range(STEPS):
            value = value * 1.01 + done
        assert json.loads((here / f"saved-{rank}").read_text()) == [value, STEPS], logs
        steps = steps_of(here, rank)
        assert sorted(set(steps)) == list(range(1, STEPS + 1)), logs
        assert how not in SAVES or len(steps) == STEPS, f"rank {rank} lost what it had saved\n{logs}"


def check_losses(run: RunDirectory, expected: Sequence[float]) -> None:
    assert losses(run.path) == expected and known_history(run)[0].step > 5


def check_stop(lab: Lab, cell: Cell) -> None:
    """Check the verdict on a job that Slurm has cancelled, and resume it, after which the verdict is gone."""
    ended = until_ended(cell.run, 30)
    assert cell.kind.startswith("c") and ended.state == "stopped", f"{ended}\n{logs_of(cell.run)}"
    assert ended.cause is not None and ended.cause.message == "Slurm preempted the job", ended
    here = cell.run.path.parents[2]
    said = hpc_mp(lab, here, "status", cell.run.path).stdout
    assert "Slurm preempted the job" in said and "--resume" in said, said
    log = "".join(path.read_text() for path in cell.run.path.glob("slurm-*.log"))
    assert re.search(f"stopped: Slurm preempted the job; {cell.goes_on}; not requeued", log), log
    done = hpc_mp(lab, here, "launch", cell.run.job, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr


def preempt_all(lab: Lab, cells: Sequence[Cell]) -> None:
    """Preempt the cells once all have begun, and see each to its end."""
    for cell in cells:
        until(cell.begun, "some steps", 200)
    kinds = {cell.kind for cell in cells}
    for nodes in (hosts(number) for number, kind in enumerate(KINDS) if kind in kinds):
        lab.sbatch("--partition=better", "--nodes=2", f"--nodelist={nodes}", "--exclusive", "--mem=100", "--output=/dev/null",
                   "--wrap=sleep 2")
    (cells[0].run.path.parents[3] / "go").touch()
    for cell in cells:
        until(lambda run=cell.run: known_history(run), f"the first end\n{logs_of(cell.run)}", 150)  # type: ignore[misc]
        first = known_history(cell.run)[0]
        assert (first.kind, first.departed) == ("stopped", "Slurm preempted the job"), f"{first}\n{logs_of(cell.run)}"
        if first.action != "requeue":
            check_stop(lab, cell)
    for cell in cells:
        assert until_ended(cell.run, 300).state == "completed", logs_of(cell.run)
        cell.check()


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
    layout = ("job.nodes=2", "job.ranks_per_node=1", "parallel.zero=1", "train.steps=400", "checkpoint.every=50")
    jobs = {kind: write_job(share / kind) for kind in KINDS}
    expected = emulated(jobs["r0"], layout)
    runs = {kind: submit(preempting, job, (*layout, f"slurm.partition={kind}"))[0] for kind, job in jobs.items()}
    preempt_all(preempting, [
        Cell(run, kind, lambda run=run: steps(run) > 5, lambda run=run: check_losses(run, expected),  # type: ignore[misc]
             r"step \d+ is saved") for kind, run in runs.items()])
