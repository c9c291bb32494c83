"""A user's command at a run's end: once, with the outcome in its variables, and no worse end for its failure."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reported import Run

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import dump_job, resolve
from hpc_mp.job.inputs import find_program
from hpc_mp.report import conclude as concluding
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir.outcome import Cause, Outcome, figures, verdict

WRITE = """
import json, os, sys
with open("heard.jsonl", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]) + "\\n")
"""


def notifying(tmp_path: Path, *command: str) -> Run:
    run = Run(tmp_path).complete()
    spec = run.spec.model_copy(update={"notify": run.spec.notify.model_copy(update={"command": command})})
    run.run.job.write_text(dump_job(spec), encoding="utf-8")
    return run


def calls(run: Run) -> list[tuple[list[str], str, dict[str, str]]]:
    file = run.path / "heard.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_command_hears_of_the_end_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_MP_TOKEN", "fencing")
    program = tmp_path / "program.py"
    program.write_text(WRITE)
    run = notifying(tmp_path, sys.executable, str(program), "$HOME; `x`", "two words")
    cause = Cause("error", "rank 3: \"boom\"; $(rm)")
    outcome = Outcome(run.path, "failed", "77", cause=cause, **figures(run.run, 1))
    conclude(outcome, 1)
    ((words, where, found),) = calls(run)
    assert words == ["$HOME; `x`", "two words"] and where == str(run.path), "no shell has touched them"
    assert {name: value for name, value in found.items() if name.startswith("HPC_MP_") and value} | {"HPC_MP_TOKEN": ""} == {
        "HPC_MP_RUN": str(run.path), "HPC_MP_NAME": "demo", "HPC_MP_STATE": "failed", "HPC_MP_JOB_ID": "77", "HPC_MP_STEPS": "20",
        "HPC_MP_LOSS": "4.0", "HPC_MP_CAUSE": cause.message, "HPC_MP_REPORT": str(run.run.report), "HPC_MP_TOKEN": "",
        **{name: os.environ[name] for name in os.environ if name.startswith("HPC_MP_") and name != "HPC_MP_TOKEN"}}
    assert "HPC_MP_TOKEN" not in found
    conclude(outcome, 1)
    assert len(calls(run)) == 1, "a job of a chain that finds the run done says nothing again"
    run.attempt = 1
    run.resume(20)
    conclude(replace(outcome, state="completed", cause=None), 2)
    assert [call[2]["HPC_MP_STATE"] for call in calls(run)] == ["failed", "completed"], "a resume is another end"


@pytest.mark.parametrize(("command", "limit", "said"), [
    ((sys.executable, "-c", "print('no route'); raise SystemExit(3)"), 60.0, "notify.command exited with 3: no route"),
    (("/nowhere/program",), 60.0, "notify.command cannot be started (No such file or directory)"),
    ((sys.executable, "-c", "import time; time.sleep(30)"), 0.5, "notify.command was aborted")])
def test_a_command_that_fails_is_said_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          command: tuple[str, ...], limit: float, said: str) -> None:
    monkeypatch.setattr(concluding, "LIMIT_S", limit)
    run, warned = notifying(tmp_path, *command), list[str]()
    ended = conclude(Outcome(run.path, "completed", **figures(run.run, 1)), 1, warned.append)
    assert ended.state == "completed" and (found := verdict(run.run)) is not None and found.state == "completed"
    assert said in warned[0] and said in run.run.main_log.read_text()


def test_without_a_command_nothing_is_started(tmp_path: Path) -> None:
    run = notifying(tmp_path)
    conclude(Outcome(run.path, "completed", **figures(run.run, 1)), 1)
    assert calls(run) == [] and not run.run.main_log.exists()


def test_the_program_is_looked_for_at_launch(tmp_path: Path) -> None:
    (tmp_path / "say.sh").write_text("#!/bin/sh\n")
    tree = {"model": {"config": {"model_type": "gpt2"}}, "data": {"files": ["*.txt"], "sequence_length": 64},
            "train": {"steps": 1, "global_batch": 1}, "notify": {"command": ["./say.sh", "x"]}}
    command = resolve(tree, tmp_path).notify.command
    assert command == (str(tmp_path / "say.sh"), "x"), "seen from the job file"
    with pytest.raises(HpcMpError, match="is not a program that can be started here"):
        find_program(command)
    (tmp_path / "say.sh").chmod(0o755)
    find_program(command)
    find_program(("sh", "-c", "true"))
    find_program(())
