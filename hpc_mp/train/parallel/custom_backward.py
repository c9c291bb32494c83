"""Functions with backwards that autograd could not derive: of collectives, and of actions that belong to a backward."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Results = TypeVar("Results", Tensor, tuple[Tensor, ...])


def with_backward(forward: Callable[..., Results], backward: Callable[..., object], *tensors: Tensor) -> Results:
    """Return ``forward(*tensors)``, whose gradients ``backward`` computes.

    Args:
        forward: runs without autograd. A result that is one of the tensors has been changed in place; an identity returns a view.
        backward: (gradients of the results) -> the gradient of the tensor, or a tuple of the gradients of several. If the forward
            returns a tuple, the gradient of a result that was not used is None.
    """
    return cast(Results, _Custom.apply(forward, backward, *tensors))


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., object], *tensors: Tensor) -> Any:
        ctx.gradients_of = backward
        results = forward(*tensors)
        several = results if isinstance(results, tuple) else (results,)
        ctx.mark_dirty(*(tensor for tensor in tensors if any(tensor is result for result in several)))
        ctx.set_materialize_grads(several is not results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.gradients_of(*gradients)
        return None, None, *(inputs if isinstance(inputs, tuple) else (inputs,))
