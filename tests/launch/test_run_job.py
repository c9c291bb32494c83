"""``hpc_mp.run_job``: launching from Python, on emulated nodes and on a real Slurm."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import emulated
import pytest
import slurm_jobs
from launching import executable, the_run, write_job
from slurm_lab.lab import Lab

import hpc_mp
import hpc_mp.launch.backends.local
import hpc_mp.launch.launch
import hpc_mp.report.page
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.launch.backends import BACKENDS
from hpc_mp.launch.launch import LaunchRequest, again, preview
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir import RunDirectory, read_json
from hpc_mp.rundir.outcome import Outcome


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file whose emulated ranks are those of ``emulated.py``: they train without a model, or do another deed."""
    local = functools.partial(hpc_mp.launch.backends.local.start, entry=emulated.ENTRY)
    monkeypatch.setitem(BACKENDS, "local", dataclasses.replace(BACKENDS["local"], start=local))
    monkeypatch.setattr(hpc_mp.launch.backends.local, "family_of", lambda _: SimpleNamespace(modules=()))
    monkeypatch.setattr(hpc_mp.launch.backends.local, "CHECK", emulated.A_WARNING)
    monkeypatch.setattr(hpc_mp.launch.launch, "check_model", lambda *_, **__: ["a warning"])
    monkeypatch.setattr(hpc_mp.report.page, "write_report", lambda run: run.report)
    monkeypatch.setenv("DEED", "train")
    return write_job(tmp_path)


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


# --- emulated nodes ---------------------------------------------------------------------------------------------------


def test_a_run_from_python(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is said reaches the caller alone."""
    heard: list[str] = []
    outcome = hpc_mp.run_job(str(job), on="local", say=heard.append)
    assert isinstance(outcome, Outcome) and outcome.run == the_run(job).path
    assert (outcome.state, outcome.steps, outcome.first_loss, outcome.loss, outcome.cause) == ("completed", 5, 8.0, 1.6, None)
    assert outcome.report == the_run(job).report and read_json(the_run(job).outcome)["report"] == str(outcome.report)
    text = "\n".join(heard)
    assert "emulated on this machine (--on local)" in text and f"run       {the_run(job).path}" in text
    assert "warning: a warning" in text and capfd.readouterr() == ("", "")


def test_in_another_thread_than_the_main_one(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A server or a notebook's widget may start it there, where Python takes no handlers of signals."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(hpc_mp.run_job(job, on="local")))
    thread.start()
    thread.join(60)
    assert [outcome.state for outcome in outcomes] == ["completed"] and capfd.readouterr() == ("", "")


def test_a_job_made_in_python(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    written = load_job(job)
    spec = JobSpec.model_validate({
        "job": {"name": "t", "nodes": 2, "ranks_per_node": 2}, "model": {"config": written.model.config},
        "data": {"files": ["text.txt"], "sequence_length": 32}, "train": {"steps": 5, "global_batch": 8}})
    outcome = hpc_mp.run_job(spec, on="local", overrides=["train.steps=3"])
    assert (outcome.state, outcome.steps, outcome.run) == ("completed", 3, the_run(job).path)
    second = hpc_mp.run_job(job, on="local", overrides=["train.steps=3"])
    assert load_job(RunDirectory(second.run).job) == load_job(RunDirectory(outcome.run).job), "the file and the value are one job"
    assert again(LaunchRequest(spec), outcome.run) == f"hpc-mp launch {outcome.run}/job.toml --on local --resume"
    for on, overrides, words in (("local", ["parallel.tensor=3"], "tensor"),
                                 ("lokal", [], "'lokal': is no back end. Choose one of auto, slurm, local, mpi")):
        with pytest.raises(HpcMpError, match=words):
            hpc_mp.run_job(spec, on=on, overrides=overrides)


def test_a_preview_is_a_value(job: Path) -> None:
    shown = preview(LaunchRequest(job, "local", ("job.nodes=1",)), Listener())
    assert shown.run == the_run(job).path and not shown.run.exists()
    assert shown.script.text.startswith("#!/bin/bash\n") and shown.plans[0].spec.job.nodes == 1
    document = json.loads(json.dumps(shown.document()))
    assert document["state"] == "planned"
    assert {"key": "job.device", "value": "cpu", "why": "nvidia-smi finds no GPU"} in document["choices"]
    request = LaunchRequest(job, "local", (
        "environment.set.TOKEN=hunter2", "train.steps=7", "environment.stage=true", "program.environment.KEY=hunter2",
        "sweep.grid.'program.environment.KEY'=['hunter2']", "program={ environment = { KEY = 'hunter2' } }"))
    shown = ("'--set=environment.set.TOKEN=…' --set=train.steps=7 --set=environment.stage=true "
             "'--set=program.environment.KEY=…' '--set=sweep.grid.'\"'\"'program.environment.KEY'\"'\"'=…' '--set=program=…'")
    assert again(request, job.parent) == f"hpc-mp launch {job} --on local {shown} --resume"


# --- the door is light ------------------------------------------------------------------------------------------------

HEAVY = "{'torch', 'transformers', 'tokenizers', 'click', 'rich', 'submitit'}"


def imported(code: str) -> str:
    return subprocess.run([sys.executable, "-c", f"import sys; {code}; print(sorted({HEAVY} & set(sys.modules)))"],
                          capture_output=True, text=True, check=True).stdout.strip()


def test_the_door_imports_nothing_heavy(job: Path) -> None:
    assert imported("import hpc_mp; hpc_mp.run_job") == imported("import hpc_mp; hpc_mp.submit") == "[]"
    assert "click" in imported("import hpc_mp.cli.launch"), "what is heavy would be seen"
    with pytest.raises(AttributeError, match="no attribute 'submitted'"):
        _ = hpc_mp.submitted
    code = ("import pathlib; [sys.modules.__setitem__(name, None) for name in ('torch', 'tokenizers')]; "
            "from hpc_mp.launch.launch import LaunchRequest, plan_job; "
            f"print(plan_job(LaunchRequest(pathlib.Path({str(job)!r}), 'local'))[0].spec.job.device)")
    assert imported(code).splitlines()[0] == "cpu", "a script is rendered without tokenizers and torch"


def test_emulated_nodes_in_place_of_a_cluster_are_named_at_the_end(job: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "scontrol"):
        executable(tmp_path / "bin", name, "echo 'no controller' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    assert hpc_mp.run_job(job, on="auto", say=said.append).state == "completed"
    last = [text for text in said if text.startswith("ran ")]
    assert last == ["ran       emulated on this machine, not on a cluster: sbatch is on PATH, but no Slurm answers "
                    "(no controller), and\n          SLURM_CONF is not set: export it if slurm.conf is not in the default place"]
    assert said.index(last[0]) > next(n for n, text in enumerate(said) if text.startswith("run "))


# --- Slurm ------------------------------------------------------------------------------------------------------------


def test_sweeps_have_an_outcome_for_every_run(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "bin", "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    job.write_text(job.read_text() + '[sweep]\ngrid = { "train.seed" = [1, 2] }\n')
    outcome = hpc_mp.run_job(job, on="slurm", wait=False)
    assert [(each.state, each.job_id) for each in outcome.elements] == [("submitted", "7_0"), ("submitted", "7_1")]
    assert [load_job(RunDirectory(each.run).job).train.seed for each in outcome.elements] == [1, 2]
    assert outcome.state == "submitted" and len(outcome.document()["elements"]) == 2
    executable(tmp_path / "bin", "sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    with pytest.raises(HpcMpError, match="was not taken by Slurm: sbatch: error: no"):
        hpc_mp.run_job(job, on="slurm")
    with pytest.raises(HpcMpError, match=r"\[sweep\] makes several\. Name the job file of the run: .*t/NNNN/job\.toml --resume"):
        hpc_mp.run_job(job, on="slurm", resume=True)


@pytest.fixture
def on_slurm(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # bad nodes that other tests have found are not this one's
    monkeypatch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
    yield slurm_jobs.write_job(lab.share / f"from python {os.urandom(2).hex()}")
    lab.mend()


@pytest.mark.timeout(300)
def test_a_slurm_job_from_python(on_slurm: Path) -> None:
    heard: list[str] = []
    outcome = hpc_mp.run_job(on_slurm, on="slurm", overrides=[*slurm_jobs.TWO, "train.steps=4"], say=heard.append)
    assert (outcome.state, outcome.steps, outcome.cause) == ("completed", 4, None), outcome
    assert outcome.job_id is not None and outcome.job_id.isdigit()
    assert any(f"job       {outcome.job_id}" in text for text in heard)
    assert read_json(RunDirectory(outcome.run).outcome)["report"] == str(outcome.report) and outcome.report is not None
    again_ = hpc_mp.run_job(on_slurm, on="slurm", overrides=[*slurm_jobs.TWO, "train.steps=4"], resume=True)
    assert again_.state == "completed" and again_.run == outcome.run, "nothing was left to do"


@pytest.mark.timeout(300)
def test_a_slurm_job_that_fails_names_its_cause(on_slurm: Path) -> None:
    ranks = slurm_jobs.light(on_slurm, 'exit "$SLURM_PROCID"')
    outcome = hpc_mp.run_job(on_slurm, on="slurm", overrides=[*slurm_jobs.TWO, "train.steps=4", ranks])
    assert outcome.state == "failed" and outcome.cause is not None, outcome
    assert (outcome.cause.kind, outcome.cause.rank, outcome.cause.node) == ("exit", 1, "n2"), outcome
