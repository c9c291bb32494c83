"""Saving and loading of state. Every rank writes its parts into one safetensors file; a rename publishes all files together.

Keys are Hugging Face names, or ``optimizer.SLOT.NAME`` for optimizer state. Shapes are the engine's. Counters are in
``state.json``. Nothing is ever pickled or unpickled. No rank receives the tensor list of all other ranks. Each byte is written
once and read once, and hashed on the way.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """A checkpoint could not be written. Earlier checkpoints are unharmed. ``ranks``: the ranks that failed. ``refused``: True if
    every failure was an error of the operating system; otherwise the program has a fault."""

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
    """Write one checkpoint of a run, and delete all except the newest ``keep`` and the best one by evaluation. All ranks call
    this at the same step. Raises SaveFailed as ``Writing``, and FencedOut on rank 0 if the run has been started again; then
    nothing is published."""
    writing = writing_of(run, counters, groups, fence)
    writing.write_all(held)
    return _pruned(writing.final, run, keep)


def writing_of(run: RunDirectory, counters: Counters, groups: Groups, fence: Fence) -> "Writing":
    """Return the writing of a checkpoint of a run."""
    final = run.checkpoints / checkpoint_name(counters.step)
    return Writing(final, counters.step, counters_document(counters), groups, fence.token, fence.confirm)


def published(writing: "Writing", run: RunDirectory, keep: int) -> Path:
    """Publish a checkpoint, and delete the old ones. All ranks call this. Raises as ``save``."""
    writing.publish()
    return _pruned(writing.final, run, keep)


def _pruned(checkpoint: Path, run: RunDirectory, keep: int) -> Path:
    if dist.get_rank() == 0:
        prune(run, keep)
    return checkpoint


class Writing:
    """One checkpoint on its way to the directory ``final``, which it replaces.

    All files are written and made durable under a temporary name, then listed in the completion marker, then renamed. All ranks
    call ``prepare``, ``write`` and ``publish``, in this order; only ``write`` may run in a thread, because it sends nothing.

    Args:
        counters: what ``state.json`` holds.
        token: tells this attempt from others that may write the same checkpoint.
        confirm: called before the rename; it raises FencedOut if nothing may be published.

    Raises:
        SaveFailed: by ``prepare`` and ``publish``, on every rank, if any rank could not write (full disk, exceeded quota, ...).
    """

    def __init__(self, final: Path, step: int, counters: Mapping[str, Any], groups: Groups, token: str = "",
                 confirm: Callable[[], None] = lambda: None) -> None:
        self.final, self.step, self.counters, self.groups, self.confirm = final, step, counters, groups, confirm
        self.temporary = final.with_name(f".{final.name}.{token}")
        self._first = dist.get_rank() == 0
        self._written = CheckpointIndex({}, {})
        self._failure: Exception | None = None

    def write_all(self, held: Iterable[Held]) -> None:
        """Prepare, write this rank's part of the state, and publish."""
        self.prepare()
        self.write(parts_to_write(held))
        self.publish()

    def prepare(self) -> None:
        self._turns((self._make_directory, True))

    def write(self, parts: Sequence[LocalPart]) -> None:
        """Write this rank's parts. ``publish`` raises what prevents that."""
        try:
            self._written = write_shard(self.temporary / SHARD.format(number=dist.get_rank() + 1), parts)
        except Exception as error:  # of any kind: the other ranks must learn of it
            self._failure = error

    def publish(self) -> None:
        self._turns((self._check, False), (self._list_stage, False), (self._rename, True))

    def _turns(self, *turns: tuple[Callable[[], None], bool]) -> None:
        """Take turns together with the other ranks. With a turn: whether rank 0 alone does something in it."""
        try:
            for turn, alone in turns:
                try:
                    _together(turn, self.groups.host)
                except SaveFailed:
                    if alone:  # can the other ranks write?
                        _together(lambda: _probe(self.final.parent), self.groups.host)
                    raise
        except (SaveFailed, FencedOut):
            if self._first:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise

    def _make_directory(self) -> None:
        if self._first:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(mode=0o700, parents=True)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _list_stage(self) -> None:
        index = _of_stage(self._written, self.groups)
        if lists_stage(self.groups):
            write_json(self.temporary / INDEX.format(stage=self.groups.pipeline), document_of(index))

    def _rename(self) -> None:
        if self._first:
            write_json(self.temporary / COUNTERS, self.counters)
            lists = sorted(self.temporary.glob("*.json"))
            hashes = {path.name: (path.stat().st_size, sha256(path)) for path in lists}
            write_manifest(self.temporary, Manifest(self.step, hashes))
            sync(self.temporary)
            self.confirm()
            shutil.rmtree(self.final, ignore_errors=True)
            os.rename(self.temporary, self.final)
            sync(self.final.parent)


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
    """Fill this rank's state from a checkpoint of any layout. All ranks call this. One replica reads each rectangle and
    broadcasts it to the others. Raises Damaged on every rank if any rank has found a file that is not what was saved."""
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
    order. A tied weight is saved only by the embedding's stage; the head's copy is loaded from there."""
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
