"""Tensor parallelism: what enters and leaves a cut layer, and projections whose two gradients are made in the best order.

Megatron-LM (arXiv:1909.08053, section 3): column projections cut their outputs, row projections their inputs. ``enter`` copies
forward and all-reduces the gradient backward, ``leave`` all-reduces forward and copies the gradient backward. The gradient of a
projection's input is wanted by whoever comes next, that of its weight by nobody before the end of the backward: so weights wait
in a queue, which is worked off while the input's gradient is being summed, or, where a schedule splits the backward in two, at
its W action (Qi et al., arXiv:2401.10241).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpc_mp.layout.models import TensorCut, chunk_sizes
from hpc_mp.train.parallel.collectives import Running, all_reduce
from hpc_mp.train.parallel.gradients import Sink
from hpc_mp.train.parallel.groups import Axis


class Waiting(Protocol):
    """Whose gradient is put off: a projection."""

    def add_weight_gradient(self, x: Tensor, gradient: Tensor) -> None: ...


class WeightGradients:
    """Gradients of weights that are still to be made: (projection, its input, the gradient of its output).

    Attributes:
        split: whether the backward that runs leaves them all to a later W.
    """

    def __init__(self) -> None:
        self.split = False
        self._waiting: deque[tuple[Waiting, Tensor, Tensor]] = deque()

    def put_off(self, projection: Waiting, x: Tensor, gradient: Tensor) -> None:
        self._waiting.append((projection, x, gradient))

    def meanwhile(self) -> None:
        """Something else is under way: there is time for them."""
        if not self.split:
            self.work_off()

    @torch.no_grad()  # behind a backward autograd is on again, and would keep these inputs in a graph that grows with every step
    def work_off(self) -> None:
        while self._waiting:
            projection, x, gradient = self._waiting.popleft()
            projection.add_weight_gradient(x, gradient)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of weight gradients that wait."""
        for _, x, gradient in self._waiting:
            yield x
            yield gradient

    def take(self) -> "WeightGradients":
        """All that wait, for a later ``work_off``."""
        taken = WeightGradients()
        taken._waiting, self._waiting = self._waiting, deque()
        return taken


class TensorAxis:
    """The tensor axis as one rank sees it. Size 1 means that nothing is cut and nothing is sent.

    Between cut layers every rank has the same hidden states; ``sequence.SequenceAxis`` has tokens of its own on each.

    Args:
        modules: patterns of the modules that are cut.

    Attributes:
        weights: this rank's queue of weight gradients.
        first_token: of this rank's tokens of a sample.
        sharers: the ranks that have other tokens of the same samples between cut layers.
    """

    first_token = 0
    sharers: tuple[Axis, ...] = ()

    def __init__(self, axis: Axis, modules: tuple[str, ...], weights: WeightGradients) -> None:
        self.axis, self.weights = axis, weights
        self.size, self.rank = axis.size, axis.rank
        self.cut = TensorCut(axis.size, axis.rank, modules)

    @property
    def alone(self) -> "TensorAxis":
        """The axis of a module that is not cut."""
        return TensorAxis(Axis(), (), self.weights)

    def part(self, size: int) -> tuple[int, int]:
        """(start, length) of this rank's part of a dimension of ``size``."""
        sizes = chunk_sizes(size, self.size)
        return sum(sizes[:self.rank]), sizes[self.rank]

    def share(self, x: Tensor, dim: int) -> Tensor:
        """Of all tokens, which lie along ``dim``, those that this rank has between cut layers."""
        return x

    def spread(self, x: Tensor) -> Tensor:
        """Return the hidden states that a cut layer takes, or the gradient that its end takes."""
        return x

    def summed(self, x: Tensor) -> tuple[Tensor, Running]:
        """The sum over the axis of what each rank has made, on its way: at the end of a cut layer, and of the gradient at its
        beginning. ``x`` may be overwritten."""
        return x, all_reduce(x, self.axis)

    def all_tokens(self, x: Tensor) -> Tensor:
        """Before attention that is whole on every rank, which needs all tokens of the hidden states."""
        return x

    def total(self, loss: Tensor) -> Tensor:
        """The loss of all tokens, of the loss that a head which is not cut has found for this rank's."""
        return loss

    def enter(self, x: Tensor) -> Tensor:
        """Before a cut layer: ``spread`` forward, ``summed`` backward."""
        return x if self.size == 1 else _Enter.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Behind a cut layer: ``summed`` forward, ``spread`` backward."""
        return x if self.size == 1 else _Leave.apply(x, self)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorAxis) -> Tensor:
        ctx.tensor = tensor
        whole = tensor.spread(x)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        found, running = ctx.tensor.summed(gradient.contiguous())
        ctx.tensor.weights.meanwhile()
        running.wait()
        return found, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorAxis) -> Tensor:
        ctx.tensor = tensor
        found, running = tensor.summed(x)
        running.wait()
        if found is x:
            ctx.mark_dirty(x)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.spread(gradient), None


class Projection(nn.Module):
    """y = x W + b with what this rank holds of W: (…, this rank's inputs) -> (…, this rank's outputs).

    The input of a column projection must have passed ``enter``; the outputs of a row projection leave here, and its bias is
    added once, after the sum.

    Args:
        transposed: W is stored as (in, …) as GPT-2's Conv1D does, all outputs behind, instead of (out, in).
        row: the inputs are cut.
    """

    def __init__(self, weight: str, bias: str | None, transposed: bool, row: bool, tensor: TensorAxis) -> None:
        super().__init__()
        self.names = weight, bias
        self.transposed, self.row, self.tensor = transposed, row, tensor
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None
        self.sinks: tuple[Sink, Sink | None]

    @property
    def owned(self) -> set[str]:
        """The parameters whose gradients autograd need not collect: a row's bias is no part of the product."""
        weight, bias = self.names
        return {weight} if bias is None or self.row else {weight, bias}

    def adopt(self, parameters: Mapping[str, nn.Parameter], sinks: Mapping[str, Sink]) -> None:
        """Get the parameters, and where their gradients go."""
        weight, bias = self.names
        self.weight = parameters[weight]
        self.bias = parameters[bias] if bias is not None else None
        self.sinks = sinks[weight], sinks[bias] if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Project.apply(x, self, self.weight)
        return y + self.bias if self.bias is not None and self.row else y

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.row or self.bias is None else self.bias.flatten()
        if not self.transposed:
            return nn.functional.linear(x, self.weight, bias)
        rows, weight = x.flatten(0, -2), self.weight.flatten(1)
        product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return product.unflatten(0, x.shape[:-1])

    def input_gradient(self, gradient: Tensor) -> Tensor:
        return gradient @ (self.weight.flatten(1).t() if self.transposed else self.weight)

    def add_weight_gradient(self, x: Tensor, gradient: Tensor, more: bool = False) -> None:
        """x: (…, in), gradient: (…, out). ``more``: other rows of the same backward follow."""
        x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        sink, bias = self.sinks
        sink.add_product(*((x.t(), gradient) if self.transposed else (gradient.t(), x)), more)
        if bias is not None and not self.row:
            bias.add(gradient.sum(0, dtype=bias.unit.slabs.dtype).view(bias.slot.shape), more)


class _Project(torch.autograd.Function):
    """A projection's product, summed over the axis where the inputs are cut. The weight is an argument so that autograd knows
    that a gradient is wanted; it gets none here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Projection, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.projection = projection
        y = projection.product(x)
        if projection.row:
            y, running = projection.tensor.summed(y)
            running.wait()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        projection = ctx.projection
        x, = ctx.saved_tensors
        if projection.row:
            gradient = projection.tensor.spread(gradient)
        wanted = projection.input_gradient(gradient) if ctx.needs_input_grad[0] else None
        projection.tensor.weights.put_off(projection, x, gradient)
        if projection.tensor.size == 1 or projection.row:
            projection.tensor.weights.meanwhile()
        return wanted, None, None
