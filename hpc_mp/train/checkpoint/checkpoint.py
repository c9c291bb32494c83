"""Saving and loading of state. Every rank writes its parts into one safetensors file; a rename publishes all files together.

Keys are Hugging Face names, or ``optimizer.SLOT.NAME`` for optimizer state. Shapes are the engine's. Counters are in
``state.json``. Nothing is ever pickled or unpickled. No rank receives the tensor list of all other ranks. Each byte is written
once and read once, and hashed on the way.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_mp.rundir import Manifest, RunDirectory, sync, write_json, write_manifest
from hpc_mp.rundir.checkpoint_index import INDEX, CheckpointIndex, document_of, index_of, merged, read_indexes
from hpc_mp.rundir.checkpoints import checkpoint_name, sha256
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.rundir.origin import Counters, counters_document
from hpc_mp.rundir.retention import prune
from hpc_mp.train.checkpoint.shard_file import Damaged, LocalPart, ShardReader, write_shard
from hpc_mp.train.optimizer.optimizer import Held
from hpc_mp.train.parallel.groups import Axis, Groups, Tree, tree_of
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.fencing import Fence, FencedOut

SHARD = "shard-{number:05d}-model.safetensors"  # number: the rank + 1
PROBE = 1 << 16  # bytes that a rank writes to test that it can write


class SaveFailed(Exception):
    """A checkpoint could not be written. Earlier checkpoints are unharmed.

    Attributes:
        ranks: the ranks that failed.
        refused: True if every failure was an error of the operating system; otherwise the program has a fault.
    """

    def __init__(self, message: str, ranks: tuple[int, ...], refused: bool = False) -> None:
        super().__init__(message)
        self.ranks, self.refused = ranks, refused


@dataclass(frozen=True, slots=True)
class State:
    """A rectangle of this rank's state. ``owner`` is the replica that saves it, and that reads it for the other replicas."""

    held: Held
    owner: int

    @property
    def mine(self) -> bool:
        return self.owner == self.held.replicas.rank

    @property
    def part(self) -> LocalPart:
        return LocalPart(self.held.key, self.held.shape, self.held.box, self.held.values, self.held.release)


def save(run: RunDirectory, counters: Counters, held: Iterable[Held], groups: Groups, keep: int, fence: Fence) -> Path:
    """Write one checkpoint of a run. All ranks call this at the same step.

    Then all checkpoints are deleted except the newest ``keep`` and the best one by evaluation.

    Raises:
        SaveFailed: as ``write``.
        FencedOut: on rank 0, if the run has been started again; nothing is published.
    """
    final = run.checkpoints / checkpoint_name(counters.step)
    write(final, counters.step, counters_document(counters), held, groups, fence.token, fence.confirm)
    if dist.get_rank() == 0:
        prune(run, keep)
    return final


def write(final: Path, step: int, counters: Mapping[str, Any], held: Iterable[Held], groups: Groups, token: str = "",
          confirm: Callable[[], None] = lambda: None) -> None:
    """Write one checkpoint to the directory ``final``, which it replaces. All ranks call this.

    All files are written and made durable under a temporary name, then listed in the completion marker, then renamed.

    Args:
        counters: what ``state.json`` holds.
        token: tells this attempt from others that may write the same checkpoint.
        confirm: called before the rename; it raises FencedOut if nothing may be published.

    Raises:
        SaveFailed: on every rank, if any rank could not write (full disk, exceeded quota, ...).
    """
    temporary = final.with_name(f".{final.name}.{token}")
    first = dist.get_rank() == 0
    written: list[CheckpointIndex] = []

    def prepare() -> None:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700, parents=True)

    def write_parts() -> None:
        written.append(write_shard(temporary / SHARD.format(number=dist.get_rank() + 1), parts_to_write(held)))

    def list_stage() -> None:
        index = _of_stage(written[0], groups)
        if lists_stage(groups):
            write_json(temporary / INDEX.format(stage=groups.pipeline), document_of(index))

    def publish() -> None:
        if first:
            write_json(temporary / COUNTERS, counters)
            lists = sorted(temporary.glob("*.json"))
            write_manifest(temporary, Manifest(step, {path.name: (path.stat().st_size, sha256(path)) for path in lists}))
            sync(temporary)
            confirm()
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            sync(final.parent)

    try:
        for turn in (prepare, write_parts, list_stage, publish):
            try:
                _together(turn, groups.host)
            except SaveFailed:
                if turn in (prepare, publish):  # only rank 0 does these: can the other ranks write?
                    _together(lambda: _probe(final.parent), groups.host)
                raise
    except (SaveFailed, FencedOut):
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _probe(directory: Path) -> None:
    """Raise OSError if this rank cannot write to the directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f".probe-{dist.get_rank()}"
    try:
        path.write_bytes(bytes(PROBE))
    finally:
        path.unlink(missing_ok=True)


def parts_to_write(held: Iterable[Held]) -> list[LocalPart]:
    """Return the parts that this rank writes to its file of a checkpoint."""
    return [state.part for state in _states(held) if state.mine and state.held.saved]


def lists_stage(groups: Groups) -> bool:
    """Return True if this rank writes the index of its pipeline place."""
    return all(axis.rank == 0 for axis in _stage_axes(groups))


def load(checkpoint: Path, held: Iterable[Held], host: Tree) -> None:
    """Fill this rank's state from a checkpoint of any layout. All ranks call this.

    One replica reads each rectangle and broadcasts it to the others.

    Raises:
        Damaged: on every rank, if any rank has found a file that is not what was saved.
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
    """Broadcast a rectangle from the replica that has read it, a piece at a time. NCCL sends only from GPUs."""
    for values in state.part.pieces():
        sent = values.cuda() if values.device.type == "cpu" and not replicas.through_host else values
        dist.broadcast(sent, group=replicas.group, group_src=state.owner)
        if sent is not values:
            values.copy_(sent)


def _states(held: Iterable[Held]) -> Iterator[State]:
    """Yield all of this rank's state. Each rectangle has one owner among its replicas; owners are chosen to balance the writes.

    The experts' state comes last. Its replicas are other ranks, and two ranks that meet in two groups must enter them in the same
    order. A tied weight is saved only by the embedding's stage; the head's copy is loaded from there.
    """
    filled: dict[bool, list[int]] = {}
    for item in sorted(held, key=lambda held: (held.of_experts, -held.values.numel())):
        loads = filled.setdefault(item.of_experts, [0] * item.replicas.size)
        owner = loads.index(min(loads))
        loads[owner] += item.values.numel()
        yield State(item, owner)


def _stage_axes(groups: Groups) -> tuple[Axis, ...]:
    """Return the axes along which ranks hold parts of the same stages."""
    return groups.replicate, groups.shard, groups.tensor


def _of_stage(written: CheckpointIndex, groups: Groups) -> CheckpointIndex:
    """Merge the indexes of all ranks that hold the same stages."""
    index = written
    for axis in _stage_axes(groups):
        if axis.size > 1:
            index = merged(map(index_of, facts.gather(document_of(index), tree_of(axis))))
    return index


def _together(action: Callable[[], None], host: Tree) -> None:
    """Run an action on every rank. If it fails on any rank, raise on all ranks with the reasons."""
    reason, refused = None, False
    try:
        action()
    except FencedOut:
        raise  # the other ranks are stale too and may fail in any way
    except Exception as error:  # of any kind: the other ranks must learn of it
        reason = f"rank {dist.get_rank()}: {error}" if isinstance(error, Damaged) else (
            f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
        refused = isinstance(error, OSError)
    if facts.largest(reason is not None, host):
        reasons = {rank: reply for rank, reply in enumerate(facts.gather((reason, refused), host)) if reply[0]}
        raise SaveFailed("; ".join(dict.fromkeys(text for text, _ in reasons.values())), tuple(reasons),
                         all(system for _, system in reasons.values()))
