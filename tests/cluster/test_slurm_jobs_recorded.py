"""What Slurm 24.11 was recorded to say about jobs is read, and is what the records made for other tests look like."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from recorded import JSON, LINES, RECORDED, SHOWN, record_24, shape

from hpc_mp.cluster.slurm.job import SlurmJob, parse_json, parse_lines, parse_scontrol


def recorded(file: str) -> str:
    return (RECORDED / file).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm writes local time."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def by_id(jobs: list[SlurmJob]) -> dict[str, SlurmJob]:
    return {job.id: job for job in jobs}


def test_three_forms_say_the_same() -> None:
    jobs = by_id(parse_json(recorded(JSON)))
    assert jobs == by_id(parse_lines(recorded(LINES))) == by_id(parse_scontrol(recorded(SHOWN)))
    assert {job.id: (job.state, job.reason, job.exit_code, job.restarts, len(job.nodes)) for job in jobs.values()} == {
        "1": ("RUNNING", "", None, 0, 2),
        "2": ("FAILED", "NonZeroExitCode", 3, 0, 1),
        "3": ("FAILED", "RaisedSignal:9(Killed)", -9, 0, 1),
        "4": ("PENDING", "JobHeldUser", None, 0, 0),
        "5": ("PENDING", "BeginTime", None, 1, 0),
        "6_0": ("RUNNING", "", None, 0, 1),
        "6_[1-2%1]": ("PENDING", "JobArrayTaskLimit", None, 0, 0),
        "7+0": ("RUNNING", "", None, 0, 1),
        "7+1": ("RUNNING", "", None, 0, 1),
        "9": ("COMPLETING", "", None, 0, 1),
    }


def test_made_records_have_the_recorded_shape() -> None:
    made = shape(record_24(1, ["RUNNING"], "None", "n1", 5))
    for job in json.loads(recorded(JSON))["jobs"]:
        assert made == {field: kind for field, kind in shape(job).items() if field in made}
