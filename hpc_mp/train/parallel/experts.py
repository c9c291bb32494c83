"""Experts: several MLPs in a block, of which a router gives each token some.

Three steps, apart from each other: ``dispatch`` says which row of which expert each choice of a token becomes, ``Dispatch``
brings tokens to rows and rows back to tokens, and ``Experts`` computes with rows that lie expert by expert. No choice is dropped,
but where experts have a capacity: see ``capacity``. The tensor axis cuts inside each expert, so that every rank has a share of
every expert's output; it is entered and left around router and experts. The expert axis lies between rows and experts: see
``expert_axis``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hpc_mp.train.parallel.capacity import Intake
from hpc_mp.train.parallel.expert_axis import ExpertAxis
from hpc_mp.train.parallel.gradients import Sink
from hpc_mp.train.parallel.projection import TensorAxis


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where tokens go. A token has ``choices`` experts; its choices are numbered token by token.

    Attributes:
        given: how many tokens there are.
        order: (rows,), the choice that each row is; rows of an expert follow each other. A choice that is dropped is no row.
        counts: rows of each expert.
    """

    given: int
    choices: int
    order: Tensor
    counts: tuple[int, ...]

    def rows(self, tokens: Tensor) -> Tensor:
        """(tokens, width) -> (rows, width)."""
        return cast(Tensor, _ToRows.apply(tokens, self))

    def tokens(self, rows: Tensor, weights: Tensor) -> Tensor:
        """(rows, width) -> (tokens, width): the sum over a token's choices, weighted with (tokens, choices)."""
        chosen = cast(Tensor, _ToChoices.apply(rows, self)).unflatten(0, (-1, self.choices))
        return (chosen * weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    def at_choices(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (choices of all tokens, width), 0 where a choice is no row. No place is written twice: the order in
        which a device writes is of no account."""
        return rows.new_zeros(self.given * self.choices, rows.shape[1]).index_copy_(0, self.order, rows)


def dispatch(index: Tensor, experts: int, most: int | None = None) -> Dispatch:
    """index: (tokens, choices), experts by number; their count stands for none, where a choice is dropped. The host waits for the
    device here: matrices have as many rows as come.

    Args:
        most: rows that an expert gets at most of these; None: as many as come.
    """
    chosen = index.flatten()
    if isinstance(chosen, FakeTensor):  # of a dry run, which knows no choices: experts get equal shares, if they take them
        shares = [len(chosen) // experts + (expert < len(chosen) % experts) for expert in range(experts)]
        counts = shares if most is None else [min(share, most) for share in shares]
    else:
        counts = chosen.bincount(minlength=experts + 1)[:experts].tolist()
    return Dispatch(len(index), index.shape[1], chosen.argsort(stable=True)[:sum(counts)], tuple(counts))


class _ToRows(torch.autograd.Function):
    """Indexing whose backward is indexing too, instead of adding in an order that devices choose."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, where: Dispatch) -> Tensor:
        ctx.where = where
        return tokens[where.order // where.choices]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.where.at_choices(gradient).unflatten(0, (-1, ctx.where.choices)).sum(1), None


class _ToChoices(torch.autograd.Function):
    """Rows in the order of choices, and 0 for those that are dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, where: Dispatch) -> Tensor:
        ctx.where = where
        return where.at_choices(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.where.order], None


class ExpertProjection(nn.Module):
    """y = x W for each expert's own W: (rows, this rank's inputs) -> (rows, this rank's outputs), rows expert by expert.

    The weight is (experts, …, in); what stands between are outputs side by side. Neither sums over the tensor axis.

    Args:
        last: nothing is under way when the gradient of this one's input is made, so that weights need not wait.
    """

    def __init__(self, name: str, last: bool, tensor: TensorAxis) -> None:
        super().__init__()
        self.name, self.last, self.tensor = name, last, tensor
        self.weight: nn.Parameter
        self.sink: Sink

    @property
    def owned(self) -> set[str]:
        return {self.name}

    def adopt(self, parameters: Mapping[str, nn.Parameter], sinks: Mapping[str, Sink]) -> None:
        """Get the parameter, and where its gradient goes."""
        self.weight, self.sink = parameters[self.name], sinks[self.name]

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return cast(Tensor, _ProjectExperts.apply(rows, self, counts, self.weight))

    def matrices(self) -> Iterator[Tensor]:
        """(outputs, inputs) of each expert."""
        return iter(self.weight.flatten(1, -2))


class _ProjectExperts(torch.autograd.Function):
    """The products of all experts. The weight is an argument so that autograd knows that a gradient is wanted; its own goes to
    the sink."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, projection: ExpertProjection, counts: Sequence[int], weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.projection, ctx.counts = projection, counts
        return torch.cat([F.linear(some, matrix) for some, matrix in zip(rows.split(counts), projection.matrices(), strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        projection, counts = ctx.projection, ctx.counts
        rows, = ctx.saved_tensors
        wanted = torch.cat([some @ matrix for some, matrix in zip(gradient.split(counts), projection.matrices(), strict=True)])
        weights = projection.tensor.weights
        weights.put_off(_ExpertGradient(projection.sink, counts), rows, gradient)
        if projection.tensor.size == 1 or projection.last:
            weights.meanwhile()
        return wanted, None, None, None


@dataclass(frozen=True, slots=True)
class _ExpertGradient:
    """The weight gradient of one passage, which had so many rows for each expert."""

    sink: Sink
    counts: Sequence[int]

    def add_weight_gradient(self, x: Tensor, gradient: Tensor) -> None:
        self.sink.add_products((g.t(), rows) for g, rows in zip(gradient.split(self.counts), x.split(self.counts), strict=True))


class Experts(nn.Module):
    """In place of transformers' module of experts with gated MLPs.

    Args:
        name: of the module in the model.
        count: how many experts.
        activation: of the gate.
        ranks: that share the experts out.
        intake: how many choices they take.
    """

    def __init__(self, name: str, count: int, activation: Callable[[Tensor], Tensor], tensor: TensorAxis, ranks: ExpertAxis,
                 intake: Intake) -> None:
        super().__init__()
        self.count, self.activation, self.ranks, self.intake = count, activation, ranks, intake
        self.gate_up = ExpertProjection(f"{name}.gate_up_proj", False, tensor)
        self.down = ExpertProjection(f"{name}.down_proj", True, tensor)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden: (tokens, hidden); index, weights: (tokens, choices), the experts of each token and how much each one counts.

        Every tensor rank routes all tokens alike. Its share of the outputs, which are summed behind the module that router and
        experts are in, gives it a share of the gradients of hidden states and of the router.
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
