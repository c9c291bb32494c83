"""The part of a batch that a rank trains: rows of its replica, microbatch by microbatch."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.layout import Layout
from hpc_mp.train.device.readback import to_device
from hpc_mp.train.own_loop.keywords import written
from hpc_mp.train.parallel.collectives import known_to_all
from hpc_mp.train.parallel.dropout import Moment
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.pipeline.stage import Batch, Carried
from hpc_mp.train.rank import facts
from hpc_mp.train.step.settings import Microbatches

LISTED = 8  # ranks that a message names


@dataclass(frozen=True, slots=True)
class ReplicaRows:
    """The rows of a replica.

    Attributes:
        batch: of this replica.
        first: position of its first row in the global batch.
        samples: rows of a microbatch.
    """

    batch: Batch
    first: int
    samples: int

    def share(self, names: Mapping[int, Sequence[str]], step: int, before: int, labels: int | None,
              device: torch.device) -> Microbatches:
        """Return the share of a step.

        Args:
            names: of the tensors that each stage of the rank needs.
            step: its number; ``before``: samples of all steps before it.
            labels: number of labels that count; None: the forward counts them.
        """
        def batch(stage: int, microbatch: int) -> Batch:
            begin = microbatch * self.samples
            rows = slice(begin, begin + self.samples)
            tensors = {name: self.batch[name][rows].contiguous() for name in names[stage]}
            return {name: tensor if tensor.device == device else to_device(tensor, device) for name, tensor in tensors.items()}

        def moment(microbatch: int) -> Moment:
            begin = before + self.first + microbatch * self.samples
            return Moment(step, tuple(range(begin, begin + self.samples)))

        return Microbatches(batch, moment, labels)

    @property
    def shapes(self) -> dict[str, Carried]:
        """The tensors of a microbatch."""
        return {name: Carried((self.samples, *tensor.shape[1:]), tensor.dtype, False) for name, tensor in self.batch.items()}


def rows_of(batch: Mapping[str, Any], layout: Layout, replica: int | None, data_rank: int) -> ReplicaRows:
    """Return the rows of a replica.

    Args:
        replica: number of replicas whose rows the batch has; None: the batch is this replica's part.
        data_rank: number of this replica.

    Raises:
        HpcMpError: the batch cannot be divided.
    """
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


@contextmanager
def alike(batch: Any, host: Tree) -> Iterator[None]:
    """Check that all ranks pass batches of one shape. What the block refuses on one rank is refused on all. All ranks call this.

    Raises:
        HpcMpError: on every rank.
    """
    refusal: HpcMpError | None = None
    try:
        yield
        text = ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in sorted(batch.items()))
    except HpcMpError as error:
        refusal, text = error, f"what is refused ({error})"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    if len(known_to_all(torch.tensor([digest]), host).unique()) > 1:
        texts = facts.gather(text, host)
        ranks = {kind: [str(rank) for rank, other in enumerate(texts) if other == kind] for kind in texts}
        parts = [f"{'ranks' if numbers[1:] else 'rank'} {', '.join(numbers[:LISTED])}{' …' if numbers[LISTED:] else ''}: {kind}"
                 for kind, numbers in ranks.items()]
        raise HpcMpError('batches="replica"', f"needs batches of one shape on all ranks, but there are {'; '.join(parts)}",
                         "let all replicas have as many samples (drop_last=True), padded to one length")
    if refusal is not None:
        raise refusal
