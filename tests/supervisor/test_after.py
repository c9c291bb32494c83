"""After a supervisor was killed: what the ends of its ranks mean, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rendering import executable, job

from hpc_mp.base.files import write_json
from hpc_mp.job.load import dump_job
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, write_attempt
from hpc_mp.rundir.history import history
from hpc_mp.supervisor import after
from hpc_mp.supervisor.signals import Signals

BEGAN = "srun: launching StepId=7.1 on host n1, 2 tasks: [0-1]\nsrun: launching StepId=7.1 on host n2, 2 tasks: [2-3]\n"
WELL = "srun: launch/slurm: _task_finish: n1: tasks 0-1: Completed\n"
ALL_WELL = WELL + "srun: launch/slurm: _task_finish: n2: tasks 2-3: Completed\n"
STOPPED = "srun: error: n1: tasks 0-1: Exited with exit code 75\nsrun: error: n2: tasks 2-3: Exited with exit code 75\n"
EXITED = WELL + "srun: error: n2: task 2: Exited with exit code 3\nsrun: launch/slurm: _task_finish: n2: task 3: Completed\n"
LOST = WELL + "srun: error: Node failure on n2\n"
KILLED = WELL + "srun: error: n2: task 3: Killed\n"
PREEMPTED = " PreemptTime=2026-11-26T11:38:46"


class EndedStep:
    """srun as ``orphans`` gives it, which ends as it is looked at."""

    pid, returncode = 1, 0

    def __init__(self) -> None:
        self.argv = ["srun", "x", "run"]

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float) -> int:
        return 0

    def send_signal(self, number: int, /) -> None:
        pass


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    """A run whose supervisor has been killed; it goes on from there."""
    def go_on(said: str, *, resumes: bool, job_says: str = "", steps: int = 1, asked_to_stop: bool = False,
              engine: bool = False) -> RunDirectory:
        run = create_run(tmp_path, "x")
        program: dict[str, Any] = {} if engine else {"program": {"command": ["x"], "resumes": resumes}}
        run.job.write_text(dump_job(job(job={"nodes": 2, "ranks_per_node": 2, "device": "cpu"}, **program)))
        write_json(run.placement, to_dict(place(Degrees(data=4), "cluster", 2)))
        write_attempt(run.attempt_record, AttemptRecord("7.0.1", 1, ("n1", "n2"), "n1", 10001, "s", None, 120.0))
        run.srun_log.write_text(said)
        if asked_to_stop:
            run.stop.touch()
        executable(tmp_path / "bin" / "scontrol",
                   f"#!/bin/sh\necho JobId=7 JobState=RUNNING Restarts=0 Command={run.script}{job_says}\n")
        for name in ("sinfo", "squeue", "scancel", "sacct", "sbatch", "srun"):
            executable(tmp_path / "bin" / name, "#!/bin/sh\n")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURMD_NODENAME": "n1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(after, "orphans", lambda *_: [EndedStep() for _ in range(steps)])
        monkeypatch.setattr(Signals, "close", lambda self: None)
        after.go_on_after(137, run.path, ["srun", "x", "run"], Signals())
        return run
    return go_on


@pytest.mark.parametrize(("said", "given", "kind", "action"), [
    (ALL_WELL, {"resumes": False}, "completed", "done"),  # it was begun anew
    (EXITED, {"resumes": False}, "exit", "fail"),  # of its own: it would come again
    (LOST, {"resumes": False}, "node", "requeue"),
    (KILLED, {"resumes": False}, "signal", "requeue"),
    (WELL, {"resumes": False}, "supervisor", "requeue"),  # the others have ended without a word
    ("", {"resumes": False, "steps": 0}, "supervisor", "requeue"),
    (ALL_WELL, {"resumes": False, "job_says": PREEMPTED}, "stopped", "requeue"),
    (STOPPED, {"resumes": False, "asked_to_stop": True}, "stopped", "done"),
    (STOPPED, {"resumes": True}, "supervisor", "requeue"),  # asked by us
    (ALL_WELL, {"resumes": True}, "supervisor", "requeue"),  # many end so when they are asked
    (LOST, {"resumes": True}, "node", "requeue"),
    (EXITED, {"resumes": True}, "supervisor", "requeue"),
    (STOPPED, {"resumes": True, "asked_to_stop": True}, "stopped", "done"),
    (STOPPED, {"resumes": True, "engine": True}, "supervisor", "requeue"),
    (LOST, {"resumes": True, "engine": True}, "node", "requeue"),
])
def test_how_the_ranks_of_a_killed_supervisor_have_ended(
        killed: Callable[..., RunDirectory], said: str, given: dict[str, Any], kind: str, action: str) -> None:
    run = killed(BEGAN + said, **given)
    [end] = history(run)
    assert (end.kind, end.action) == (kind, action), end
    assert run.outcome.exists() is (action != "requeue")
    if kind == "supervisor":
        assert end.message.startswith("the supervisor on n1 was killed by SIGKILL")
    saves = "its ranks save and stop, and the run continues" in run.main_log.read_text()
    assert saves is given["resumes"]
