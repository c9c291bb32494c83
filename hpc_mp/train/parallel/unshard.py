"""Parameters that are on the device only while they are used: unsharded before a computation, freed behind it, and again for its
backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpc_mp.train.parallel.data_axis import Unit


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Units to prefetch: the next ones of a forward, and of a backward."""

    forward: Sequence[Unit] = ()
    backward: Sequence[Unit] = ()


def unsharded(units: Sequence[Unit], prefetch: Prefetch, compute: Callable[..., tuple[Tensor, ...]],
              *tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute with the parameters of units, which are unsharded for the computation and again for its backward."""
    training = torch.is_grad_enabled() and any(unit.gathers for unit in units)
    passed = any(tensor.requires_grad for tensor in tensors)  # then a gradient leaves, behind which units can be freed
    if training and passed:
        tensors = _ReshardBehind.apply(units, *tensors)
    for unit in units:
        unit.need()
    for unit in prefetch.forward:
        unit.request()
    results = compute(*tensors)
    for unit in units:
        unit.release()
    return _UnshardBefore.apply(units, prefetch.backward, not passed, *results) if training else results


class _UnshardBefore(torch.autograd.Function):
    """Identity behind a computation; its backward unshards the parameters before the gradient enters the computation."""

    @staticmethod
    def forward(ctx: Any, units: Sequence[Unit], prefetch: Sequence[Unit], at_end: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.units, ctx.prefetch, ctx.at_end = units, prefetch, at_end
        return _identity(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        for unit in ctx.units:
            unit.need()
        for unit in ctx.prefetch:
            unit.request()
        if ctx.at_end:  # the first computation of a model, which no gradient leaves
            torch.autograd.Variable._execution_engine.queue_callback(partial(_release, ctx.units))
        return None, None, None, *gradients


class _ReshardBehind(torch.autograd.Function):
    """Identity before a computation; its backward frees the parameters when the gradient has left the computation."""

    @staticmethod
    def forward(ctx: Any, units: Sequence[Unit], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.units = units
        return _identity(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _release(ctx.units)
        return None, *gradients


def _identity(ctx: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    views = tuple(tensor.view_as(tensor) for tensor in tensors)
    ctx.mark_non_differentiable(*(view for view in views if not view.is_floating_point()))
    ctx.set_materialize_grads(False)
    return views


def _release(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.release()
