"""Saving and loading state: every rank writes its parts into one safetensors file, published together by a rename.

Keys are Hugging Face names, and ``optimizer.SLOT.NAME`` for optimizer state; shapes are the engine's. Counters lie in
``state.json``. Nothing is ever pickled or unpickled, no rank hears of all others' tensors, and each byte is written once and
read once: hashes are made on the way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_mp.rundir import Manifest, sync, write_json, write_manifest
from hpc_mp.rundir.checkpoint_index import INDEX, CheckpointIndex, document_of, index_of, merged, read_indexes
from hpc_mp.rundir.checkpoints import checkpoint_name, prune, sha256
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.rundir.origin import Counters, counters_document
from hpc_mp.train.checkpoint.shard_file import Damaged, LocalPart, ShardReader, write_shard
from hpc_mp.train.engine.groups import Groups
from hpc_mp.train.engine.optimizer import Optimizer
from hpc_mp.train.engine.shard_layout import local_box
from hpc_mp.train.engine.stage import Stage
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.fencing import Fence, FencedOut

SHARD = "shard-{number:05d}-model.safetensors"  # of a rank, counted from 1


class SaveFailed(Exception):
    """A checkpoint could not be written; the earlier ones are unharmed."""


STAGE_AXES = ("replicate", "shard", "tp")


@dataclass(frozen=True, slots=True)
class State:
    """A tensor of this rank's state. ``owner``: the replica that saves it and reads it for the others; None: this rank never
    saves it, because another tensor rank or stage has the same."""

    key: str
    tensor: Tensor
    owner: int | None


def save(
    checkpoints: Path, counters: Counters, stage: Stage, optimizer: Optimizer, groups: Groups, keep: int, fence: Fence,
) -> Path:
    """Write one checkpoint; all ranks call this at the same step.

    Everything is written and made durable under a temporary name, then listed in the completion marker, then renamed;
    then the oldest are deleted down to ``keep``.

    Raises:
        SaveFailed: on every rank, when any rank could not write (full disk, exceeded quota, ...).
        FencedOut: on rank 0, when the run has been started again; nothing is published.
    """
    # Ranks of another attempt may write the same step.
    temporary = checkpoints / f".{checkpoint_name(counters.step)}.{fence.token}"
    final = checkpoints / checkpoint_name(counters.step)
    first = dist.get_rank() == 0
    own = groups.mesh["replicate"].get_local_rank()
    written: list[CheckpointIndex] = []

    def prepare() -> None:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700, parents=True)

    def write() -> None:
        parts = [_part(state) for state in _states(stage, optimizer, groups) if state.owner == own]
        written.append(write_shard(temporary / SHARD.format(number=dist.get_rank() + 1), parts))

    def list_stage() -> None:
        index = _of_stage(written[0], groups)
        if all(groups.mesh[axis].get_local_rank() == 0 for axis in STAGE_AXES):
            write_json(temporary / INDEX.format(stage=groups.mesh["pp"].get_local_rank()), document_of(index))

    def publish() -> None:
        if first:
            write_json(temporary / COUNTERS, counters_document(counters))
            lists = sorted(temporary.glob("*.json"))
            write_manifest(temporary, Manifest(counters.step, {path.name: (path.stat().st_size, sha256(path)) for path in lists}))
            sync(temporary)
            fence.confirm()
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            sync(checkpoints)

    try:
        for turn in (prepare, write, list_stage, publish):
            _together(turn)
    except (SaveFailed, FencedOut):
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if first:
        prune(checkpoints, keep)
    return final


def load(checkpoint: Path, counters: Counters, stage: Stage, optimizer: Optimizer, groups: Groups) -> None:
    """Fill parameters and the optimizer's state, whatever layout wrote them; all ranks call this.

    Each tensor is read by one replica, which hands it on to the others.

    Raises:
        Damaged: on every rank, when any of them has found a file that is not what was saved.
    """
    replicas = groups.mesh["replicate"]
    states = list(_states(stage, optimizer, groups))

    def read() -> None:
        reader = ShardReader(checkpoint, read_indexes(checkpoint))
        for state in states:
            if _reader(state) == replicas.get_local_rank():
                part = _part(state)
                reader.read(part.name, part.box, part.values)

    try:
        _together(read)
    except SaveFailed as failed:
        raise Damaged(str(failed)) from None
    if replicas.size() > 1:
        for values, reader in ((_part(state).values, _reader(state)) for state in states):
            if values.numel():
                dist.broadcast(values, group=replicas.get_group(), group_src=reader)
    optimizer.set_steps(counters.step - counters.skipped)


def _states(stage: Stage, optimizer: Optimizer, groups: Groups) -> Iterator[State]:
    """All tensors of this rank's state; each has one owner among its replicas, so that all of them have as much to write.

    A tied weight is saved by the embedding's stage alone; the head's copy loads from there.
    """
    replicas = groups.mesh["replicate"].size()
    filled = [0] * replicas
    for held in sorted(optimizer.held, key=lambda held: -held.parameter.numel()):
        slots = ((f"optimizer.{slot}.{held.name}", tensor) for slot, tensor in held.state.items())
        for key, tensor in ((held.name, held.parameter), *slots):
            owner = filled.index(min(filled))
            filled[owner] += tensor.numel()
            yield State(key, tensor, owner if held.saved else None)


def _reader(state: State) -> int:
    return state.owner or 0


def _part(state: State) -> LocalPart:
    values = state.tensor.detach()
    values = values.to_local() if isinstance(values, DTensor) else values
    return LocalPart(state.key, tuple(state.tensor.shape), local_box(state.tensor), values)


def _of_stage(written: CheckpointIndex, groups: Groups) -> CheckpointIndex:
    """What all ranks of this stage have written."""
    index = written
    for axis in STAGE_AXES:
        if groups.mesh[axis].size() > 1:
            index = merged(map(index_of, facts.gather(document_of(index), groups.mesh[axis].get_group())))
    return index


def _together(action: Callable[[], None]) -> None:
    """Do something on every rank; if it fails anywhere, it fails everywhere with the reasons."""
    reason = None
    try:
        action()
    except FencedOut:
        raise  # the others are stale too: they may fail as they like
    except Exception as error:  # whatever it is, the other ranks must learn of it
        reason = f"rank {dist.get_rank()}: {error}" if isinstance(error, Damaged) else (
            f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    reasons = [each for each in facts.gather(reason) if each]
    if reasons:
        raise SaveFailed("; ".join(dict.fromkeys(reasons)))
