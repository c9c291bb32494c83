"""Parameters that are on the device only while they are used: gathered before a computation, freed behind it, and again for its
backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_mp.train.engine.data_axis import Unit


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Units that are requested before their turn: those that come next in a forward, and in a backward."""

    forward: Sequence[Unit] = ()
    backward: Sequence[Unit] = ()


def unsharded(units: Sequence[Unit], prefetch: Prefetch, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Compute with the parameters of some units, which are on the device meanwhile, and again during the backward."""
    training = torch.is_grad_enabled() and any(unit.gathers for unit in units)
    if training:
        hidden = _ReshardBehind.apply(hidden, units)
    for unit in units:
        unit.need()
    for unit in prefetch.forward:
        unit.request()
    hidden = compute(hidden)
    for unit in units:
        unit.release()
    return _UnshardBefore.apply(hidden, units, prefetch.backward) if training else hidden


class _UnshardBefore(torch.autograd.Function):
    """Identity behind some units: their parameters are there again when the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: Sequence[Unit], prefetch: Sequence[Unit]) -> Tensor:
        ctx.units, ctx.prefetch = units, prefetch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        for unit in ctx.units:
            unit.need()
        for unit in ctx.prefetch:
            unit.request()
        return gradient, None, None


class _ReshardBehind(torch.autograd.Function):
    """Identity before some units: their parameters are not needed any more when the gradient has passed them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: Sequence[Unit]) -> Tensor:
        ctx.units = units
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for unit in ctx.units:
            unit.release()
        return gradient, None
