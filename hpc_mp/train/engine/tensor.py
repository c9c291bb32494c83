"""Tensor parallelism: column, row and fused projections, the vocabulary-parallel embedding, head and loss.

Parameters are DTensors on the ``tp`` mesh axis; compute runs on their local parts between two conjugate functions
(Megatron-LM, arXiv:1909.08053, section 3): ``enter`` copies forward and all-reduces the gradient backward, ``leave``
all-reduces forward and copies the gradient backward. Dimensions are cut as ``torch.chunk`` cuts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpc_mp.layout.models import chunk_sizes


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross entropy of logits whose vocabulary is cut over a group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
        counted = labels != IGNORED
        local = labels - start
        mine = counted & (local >= 0) & (local < logits.shape[-1])
        index = local.clamp(0, logits.shape[-1] - 1)

        highest = logits.amax(dim=-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(-1)
        target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        exponentials = shifted.exp_()
        parts = torch.stack((exponentials.sum(dim=-1), target))
        dist.all_reduce(parts, group=group)
        total, target = parts.unbind()

        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, mine, counted)
        return (total.log() - target).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, mine, counted = ctx.saved_tensors
        gradient = probabilities * counted.unsqueeze(-1)
        gradient.scatter_add_(-1, index.unsqueeze(-1), -mine.to(gradient.dtype).unsqueeze(-1))
        return gradient * grad, None, None, None


IGNORED = -100  # Hugging Face's label for tokens that do not count in the loss


class TensorGroup:
    """The tensor axis as one rank sees it. ``size`` 1 means that nothing is cut and nothing is sent."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh if mesh is not None and mesh.size() > 1 else None
        self.size = 1 if self.mesh is None else self.mesh.size()
        self.rank = 0 if self.mesh is None else self.mesh.get_local_rank()
        self.group = None if self.mesh is None else self.mesh.get_group()

    def enter(self, x: Tensor) -> Tensor:
        """Identity forward; backward sums the gradient over the group."""
        return x if self.group is None else _Enter.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum over the group forward; identity backward. ``x`` is overwritten."""
        return x if self.group is None else _Leave.apply(x, self.group)

    def part(self, size: int) -> tuple[int, int]:
        """(start, length) of this rank's part of a dimension of ``size``."""
        sizes = chunk_sizes(size, self.size)
        return sum(sizes[: self.rank]), sizes[self.rank]

    def parameter(self, shape: tuple[int, ...], cut: int | None, dtype: torch.dtype) -> nn.Parameter:
        """A parameter of global ``shape`` on the meta device: a DTensor cut along ``cut``, or plain when nothing is cut."""
        if self.mesh is None or cut is None:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        local = list(shape)
        local[cut] = self.part(shape[cut])[1]
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return nn.Parameter(DTensor.from_local(
            torch.empty(local, dtype=dtype, device="meta"), self.mesh, [Shard(cut)], run_check=False,
            shape=whole.shape, stride=whole.stride(),
        ))

    def cross_entropy(self, logits: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
        """Summed cross entropy (a scalar). logits: (tokens, this rank's part of the vocabulary); labels: (tokens,),
        ``IGNORED`` where a token does not count."""
        if self.group is None:
            return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return _VocabularyCrossEntropy.apply(logits, labels, self.part(vocabulary)[0], self.group)


class _Local(torch.autograd.Function):
    """``DTensor.to_local`` whose gradient has the parameter's own shape and strides also where the cut is uneven: torch
    2.11 guesses wrong strides there, and then gathers the whole gradient on every rank to mend them."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.like = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        return parameter.to_local().view_as(parameter.to_local())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.like
        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor (differentiable), or the plain tensor itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    part: Tensor = _Local.apply(parameter) if parameter.requires_grad and torch.is_grad_enabled() else parameter.to_local()
    return part


class ColumnProjection(nn.Module):
    """y = x W + b with the outputs cut: (…, in) -> (…, this rank's part of out). The input must have passed ``enter``."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.transposed = weight, bias, transposed

    def forward(self, x: Tensor) -> Tensor:
        return project(x, local(self.weight), None if self.bias is None else local(self.bias), self.transposed)


class RowProjection(nn.Module):
    """y = sum over ranks of x W, + b: (…, this rank's part of in) -> (…, out)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.transposed, self.tensor = weight, bias, transposed, tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.tensor.group is None:
            return project(x, self.weight, self.bias, self.transposed)
        y = self.tensor.leave(project(x, local(self.weight), None, self.transposed))
        return y if self.bias is None else y + self.bias


class FusedProjection(nn.Module):
    """Several column projections in one weight of shape (in, n, out), cut along out: (…, in) -> (…, n x part of out)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return project(x, local(self.weight).flatten(1), local(self.bias).flatten(), transposed=True)


class VocabularyEmbedding(nn.Module):
    """Token embedding with the vocabulary cut over the group: ids (batch, sequence) -> (batch, sequence, hidden)."""

    def __init__(self, weight: nn.Parameter, padding: int | None, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight, self.padding, self.tensor = weight, padding, tensor
        self.start, self.length = tensor.part(weight.shape[0])

    def forward(self, ids: Tensor) -> Tensor:
        index = ids - self.start
        outside = (index < 0) | (index >= self.length)
        padding = None
        if self.padding is not None and 0 <= self.padding - self.start < self.length:
            padding = self.padding - self.start
        rows = F.embedding(index.masked_fill(outside, 0), local(self.weight), padding_idx=padding)
        if self.tensor.group is None:
            return rows
        return self.tensor.leave(rows.masked_fill(outside.unsqueeze(-1), 0.0))


def project(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x W + b with W stored (in, out) when ``transposed``, else (out, in).

    Both ways the weight's gradient comes out in the weight's own memory layout, so that it need not be copied.
    """
    if not transposed:
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.unflatten(0, x.shape[:-1])
