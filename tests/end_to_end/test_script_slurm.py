"""Job scripts as programs on a real Slurm: what the verdict names when one of them ends, and what is queued again."""

import sys
from pathlib import Path

import pytest
import tomli_w
from lab_runs import ended, hpc_mp, kill_supervisor, newest, until_ended
from slurm_jobs import until
from slurm_lab.lab import Lab
from tables import table

from hpc_mp.rundir import RunDirectory, history
from hpc_mp.rundir.outcome import verdict

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]
# A task: notes that it has come, then ends as its words tell, in the first attempt alone with `once`.
TASK = """import os, signal, sys, time
task, attempt, words = os.environ["SLURM_PROCID"], os.environ["HPC_MP_ATTEMPT"], sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit(75)))
open(f"here-{task}.{attempt}", "w").write(f"{os.getpid()} {os.environ['SLURMD_NODENAME']}")
if words[:1] == ["raise"] and task == words[1]:
    raise ValueError("no such layer: 'head'")
if words[:1] == ["exit"] and task == words[1]:
    sys.exit(int(words[2]))
if words[:1] == ["kill"] and task == words[1] and attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if words[:1] == ["wait"] and ("once" not in words or attempt == "1"):
    time.sleep(200)
"""


@pytest.fixture
def here(here: Path) -> Path:
    (here / "task.py").write_text(TASK)
    return here


def launched(lab: Lab, here: Path, body: str, *options: str, wait: bool = True) -> RunDirectory:
    """The run of a script: to its end with ``wait``, otherwise until its tasks have come."""
    (here / "job.sbatch").write_text("#!/bin/bash\n" + body.replace("TASK", f"{sys.executable} task.py"))
    tree = {"job": {"name": "scripted", "nodes": 2, "time_limit": "00:10:00"}, "environment": {"health": False},
            "program": {"command": ["job.sbatch"], "start": "script"}, "slurm": {"extra": {"ntasks": 4}}}
    (here / "job.toml").write_text(tomli_w.dumps(tree))
    done = hpc_mp(lab, here, "launch", "job.toml", "--on", "slurm", *(["--wait"] if wait else []), *options)
    assert list(here.glob("runs/*/0*")), done.stdout + done.stderr
    if not wait:
        until(lambda: len([path for path in here.glob("here-*.1") if path.read_text()]) == 4, "the tasks come")
    return newest(here)


@pytest.mark.parametrize(("body", "words"), table(__file__, "script_slurm.toml", "causes"),
                         ids=["raise", "exit", "shell", "last of several", "script", "option"])
def test_the_cause_is_named(lab: Lab, here: Path, body: str, words: list[str]) -> None:
    outcome = ended(launched(lab, here, body))
    assert outcome.state == "failed" and outcome.cause is not None
    assert all(word in outcome.cause.message for word in words), outcome.cause.message


@pytest.mark.parametrize("body", ["srun TASK exit 1 3 || srun TASK\n", "if srun TASK exit 0 1; then exit 1; fi\n",
                                  "srun -n1 --exact TASK & srun -n1 --exact TASK & wait\n"], ids=["or", "if", "parallel"])
def test_a_failure_that_the_script_expects_is_none(lab: Lab, here: Path, body: str) -> None:
    assert ended(launched(lab, here, body)).state == "completed"


def test_a_rank_that_is_killed_is_named_and_the_job_is_queued_again(lab: Lab, here: Path) -> None:
    run = launched(lab, here, "srun TASK kill 2\n")
    first, last = history.history(run)[0], ended(run)
    assert (first.action, first.rank, first.node) == ("requeue", 2, (here / "here-2.1").read_text().split()[1])
    assert "SIGKILL" in first.message and last.state == "completed"


def test_cancel_reaches_the_script_and_its_ranks(lab: Lab, here: Path) -> None:
    run = launched(lab, here, "trap 'echo was asked' TERM\nsrun TASK wait\nexit 0\n", wait=False)
    hpc_mp(lab, here, "cancel", run.path)
    assert until_ended(run).state == "stopped"


def test_a_dead_node_is_left_out(lab: Lab, here: Path) -> None:
    run = launched(lab, here, "srun TASK wait once\n", wait=False)
    nodes = {path.read_text().split()[1] for path in here.glob("here-*.1")}
    first = (here / "here-0.1").read_text().split()[1]
    (second,) = nodes - {first}
    lab.kill(second)
    assert until_ended(run, 300).state == "completed" and second in history.history(run)[0].message


@pytest.mark.parametrize(("code", "state"), [(0, "completed"), (5, "failed")])
def test_a_script_outlives_its_supervisor(lab: Lab, here: Path, code: int, state: str) -> None:
    """It goes on to its end; its exit code is known by its witness."""
    body = f"srun TASK\ntouch begun\nwhile [ ! -e go ]; do sleep 0.1; done\nsrun TASK\nexit {code}\n"
    run = launched(lab, here, body, wait=False)
    until(lambda: (here / "begun").exists(), "it begins")
    kill_supervisor(lab, run)
    until(lambda: "the supervisor on" in run.main_log.read_text(), "it is noticed")
    (here / "go").touch()
    assert until_ended(run, 200).state == state and run.attempt() == 1


def test_signals_of_slurm_reach_the_script_and_not_its_ranks(lab: Lab, here: Path) -> None:
    body = "trap 'echo script was asked >>asked' USR1\nsrun TASK wait & wait; wait\nexit 0\n"
    run = launched(lab, here, body, wait=False)
    lab.run(["scancel", "--batch", "--signal=USR1", run.job_id.read_text().strip()], timeout=60)
    until(lambda: (here / "asked").exists(), "the script is asked")
    assert verdict(run) is None and run.srun_log.read_text().count("asked") == 0
    hpc_mp(lab, here, "cancel", run.path)
    assert until_ended(run).state == "stopped"


def test_the_time_limit_has_a_verdict(lab: Lab, here: Path) -> None:
    outcome = ended(launched(lab, here, "srun TASK wait\n", "--set", "job.time_limit=00:01:00"))
    assert outcome.state in ("failed", "stopped") and "time limit" in str(outcome.cause and outcome.cause.message)
