"""Parameters that are on the device only while they are used: unsharded before a computation, freed behind it, and again for its
backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hpc_mp.train.parallel.custom_backward import with_backward
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
        tensors = _marked(partial(_release, units), tensors)
    _unshard(units, prefetch.forward)
    results = compute(*tensors)
    _release(units)
    return _marked(partial(_unshard, units, prefetch.backward, not passed), results) if training else results


def _unshard(units: Sequence[Unit], prefetch: Sequence[Unit], at_end: bool = False) -> None:
    """Unshard units. ``at_end``: free them at the end of this backward, because no gradient leaves the computation."""
    for unit in units:
        unit.need()
    for unit in prefetch:
        unit.request()
    if at_end:
        torch.autograd.Variable._execution_engine.queue_callback(partial(_release, units))


def _release(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.release()


def _marked(before: Callable[[], None], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the same tensors; their backward begins with a call of ``before``."""
    def backward(*gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        before()
        return gradients

    return with_backward(lambda *tensors: tensors, backward, *tensors)
