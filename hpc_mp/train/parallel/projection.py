"""Tensor parallelism: the ends of cut layers, and projections that compute input gradients before weight gradients.

Megatron-LM (arXiv:1909.08053, section 3): column projections cut their outputs, row projections their inputs. ``enter`` copies in
the forward and all-reduces the gradient in the backward; ``leave`` all-reduces in the forward and copies the gradient in the
backward. The layer before needs the gradient of a projection's input at once, but nothing needs that of its weight before the
end of the backward. Therefore weight gradients wait in a queue. It is worked off during the all-reduce of the input
gradient or, if a schedule splits the backward in two, at its W action (Qi et al., arXiv:2401.10241).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpc_mp.layout.models import TensorCut, chunk_sizes
from hpc_mp.train.parallel.collectives import Running, all_reduce, sum_over
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.gradients import Sink
from hpc_mp.train.parallel.groups import Axis


class WeightGradients:
    """Queue of deferred weight gradients: (function that adds it, input of the projection, gradient of its output, and more).
    ``split``: True if the current backward leaves all of them to a later W."""

    def __init__(self) -> None:
        self.split = False
        self._waiting: deque[tuple[Callable[..., None], tuple[Tensor, ...]]] = deque()

    def put_off(self, add: Callable[..., None], *tensors: Tensor) -> None:
        self._waiting.append((add, tensors))

    def meanwhile(self) -> None:
        """Work the queue off while a collective is in flight, unless the backward is split."""
        if not self.split:
            self.work_off()

    def work_off(self) -> None:
        """Add all gradients that wait. Outside of a backward autograd is on, and would keep their inputs in a growing graph."""
        if self._waiting:
            with torch.no_grad():
                while self._waiting:
                    add, tensors = self._waiting.popleft()
                    add(*tensors)

    def tensors(self) -> Iterator[Tensor]:
        """Return the tensors that the queue holds."""
        return (tensor for _, tensors in self._waiting for tensor in tensors)

    def take(self) -> "WeightGradients":
        """Move all entries to a new queue, for a later ``work_off``."""
        queue = WeightGradients()
        queue._waiting, self._waiting = self._waiting, queue._waiting
        return queue


class TensorAxis:
    """The tensor axis as one rank sees it. With size 1 nothing is cut and nothing is sent. Between cut layers all ranks have the
    same hidden states; with ``sequence.SequenceAxis`` each rank has its own tokens. ``modules``: patterns of the modules that are
    cut. ``weights``: this rank's queue of weight gradients. ``sharers``: axes whose ranks have other tokens of the same samples
    between cut layers."""

    sharers: tuple[Axis, ...] = ()

    def __init__(self, axis: Axis, modules: tuple[str, ...], weights: WeightGradients) -> None:
        self.axis, self.weights = axis, weights
        self.size, self.rank = axis.size, axis.rank
        self.cut = TensorCut(axis.size, axis.rank, modules)

    @property
    def alone(self) -> "TensorAxis":
        """The axis for a module that is not cut."""
        return TensorAxis(Axis(), (), self.weights)

    def part(self, size: int) -> tuple[int, int]:
        """Return (start, length) of this rank's part of a dimension of ``size``."""
        sizes = chunk_sizes(size, self.size)
        return sum(sizes[:self.rank]), sizes[self.rank]

    def share(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of this rank between cut layers; all tokens of x lie along ``dim``."""
        return x

    def spread(self, x: Tensor) -> Tensor:
        """Return the hidden states for a cut layer, or the output gradient for its end."""
        return x

    def summed(self, x: Tensor) -> tuple[Tensor, Running]:
        """Begin to sum x over the axis: outputs at the end of a cut layer, input gradients at its beginning. ``x`` may be
        overwritten. The result is valid after ``wait``."""
        return x, all_reduce(x, self.axis)

    def all_tokens(self, x: Tensor) -> Tensor:
        """Return the hidden states of all tokens, for attention that is not cut."""
        return x

    def total(self, loss: Tensor) -> Tensor:
        """Return the loss of all tokens, given the loss of this rank's tokens by a head that is not cut."""
        return with_backward(lambda own: sum_over(own, self.sharers), lambda gradient: gradient, loss)  # each rank has its own

    def enter(self, x: Tensor) -> Tensor:
        """Begin a cut layer: ``spread`` in the forward, ``summed`` in the backward, while weight gradients are computed."""
        return x if self.size == 1 else with_backward(self.spread, self._input_gradient, x)

    def leave(self, x: Tensor) -> Tensor:
        """End a cut layer: ``summed`` in the forward, which may overwrite x, and ``spread`` in the backward."""
        return x if self.size == 1 else with_backward(self.sum, self.spread, x, in_place=True)

    def sum(self, x: Tensor) -> Tensor:
        """Return the result of ``summed``. It is no view, so that a model may change it in place."""
        total, running = self.summed(x)
        running.wait()
        return total.clone() if total._is_view() else total

    def _input_gradient(self, gradient: Tensor) -> Tensor:
        total, running = self.summed(gradient.contiguous())
        self.weights.meanwhile()
        running.wait()
        return total


class SunkWeight(nn.Module):
    """A module with one parameter, whose gradient it adds to a sink; None: it is not trained. ``name``: of the parameter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight: nn.Parameter
        self.sink: Sink | None

    @property
    def owned(self) -> set[str]:
        """The parameters whose gradients autograd does not compute."""
        return {self.name}

    def adopt(self, parameters: Mapping[str, nn.Parameter], sinks: Mapping[str, Sink]) -> None:
        """Take the parameter, and the sink of its gradient."""
        self.weight, self.sink = parameters[self.name], sinks.get(self.name)


class Projection(nn.Module):
    """y = x W + b with this rank's part of W: (…, this rank's inputs) -> (…, this rank's outputs).

    The input of a column projection must have passed ``enter``. A row projection sums its outputs over the axis, and then adds
    its bias once.

    Args:
        transposed: True if W is stored as (in, …), all output dimensions behind, as in GPT-2's Conv1D, instead of (…, in).
        row: True if the inputs are cut.

    Attributes:
        adapter: is added to the product of W, before the sum over the axis; None: there is none.
        columns: W, and the bias that the product adds, if any.
        trained: True if weight or bias gets a gradient.
        sums: True if the product alone is summed over the axis.
    """

    def __init__(self, weight: str, bias: str | None, transposed: bool, row: bool, tensor: TensorAxis) -> None:
        super().__init__()
        self.names = weight, bias
        self.transposed, self.row, self.tensor = transposed, row, tensor
        self.last = row  # a column's weight gradients are computed during the sum of its input gradient
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None
        self.sinks: tuple[Sink | None, Sink | None]
        self.adapter: nn.Module | None = None
        self.columns: tuple[Tensor, Tensor | None]
        self.trained: bool
        self.sums: bool

    @property
    def owned(self) -> set[str]:
        """The parameters whose gradients autograd does not compute. A row's bias is not among them: it is added after the sum."""
        weight, bias = self.names
        return {weight} if bias is None or self.row else {weight, bias}

    def adopt(self, parameters: Mapping[str, nn.Parameter], sinks: Mapping[str, Sink]) -> None:
        """Take the parameters, and the sinks of their gradients. What a pass needs of them is prepared here: between two products
        of matrices, Python's own work finds cold caches, and costs several times what it costs elsewhere."""
        weight, bias = self.names
        self.weight = parameters[weight]
        self.bias = parameters[bias] if bias is not None else None
        self.sinks = sinks.get(weight), sinks.get(bias) if bias is not None else None
        self.columns = self.weight, None if self.row else self.bias
        self.trained = self.sinks != (None, None)
        self.sums = self.row and self.adapter is None and self.tensor.size > 1

    @property
    def matrix(self) -> Tensor:
        """W as (this rank's outputs, this rank's inputs)."""
        weight, _ = self.columns
        return weight.flatten(1).t() if self.transposed else weight.flatten(0, -2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Projected.apply(x, self, self.weight)
        if not self.row and self.adapter is None:
            return y
        if self.adapter is not None:
            y = y + self.adapter(x)
            y = self.tensor.leave(y) if self.row else y
        return y + self.bias if self.bias is not None and self.row else y

    def product(self, x: Tensor) -> Tensor:
        _, bias = self.columns
        return nn.functional.linear(x, self.matrix, None if bias is None else bias.flatten())

    def input_gradient(self, gradient: Tensor) -> Tensor:
        return gradient @ self.matrix

    def add_weight_gradient(self, x: Tensor, gradient: Tensor, more: bool = False) -> None:
        """Add the gradients of weight and bias. x: (…, in); gradient: (…, out); ``more``: other rows of this backward follow."""
        x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        sink, bias = self.sinks
        if sink is not None:
            sink.add_product(*((x.t(), gradient) if self.transposed else (gradient.t(), x)), more)
        if bias is not None and not self.row:
            bias.add(gradient.sum(0, dtype=bias.unit.slabs.dtype).view(bias.slot.shape), more)


class Projected(torch.autograd.Function):
    """The product of a projection, summed over the axis if it says so; its weight gradient is put off. The projection is a
    ``Projection``, or has the same methods; they also get ``more``. The weight is an argument so that autograd runs the backward,
    which returns no gradient of it. Without a weight gradient the input is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Any, weight: Tensor, *more: Tensor) -> Tensor:
        if projection.trained:
            ctx.save_for_backward(x)
        ctx.projection, ctx.more = projection, more
        y: Tensor = projection.product(x, *more)
        return projection.tensor.sum(y) if projection.sums else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        projection, more, tensor = ctx.projection, ctx.more, ctx.projection.tensor
        if projection.sums:
            gradient = tensor.spread(gradient)
        input_gradient = projection.input_gradient(gradient, *more) if ctx.needs_input_grad[0] else None
        if tensor.weights.split or (tensor.size > 1 and not projection.last):
            if projection.trained:
                tensor.weights.put_off(projection.add_weight_gradient, *ctx.saved_tensors, gradient, *more)
        else:
            tensor.weights.work_off()
            if projection.trained:
                projection.add_weight_gradient(*ctx.saved_tensors, gradient, *more)
        return input_gradient, None, None, *(None for _ in more)


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Make a module compute with changed hidden states."""
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def change_flat(module: Any, change: Callable[[Tensor], Tensor], samples: int) -> None:
    """Make a module compute with changed hidden states, (samples, tokens, hidden), and also if it gets them without the first
    two dimensions apart."""
    forward = module.forward

    def changed(x: Tensor) -> Tensor:
        result: Tensor = forward(change(x if x.dim() > 2 else x.unflatten(0, (samples, -1))))
        return result if x.dim() > 2 else result.flatten(0, 1)

    module.forward = changed


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Make a module return changed hidden states, which may be the first of several results."""
    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> Tensor | tuple[Any, ...]:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    module.register_forward_hook(hook)
