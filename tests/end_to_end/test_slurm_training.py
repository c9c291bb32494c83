"""Training on a real multi-host Slurm: the same numbers as one process, through signals, failures and dead nodes."""

import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab_runs import ENDS, job_ends, saving, state, with_fault
from plain import run_plain
from slurm_jobs import EIGHT, TWO, close, command, emulated, hpc_mp, launch, logs, losses, steps, submit, until, write_job
from slurm_lab.cluster import Cluster
from slurm_lab.lab import USER, Lab
from tables import table

from hpc_mp.job import load_job
from hpc_mp.rundir import RunDirectory, read_json, read_lines
from hpc_mp.rundir.history import history

pytestmark = pytest.mark.timeout(900)


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_ranks_on_four_hosts_are_one_process(lab: Cluster, job: Path, per_node: int) -> None:
    layout = (*EIGHT, f"job.ranks_per_node={per_node}")
    ended = launch(lab, job, layout)
    assert ended["state"] == "completed"
    assert close(losses(ended["run"]), run_plain(load_job(job, layout)).losses)
    found = {(line["rank"], line["node"]) for line in read_lines(Path(ended["run"]) / "ranks.jsonl")}
    assert found == {(rank, f"n{1 + rank // per_node}") for rank in range(4 * per_node)}


FORMS: dict[str, tuple[str, ...]] = table(__file__, "slurm_training.toml", "forms")


@pytest.mark.prove
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_start_gives_the_same_numbers(lab: Cluster, job: Path, form: str) -> None:
    # Slurm lists the plugin also where the library that it loads is not there.
    if form == "pmix" and lab.run(["srun", "--mpi=pmix", "--ntasks=1", "true"]).returncode:
        pytest.skip("this Slurm cannot load PMIx: install libpmix-dev")
    assert close(losses(launch(lab, job, (*EIGHT, *FORMS[form]))["run"]), emulated(job, EIGHT)), form


@pytest.mark.prove
def test_an_ordinary_user_gets_the_same_numbers(lab: Cluster, job: Path) -> None:
    assert Path(launch(lab, job, EIGHT, user=USER)["run"]).owner() == USER
    shutil.rmtree(job.parent / "runs")
    assert close(losses(launch(lab, job, EIGHT)["run"]), emulated(job, EIGHT))


@pytest.mark.prove
def test_a_sweep_is_three_jobs(lab: Cluster, job: Path) -> None:
    sweep = 'sweep.runs=[{"train.seed"=7}, {"train.seed"=8}, {"train.seed"=7, "checkpoint.keep"=3}]'
    launch(lab, job, (*TWO, sweep))
    runs = sorted(job.parent.glob("runs/exact/[0-9]*"))
    first, second, third = map(losses, runs)
    assert first == third and close(first, emulated(job, TWO)) and not close(first, second)


POLLUTION = table(__file__, "slurm_training.toml", "pollution")


@pytest.mark.prove
@pytest.mark.parametrize("how", ["polluted", "export none"])
def test_the_environment_of_the_job_is_what_the_script_says(lab: Cluster, job: Path, how: str) -> None:
    polluted = {name: value for name, value in POLLUTION.items() if not name.startswith("PYTHON")}
    environ = {"SBATCH_EXPORT": "NONE"} if how == "export none" else polluted
    overrides = (*TWO, 'slurm.extra.export="NONE"') if how == "export none" else TWO
    assert losses(launch(lab, job, overrides, environ=environ)["run"]) == losses(launch(lab, job, TWO)["run"])


@pytest.mark.prove
def test_a_step_of_a_larger_allocation_with_few_cpus(lab: Cluster, job: Path) -> None:
    words = [word for override in TWO for word in ("--set", override)]
    done = lab.run(["salloc", "--nodes=3", *hpc_mp("launch", job, "--json", *words)], cwd=job.parent, timeout=120)
    assert done.returncode == 0, f"{done.stderr}\n{logs(job)}"
    assert close(losses(json.loads(done.stdout)["run"]), emulated(job, TWO))


# --- stopping and going on -------------------------------------------------------------------------------------------


LONG = (*TWO, "train.steps=40", "checkpoint.every=5")
SHARED = (*LONG, "job.ranks_per_node=2", "parallel.tensor=2")


def stop_and_compare(lab: Cluster, job: Path, overrides: tuple[str, ...], expected: list[float], ready: Any) -> int:
    """Send USR2 when ``ready``; the run must end by itself with the expected losses. Returns the number of its starts."""
    run, job_id = submit(lab, job, overrides)
    until(lambda: ready(run), "ready for the signal")
    lab.run(["scancel", "--signal=USR2", job_id])
    job_ends(lab, job_id, run)
    assert losses(run.path) == expected
    stopped = [end for end in history(run) if end.kind == "stopped"]
    for end, following in zip(stopped, history(run)[1:], strict=False):
        first = next((line["step"] for line in read_lines(run.metrics) if line["attempt"] == following.attempt), None)
        assert first in (None, end.step + 1), "a step was lost or done twice"
    assert not saving(run)
    return len(history(run))


def moment(number: int) -> Callable[[RunDirectory], bool]:
    """Return a condition: so many seconds after a run's first start, or while its first checkpoint is written."""
    seconds, begun = random.Random(number).uniform(0.0, 13.0), list[float]()

    def reached(run: RunDirectory) -> bool:
        if not begun and run.attempt_record.exists():
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() - begun[0] > seconds

    return saving if number % 5 == 4 else reached


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_usr2_at_twenty_random_moments(lab: Cluster, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = (*TWO, "train.steps=150", "checkpoint.every=5")
    expected = emulated(job, longer)
    starts = []
    for number in range(20):
        starts.append(stop_and_compare(lab, job, longer, expected, moment(number)))
        shutil.rmtree(job.parent / "runs" / "exact")
    with capsys.disabled():
        print(f"\n20 stops: starts per run {starts}")
    assert sum(count == 2 for count in starts) >= 15  # before srun has started a task Slurm gives the signal to nobody


def test_usr2_requeues_cancel_saves_resume_goes_on_and_no_number_changes(lab: Cluster, job: Path) -> None:
    longer = (*TWO, "train.steps=80", "train.global_batch=8", "checkpoint.every=20")
    slow = with_fault(job, "time.sleep(0.3)")
    run, job_id = submit(lab, job, (*longer, *slow))
    until(lambda: steps(run) >= 3, "some steps")
    lab.run(["scancel", "--signal=USR2", job_id])
    until(lambda: len(history(run)) == 1 and steps(run) >= history(run)[0].step + 3, "some steps of the second start")
    assert status(lab, run)["state"] == "running"
    command(lab, "cancel", run.path)
    done = steps(run)
    until(lambda: state(lab, job_id) == "FAILED", "the job's end")  # with 75: a job that depends on this one must not start
    first, second = history(run)
    assert (first.kind, first.action) == ("stopped", "requeue")
    assert (second.kind, second.action, second.step) == ("stopped", "done", done)
    assert status(lab, run)["state"] == "stopped" and done < 80
    (job.parent / "fault" / "sitecustomize.py").unlink()
    assert launch(lab, job, (*longer, *slow), "--resume")["run"] == str(run.path) and losses(run.path) == emulated(job, longer)
    begun = [next(line["step"] for line in read_lines(run.metrics) if line["attempt"] == attempt) for attempt in (1, 2, 3)]
    assert begun == [1, first.step + 1, done + 1], "a step was lost or done twice"
    assert not saving(run)


def status(lab: Cluster, run: RunDirectory) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(command(lab, "status", run.path, "--json").stdout)
    return document


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_ends_the_job_soon_and_says_so_last(lab: Cluster, job: Path) -> None:
    fault = with_fault(job, 'raise RuntimeError("planted")', step=2)
    run, job_id = submit(lab, job, (*LONG, *fault))
    until(lambda: list(run.path.glob("failures/attempt-*-rank-*.json")), "a failure")
    until(lambda: state(lab, job_id) == "FAILED", "the job's end", 50)  # srun would wait 60 s for the other rank
    [end] = history(run)
    assert (end.kind, end.action) == ("error", "fail")
    shown = command(lab, "logs", run.path).stdout.splitlines()
    for said in (read_json(run.outcome)["cause"]["message"], "\n".join(shown[-3:])):
        assert all(word in said for word in ("rank 1", "n2", "dp 1", "RuntimeError: planted")), said
    assert status(lab, run)["state"] == "failed"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("rank", "local", "coordinates", "overrides"), table(__file__, "slurm_training.toml", "memory_eaters", globals()))
def test_a_rank_that_eats_all_memory_is_named(rank: int, local: int, coordinates: str, overrides: tuple[str, ...]) -> None:
    with Lab(2, overrides={"JobAcctGatherParams": "OverMemoryKill"}) as lab:
        job = write_job(lab.share / "job")
        eat = "x = [os.urandom(2**26) for _ in range(48)]; time.sleep(20)"
        fault = with_fault(job, eat, step=2, local=local)
        run, job_id = submit(lab, job, (*overrides, *fault, "slurm.extra.mem=2000"))
        until(lambda: state(lab, job_id) in ("FAILED", "OUT_OF_MEMORY"), "the job's end", 180, 0.3)
        message = read_json(run.outcome)["cause"]["message"]
        assert f"rank {rank} ({coordinates}) on n2 ran out of memory" in message, message
        assert [(end.kind, end.action) for end in history(run)] == [("memory", "fail")]


@pytest.mark.prove
@pytest.mark.parametrize("fault", ["dead", "back within 5 s", "link cut"])
def test_a_lost_node_is_replaced_by_the_spare(lab: Cluster, job: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    three = ("job.nodes=3", "job.ranks_per_node=1", "train.global_batch=24", "train.steps=60", "checkpoint.every=5",
             "job.heartbeat_timeout=10")
    expected = emulated(job, three)
    run, job_id = submit(lab, job, three)
    until(lambda: steps(run) >= 12, "some steps")
    victim = read_json(run.attempt_record)["hosts"][1]
    began = time.time()
    if fault == "link cut":
        lab.link(victim, up=False)
    else:
        lab.kill(victim)
    if fault == "back within 5 s":
        time.sleep(3)
        lab.boot(victim)
    until(lambda: any(line["attempt"] > 1 for line in read_lines(run.metrics)), "a step of the next start", 240)
    took = time.time() - began
    with capsys.disabled():
        print(f"\n{fault}: {took:.1f} s from the fault to the first new step")
    if fault == "link cut":
        lab.link(victim, up=True)  # what still runs there comes back, and must change nothing
    until(lambda: state(lab, job_id) in ("COMPLETED", "FAILED"), "the job's end", 240, 0.3)
    assert losses(run.path) == expected, logs(job)
    assert victim not in read_json(run.attempt_record)["hosts"]
    if fault == "dead":
        lab.boot(victim)


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_twenty_requeues_with_exclusion_hold_no_job(lab: Cluster) -> None:
    run = lab.share / "requeue" / "0001"
    run.mkdir(parents=True)
    script = run / "job.sbatch"
    checkout = Path(__file__).parents[2]
    (run / "again.py").write_text(f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(checkout)!r})
from hpc_mp.cluster.bad_nodes import BadNode
from hpc_mp.cluster.slurm.requeue import exclude, requeue
restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
nodes = [f"n{{1 + number}}" for number in range(min(restart, 2) + 1)]
node = f"n{{1 + restart % 3}}"
job_id = os.environ["SLURM_JOB_ID"]
refused = requeue(job_id, restart, Path({str(script)!r}))
exclude(job_id, [BadNode(each, "lost", "", "", 0.0, 9e9) for each in nodes], nodes, needed=1)
print("refused:", refused, "without", node, flush=True)
""")
    log = run / "log"
    log.touch()
    log.chmod(0o666)
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1 --requeue --open-mode=append\n"
                      f"#SBATCH --output={log}\ntrap '' TERM USR2\n"
                      "echo start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST\n"
                      f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge 20 ] || {sys.executable} {run}/again.py\n')
    job_id = lab.run(["sbatch", "--parsable", str(script)], user=USER, check=True).stdout.strip()
    until(lambda: state(lab, job_id) in ENDS, "20 requeues", 900, 0.3)
    said = log.read_text()
    assert state(lab, job_id) == "COMPLETED" and said.count("refused: None") == 20, said
    nodes = [line.split()[-1] for line in said.splitlines() if line.startswith("start")]
    without = [line.split()[-1] for line in said.splitlines() if line.startswith("refused")]
    assert len(nodes) == 21 and all(node not in without[:number] for number, node in enumerate(nodes)), said
