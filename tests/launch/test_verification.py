"""A job is verified before its first start, once for its structure; what has been verified lies in its run."""

import json
from pathlib import Path

import pytest
from launching import write_job

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.launch import verification
from hpc_mp.launch.launch import run_job
from hpc_mp.launch.verification import OFF, known, verified
from hpc_mp.rundir import RunDirectory

UNTIED = "model.config.tie_word_embeddings=false"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hpc-mp" / "verified"


def never(*_: object, **__: object) -> None:
    raise AssertionError("a process is started")


def test_a_result_is_kept_for_jobs_of_the_same_structure(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(*overrides: str) -> JobSpec:
        return load_job(write_job(tmp_path), overrides)

    record = verified(job())
    assert record.difference < 1e-10 and record.gradients > 10 and len([*cache.iterdir()]) == 1
    monkeypatch.setattr(verification.subprocess, "run", never)
    assert verified(job("job.nodes=4", "train.global_batch=64", "train.seed=0")) == record
    assert known(job(UNTIED)) is None and known(job("parallel.zero=0")) is None


@pytest.mark.prove
def test_a_launch_verifies_and_leaves_the_record(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFF)
    lines: list[str] = []
    outcome = run_job(write_job(tmp_path), on="local", say=lines.append)
    assert outcome.state == "completed" and any(line.startswith("verified") for line in lines)
    record = json.loads(RunDirectory(outcome.run).verified.read_text())
    assert record["difference"] < 1e-10 and record["versions"].keys() == {"torch", "transformers"}


# Python runs this where it starts: the verification of a job, and nothing else, has embeddings that are too large.
FAULT = """
import sys
if "hpc_mp.train.verify.verify" in sys.orig_argv:
    from hpc_mp.train.model.transformers_stage import TransformersStage
    right = TransformersStage._embed
    TransformersStage._embed = lambda stage, batch: 1.01 * right(stage, batch)
"""


@pytest.mark.prove
def test_what_differs_is_not_launched(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFF)
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fault"))
    with pytest.raises(HpcMpError, match=r"the input of transformer\.h\.0: its output differs"):
        run_job(write_job(tmp_path), on="local")
    assert not (tmp_path / "runs").exists()
