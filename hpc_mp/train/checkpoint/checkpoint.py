"""Saving and loading state: torch's distributed checkpoint in safetensors files, published atomically.

Keys are Hugging Face names, and ``optimizer.SLOT.NAME`` for optimizer state; shapes are the engine's. Counters lie in
``state.json``. Nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from hpc_mp.rundir import Manifest, read_json, sync, write_json, write_manifest
from hpc_mp.rundir.checkpoints import checkpoint_name, prune, sha256
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.train.engine.optimizer import Optimizer
from hpc_mp.train.engine.shard_layout import Saved
from hpc_mp.train.engine.stage import Stage
from hpc_mp.train.rank.fencing import Fence, FencedOut


class SaveFailed(Exception):
    """A checkpoint could not be written; the earlier ones are unharmed."""


def save(
    checkpoints: Path, counters: dict[str, Any], stage: Stage, optimizer: Optimizer, keep: int, fence: Fence,
) -> Path:
    """Write one checkpoint; all ranks call this at the same step.

    Everything is written and made durable under a temporary name, then listed in the completion marker, then renamed;
    then the oldest are deleted down to ``keep``.

    Raises:
        SaveFailed: on every rank, when any rank could not write (full disk, exceeded quota, ...).
        FencedOut: on rank 0, when the run has been started again; nothing is published.
    """
    step = counters["step"]
    temporary = checkpoints / f".{checkpoint_name(step)}.{fence.token}"  # ranks of another attempt may write the same step
    final = checkpoints / checkpoint_name(step)
    first = dist.get_rank() == 0

    def prepare() -> None:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700, parents=True)

    def write() -> None:
        dcp.save(_state(stage, optimizer, saving=True),
                 storage_writer=HuggingFaceStorageWriter(str(temporary), save_distributed=True))

    def publish() -> None:
        if first:
            write_json(temporary / COUNTERS, counters)
            files = sorted(path for path in temporary.iterdir() if not path.name.startswith("."))
            manifest = {path.name: (path.stat().st_size, listed.get(path.name) or sha256(path)) for path in files}
            write_manifest(temporary, Manifest(step, manifest))
            sync(temporary)
            fence.confirm()
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            sync(checkpoints)

    listed: dict[str, str] = {}
    try:
        _together(prepare)
        _together(write)
        for hashed in _together(lambda: _hash_own(temporary)):
            listed |= hashed
        _together(publish)
    except (SaveFailed, FencedOut):
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if first:
        prune(checkpoints, keep)
    return final


def load(checkpoint: Path, stage: Stage, optimizer: Optimizer | None) -> dict[str, Any]:
    """Fill parameters and optimizer state, whatever layout wrote them; returns the counters."""
    dcp.load(_state(stage, optimizer, saving=False), storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    counters: dict[str, Any] = read_json(checkpoint / COUNTERS)
    if optimizer is not None:
        optimizer.set_steps(counters["step"])
    return counters


def _state(stage: Stage, optimizer: Optimizer | None, saving: bool) -> dict[str, Tensor]:
    """The tensors of this rank. A tied weight is saved by the embedding's stage alone; the head's copy loads from there."""
    state: dict[str, Tensor] = {}
    slots = {held.name: held.state for held in optimizer.held} if optimizer is not None else {}
    for name, parameter in stage.named_parameters():
        if saving and name == stage.copied:
            continue
        state[name] = Saved.of(parameter)
        for slot, tensor in slots.get(name, {}).items():
            state[f"optimizer.{slot}.{name}"] = Saved.of(tensor)
    return state


def _hash_own(directory: Path) -> dict[str, str]:
    """Hashes of the files that this rank wrote (torch numbers them by rank, from 1)."""
    own = directory.glob(f"shard-{dist.get_rank() + 1:05d}-*")
    return {path.name: sha256(path) for path in own}


def _together(action: Callable[[], Any]) -> list[Any]:
    """Do something on every rank and gather the results; if it fails anywhere, it fails everywhere with the reasons."""
    result, reason = None, None
    try:
        result = action()
    except FencedOut:
        raise  # the others are stale too: they may fail as they like
    except (Exception, CheckpointException) as error:  # whatever it is, the other ranks must learn of it
        reason = f"rank {dist.get_rank()}: {_first_cause(error)}"
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (result, reason))
    reasons = [reason for _, reason in answers if reason]
    if reasons:
        raise SaveFailed("; ".join(dict.fromkeys(reasons)))
    return [result for result, _ in answers]


def _first_cause(error: BaseException) -> str:
    """torch wraps the ranks' errors in a dictionary; one line of them is what a user needs."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, wrapped = next(iter(failures.items()))
        inner = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"{type(inner).__name__}: {inner} (on rank {rank})"
    return f"{type(error).__name__}: {error}"
