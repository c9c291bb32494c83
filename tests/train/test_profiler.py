"""``train.profile``: torch's profiler has the named steps of the named ranks, and no others."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from exact import GPT2
from layouts import job, trained_run

from hpc_mp.job.spec import ProfiledSteps
from hpc_mp.report.page import write_report
from hpc_mp.rundir import read_lines
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.rank.profiler import ProfilerWindow


def spans(trace: Path) -> Counter[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(("rank", "first", "traced"), [(1, 1, "23"), (1, 3, "3"), (1, 4, ""), (0, 1, "")])
def test_a_window_has_its_steps_alone(tmp_path: Path, rank: int, first: int, traced: str) -> None:
    settings, file = ProfiledSteps(steps=2, from_step=2, on_ranks=(1, 2)), tmp_path / "trace" / "x.json.gz"
    window = ProfilerWindow(settings, rank, torch.device("cpu"), file, (said := list[str]()).append)
    for step in range(first, 5):
        window.before(step)
        with profiled(f"step {step}"):
            torch.ones(2).sum()
    window.close()
    found = spans(file) if traced else Counter[str]()
    assert found == Counter(f"step {step}" for step in traced)
    assert [line.partition(":")[0] for line in said] == [f"torch's profiler traces steps {step} to 3" for step in traced[:1]]


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    window = ProfilerWindow(ProfiledSteps(steps=1, from_step=1), 0, torch.device("cpu"), tmp_path / "file" / "x.json.gz",
                            (said := list[str]()).append)
    window.before(1)
    window.before(2)
    assert said[1].startswith("warning: ") and "cannot be written" in said[1]


def test_a_run_has_the_traces_of_its_ranks(place: Path) -> None:
    keys = ("job.ranks_per_node=2", "parallel.tensor=2", "train.steps=3",
            "train.profile={steps = 1, from_step = 2, on_ranks = [1]}")
    run = trained_run(job(place, GPT2, keys))
    assert run.profile.found() == [run.profile(1)]
    found = spans(run.profile(1))
    assert all(found[phase] == 1 for phase in ("forward_backward", "reduce_gradients", "agree", "update", "publish"))
    assert found["F of stage 0, microbatch 0"] == 1 and found["all-reduce, tensor"] > 1
    assert "torch's profiler traces steps 2 to 2: " in run.rank_log(1).read_text()
    assert "trace/profile-00001.json.gz" in write_report(run).read_text()
    for line in read_lines(run.metrics):
        assert line["mfu"] is None and line["samples_per_s"] * 24 == pytest.approx(line["tokens_per_s"])
