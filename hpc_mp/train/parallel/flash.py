"""Blocks of attention by torch's fused kernels, which return the logarithm of the sum of exponentials of each query's scores.

With it the outputs of several blocks of keys can be merged. The backward of a block gets the output and the logarithm of all of
them, as in ring attention (arXiv:2310.01889): the gradients of the blocks add up. Keys are computed with one group of query heads
after another, so that no copy of them is made for each query head.

``of_documents`` is attention of whole samples by the kernel for sequences of several lengths, which skips what no token sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from hpc_mp.train.device.precision import since_a100
from hpc_mp.train.parallel.masks import Visible

Slopes = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values
ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fused kernel.

    Attributes:
        formats: that it computes in.
        widest, multiple: the largest head, and what a head's size is a multiple of.
        attend: (queries, keys, values, dropout, causal, scale=…) -> output, logarithm of the sum, and more.
        slopes: (outer gradient, queries, keys, values, output, logarithm, dropout, causal, scale=…) -> gradients.
    """

    formats: tuple[torch.dtype, ...]
    widest: int
    multiple: int
    attend: Callable[..., tuple[Tensor, ...]]
    slopes: Callable[..., Slopes]


def computes(query: Tensor) -> bool:
    """Return True if there is a kernel for the device, the format and the head size of these queries."""
    kernel, size = _kernel(query), query.shape[-1]
    fits = query.dtype in kernel.formats and size <= kernel.widest and size % kernel.multiple == 0
    return fits and (kernel is ON_CPU or since_a100(query.device))


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output of a block, (…, groups, rows, head_dim), and the logarithm of the sum of exponentials, (…, groups, rows).
    ``query``: (batch, key-value heads, groups, rows, head_dim). ``key``, ``value``: (batch, key-value heads, columns, head_dim).
    ``causal``: True if both are the same tokens, and later ones are hidden."""
    kernel = _kernel(query)
    parts = [kernel.attend(group, key, value, 0.0, causal, scale=scale) for group in query.unbind(2)]
    output, log_z, *_ = zip(*parts, strict=True)
    return torch.stack(output, 2), torch.stack(log_z, 2)


def slopes(query: Tensor, key: Tensor, value: Tensor, outer: Tensor, output: Tensor, log_z: Tensor, causal: bool,
           scale: float) -> Slopes:
    """Return the gradients of a block, given gradient, output and logarithm of all blocks of its queries."""
    kernel = _kernel(query)
    groups = zip(*(values.unbind(2) for values in (outer, query, output, log_z)), strict=True)
    parts = [kernel.slopes(outer, group, key, value, output, log_z, 0.0, causal, scale=scale)
             for outer, group, output, log_z in groups]
    queries, keys, values = zip(*parts, strict=True)
    return torch.stack(queries, 2), *(sum(of_groups[1:], of_groups[0].to(log_z.dtype)) for of_groups in (keys, values))


def computes_documents(query: Tensor) -> bool:
    """Return True if there is a kernel for sequences of several lengths for these queries."""
    return query.is_cuda and computes(query)


def of_documents(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scale: float | None) -> Tensor:
    """Return the attention of whole samples, (batch, sequence, heads, head_dim). ``query``, ``key``, ``value``: (batch, heads,
    sequence, head_dim); the heads of keys and values divide those of queries. ``scale``: of scores; None: 1 / sqrt(head_dim)."""
    tokens = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    before = -1 if visible.window is None else visible.window - 1
    output, *_ = ATEN._flash_attention_forward(
        *tokens, visible.offsets, visible.offsets, query.shape[2], query.shape[2], 0.0, visible.causal, False, scale=scale,
        window_size_left=before, window_size_right=0 if visible.causal else before)
    return cast(Tensor, output).unflatten(0, (query.shape[0], query.shape[2]))


def _kernel(query: Tensor) -> Kernel:
    return ON_GPU if query.is_cuda else ON_CPU


def _slopes_on_gpu(outer: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_z: Tensor, dropout: float,
                   causal: bool, scale: float) -> Slopes:
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a dropout that is not used
    gradients: Slopes = ATEN._scaled_dot_product_flash_attention_backward(
        outer, query, key, value, output, log_z, None, None, query.shape[2], key.shape[2], dropout, causal, seed, seed,
        scale=scale)
    return gradients


ON_CPU = Kernel((torch.float64, torch.float32, torch.bfloat16, torch.float16), 1024, 1,
                ATEN._scaled_dot_product_flash_attention_for_cpu, ATEN._scaled_dot_product_flash_attention_for_cpu_backward)
ON_GPU = Kernel((torch.bfloat16, torch.float16), 256, 8, ATEN._scaled_dot_product_flash_attention, _slopes_on_gpu)
