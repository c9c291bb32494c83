"""Experts: several MLPs in a block; a router chooses some of them for each token.

There are three independent steps: ``dispatch`` assigns each choice of a token to a row of an expert, ``Dispatch`` moves tokens to
rows and rows back to tokens, and ``Experts`` computes with rows that lie expert by expert. Choices are dropped only if experts
have a capacity, see ``capacity``. The tensor axis cuts inside each expert, so that every rank has a share of every expert's
output; it is entered before router and experts, and left behind them. The expert axis lies between rows and experts, see
``expert_axis``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_mp.layout.models import expert_slots
from hpc_mp.train.parallel.capacity import Intake
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.expert_axis import ExpertAxis
from hpc_mp.train.parallel.grouped import grouped_product
from hpc_mp.train.parallel.projection import Projected, SunkWeight, TensorAxis


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The assignment of tokens to rows of experts. Each token has ``choices`` experts; choices are numbered token by token.

    Forwards and backwards read and write by index, no place twice, because additions on a device have no fixed order.

    Attributes:
        length: number of tokens.
        order: (rows,), the choice of each row, or the number of all choices for a row of none. Rows of an expert are adjacent.
        ends: end of each expert's rows, (experts,), int32. Rows behind the last end are of no choice.
        spare: True if there may be rows of no choice.
    """

    length: int
    choices: int
    order: Tensor
    ends: Tensor
    spare: bool

    def rows(self, tokens: Tensor) -> Tensor:
        """Gather tokens, (tokens, width), into rows, (rows, width)."""
        token = (self.order // self.choices).clamp(max=self.length - 1) if self.spare else self.order // self.choices
        return with_backward(lambda tokens: tokens[token], lambda rows: self._choices(rows).sum(1), tokens)

    def tokens(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Combine rows, (rows, width), into tokens, (tokens, width): sums over choices with weights (tokens, choices)."""
        chosen = with_backward(self._choices, self._rows, rows)
        return (chosen * weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    def _choices(self, rows: Tensor) -> Tensor:
        """Scatter rows, (rows, width), to the choices of all tokens, (tokens, choices, width); dropped choices get 0."""
        count = self.length * self.choices
        scattered = rows.new_zeros(count + self.spare, rows.shape[1]).index_copy_(0, self.order, rows)
        return scattered[:count].unflatten(0, (-1, self.choices))

    def _rows(self, choices: Tensor) -> Tensor:
        """Gather the choices of all tokens, (tokens, choices, width), into rows, (rows, width); rows of no choice get 0."""
        rows = choices.flatten(0, 1)
        return (F.pad(rows, (0, 0, 0, 1)) if self.spare else rows)[self.order]


def dispatch(index: Tensor, experts: int, limit: int | None = None, slots: int | None = None) -> Dispatch:
    """Assign choices to rows, on the device. ``index``: numbers of the chosen experts, (tokens, choices); ``experts`` stands for
    a dropped choice. ``limit``: largest number of rows that an expert receives; None: no limit. ``slots``: number of rows that
    every expert receives, at least ``limit``: the last ones may be of no choice; None: as many as it has choices."""
    chosen, order = index.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(experts, device=index.device), right=True, out_int32=True)
    if limit is None:
        return Dispatch(len(index), index.shape[1], order, ends, False)
    if slots is None:
        place = torch.arange(min(len(chosen), experts * limit), device=index.device)
        behind = ends[-1:]
    else:
        place = (F.pad(ends[:-1], (1, 0)).unsqueeze(1) + torch.arange(slots, device=index.device)).flatten()
        behind = ends.repeat_interleave(slots, output_size=len(place))
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=index.device) * slots
    order = torch.where(place < behind, order[place.clamp(max=len(chosen) - 1)], len(chosen))
    return Dispatch(len(index), index.shape[1], order, ends, True)


class ExpertProjection(SunkWeight):
    """y = x W with each expert's own W: (rows, this rank's inputs) -> (rows, this rank's outputs), rows expert by expert. The
    weight is (experts, …, in), or transposed, (experts, in, …); the other dimensions are those of the outputs. ``ends``: of
    each expert's rows. There is no sum over the tensor axis here. ``last``: True if weight gradients can be computed as soon as
    this projection's input gradient is complete. ``adapter``: is added to the product; None: there is none."""

    sums = False

    def __init__(self, name: str, last: bool, tensor: TensorAxis, transposed: bool = False) -> None:
        super().__init__(name)
        self.last, self.tensor, self.transposed = last, tensor, transposed
        self.adapter: nn.Module | None = None

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = Projected.apply(rows, self, self.weight, ends)
        return y if self.adapter is None else y + self.adapter(rows, ends)

    @property
    def trained(self) -> bool:
        return self.sink is not None

    @property
    def matrices(self) -> Tensor:
        """The matrices of the experts, (experts, in, out)."""
        return self.weight.flatten(2) if self.transposed else self.weight.flatten(1, -2).transpose(1, 2)

    def product(self, rows: Tensor, ends: Tensor) -> Tensor:
        return grouped_product(rows, self.matrices, ends)

    def input_gradient(self, gradient: Tensor, ends: Tensor) -> Tensor:
        return grouped_product(gradient, self.matrices.transpose(1, 2), ends)

    def add_weight_gradient(self, rows: Tensor, gradient: Tensor, ends: Tensor) -> None:
        if self.sink is not None:
            self.sink.add_grouped(*((rows, gradient) if self.transposed else (gradient, rows)), ends)


class Experts(nn.Module):
    """Replacement of transformers' module of experts with gated MLPs.

    Args:
        name: name of the module in the model.
        count: number of experts.
        original: transformers' module, which says how its parameters lie, and computes the gate.
        ranks: expert axis of the block.
        intake: limit of the choices that experts take.

    Attributes:
        gated: function of the gate's columns and those of the other half: the activated gate times the other half.
        ends: the tensor axis by which they are entered and left by themselves, and the number of samples in a microbatch; None:
            together with their router.
    """

    def __init__(self, name: str, count: int, original: Any, tensor: TensorAxis, ranks: ExpertAxis, intake: Intake) -> None:
        super().__init__()
        self.count, self.ranks, self.intake = count, ranks, intake
        self.gated: Callable[[Tensor], Tensor] = original._apply_gate
        self.gate_up = ExpertProjection(f"{name}.gate_up_proj", False, tensor, original.is_transposed)
        self.down = ExpertProjection(f"{name}.down_proj", True, tensor, original.is_transposed)
        self.gate_up_proj_bias: nn.Parameter | None = original.gate_up_proj_bias if original.has_bias else None
        self.down_proj_bias: nn.Parameter | None = original.down_proj_bias if original.has_bias else None
        self.ends: tuple[TensorAxis, int] | None = None

    def enter_by(self, tensor: TensorAxis, samples: int) -> None:
        """Enter and leave them by themselves."""
        self.ends = tensor, samples

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs, (tokens, hidden). index, weights: experts of each token and their weights, (tokens, choices). Every
        tensor rank routes all tokens alike. The outputs are shares. They are summed here, or behind the module of router and
        experts: then each rank has a share of the gradients of hidden states and of the router."""
        if self.ends is None:
            return self._shares(hidden, index, weights)
        tensor, samples = self.ends
        hidden, index, weights = (x.unflatten(0, (samples, -1)) for x in (hidden, index, weights))
        whole = tensor.enter(hidden), tensor.spread(index), tensor.enter(weights)
        shares = self._shares(*(x.flatten(0, 1) for x in whole)).unflatten(0, (samples, -1))
        return tensor.leave(shares.clone()).flatten(0, 1)

    def _shares(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's share of the outputs."""
        index, weights = self.intake.apply(index, weights, self.count)
        if self.ranks.size == 1:
            where = dispatch(index, self.count, self.intake.rows)
            return where.tokens(self._computed(where.rows(hidden), where.ends), weights)
        slots = expert_slots(self.intake.rows, len(index), index.shape[1], self.count)
        where = dispatch(index, self.count, self.intake.rows, slots)
        if slots is None:
            journey = self.ranks.journey(where.ends, len(where.order))
            where = replace(where, order=where.order[:sum(journey.sent)])
        else:
            journey = self.ranks.journey_of_slots(slots, index.device)
        return where.tokens(journey.back(self._computed(journey.out(where.rows(hidden)), journey.ends)), weights)

    def _computed(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs of this rank's experts for their rows."""
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return self.down(self.gated(self.gate_up(rows, ends)), ends)
        place = torch.arange(len(rows), device=rows.device).unsqueeze(1)  # sums by products have a fixed order
        of_expert = ((place >= F.pad(ends[:-1], (1, 0))) & (place < ends)).to(rows.dtype)
        inner = self.gated(self.gate_up(rows, ends) + of_expert @ self.gate_up_proj_bias)
        once = float(self.down.tensor.rank == 0)  # in the sum over the tensor axis
        return self.down(inner, ends) + of_expert @ self.down_proj_bias * once
