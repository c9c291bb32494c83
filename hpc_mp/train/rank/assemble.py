"""What a rank trains: its tokens, its stage with optimizer and pipeline, and the values in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape, check_pretrained, family_of, read_config, stage_layers
from hpc_mp.layout.schedule import build as build_schedule
from hpc_mp.layout.schedule import validate
from hpc_mp.rundir import find_run, newest_complete
from hpc_mp.rundir.checkpoints import put_aside
from hpc_mp.rundir.origin import Counters, Origin, check_resumable, counters_of, first_difference, model_fields
from hpc_mp.rundir.staged import stage_directory, staged, staging_root
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.checkpoint.shard_file import Damaged
from hpc_mp.train.data import TokenSet, load_tokens, prepare_job
from hpc_mp.train.engine import initial
from hpc_mp.train.engine.dropout import DropoutClock
from hpc_mp.train.engine.groups import Groups
from hpc_mp.train.engine.optimizer import Optimizer
from hpc_mp.train.engine.pipeline import Pipeline
from hpc_mp.train.engine.stage import Stage, StageSpan, hugging_face_config
from hpc_mp.train.engine.tensor import TensorGroup
from hpc_mp.train.engine.zero import PRECISIONS, shard
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.bootstrap import status
from hpc_mp.train.rank.failures import RankContext
from hpc_mp.train.rank.rendezvous import FILES_TIMEOUT
from hpc_mp.train.rank.signals import Stopped

PROGRESS_S = 0.5  # between two reports of the progress of tokenizing


def tokens_of(
    spec: JobSpec, shape: ModelShape, context: RankContext, store: dist.Store, asked: Callable[[], str | None],
) -> TokenSet:
    """Rank 0 tokenizes (or finds it done), the others wait for it; they all read the same files.

    Args:
        asked: why rank 0 must stop, now and then asked for; None: go on.

    Raises:
        Stopped: on all ranks, when rank 0 had to stop.
    """
    key = "token set"
    if context.who.rank == 0:
        try:
            tokens = _tokenize(spec, shape, context, asked)
        except Stopped as stopped:
            store.set(key, json.dumps({"stopped": str(stopped)}))
            raise
        store.set(key, json.dumps({"directory": str(tokens.directory)}))
    context.waits.behind(key, 0, lambda: store.wait([key], FILES_TIMEOUT))
    answer = json.loads(store.get(key))
    if "stopped" in answer:
        raise Stopped(answer["stopped"])
    return load_tokens(_near(Path(answer["directory"]), spec, context, store))


def _near(directory: Path, spec: JobSpec, context: RankContext, store: dist.Store) -> Path:
    """With ``data.stage`` the copy of a token set on this node's own disk, which its first rank makes; else the set itself."""
    root = staging_root() if spec.data.stage else None
    if root is None:
        return directory
    key = f"staged {context.who.node}"
    if context.who.local_rank == 0:
        stage_directory(directory, root)
        store.set(key, "")
    first = next(place.rank for place in context.placement.ranks if (place.node, place.local_rank) == (context.place.node, 0))
    context.waits.behind(key, first, lambda: store.wait([key], FILES_TIMEOUT))
    return staged(directory, root)


def _tokenize(spec: JobSpec, shape: ModelShape, context: RankContext, asked: Callable[[], str | None]) -> TokenSet:
    last = [0.0]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - last[0] < PROGRESS_S:
            return
        last[0] = time.monotonic()
        status(context, "preparing data", done=done, total=total)
        reason = asked()
        if reason is not None:
            raise Stopped(reason)

    status(context, "preparing data")
    tokens = prepare_job(spec, shape.vocabulary, context.run.cache, progress)
    context.run.tokenizer.write_text(str(tokens.tokenizer_directory), encoding="utf-8")
    return tokens


def assemble(
    spec: JobSpec, shape: ModelShape, groups: Groups, device: torch.device, clock: DropoutClock,
) -> tuple[Stage, Pipeline, Optimizer]:
    """This rank's stage, its part of the data axis, its optimizer and its pipeline; parameters have no values yet."""
    family, precision = family_of(shape.model_type), PRECISIONS[spec.train.precision]
    number, stages = groups.mesh["pp"].get_local_rank(), spec.parallel.pipeline
    layers = stage_layers(spec, shape)
    begin = sum(layers[:number])
    part = StageSpan(range(begin, begin + layers[number]), number == 0, number == stages - 1)
    config = hugging_face_config(read_config(spec), family, spec.train.dropout)

    stage = Stage(config, family, shape, part, TensorGroup(groups.mesh["tp"]), precision.master, clock)
    data = shard(stage, groups.mesh, spec.parallel.zero, precision)
    stage.to_empty(device=device)
    data.settle()
    optimizer = Optimizer(stage, spec.train, first_replica=groups.mesh["replicate"].get_local_rank() == 0)

    schedule = build_schedule(spec.parallel.schedule, stages, spec.microbatches,
                              reduce="each" if spec.parallel.zero >= 2 else "last")
    validate(schedule, stages, spec.microbatches)
    pipeline = Pipeline(stage, data, schedule[number], groups.neighbours,
                        (spec.microbatch_size, spec.data.sequence_length, shape.hidden), precision.compute, device)
    return stage, pipeline, optimizer


def restore(
    spec: JobSpec, shape: ModelShape, context: RankContext, stage: Stage, optimizer: Optimizer, groups: Groups, tokens: TokenSet,
) -> Counters:
    """State from the run's newest complete checkpoint, else from ``checkpoint.resume``, else first values; how far it is.

    Raises:
        HpcMpError: nothing to resume from, or a checkpoint that was trained as something else.
    """
    family = family_of(shape.model_type)
    configuration = hugging_face_config(read_config(spec), family, spec.train.dropout).to_dict()
    now = Origin(model_fields(configuration, family.dropouts), spec.train.optimizer, tokens.tokenizer_sha256,
                 tokens.directory.name, spec.data.sequence_length, spec.train.seed)
    damaged: set[Path] = set()
    while (found := facts.broadcast(_newest(spec, context, damaged))) is not None:
        path = Path(found)
        context.log.say(f"going on from {path}")
        counters = _counters(path, now, spec, context)
        try:
            checkpoint.load(path, counters, stage, optimizer, groups)
            return counters
        except Damaged as damage:
            damaged.add(path)
            if context.who.rank == 0:
                _skip(path, str(damage), context)
    if spec.model.pretrained is not None:
        if context.who.rank == 0:
            check_pretrained(spec)
        source = initial.read(staged(Path(spec.model.pretrained), staging_root()), family)
    else:
        source = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, stage.padding)
    initial.fill(stage, source)
    return Counters(step=0, samples=0, tokens=0, origin=now)


def _newest(spec: JobSpec, context: RankContext, damaged: Collection[Path]) -> str | None:
    """The checkpoint to go on from; None for none. Rank 0 looks for it; hashes are for those who read what they stand for."""
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
    """Say that a checkpoint is not used, and take it out of its series if that is this run's."""
    context.log.say(f"checkpoint {path.name} is skipped: {reason}")
    if path.parent == context.run.checkpoints:
        put_aside(path)


def _counters(path: Path, now: Origin, spec: JobSpec, context: RankContext) -> Counters:
    """Those of a checkpoint, if this job may go on with it. Another run's text may have been another."""
    own = path.parent == context.run.checkpoints
    counters = counters_of(path)
    if not own:
        check_resumable(f"checkpoint.resume = {spec.checkpoint.resume}", counters,
                        {"model": now.model, "optimizer": now.optimizer, "tokenizer": now.tokenizer}, spec.train.steps)
        if not counters.origin.same_samples(now):
            context.log.say("the text, the sequence length or the seed is another than there: samples begin anew")
            return replace(counters, samples=0, origin=now)
    elif difference := first_difference(counters.origin, asdict(now)):
        if difference.what in ("tokenizer", "data"):
            raise HpcMpError(f"data.files ({', '.join(spec.data.files)})",
                             f"are not what this run has trained on: their text or its tokenizer has changed since {path.name}",
                             "bring the old text back, or start a new run with checkpoint.resume")
        raise HpcMpError(f"checkpoint {path}", str(difference), "put that back, or launch a new run")
    return replace(counters, origin=now)
