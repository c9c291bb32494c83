"""Trackers: TensorBoard, Weights & Biases and MLflow get the numbers of ``metrics.jsonl`` and ``evaluations.jsonl`` from rank 0.

A tracker is a copy. If it fails while ranks train, the log says so, it gets no further numbers, and training goes on. Libraries
read their keys themselves, from where they keep them. Of the job file only the tables of the training are sent: variables of the
environment can be secrets, and so can the text of an error (an address with a password), of which the log has the kind alone.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import need_trackers
from hpc_mp.job import JobSpec
from hpc_mp.job.values import leaves
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import Evaluation, StepMetrics
from hpc_mp.train.rank.failures import RankContext

TABLES = {"model", "data", "parallel", "train", "evaluate"}  # of the job file, which are sent
UNSENT = {"step", "attempt", "criterion"}
Track = Callable[[str, StepMetrics | Evaluation], None]  # ("train" or "held_out", numbers)


class Tracker(NamedTuple):
    """A tracker of one run: ``write`` is called with a step and its numbers, ``close`` at the end."""

    write: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


def tensorboard(spec: JobSpec, run: RunDirectory, begin: int) -> Tracker:
    """Open event files in the run directory. Numbers of steps that are trained again are replaced. ``begin``: number of steps
    done."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(run.tensorboard), purge_step=begin + 1)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return Tracker(write, writer.close)


def weights_and_biases(spec: JobSpec, run: RunDirectory, begin: int) -> Tracker:
    """Open a run of W&B, with which later attempts go on. It keeps the first numbers of a step that is trained again."""
    wandb = import_module("wandb")
    place = run.path.stat()
    identity = blake2b(f"{run.path} {place.st_dev} {place.st_ino}".encode(), digest_size=8).hexdigest()
    opened = wandb.init(
        project=project_of(spec), name=run_name(spec, run), id=identity, resume="allow", dir=str(run.path),
        config=described(spec), settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True))
    return Tracker(lambda step, numbers: opened.log(dict(numbers), step=step), opened.finish)


def mlflow(spec: JobSpec, run: RunDirectory, begin: int) -> Tracker:
    """Open a run of MLflow, with which later attempts go on; in the run directory, unless ``MLFLOW_TRACKING_URI`` names a
    server."""
    library = import_module("mlflow")
    if "MLFLOW_TRACKING_URI" not in os.environ:
        library.set_tracking_uri(f"sqlite:///{run.mlflow}")
    experiment = library.set_experiment(project_of(spec))
    earlier = library.search_runs([experiment.experiment_id], f"tags.`hpc_mp.run` = '{run.path}'", output_format="list")
    library.start_run(earlier[0].info.run_id if earlier else None, run_name=run_name(spec, run),
                      tags={"hpc_mp.run": str(run.path)})
    if not earlier:
        library.log_params(described(spec))
    return Tracker(lambda step, numbers: library.log_metrics(dict(numbers), step=step), library.end_run)


TRACKERS: Mapping[str, Callable[[JobSpec, RunDirectory, int], Tracker]] = {
    "tensorboard": tensorboard, "wandb": weights_and_biases, "mlflow": mlflow}


def project_of(spec: JobSpec) -> str:
    return spec.track.experiment or spec.job.name


def run_name(spec: JobSpec, run: RunDirectory) -> str:
    return f"{spec.job.name}/{run.path.name}"


def described(spec: JobSpec) -> dict[str, Any]:
    """Return the settings of a training by dotted name."""
    return leaves("", spec.model_dump(mode="json", include=TABLES, exclude_none=True))


@contextmanager
def tracked(spec: JobSpec, context: RankContext, begin: int) -> Iterator[Track]:
    """Open the trackers on rank 0, and yield what writes numbers to them. ``begin``: number of steps done. Raises HpcMpError if a
    library is missing, or refuses to begin."""
    need_trackers(spec.track.to)
    trackers = {name: _opened(name, spec, context.run, begin) for name in spec.track.to} if context.who.rank == 0 else {}

    def attempted(action: Callable[[Tracker], object]) -> None:
        for name, tracker in list(trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # of any kind: a copy must not end a training
                context.log.say(f"{name} fails ({type(error).__name__}): it gets no further numbers")
                del trackers[name]

    def track(prefix: str, record: StepMetrics | Evaluation) -> None:
        numbers = {f"{prefix}/{name}": float(number) for name, number in asdict(record).items()
                   if name not in UNSENT and math.isfinite(number)}
        attempted(lambda tracker: tracker.write(record.step, numbers))

    try:
        yield track
    finally:
        attempted(lambda tracker: tracker.close())


def _opened(name: str, spec: JobSpec, run: RunDirectory, begin: int) -> Tracker:
    try:
        return TRACKERS[name](spec, run, begin)
    except Exception as error:  # of any kind: libraries have their own
        raise HpcMpError(f"track.to = {list(spec.track.to)}", f"{name} refuses to begin ({type(error).__name__})",
                         "log in to it on this cluster, set its variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI) in "
                         "slurm.setup, or leave it out") from None
