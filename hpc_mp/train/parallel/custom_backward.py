"""Functions with backwards that autograd could not derive: of collectives, and of actions that belong to a backward."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Results = TypeVar("Results", Tensor, tuple[Tensor, ...])


def with_backward(forward: Callable[..., Results], backward: Callable[..., object], *tensors: Tensor,
                  in_place: bool = False) -> Results:
    """Return ``forward(*tensors)``, whose gradients ``backward`` computes. ``forward``: runs without autograd. It may return its
    tensors. ``backward``: (gradients of the results) -> the gradient of the tensor, or a tuple of the gradients of several. If
    the forward returns a tuple, the gradient of a result that was not used is None. ``in_place``: True if a tensor that the
    forward returns has been changed by it."""
    return cast(Results, _Custom.apply(forward, backward, in_place, *tensors))


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., object], in_place: bool, *tensors: Tensor) -> Any:
        ctx.gradients_of = backward
        result = forward(*tensors)
        ctx.set_materialize_grads(not isinstance(result, tuple))
        if in_place:
            ctx.mark_dirty(*(tensor for tensor in tensors if tensor is result))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.gradients_of(*gradients)
        return None, None, None, *(inputs if isinstance(inputs, tuple) else (inputs,))
