"""Which rectangle of a whole tensor a rank holds.

A weight is cut over the tensor axis first and then over the data axis, each time as ``torch.chunk`` cuts. DTensor's own
answer (``compute_local_shape_and_global_offset``, up to torch 2.13) is wrong where both cuts are of the same dimension
and uneven: GPT-2's 50,257 rows over 2 × 4 ranks. So this room counts for itself, and tells torch's checkpoints too.
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hpc_mp.layout.models import chunk_sizes

Box = tuple[slice, ...]  # the part of a whole tensor that a rank holds


def local_box(tensor: Tensor) -> Box:
    """Which rectangle of the whole tensor this rank holds; the mesh's last axis is the one that is cut first."""
    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis in reversed(range(mesh.ndim)):
            placement = tensor.placements[axis]
            if not placement.is_replicate():
                dimension, coordinate = cast(Any, placement).dim, mesh.get_local_rank(axis)
                pieces = chunk_sizes(sizes[dimension], mesh.size(axis))
                starts[dimension] += sum(pieces[:coordinate])
                sizes[dimension] = pieces[coordinate]
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


class Saved(Tensor):
    """A parameter or optimizer tensor as torch's checkpoints want it: the shape of the whole, the memory of this rank's
    part, and where that lies (torch's ``_Checkpointable`` protocol)."""

    part: Tensor
    place: ChunkStorageMetadata

    @staticmethod
    def of(tensor: Tensor) -> Saved:
        part = tensor.detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        saved = part.new_empty(()).expand(tensor.shape).as_subclass(Saved)  # one number stands for the whole
        box = local_box(tensor)
        saved.part = part
        saved.place = ChunkStorageMetadata(torch.Size(s.start for s in box), torch.Size(s.stop - s.start for s in box))
        return saved

    def __create_write_items__(self, name: str, saved: Self) -> list[WriteItem]:
        data = TensorWriteData(self.place, TensorProperties.create_from_tensor(self.part), self.shape)
        return [WriteItem(MetadataIndex(name, place.offsets), WriteItemType.SHARD, tensor_data=data)
                for place in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.place] if self.part.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.part
