"""The part of a batch that a rank trains: rows of its replica, microbatch by microbatch."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.layout import Layout
from hpc_mp.train.device.readback import to_device
from hpc_mp.train.own_loop.keywords import written
from hpc_mp.train.parallel.dropout import Moment
from hpc_mp.train.pipeline.stage import Batch, Carried, Microbatches


@dataclass(frozen=True, slots=True)
class ReplicaRows:
    """The rows of a replica."""

    batch: Batch  # of this replica
    first: int  # position of its first row in the global batch
    samples: int  # rows of a microbatch

    def share(self, names: Mapping[int, Sequence[str]], step: int, before: int, labels: int | None,
              device: torch.device) -> Microbatches:
        """Return the share of a step. ``names``: of the tensors that each stage of the rank needs. ``step``: its number;
        ``before``: samples of all steps before it. ``labels``: number of labels that count; None: the forward counts them."""
        parts = {}
        for name in {name: None for needed in names.values() for name in needed}:
            tensor = self.batch[name].contiguous()
            parts[name] = (tensor if tensor.device == device else to_device(tensor, device)).split(self.samples)
        rows = range(before + self.first, before + self.first + len(next(iter(self.batch.values()))), self.samples)
        batches = {(stage, number): {name: parts[name][number] for name in needed}
                   for stage, needed in names.items() for number in range(len(rows))}
        return Microbatches(batches, [Moment(step, tuple(range(begin, begin + self.samples))) for begin in rows], labels)

    @property
    def shapes(self) -> dict[str, Carried]:
        """The tensors of a microbatch."""
        return {name: Carried((self.samples, *tensor.shape[1:]), tensor.dtype, False) for name, tensor in self.batch.items()}


def checksum(batch: Batch) -> int:
    """Return a number that differs between batches with other values; tensors on a GPU do not count: the host would wait."""
    total = 0
    for _, tensor in sorted(batch.items()):
        if tensor.device.type == "cpu":
            total = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data, total)
    return total


def check_alike(shapes: Sequence[Mapping[str, Sequence[int]]], sums: Sequence[int], replicas: Sequence[int]) -> None:
    """Check the batches that all ranks pass, by rank.

    Args:
        shapes: of the tensors by name.
        sums: checksums.
        replicas: number of the replica that a rank belongs to; 0 on all ranks if a batch is the global one.

    Raises:
        HpcMpError: ranks of a replica have different batches, or replicas have batches of different shapes.
    """
    for rank, (shape, total, replica) in enumerate(zip(shapes, sums, replicas, strict=True)):
        if shape != shapes[0]:
            raise HpcMpError(f"a batch of {_listed(shapes[0])} on rank 0", f"is one of {_listed(shape)} on rank {rank}",
                             "pass batches of one shape on all ranks")
        if total != sums[first := replicas.index(replica)]:
            raise HpcMpError(f"the batch of rank {rank}", f"has other values than that of rank {first}",
                             "pass the same batch on all ranks of a replica (a sampler with the same seed)" if max(replicas) else
                             'pass the same global batch on all ranks (a sampler with the same seed), or batches="replica"')


def _listed(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())


def rows_of(batch: Mapping[str, Any], layout: Layout, replica: int | None, data_rank: int) -> ReplicaRows:
    """Return the rows of a replica. ``replica``: number of replicas whose rows the batch has; None: the batch is this replica's
    part. ``data_rank``: number of this replica. Raises HpcMpError if the batch cannot be divided."""
    if not isinstance(batch, Mapping) or not batch:
        raise HpcMpError(f"batch = {written(batch)}", "must be a dict of tensors",
                         'pass for example {"input_ids": ids, "labels": labels}')
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise HpcMpError(f"batch[{name!r}] = {written(tensor)}", "must be a tensor whose first dimension counts samples",
                             "collate samples into tensors")
    sizes = {name: len(tensor) for name, tensor in batch.items()}
    if len(set(sizes.values())) > 1:
        raise HpcMpError(f"a batch of {', '.join(f'{name}: {size}' for name, size in sizes.items())} samples",
                         "must have as many samples in each tensor", "collate all tensors from the same samples")
    size, parts = next(iter(sizes.values())), layout.microbatches * (replica or 1)
    if size == 0 or size % parts:
        replicas = f"replicas({replica}) × " if replica else ""
        raise HpcMpError(f"a batch of {size} samples",
                         f"is not a multiple of {replicas}microbatches({layout.microbatches}) = {parts}",
                         f"use {max(1, size // parts) * parts} or another multiple; a DataLoader with drop_last=True leaves out "
                         "what is left")
    own = size // (replica or 1)
    first = data_rank * own
    mine = {name: tensor[first:first + own] if replica else tensor for name, tensor in batch.items()}
    return ReplicaRows(mine, first, own // layout.microbatches)
