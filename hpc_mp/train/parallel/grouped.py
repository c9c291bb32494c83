"""Grouped products: rows that lie group by group, and a matrix for each group.

The ends of groups are data on the device. One kernel reads them there, so that the host waits for no routing and launches as much
for a hundred experts as for one. torch has this kernel for formats of at most 32 bits (on GPUs it is fast for bf16 alone) and for
rows that begin at multiples of 16 bytes. Everything else is computed group by group: the host then has to know the ends.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import grouped_mm

ALIGNMENT = 16  # bytes, of torch's kernels


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each group, (rows, n), with the group's matrix, (groups, n, m), into (rows, m). ``ends``: end of each
    group's rows, (groups,), int32. The results of rows behind the last end have no meaning."""
    if _in_one_kernel(rows, matrices):
        return grouped_mm(rows, matrices, offs=ends)
    product = rows.new_zeros(len(rows), matrices.shape[2])
    for group, part in _parts(ends):
        torch.mm(rows[part], matrices[group], out=product[part])
    return product


def add_grouped_outer(target: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """Add the product of each group's rows, left, (rows, n), transposed, and right, (rows, m), to ``target``, (groups, n, m). The
    kernel rounds to the format of the rows before the addition."""
    if _in_one_kernel(left, right):
        target.add_(grouped_mm(left.t(), right, offs=ends))
        return
    for group, part in _parts(ends):
        if left.dtype == target.dtype:
            target[group].addmm_(left[part].t(), right[part])
        else:
            target[group].add_(left[part].t() @ right[part])


def _in_one_kernel(*factors: Tensor) -> bool:
    """Return whether torch multiplies these in one kernel. Every factor has its rows, or its columns, side by side."""
    sizes = [size * factor.element_size() for factor in factors for size in (*factor.shape[1:], factor.storage_offset())]
    return factors[0].dtype.itemsize < 8 and len(factors[0]) > 0 and all(size % ALIGNMENT == 0 for size in sizes)


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the groups that have rows, with these rows. Tensors of a dry run have no values, and the products no memory."""
    places = [] if isinstance(ends, FakeTensor) else ends.tolist()
    return ((group, slice(begin, end)) for group, (begin, end) in enumerate(pairwise([0, *places])) if begin < end)
