"""What a rank trains: its tokens, its stage with optimizer and pipeline, and the values in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.inputs import find_files
from hpc_mp.layout.models import ModelShape, family_of, read_config, stage_layers
from hpc_mp.layout.schedule import build as build_schedule
from hpc_mp.layout.schedule import validate
from hpc_mp.rundir import find_run, newest_complete
from hpc_mp.rundir.checkpoints import put_aside
from hpc_mp.rundir.staged import stage_directory, staged, staging_root
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.data import TokenSet, load_tokens, prepare
from hpc_mp.train.engine import initial
from hpc_mp.train.engine.dropout import DropoutClock
from hpc_mp.train.engine.groups import Groups
from hpc_mp.train.engine.optimizer import Optimizer
from hpc_mp.train.engine.pipeline import Pipeline
from hpc_mp.train.engine.stage import Stage, StageSpan, hugging_face_config
from hpc_mp.train.engine.tensor import TensorGroup
from hpc_mp.train.engine.zero import PRECISIONS, shard
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
    tokens = prepare(
        find_files(spec.data.files), vocabulary=shape.vocabulary, cache=context.run.cache, progress=progress,
        tokenizer_directory=Path(spec.data.tokenizer) if spec.data.tokenizer else None,
        pretrained=Path(spec.model.pretrained) if spec.model.pretrained else None,
    )
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
    spec: JobSpec, shape: ModelShape, context: RankContext, stage: Stage, optimizer: Optimizer, tokens: TokenSet,
) -> dict[str, Any]:
    """State from the run's newest complete checkpoint, else from ``checkpoint.resume``, else first values.

    Returns the counters: steps and tokens done, and the name of the token set, which stands for the text's content.

    Raises:
        HpcMpError: nothing to resume from, or the run has trained on another text.
    """
    run, log = context.run, context.log
    found: list[str | None] = [None]
    if context.who.rank == 0:
        path, skipped = newest_complete(run.checkpoints)
        for bad, reason in skipped:
            log.say(f"checkpoint {bad.name} is skipped: {reason}")
            put_aside(bad)
        if path is None and spec.checkpoint.resume is not None:
            other = find_run(Path(spec.checkpoint.resume))
            path, skipped = newest_complete(other.checkpoints)
            if path is None:
                raise HpcMpError(f"checkpoint.resume = {other.path}", "holds no complete checkpoint", "name another run")
        found = [str(path) if path else None]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        log.say(f"going on from {found[0]}")
        path = Path(found[0])
        counters = checkpoint.load(path, stage, optimizer)
        if path.parent == run.checkpoints and counters["data"] != tokens.directory.name:
            raise HpcMpError(f"data.files ({', '.join(spec.data.files)})",
                             f"are not what this run has trained on: their text or its tokenizer has changed since {path.name}",
                             "bring the old text back, or start a new run with checkpoint.resume")
        return counters | {"data": tokens.directory.name}
    family = family_of(shape.model_type)
    if spec.model.pretrained is not None:
        source = initial.read(staged(Path(spec.model.pretrained), staging_root()), family.checkpoint_prefixes)
    else:
        source = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, stage.padding)
    initial.fill(stage, source)
    return {"step": 0, "tokens": 0, "data": tokens.directory.name}
