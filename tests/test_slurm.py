"""Handing a script to Slurm: submission, following, ending, steps. Fake programs on PATH, no Slurm."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_mp.cluster.ask import NoAnswer
from hpc_mp.cluster.slurm_query import NodeKind, Partition
from hpc_mp.errors import RunFailed
from hpc_mp.job import JobSpec, resolve
from hpc_mp.launch import slurm

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


# --- submission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["1234", "1234;west", "a site's greeting\n1234"])
def test_submit_returns_the_job_id(fake: Fake, answer: str) -> None:
    record = fake("sbatch", f'echo "{answer}"')
    assert slurm.submit(Path("/a run/job.sbatch")) == "1234"
    assert seen(record)[0] == ["--parsable", "/a run/job.sbatch"]


def test_a_job_inherits_nothing_from_another_job_or_profile(fake: Fake) -> None:
    record = fake("sbatch", "echo 1")
    foreign = {"SLURM_NTASKS": "99", "SLURM_MEM_PER_CPU": "1", "SBATCH_PARTITION": "nowhere", "SALLOC_QOS": "x",
               "SRUN_CPUS_PER_TASK": "3", "MASTER_PORT": "1", "RANK": "5"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "secret", "SLURMISH": "1", "OMP_NUM_THREADS": "4"}
    slurm.submit(Path("job.sbatch"), os.environ | foreign | kept)
    environ = seen(record)[1]
    assert not foreign.keys() & environ.keys()
    assert kept.items() <= environ.items()


def test_a_refusal_is_passed_on_in_slurms_words(fake: Fake) -> None:
    fake("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    words = r"refused /r/job\.sbatch:\nsbatch: error: Batch job submission failed: Invalid qos$"
    with pytest.raises(RunFailed, match=words):
        slurm.submit(Path("/r/job.sbatch"))


def test_without_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunFailed, match="sbatch is not on PATH"):
        slurm.submit(Path("job.sbatch"))


def test_cancel(fake: Fake) -> None:
    record = fake("scancel", "")
    slurm.cancel("7")
    assert seen(record)[0] == ["7"]
    slurm.cancel("7", "USR2")
    assert seen(record)[0] == ["--signal=USR2", "7"]


def test_a_refused_cancel_is_told(fake: Fake) -> None:
    fake("scancel", "echo 'scancel: error: Access denied' >&2; exit 1")
    with pytest.raises(RunFailed, match="Access denied"):
        slurm.cancel("7")


# --- following --------------------------------------------------------------------------------------------------------

GONE = NoAnswer("slurm_load_jobs error: Invalid job id specified")
BUSY = NoAnswer("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")


def program(answers: Mapping[str, str | NoAnswer]) -> Callable[[Sequence[str]], str]:
    def ask(argv: Sequence[str]) -> str:
        answer = answers.get(argv[0], NoAnswer(f"{argv[0]} is not on PATH"))
        if isinstance(answer, NoAnswer):
            raise answer
        return answer

    return ask


@pytest.mark.parametrize(("answers", "state"), [
    ({"squeue": "RUNNING\n"}, "RUNNING"),
    ({"squeue": "\n", "scontrol": "JobId=7 JobName=x JobState=COMPLETED Reason=None"}, "COMPLETED"),
    ({"squeue": GONE, "scontrol": GONE, "sacct": "CANCELLED by 0\n"}, "CANCELLED"),
    ({"squeue": GONE, "scontrol": GONE}, slurm.FORGOTTEN),
    ({"squeue": BUSY, "scontrol": BUSY}, slurm.UNKNOWN),
    ({}, slurm.UNKNOWN),
])
def test_state(answers: dict[str, str | NoAnswer], state: str) -> None:
    assert slurm.state("7", program(answers)) == state


def test_wait_looks_ever_more_rarely_and_ends_with_the_last_state() -> None:
    states = iter(["PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "PENDING", "RUNNING", "RUNNING", "TIMEOUT"])
    pauses: list[tuple[str, float]] = []
    last = slurm.wait("7", lambda state, seconds: pauses.append((state, seconds)), lambda argv: next(states))
    assert last == "TIMEOUT"
    assert [state for state, _ in pauses] == [
        "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "PENDING", "RUNNING", "RUNNING"]
    seconds = [seconds for _, seconds in pauses]
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 30


def test_wait_outlives_a_controller_that_is_away() -> None:
    # squeue, scontrol and sacct; then squeue again
    answers: Iterator[str | NoAnswer] = iter([BUSY, BUSY, BUSY, "COMPLETED\n"])

    def ask(argv: Sequence[str]) -> str:
        answer = next(answers)
        if isinstance(answer, NoAnswer):
            raise answer
        return answer

    assert slurm.wait("7", lambda state, seconds: None, ask) == "COMPLETED"


# --- a step of a live allocation --------------------------------------------------------------------------------------


def test_a_step_keeps_the_allocation_and_nothing_else_of_slurm() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CONF": "/c", "SLURM_NTASKS": "1",
              "SLURM_STEP_ID": "0", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_PROCID": "0", "MASTER_PORT": "1",
              "HOME": "/h"}
    assert slurm.step_environment(inside) == {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CONF": "/c", "HOME": "/h", "SLURM_OVERLAP": "1"}
    assert slurm.step_command(Path("/a b/job.sbatch")) == ["bash", "/a b/job.sbatch"]


# --- what "auto" means on a partition ---------------------------------------------------------------------------------


def job(**sections: Any) -> JobSpec:
    tree = {"model": {"config": {"model_type": "gpt2"}}, "data": {"files": ["a.txt"], "sequence_length": 8},
            "train": {"steps": 1, "global_batch": 32}}
    return resolve(tree | sections, Path("/"))


GPU = Partition("gpu", False, True, None, (NodeKind(("g1",), 64, 1, (("h100", 4),)),))
CPU = Partition("cpu", True, True, None, (NodeKind(("n1",), 64, 1, ()),))


@pytest.mark.parametrize(("partition", "device", "request_form", "expected"), [
    ("gpu", "auto", "auto", ("cuda", "gpus-per-node")),
    (None, "auto", "auto", ("cpu", "none")),
    ("cpu", "cuda", "auto", ("cuda", "none")),
    ("gpu", "cpu", "gres", ("cpu", "gres")),
    ("gone", "auto", "auto", ("auto", "auto")),
])
def test_settle(partition: str | None, device: str, request_form: str, expected: tuple[str, str]) -> None:
    spec = job(job={"device": device}, slurm={"partition": partition, "gpu_request": request_form})
    settled = slurm.settle(spec, [CPU, GPU])
    assert (settled.job.device, settled.slurm.gpu_request) == expected
