"""Agreement of all ranks on the numbers of a step: each rank computes its shares, and all ranks receive the same totals.

One message to all ranks carries the shares. Every rank sums them in the order of ranks, so that all results are bitwise equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hpc_mp.train.parallel.collectives import known_to_all
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.step.loss_scale import ScaleState


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of one rank, or their sums over all ranks; scalars in fp64.

    Attributes:
        squares: sum of the squares of the gradients that this rank counts.
        loss: loss, summed over labels; ``count``: number of labels that the forwards have counted.
        router: sum of the losses of routers.
        dropped, choices: number of choices that experts dropped, and of all choices.
    """

    squares: Tensor
    loss: Tensor
    count: Tensor
    router: Tensor
    dropped: Tensor
    choices: Tensor

    def exchanged(self, notes: Sequence[float], ranks: Tree) -> tuple["Shares", Tensor]:
        """Return the sums over all ranks, and the largest value of each note over all ranks, (notes,)."""
        own = [torch.full((), note, dtype=torch.float64, device=self.loss.device) for note in notes]
        everyone = known_to_all(torch.stack([*astuple_of(self), *own]), ranks)
        count = len(fields(Shares))
        return Shares(*everyone[:, :count].sum(0)), everyone[:, count:].amax(0)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Numbers that all ranks know after a step; scalars in fp64 on the device, unless a shape is given.

    Attributes:
        loss: mean over the labels of the global batch that count; ``labels``: their number.
        norm: L2 norm of all gradients before clipping; if it is not finite, nothing is updated.
        absorbed: 1 if nothing is updated because there are no labels or fp16's loss scale is lowered, else 0.
        router_loss: sum of the losses of routers.
        dropped: share of choices that experts dropped; NaN if experts have no capacity.
        scale: fp16's loss scale from now on, (3,).
        notes: largest value of each note over all ranks, (notes,).
    """

    loss: Tensor
    norm: Tensor
    labels: Tensor
    absorbed: Tensor
    router_loss: Tensor
    dropped: Tensor
    scale: Tensor
    notes: Tensor

    def packed(self) -> Tensor:
        """Return all numbers in one tensor, for the host to read."""
        *scalars, scale, notes = astuple_of(self)
        return torch.cat((torch.stack(scalars), scale, notes))


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of ``Agreed`` on the host.

    Attributes:
        loss: mean over the labels of the global batch that count.
        norm: L2 norm of all gradients before clipping; if it is not finite, nothing was updated.
        labels: number of labels that count.
        absorbed: True if nothing was updated because there were no labels or fp16's loss scale was lowered.
        router_loss: sum of the losses of routers, a part of the training objective, see ``router_loss``.
        dropped: share of the choices of all tokens in all layers that experts dropped, see ``capacity``; NaN if experts have no
            capacity.
        scale: fp16's loss scale after the step.
        notes: largest value of each note over all ranks.
        seconds: duration of the step on this rank's device.
    """

    loss: float
    norm: float
    labels: float
    absorbed: bool
    router_loss: float
    dropped: float
    scale: ScaleState
    notes: tuple[float, ...]
    seconds: float


def unpacked(values: Sequence[float], seconds: float) -> StepNumbers:
    """Unpack the values of ``Agreed.packed``. ``seconds``: duration of the step on this rank's device."""
    names = [field.name for field in fields(Agreed)][:-2]
    scalars = dict(zip(names, values, strict=False))
    scale, notes = values[len(names):len(names) + 3], values[len(names) + 3:]
    labels, absorbed = scalars.pop("labels"), bool(scalars.pop("absorbed"))
    return StepNumbers(**scalars, labels=labels, absorbed=absorbed, scale=ScaleState(*scale), notes=tuple(notes), seconds=seconds)


def astuple_of(record: Shares | Agreed) -> tuple[Tensor, ...]:
    """Return the fields of a record as they are; ``dataclasses.astuple`` would copy tensors."""
    return tuple(getattr(record, field.name) for field in fields(record))
