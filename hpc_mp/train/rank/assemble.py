"""The engine that a rank trains with, and the engine's values. This is what a rank imports transformers for."""

import os
import platform
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shutil import which

import torch

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import check_pretrained, read_config
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.adapter_weights import keeps_values
from hpc_mp.layout.schedule import Schedule
from hpc_mp.rundir import find_run, newest_complete
from hpc_mp.rundir.checkpoints import put_aside
from hpc_mp.rundir.origin import Counters, Origin, adapter_fields, check_resumable, counters_of, first_difference, model_fields
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.checkpoint.shard_file import Damaged
from hpc_mp.train.data import TokenSet
from hpc_mp.train.device.precision import since_a100
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_modules import hugging_face_config
from hpc_mp.train.optimizer.optimizer_state import HomeMaker, OnDevice, Streamed
from hpc_mp.train.optimizer.state_stores import FileStore, MemoryStore
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.parallel.surroundings import LossTerms
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.failures import RankContext
from hpc_mp.train.rank.first_values import first_values
from hpc_mp.train.step.engine import Engine
from hpc_mp.train.step.settings import EngineSettings


def assemble(spec: JobSpec, shape: ModelShape, layout: Layout, groups: Groups, schedule: Schedule,
             device: torch.device) -> Engine:
    """Build this rank's engine and its passes. Its parameters have no values yet."""
    if spec.train.compile:
        check_compiler(device)
    engine = Engine(model_of(spec, shape), settings_of(spec, layout, schedule), groups, device)
    _ = engine.passes  # not only in the first step
    return engine


def check_precision(precision: str, device: torch.device) -> None:
    """Check that the device computes in a precision. Raises HpcMpError if it does not."""
    if precision != "tf32" or since_a100(device):
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise HpcMpError('train.precision = "tf32"', f"needs an A100 or a later GPU, and this rank has {name}",
                     'use precision = "fp32"')


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile finds a compiler: C for Triton's launchers on a GPU, else C++ for its kernels. Raises HpcMpError
    if this node has none."""
    variable, programs = ("CC", ("gcc", "clang", "cc")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    if not any(map(which, filter(None, (os.environ.get(variable), *programs)))):
        raise HpcMpError("train.compile = true", f"needs one of {', '.join(programs)} on PATH, and {platform.node()} has none",
                         f'load one with slurm.setup = ["module load gcc"], name it with {variable}, or leave train.compile out')


def model_of(spec: JobSpec, shape: ModelShape) -> TransformersModel:
    family = family_of(shape)
    config = hugging_face_config(read_config(spec), family, spec.train.dropout, spec.parallel.recompute)
    return TransformersModel(config, family, shape)


def settings_of(spec: JobSpec, layout: Layout, schedule: Schedule) -> EngineSettings:
    """Return the engine's settings."""
    train = spec.train
    return EngineSettings(
        layout=layout, schedule=schedule, seed=train.seed, optimizer=train,
        loss_scale=train.loss_scale if train.precision == "fp16" else None, home=home_of(layout),
        router_balance=train.router_balance, router_z=train.router_z, compile=train.compile,
        loss_terms=LossTerms(train.label_smoothing, train.z_loss))


def home_of(layout: Layout) -> HomeMaker:
    """Return the maker of the place that holds optimizer state between steps."""
    directory, away = layout.offload_directory, "optimizer" in layout.offload
    if not (away or "parameters" in layout.offload or layout.narrow_slots):
        return OnDevice
    if directory is not None:
        return partial(Streamed, partial(FileStore, Path(directory)))
    return partial(Streamed, partial(MemoryStore, "host" if away else "device", narrow=layout.narrow_slots))


def restore(spec: JobSpec, shape: ModelShape, context: RankContext, engine: Engine, groups: Groups, tokens: TokenSet) -> Counters:
    """Restore state from the run's newest complete checkpoint, else from ``checkpoint.resume``, else set first values.
    Checkpoints hold what is trained: other weights, such as the model's own beside adapters, begin with their first values.
    Return the counters. Raises HpcMpError for nothing to resume from, or a checkpoint with another origin."""
    family = family_of(shape)
    configuration = hugging_face_config(read_config(spec), family, spec.train.dropout).to_dict()
    now = Origin(model_fields(configuration, family.dropouts) | adapter_fields(shape.adapters), spec.train.optimizer,
                 tokens.tokenizer_sha256, tokens.directory.name, spec.data.sequence_length, spec.train.seed, spec.data.documents,
                 [*spec.data.weights], spec.data.prompt_length)
    damaged: set[Path] = set()
    if keeps := keeps_values(family, shape):
        _start(spec, shape, context, engine)
    while (newest := facts.broadcast(_newest(spec, context, damaged), context.everyone)) is not None:
        path = Path(newest)
        context.log.say(f"going on from {path}")
        counters = _counters(path, now, spec, context)
        try:
            checkpoint.load(path, engine.held(), context.everyone)
            engine.restored(counters.step - counters.skipped, counters.loss_scale if spec.train.precision == "fp16" else ())
            return counters
        except Damaged as damage:
            damaged.add(path)
            if context.who.rank == 0:
                _skip(path, str(damage), context)
    if not keeps:
        _start(spec, shape, context, engine)
    return Counters(step=0, samples=0, tokens=0, origin=now)


def _start(spec: JobSpec, shape: ModelShape, context: RankContext, engine: Engine) -> None:
    """Set first values. Raises HpcMpError on rank 0 if the checkpoint in ``model.pretrained`` is not that of the model."""
    if context.who.rank == 0 and (without := check_pretrained(spec)):
        context.log.say(f"{spec.model.pretrained} has no {', '.join(without)}: they begin with initial values")
    engine.start(first_values(spec, shape))


def _newest(spec: JobSpec, context: RankContext, damaged: Collection[Path]) -> str | None:
    """Return the checkpoint to continue from; None if there is none. Only rank 0 searches. Hashes are checked later, by the
    ranks that read the data."""
    if context.who.rank != 0:
        return None
    path, skipped = newest_complete(context.run.checkpoints, hashes=False, but=damaged)
    for bad, reason in skipped:
        _skip(bad, reason, context)
    if path is None and spec.checkpoint.resume is not None:
        other = find_run(Path(spec.checkpoint.resume))
        path, _ = newest_complete(other.checkpoints, hashes=False, but=damaged)
        if path is None:
            raise HpcMpError(f"checkpoint.resume = {other.path}", "holds no complete checkpoint", "name another run")
    return str(path) if path else None


def _skip(path: Path, reason: str, context: RankContext) -> None:
    """Log that a checkpoint is skipped. If it is this run's, move it out of the series."""
    context.log.say(f"checkpoint {path.name} is skipped: {reason}")
    if path.parent == context.run.checkpoints:
        put_aside(path)


def _counters(path: Path, now: Origin, spec: JobSpec, context: RankContext) -> Counters:
    """Return a checkpoint's counters, if this job may continue from it. Samples begin anew if another run's text differs."""
    own = path.parent == context.run.checkpoints
    counters = counters_of(path)
    if not own:
        check_resumable(f"checkpoint.resume = {spec.checkpoint.resume}", counters,
                        {"model": now.model, "optimizer": now.optimizer, "tokenizer": now.tokenizer}, spec.train.steps)
        if counters.origin.documents != now.documents:
            context.log.say(f"documents were {counters.origin.documents} there, and are {now.documents} from now on")
        if not counters.origin.same_samples(now):
            context.log.say("the text, the lengths of its samples or the seed is another than there: samples begin anew")
            return replace(counters, samples=0, origin=now)
    elif difference := first_difference(counters.origin, asdict(now)):
        if difference.what in ("tokenizer", "data"):
            raise HpcMpError(f"data.files ({', '.join(spec.data.files)})",
                             f"are not what this run has trained on: their text or its tokenizer has changed since {path.name}",
                             "bring the old text back, or start a new run with checkpoint.resume")
        raise HpcMpError(f"checkpoint {path}", str(difference), "put that back, or launch a new run")
    return replace(counters, origin=now)
