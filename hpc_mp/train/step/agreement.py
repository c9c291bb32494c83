"""Agreement of all ranks on the numbers of a step: each rank computes its shares, and all ranks receive the same totals.

One message to all ranks carries the shares. Every rank sums them in the order of ranks, so that all results are bitwise equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpc_mp.train.parallel.collectives import known_to_all
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.step import loss_scale

SCALE = slice(6, 9)  # place of the loss scale among the numbers of a step


class Shares(NamedTuple):
    """Shares of one rank, or their sums over all ranks; scalars in fp64."""

    squares: Tensor  # sum of the squares of the gradients that this rank counts
    # loss: loss, summed over labels; ``labels``: number of labels that the forwards have counted
    loss: Tensor
    labels: Tensor
    router: Tensor  # sum of the losses of routers
    # dropped, choices: number of choices that experts dropped, and of all choices
    dropped: Tensor
    choices: Tensor


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Numbers of a step on the host."""

    # loss: mean over the labels of the global batch that count; ``labels``: their number
    loss: float
    norm: float  # L2 norm of all gradients before clipping; if it is not finite, nothing was updated
    labels: float
    absorbed: bool  # True if nothing was updated because there were no labels or fp16's loss scale was lowered
    router_loss: float  # sum of the losses of routers, a part of the training objective, see ``router_loss``
    # share of the choices of all tokens in all layers that experts dropped, see ``capacity``; NaN if experts have no capacity
    dropped: float
    scale: loss_scale.ScaleState  # fp16's loss scale after the step
    notes: tuple[float, ...]  # largest value of each note over all ranks
    seconds: float  # duration of the step on this rank's device


def agree(shares: Shares, notes: Sequence[float], labels: Tensor | None, scale: Tensor, rule: loss_scale.ScaleRule | None,
          ranks: Tree) -> tuple[Tensor, Tensor]:
    """Exchange the shares and notes of all ranks. All ranks call this. Return the numbers of the step on the device, (9 + notes,)
    in fp64: the fields of ``StepNumbers`` but ``seconds``, in their order. Return also the factor by which the gradients are too
    large, a scalar. ``labels``: labels of the global batch, by which the gradient has been divided; None: forwards have counted
    them. ``scale``: fp16's loss scale in this step, (3,)."""
    own = [torch.full((), note, dtype=torch.float64, device=scale.device) for note in notes]
    everyone = known_to_all(torch.stack([*shares, *own]), ranks)
    total, largest = Shares(*everyone[:, :len(shares)].sum(0)), everyone[:, len(shares):].amax(0)
    divisor = scale[0] if labels is not None else scale[0] * total.labels
    labels = total.labels if labels is None else labels
    unlabelled = labels == 0  # then there is nothing to learn from, and momentum alone must not move the parameters
    norm = (total.squares.sqrt() / divisor).masked_fill(unlabelled, float("nan"))
    advanced, absorbed = loss_scale.advanced(scale, norm.isfinite(), rule)
    scalars = total.loss / labels, norm, labels, (absorbed | unlabelled).double(), total.router, total.dropped / total.choices
    return torch.cat((torch.stack(scalars), torch.where(unlabelled, scale, advanced), largest)), divisor


def step_numbers(values: Sequence[float], seconds: float) -> StepNumbers:
    """Return the numbers of a step from those of ``agree``. ``seconds``: duration of the step on this rank's device."""
    loss, norm, labels, absorbed, router_loss, dropped = values[:SCALE.start]
    return StepNumbers(loss, norm, labels, bool(absorbed), router_loss, dropped, loss_scale.ScaleState(*values[SCALE]),
                       tuple(values[SCALE.stop:]), seconds)
