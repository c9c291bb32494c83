"""``track.to``: TensorBoard, Weights & Biases and MLflow, as installed, get the numbers that metrics.jsonl has."""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from exact import GPT2, HELD_OUT
from layouts import job, relaunch, start, trained_run
from planting import wrapped
from ranks import exit_codes

from hpc_mp.base import extras
from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import RunDirectory, read_json, read_lines
from hpc_mp.train.rank import trackers

Numbers = Mapping[str, Mapping[int, float]]  # name -> step -> number


def of_tensorboard(run: RunDirectory) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def of_mlflow(run: RunDirectory) -> Numbers:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run.mlflow}")
    (experiment,) = client.search_experiments(filter_string="name = 'a proof'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == f"exact/{run.path.name}" and found.data.params["train.global_batch"] == "24"
    assert not any("environment" in name or "hunter2" in value for name, value in found.data.params.items())
    return {name: {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, name)}
            for name in found.data.metrics}


def of_wandb(run: RunDirectory) -> Numbers:
    from wandb.proto.wandb_internal_pb2 import Record

    numbers: dict[str, dict[int, float]] = {}
    for path in sorted((run.path / "wandb").glob("offline-run-*/*.wandb")):
        assert b"hunter2" not in path.read_bytes()
        for data in records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    numbers.setdefault(name, {})[record.history.step.num] = float(item.value_json)
    return numbers


def records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which W&B writes without its servers: a header of 7 bytes, then pieces with
    a sum of 4 bytes, a length of 2 and a kind (whole, first, middle, last), none across the end of a block."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7:at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


READERS: dict[str, Callable[[RunDirectory], Numbers]] = {
    "tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
CASES = [pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"))
         for name in READERS]


@pytest.mark.parametrize("name", CASES)
def test_a_tracker_has_the_numbers_of_the_run(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    keys = (f'track.to=["{name}"]', 'track.experiment="a proof"', 'environment.set={SECRET="hunter2"}', *HELD_OUT,
            "job.ranks_per_node=2")
    run = trained_run(job(place, GPT2, [*keys, "train.steps=2"]))
    relaunch(run, place, GPT2, [*keys, "train.steps=4"])
    numbers, lines, evaluations = READERS[name](run), read_lines(run.metrics), read_lines(run.evaluations)
    for prefix, records, key in (("train", lines, "loss"), ("train", lines, "tokens_per_s"), ("held_out", evaluations, "loss")):
        expected = {line["step"]: line[key] for line in records}
        assert numbers[f"{prefix}/{key}"] == pytest.approx(expected, rel=1e-6), "and once for each step, over both attempts"
    assert "train/dropped_share" not in numbers and all(map(math.isfinite, numbers["train/grad_norm"].values()))


def test_a_library_that_is_missing_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(HpcMpError, match=r"track.to = \['wandb'\]: needs what is not installed: wandb. pip install wandb"):
        extras.need_trackers(["wandb"])
    extras.need_trackers([])


def forgetful() -> None:
    """Have TensorBoard's library be there, and its writer fail at the second step, with a secret in the error."""
    class Writer:
        def __init__(self, **_: object) -> None: ...
        def add_scalar(self, name: str, number: float, step: int) -> None:
            if step == 2:
                raise ConnectionError("https://user:hunter2@example.org")
        def close(self) -> None: ...

    wrapped(trackers, "need_trackers", lambda need: lambda names: None)()
    wrapped(trackers, "import_module", lambda load: lambda name: type("module", (), {"SummaryWriter": Writer}))()


def test_a_tracker_that_fails_ends_no_training(place: Path) -> None:
    run = trained_run(job(place, GPT2, ['track.to=["tensorboard"]']), forgetful)
    log = run.main_log.read_text()
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3]
    assert log.count("tensorboard fails (ConnectionError): it gets no further numbers") == 1 and "hunter2" not in log


def test_a_tracker_that_refuses_to_begin_ends_the_run(place: Path) -> None:
    def unwilling() -> None:
        wrapped(trackers, "need_trackers", lambda need: lambda names: None)()
        wrapped(trackers, "import_module", lambda load: lambda name: 1 / 0)()

    run = start(job(place, GPT2, ['track.to=["wandb"]']))
    assert exit_codes(1, run.job, unwilling) == [2]
    message = read_json(run.failure(1, 0))["message"]
    assert "track.to = ['wandb']: wandb refuses to begin (ZeroDivisionError)" in message and "Log in to it" in message
