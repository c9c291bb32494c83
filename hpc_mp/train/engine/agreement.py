"""What the ranks of a step agree on: each finds its share of a few numbers, and all get the same totals.

One message to all ranks carries the shares. They are summed in the order of ranks, so that all get the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hpc_mp.train.engine.collectives import known_to_all
from hpc_mp.train.engine.groups import Tree
from hpc_mp.train.engine.loss_scale import ScaleState


@dataclass(frozen=True, slots=True)
class Shares:
    """What one rank has found, or all together; scalars in fp64.

    Attributes:
        squares: of the gradients that count on this rank.
        loss: summed over labels; ``count``: of labels that the forwards have counted.
        router: what routers add to the loss.
        dropped, choices: choices that experts did not take, and all of them.
    """

    squares: Tensor
    loss: Tensor
    count: Tensor
    router: Tensor
    dropped: Tensor
    choices: Tensor

    def exchanged(self, notes: Sequence[float], ranks: Tree) -> tuple["Shares", Tensor]:
        """Return the sums over all ranks, and of each note the largest over them."""
        own = [torch.full((), note, dtype=torch.float64, device=self.loss.device) for note in notes]
        everyone = known_to_all(torch.stack([*astuple_of(self), *own]), ranks)
        count = len(fields(Shares))
        return Shares(*everyone[:, :count].sum(0)), everyone[:, count:].amax(0)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know behind a step; scalars in fp64 on the device, unless said otherwise.

    Attributes:
        loss: mean over the labels of the global batch that count; ``labels``: how many did.
        norm: L2 norm of all gradients before clipping; not finite: nothing is updated.
        absorbed: whether nothing is updated for want of labels, or because fp16's loss scale gives way.
        dropped: the share of choices that experts did not take; NaN where they take all.
        scale: fp16's loss scale from now on, (3,).
        notes: (notes,).
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
        """All numbers one behind the other, for the host to read."""
        *scalars, scale, notes = astuple_of(self)
        return torch.cat((torch.stack(scalars), scale, notes))


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What all ranks agree on after a step.

    Attributes:
        loss: mean over the labels of the global batch that count.
        norm: L2 norm of all gradients before clipping; not finite: nothing was updated.
        labels: how many counted.
        absorbed: nothing was updated, and fp16's loss scale gives way for it.
        router_loss: what routers add to the loss that is trained, see ``router_loss``.
        dropped: the share of the choices of all tokens in all layers that experts did not take, see ``capacity``; NaN where they
            have no capacity.
        scale: fp16's loss scale after the step.
        notes: of each the largest over all ranks.
        seconds: that this rank's device took.
    """

    loss: float
    norm: float
    labels: int
    absorbed: bool
    router_loss: float
    dropped: float
    scale: ScaleState
    notes: tuple[float, ...]
    seconds: float


def unpacked(values: Sequence[float], seconds: float) -> StepNumbers:
    """Return what ``Agreed.packed`` has packed."""
    names = [field.name for field in fields(Agreed)][:-2]
    scalars = dict(zip(names, values, strict=False))
    scale, notes = values[len(names):len(names) + 3], values[len(names) + 3:]
    labels, absorbed = int(scalars.pop("labels")), bool(scalars.pop("absorbed"))
    return StepNumbers(**scalars, labels=labels, absorbed=absorbed, scale=ScaleState(*scale), notes=tuple(notes), seconds=seconds)


def astuple_of(record: Shares | Agreed) -> tuple[Tensor, ...]:
    """Return the fields of a record as they are; ``dataclasses.astuple`` would copy tensors."""
    return tuple(getattr(record, field.name) for field in fields(record))
