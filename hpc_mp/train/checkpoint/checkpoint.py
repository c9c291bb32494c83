"""Saving and loading state: every rank writes its parts into one safetensors file, published together by a rename.

Keys are Hugging Face names, and ``optimizer.SLOT.NAME`` for optimizer state; shapes are the engine's. Counters lie in
``state.json``. Nothing is ever pickled or unpickled, no rank hears of all others' tensors, and each byte is written once and
read once: hashes are made on the way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hpc_mp.rundir import Manifest, RunDirectory, sync, write_json, write_manifest
from hpc_mp.rundir.checkpoint_index import INDEX, CheckpointIndex, document_of, index_of, merged, read_indexes
from hpc_mp.rundir.checkpoints import checkpoint_name, sha256
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.rundir.origin import Counters, counters_document
from hpc_mp.rundir.retention import prune
from hpc_mp.train.checkpoint.shard_file import Damaged, LocalPart, ShardReader, write_shard
from hpc_mp.train.engine.groups import Axis, Groups, Tree, tree_of
from hpc_mp.train.engine.optimizer import Held
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.fencing import Fence, FencedOut

SHARD = "shard-{number:05d}-model.safetensors"  # of a rank, counted from 1
PROBE = 1 << 16  # bytes by which a rank finds out that it can write


class SaveFailed(Exception):
    """A checkpoint could not be written; the earlier ones are unharmed.

    Attributes:
        ranks: those that failed.
        refused: whether the operating system refused each of them; else something is wrong with the program.
    """

    def __init__(self, message: str, ranks: tuple[int, ...], refused: bool = False) -> None:
        super().__init__(message)
        self.ranks, self.refused = ranks, refused


@dataclass(frozen=True, slots=True)
class State:
    """A rectangle of this rank's state. ``owner``: the replica that saves it and reads it for the others."""

    held: Held
    owner: int

    @property
    def mine(self) -> bool:
        return self.owner == self.held.replicas.rank

    @property
    def part(self) -> LocalPart:
        return LocalPart(self.held.key, self.held.shape, self.held.box, self.held.values, self.held.release)


def save(
    run: RunDirectory, counters: Counters, held: Iterable[Held], groups: Groups, keep: int, fence: Fence,
) -> Path:
    """Write one checkpoint; all ranks call this at the same step.

    Everything is written and made durable under a temporary name, then listed in the completion marker, then renamed;
    then those beyond the newest ``keep`` and the best one by evaluation are deleted.

    Raises:
        SaveFailed: on every rank, when any rank could not write (full disk, exceeded quota, ...).
        FencedOut: on rank 0, when the run has been started again; nothing is published.
    """
    checkpoints = run.checkpoints
    # Ranks of another attempt may write the same step.
    temporary = checkpoints / f".{checkpoint_name(counters.step)}.{fence.token}"
    final = checkpoints / checkpoint_name(counters.step)
    first = dist.get_rank() == 0
    written: list[CheckpointIndex] = []

    def prepare() -> None:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700, parents=True)

    def write() -> None:
        written.append(write_shard(temporary / SHARD.format(number=dist.get_rank() + 1), parts_to_write(held)))

    def list_stage() -> None:
        index = _of_stage(written[0], groups)
        if lists_stage(groups):
            write_json(temporary / INDEX.format(stage=groups.pipeline), document_of(index))

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
            try:
                _together(turn, groups.host)
            except SaveFailed:
                if turn in (prepare, publish):  # which rank 0 does alone: can the others write?
                    _together(lambda: _probe(checkpoints), groups.host)
                raise
    except (SaveFailed, FencedOut):
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if first:
        prune(run, keep)
    return final


def _probe(directory: Path) -> None:
    """Raises OSError where this rank cannot write there."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f".probe-{dist.get_rank()}"
    try:
        path.write_bytes(bytes(PROBE))
    finally:
        path.unlink(missing_ok=True)


def parts_to_write(held: Iterable[Held]) -> list[LocalPart]:
    """What this rank's file of a checkpoint has."""
    return [state.part for state in _states(held) if state.mine and state.held.saved]


def lists_stage(groups: Groups) -> bool:
    """Whether this rank writes the index of its place in the pipeline."""
    return all(axis.rank == 0 for axis in _stage_axes(groups))


def load(checkpoint: Path, held: Iterable[Held], host: Tree) -> None:
    """Fill what this rank holds, whatever layout wrote it; all ranks call this.

    Each rectangle is read by one replica, which hands it on to the others.

    Raises:
        Damaged: on every rank, when any of them has found a file that is not what was saved.
    """
    states = list(_states(held))

    def read() -> None:
        ShardReader(checkpoint, read_indexes(checkpoint)).read(state.part for state in states if state.mine)

    try:
        _together(read, host)
    except SaveFailed as failed:
        raise Damaged(str(failed)) from None
    for state in states:
        if state.held.replicas.size > 1:
            _share_out(state, state.held.replicas)


def _share_out(state: State, replicas: Axis) -> None:
    """Hand a rectangle that one replica has read to the others, a piece at a time; NCCL sends from GPUs alone."""
    for values in state.part.pieces():
        sent = values.cuda() if values.device.type == "cpu" and not replicas.through_host else values
        dist.broadcast(sent, group=replicas.group, group_src=state.owner)
        if sent is not values:
            values.copy_(sent)


def _states(held: Iterable[Held]) -> Iterator[State]:
    """All of this rank's state; each rectangle has one owner among its replicas, so that all of them have as much to write.

    What experts hold comes last: other ranks hold the same, and two ranks that wait for each other in two groups have to come to
    these in one order. A tied weight is saved by the embedding's stage alone; the head's copy loads from there.
    """
    filled: dict[bool, list[int]] = {}
    for each in sorted(held, key=lambda held: (held.of_experts, -held.values.numel())):
        loads = filled.setdefault(each.of_experts, [0] * each.replicas.size)
        owner = loads.index(min(loads))
        loads[owner] += each.values.numel()
        yield State(each, owner)


def _stage_axes(groups: Groups) -> tuple[Axis, ...]:
    """Those along which ranks hold parts of the same stages."""
    return groups.replicate, groups.shard, groups.tensor


def _of_stage(written: CheckpointIndex, groups: Groups) -> CheckpointIndex:
    """What all ranks with the same stages have written."""
    index = written
    for axis in _stage_axes(groups):
        if axis.size > 1:
            index = merged(map(index_of, facts.gather(document_of(index), tree_of(axis))))
    return index


def _together(action: Callable[[], None], host: Tree) -> None:
    """Do something on every rank; if it fails anywhere, it fails everywhere with the reasons."""
    reason, refused = None, False
    try:
        action()
    except FencedOut:
        raise  # the others are stale too: they may fail as they like
    except Exception as error:  # whatever it is, the other ranks must learn of it
        reason = f"rank {dist.get_rank()}: {error}" if isinstance(error, Damaged) else (
            f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
        refused = isinstance(error, OSError)
    if facts.largest(reason is not None, host):
        reasons = {rank: given for rank, given in enumerate(facts.gather((reason, refused), host)) if given[0]}
        raise SaveFailed("; ".join(dict.fromkeys(words for words, _ in reasons.values())), tuple(reasons),
                         all(system for _, system in reasons.values()))
