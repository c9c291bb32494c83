"""Handing a script to Slurm: submission, following, ending, steps. Fake programs on PATH, no Slurm."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import table

from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm import submit as slurm
from hpc_mp.cluster.slurm.allocation import step_environment

PYTHON = shlex.quote(sys.executable)
WRITE_DOWN = "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"
Fake = Callable[[str, str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """fake(program, shell lines) puts a program on PATH; returns where its arguments and environment are written."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def make(program: str, lines: str) -> Path:
        record = tmp_path / f"{program}.json"
        (tmp_path / program).write_text(f"#!/bin/sh\n{PYTHON} -c \"{WRITE_DOWN}\" '{record}' \"$@\"\n{lines}\n")
        (tmp_path / program).chmod(0o755)
        return record

    return make


def seen(record: Path) -> tuple[list[str], dict[str, str]]:
    argv, environ = json.loads(record.read_text())
    return argv, environ


@pytest.mark.parametrize("answer", ["1234", "1234;west", "a site's greeting\n1234"])
def test_sbatch_gives_the_job_id(fake: Fake, answer: str) -> None:
    record = fake("sbatch", f'echo "{answer}"')
    assert slurm.sbatch(Path("/a run/job.sbatch")).job_id == "1234"
    assert seen(record)[0] == ["--parsable", "/a run/job.sbatch"]


def test_a_job_inherits_nothing_from_another_job_or_profile(fake: Fake) -> None:
    record = fake("sbatch", "echo 1")
    foreign = {"SLURM_NTASKS": "99", "SLURM_MEM_PER_CPU": "1", "SBATCH_PARTITION": "nowhere", "SALLOC_QOS": "x",
               "SRUN_CPUS_PER_TASK": "3", "MASTER_PORT": "1", "RANK": "5"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "secret", "SLURMISH": "1", "OMP_NUM_THREADS": "4"}
    slurm.sbatch(Path("job.sbatch"), (), os.environ | foreign | kept)
    environ = seen(record)[1]
    assert not foreign.keys() & environ.keys()
    assert kept.items() <= environ.items()


def test_the_words_of_a_site_come_with_the_job(fake: Fake) -> None:
    record = fake("sbatch", "echo a site\\'s greeting; echo 1234; echo 'sbatch: INFO your project has 3 h left' >&2")
    submission = slurm.sbatch(Path("job.sbatch"), ["--dependency=afterany:7"])
    assert submission == slurm.Submission("1234", "a site's greeting\nsbatch: INFO your project has 3 h left")
    assert seen(record)[0] == ["--parsable", "--dependency=afterany:7", "job.sbatch"]


@pytest.mark.parametrize(("answer", "words"), table(__file__, "slurm_submit.toml", "answers_without_an_id"))
def test_an_answer_without_an_id_is_a_refusal_in_slurms_words(fake: Fake, answer: str, words: str) -> None:
    fake("sbatch", answer)
    with pytest.raises(RunFailed, match=words):
        slurm.sbatch(Path("/r/job.sbatch"))


def test_cancel(fake: Fake) -> None:
    record = fake("scancel", "")
    slurm.cancel("7")
    assert seen(record)[0] == ["7"]
    slurm.cancel(["7", "8"], "USR2")
    assert seen(record)[0] == ["--signal=USR2", "7", "8"]


def test_a_refused_cancel_and_a_missing_sbatch_are_told(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("scancel", "echo 'scancel: error: Access denied' >&2; exit 1")
    with pytest.raises(RunFailed, match="Access denied"):
        slurm.cancel("7")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunFailed, match="sbatch is not on PATH"):
        slurm.sbatch(Path("job.sbatch"))


def test_a_step_keeps_the_allocation_and_nothing_else_of_slurm() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CONF": "/c", "SLURM_NTASKS": "1",
              "SLURM_STEP_ID": "0", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_PROCID": "0", "MASTER_PORT": "1",
              "HOME": "/h"}
    assert step_environment(inside) == {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CONF": "/c", "HOME": "/h", "SLURM_OVERLAP": "1"}
