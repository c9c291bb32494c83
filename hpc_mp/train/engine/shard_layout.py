"""Which rectangle of a whole tensor a rank holds.

A weight is cut over the tensor axis first and then over the data axis, each time as ``torch.chunk`` cuts. DTensor's own
answer (``compute_local_shape_and_global_offset``, up to torch 2.13) is wrong where both cuts are of the same dimension
and uneven: GPT-2's 50,257 rows over 2 × 4 ranks. So this room counts for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, cast

from torch import Tensor
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


def stretches(sizes: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """(first element, elements) of the stretches of a row-major array that a rectangle of it consists of, in its own order."""
    whole = len(sizes)  # dimensions from this one on are complete, so that their elements follow each other
    while whole and (box[whole - 1].start, box[whole - 1].stop) == (0, sizes[whole - 1]):
        whole -= 1
    strides = [prod(sizes[dimension + 1:]) for dimension in range(len(sizes))]
    if whole == 0:
        yield 0, prod(sizes)
        return
    last = box[whole - 1]
    length = (last.stop - last.start) * strides[whole - 1]
    for at in product(*(range(part.start, part.stop) for part in box[:whole - 1])):
        yield sum(i * stride for i, stride in zip((*at, last.start), strides[:whole], strict=True)), length
