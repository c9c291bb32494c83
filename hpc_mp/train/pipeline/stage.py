"""Interfaces between the engine and a model: stages, which a pipeline runs, and models, which build them.

This module does not depend on a family of models or on transformers. A stage receives named tensors from the stage before and its
part of a batch. It returns named tensors for the next stage; the last stage returns the summed loss and its number of labels. The
data axis owns the parameters of a stage, in units.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hpc_mp.layout.flat import FlatLayout, StageSpan
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule import Chunk
from hpc_mp.train.device.precision import Precision
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.dropout import Moment

if TYPE_CHECKING:
    from hpc_mp.train.parallel.surroundings import Surroundings

Batch = Mapping[str, Tensor]  # name -> tensor of a microbatch that a stage needs, on the device
Boundary = dict[str, Tensor]  # name -> tensor that crosses from one stage to the next


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that crosses from one stage to the next. ``differentiable``: True if its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True


@dataclass(slots=True)
class Microbatches:
    """A replica's share of a step, on a rank with some of its stages."""

    batches: Mapping[Chunk, Batch]  # the tensors that each stage of the rank needs of each microbatch, on the device
    moments: Sequence[Moment]  # the step and the global positions of the samples, of each microbatch
    labels: int | None  # number of labels in this share that count in the loss; None: the forward counts them
    begun: int = -1  # the microbatch whose forward was the last to begin; -1: none has begun

    @classmethod
    def artificial(cls, layout: Layout, stages: Iterable[int], tokens: Callable[[], Tensor], separate: bool,
                   device: torch.device) -> "Microbatches":
        """Return a share of samples of one document. ``tokens``: returns ids or labels of a microbatch. ``separate``: True if
        stages need to know documents."""
        ends, samples = {"ids": 0, "labels": layout.stages - 1}, layout.samples
        batches = {(stage, number): {name: tokens() for name, end in ends.items() if end == stage}
                   | ({"documents": torch.zeros((samples, 1), dtype=torch.int64, device=device)} if separate else {})
                   for stage in stages for number in range(layout.microbatches)}
        begins = range(0, layout.microbatches * samples, samples)
        return cls(batches, [Moment(0, tuple(range(begin, begin + samples))) for begin in begins],
                   layout.microbatches * samples * layout.sequence)


class Stage(Protocol):
    """A part of a model on this rank. ``precision``: number formats of its parameters and of its computation. ``units``: the
    units of its parameters, by name."""

    @property
    def precision(self) -> Precision: ...

    @property
    def units(self) -> Mapping[str, Unit]: ...

    def __call__(self, received: Boundary, batch: Batch, gradient: Tensor | None) -> Boundary | tuple[Tensor, Tensor]:
        """Compute a microbatch. ``received``: tensors from the stage before; empty on the first stage. ``gradient``: what the
        summed loss will get in its backward, a scalar, so that the last stage may compute gradients in its forward; None: no
        backward follows."""

    def adopt(self, units: Mapping[str, Unit]) -> None:
        """Use the parameters of these units."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the stage holds besides activations."""

    def train(self) -> object:
        """Enable dropout."""

    def eval(self) -> object:
        """Disable dropout."""


class StagedModel(Protocol):
    """A model as the engine cuts it. ``experts``: number of experts of a block; 0 if there are none."""

    @property
    def experts(self) -> int: ...

    def capacity(self, layout: Layout) -> int | None:
        """Return the limit of the choices that an expert takes of a sample; None if it takes all."""

    def units(self, layout: Layout, spans: Iterable[StageSpan], tensor: int, expert: int) -> Mapping[str, FlatLayout]:
        """Return the units of a rank with these stages and these tensor and expert coordinates, by name."""

    def module_shapes(self, spans: Iterable[StageSpan]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that the modules of stages give their parameters, by name."""

    def received(self, layout: Layout, stage: int, tokens: int, dtype: torch.dtype) -> Mapping[str, Carried]:
        """Return the tensors that a stage receives. ``tokens``: number of a sample's tokens on this rank, between cut layers."""

    def build(self, span: StageSpan, around: "Surroundings") -> Stage:
        """Build a stage without parameters, which ``adopt`` gives it."""
