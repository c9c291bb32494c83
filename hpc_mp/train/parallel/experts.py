"""Experts: several MLPs in a block; a router chooses some of them for each token.

There are three independent steps: ``dispatch`` assigns each choice of a token to a row of an expert, ``Dispatch`` moves tokens to
rows and rows back to tokens, and ``Experts`` computes with rows that lie expert by expert. Choices are dropped only if experts
have a capacity, see ``capacity``. The tensor axis cuts inside each expert, so that every rank has a share of every expert's
output; it is entered before router and experts, and left behind them. The expert axis lies between rows and experts, see
``expert_axis``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hpc_mp.train.parallel.capacity import Intake
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.expert_axis import ExpertAxis
from hpc_mp.train.parallel.gradients import Sink
from hpc_mp.train.parallel.projection import Projected, SunkWeight, TensorAxis


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The assignment of tokens to rows of experts. Each token has ``choices`` experts; choices are numbered token by token.

    Forwards and backwards read and write by index, no place twice, because additions on a device have no fixed order.

    Attributes:
        length: number of tokens.
        order: (rows,), the choice of each row; the rows of an expert are adjacent. A dropped choice has no row.
        counts: number of rows of each expert.
    """

    length: int
    choices: int
    order: Tensor
    counts: tuple[int, ...]

    def rows(self, tokens: Tensor) -> Tensor:
        """Gather tokens, (tokens, width), into rows, (rows, width)."""
        return with_backward(lambda tokens: tokens[self.order // self.choices], lambda rows: self._choices(rows).sum(1), tokens)

    def tokens(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Combine rows, (rows, width), into tokens, (tokens, width): sums over choices with weights (tokens, choices)."""
        chosen = with_backward(self._choices, lambda choices: choices.flatten(0, 1)[self.order], rows)
        return (chosen * weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    def _choices(self, rows: Tensor) -> Tensor:
        """Scatter rows, (rows, width), to the choices of all tokens, (tokens, choices, width); dropped choices get 0."""
        scattered = rows.new_zeros(self.length * self.choices, rows.shape[1]).index_copy_(0, self.order, rows)
        return scattered.unflatten(0, (-1, self.choices))


def dispatch(index: Tensor, experts: int, limit: int | None = None) -> Dispatch:
    """Assign choices to rows. The host waits for the device, because the number of rows follows routing.

    Args:
        index: numbers of the chosen experts, (tokens, choices); ``experts`` stands for a dropped choice.
        limit: largest number of rows that an expert receives; None: no limit.
    """
    chosen = index.flatten()
    if isinstance(chosen, FakeTensor):  # of a dry run without choices: experts get equal shares, up to the limit
        shares = [len(chosen) // experts + (expert < len(chosen) % experts) for expert in range(experts)]
        counts = shares if limit is None else [min(share, limit) for share in shares]
    else:
        counts = chosen.bincount(minlength=experts + 1)[:experts].tolist()
    return Dispatch(len(index), index.shape[1], chosen.argsort(stable=True)[:sum(counts)], tuple(counts))


class ExpertProjection(SunkWeight):
    """y = x W with each expert's own W: (rows, this rank's inputs) -> (rows, this rank's outputs), rows expert by expert.

    The weight is (experts, …, in); the dimensions between are those of the outputs. There is no sum over the tensor axis here.

    Args:
        last: True if weight gradients can be computed as soon as this projection's input gradient is complete.
    """

    def __init__(self, name: str, last: bool, tensor: TensorAxis) -> None:
        super().__init__(name)
        self.last, self.tensor = last, tensor

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return cast(Tensor, Projected.apply(rows, _Products(self.weight, self.sink, counts, self.last, self.tensor), self.weight))


@dataclass(frozen=True, slots=True)
class _Products:
    """The products of all experts in one pass, a projection for ``Projected``. ``counts``: number of rows of each expert."""

    weight: Tensor
    sink: Sink
    counts: Sequence[int]
    last: bool
    tensor: TensorAxis
    row: bool = False

    def product(self, rows: Tensor) -> Tensor:
        return torch.cat([part @ matrix.t() for part, matrix in self._by_expert(rows)])

    def input_gradient(self, gradient: Tensor) -> Tensor:
        return torch.cat([part @ matrix for part, matrix in self._by_expert(gradient)])

    def add_weight_gradient(self, rows: Tensor, gradient: Tensor) -> None:
        pairs = zip(gradient.split(self.counts), rows.split(self.counts), strict=True)
        self.sink.add_products((outer.t(), inner) for outer, inner in pairs)

    def _by_expert(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each expert's rows, and its matrix, (outputs, inputs)."""
        return zip(rows.split(self.counts), self.weight.flatten(1, -2), strict=True)


class Experts(nn.Module):
    """Replacement of transformers' module of experts with gated MLPs.

    Args:
        name: name of the module in the model.
        count: number of experts.
        activation: activation of the gate.
        ranks: expert axis of the block.
        intake: limit of the choices that experts take.
    """

    def __init__(self, name: str, count: int, activation: Callable[[Tensor], Tensor], tensor: TensorAxis, ranks: ExpertAxis,
                 intake: Intake) -> None:
        super().__init__()
        self.count, self.activation, self.ranks, self.intake = count, activation, ranks, intake
        self.gate_up = ExpertProjection(f"{name}.gate_up_proj", False, tensor)
        self.down = ExpertProjection(f"{name}.down_proj", True, tensor)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs, (tokens, hidden). index, weights: experts of each token and their weights, (tokens, choices).

        Every tensor rank routes all tokens alike. The outputs are shares that are summed behind the module of router and experts,
        so that each rank has a share of the gradients of hidden states and of the router.
        """
        index, weights = self.intake.apply(index, weights, self.count)
        where = dispatch(index, self.count, self.intake.rows)
        if self.ranks.size == 1:
            return where.tokens(self._computed(where.rows(hidden), where.counts), weights)
        journey = self.ranks.journey(where.counts, hidden.device)
        return where.tokens(journey.back(self._computed(journey.out(where.rows(hidden)), journey.counts)), weights)

    def _computed(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of this rank's experts for their rows."""
        gate, up = self.gate_up(rows, counts).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up, counts)
