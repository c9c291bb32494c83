"""What a pipeline runs: stages, and the models that make them. Nothing here knows a family of models or transformers.

A stage gets named tensors from the stage before and its part of a batch. It returns what the next one gets, the last one
the summed loss and the number of labels of which it is the sum. Its parameters come in units, which the data axis owns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hpc_mp.layout.flat import FlatLayout, StageSpan
from hpc_mp.layout.layout import Layout
from hpc_mp.train.engine.data_axis import Unit
from hpc_mp.train.engine.precision import Precision

if TYPE_CHECKING:
    from hpc_mp.train.engine.surroundings import Surroundings

Batch = Mapping[str, Tensor]  # a microbatch: what a stage needs of it, on the device, by name
Boundary = dict[str, Tensor]  # what crosses from one stage to the next, by name


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that crosses from one stage to the next. ``differentiable``: its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True


class Stage(Protocol):
    """A part of a model on this rank.

    Attributes:
        precision: in which it computes.
        units: its parameters, by the names of their units.
    """

    @property
    def precision(self) -> Precision: ...

    @property
    def units(self) -> Mapping[str, Unit]: ...

    def __call__(self, received: Boundary, batch: Batch) -> Boundary | tuple[Tensor, Tensor]:
        """Compute a microbatch. ``received``: what the stage before has sent, nothing on the first one."""

    def adopt(self, units: Mapping[str, Unit]) -> None:
        """Compute with the parameters of these units from now on."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield what the stage holds besides activations."""

    def train(self) -> object:
        """Drop what dropout drops."""

    def eval(self) -> object:
        """Drop nothing."""


class Model(Protocol):
    """A model as the engine cuts it.

    Attributes:
        experts: of a block with experts; 0: none has any.
    """

    @property
    def experts(self) -> int: ...

    def capacity(self, layout: Layout) -> int | None:
        """Return the number of choices of a sample that an expert takes; None: all."""

    def units(self, layout: Layout, spans: Iterable[StageSpan], tensor: int, expert: int) -> Mapping[str, FlatLayout]:
        """Return the units of a rank with these stages and these tensor and expert coordinates, by name."""

    def received(self, layout: Layout, stage: int, tokens: int, dtype: torch.dtype) -> Mapping[str, Carried]:
        """Return what a stage receives from the one before. ``tokens``: of a sample on this rank, between cut layers."""

    def build(self, span: StageSpan, around: "Surroundings") -> Stage:
        """Make a stage. Its parameters come with ``adopt``."""


def gradients_of(carried: Mapping[str, Carried]) -> Sequence[str]:
    """Return the names of the tensors whose gradients come back."""
    return [name for name, tensor in carried.items() if tensor.differentiable]
