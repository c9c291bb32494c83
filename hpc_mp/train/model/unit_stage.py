"""A stage whose modules compute with the parameters of units, in groups of layers that are unsharded and recomputed together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpc_mp.layout.flat import StageSpan, blocks_together
from hpc_mp.train.model.recompute import computed_again
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.data_axis import TrainedUnit, Unit
from hpc_mp.train.parallel.projection import Projection, SunkWeight
from hpc_mp.train.parallel.surroundings import Surroundings


def opened(units: Sequence[Unit], *tensors: Tensor, prefetch: Sequence[Unit] = ()) -> tuple[Tensor, ...]:
    """Unshard units for a computation with these tensors; behind its backward they are freed.

    ``prefetch``: units of the computation that follows.
    """
    if _regathered(units) and any(tensor.requires_grad for tensor in tensors):
        tensors = _marked(partial(_release, units), tensors)
    _unshard(units, prefetch)
    return tensors


def closed(units: Sequence[Unit], *results: Tensor, prefetch: Sequence[Unit] = (), passed: bool = True) -> tuple[Tensor, ...]:
    """Free units behind a computation with these results; for its backward they are unsharded again.

    Args:
        prefetch: units of the backward that follows.
        passed: True if a gradient leaves the computation.
    """
    _release(units)
    return _marked(partial(_unshard, units, prefetch, not passed), results) if _regathered(units) else results


def _regathered(units: Sequence[Unit]) -> bool:
    return torch.is_grad_enabled() and any(unit.gathers for unit in units)


def _unshard(units: Sequence[Unit], prefetch: Sequence[Unit], at_end: bool = False) -> None:
    """Unshard units. ``at_end``: free them at the end of this backward, because no gradient leaves the computation."""
    for unit in units:
        unit.need()
    for unit in prefetch:
        unit.request()
    if at_end:
        torch.autograd.Variable._execution_engine.queue_callback(partial(_release, units))


def _release(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.release()


def _marked(before: Callable[[], None], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the same tensors; their backward begins with a call of ``before``."""
    def backward(*gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        before()
        return gradients

    return with_backward(lambda *tensors: tensors, backward, *tensors)


class UnitStage(nn.Module):
    """The parameters of a stage, and the order in which they are unsharded.

    Args:
        blocks: names of the stage's layers, in order.

    Attributes:
        groups: names of the layers that are recomputed together; single layers if none are.
        gathered: units of each group, and those to prefetch with it in a forward and in a backward.
    """

    def __init__(self, span: StageSpan, around: Surroundings, blocks: Sequence[str]) -> None:
        super().__init__()
        self.span, self.around, self.blocks, self.precision = span, around, blocks, around.precision
        together = blocks_together(around.recompute)
        self.recomputes, size = together is not None, together or 1
        self.groups = [blocks[begin:begin + size] for begin in range(0, len(blocks), size)]
        self.units: dict[str, Unit] = {}
        self.gathered: list[tuple[list[Unit], list[Unit], list[Unit]]] = []

    def weight_name(self, path: str) -> str:
        """Return the name in the model of the parameter at a path in this module."""
        return path

    def units_of(self, blocks: Sequence[str]) -> list[Unit]:
        """Return the units of some layers or ends of the model, by their names."""
        return [unit for unit in self.units.values() if unit.layout.block in blocks]

    def adopt(self, units: Mapping[str, Unit]) -> None:
        """Replace the parameters of modules, and buffers that checkpoints have, by those of this stage's units."""
        self.units = dict(units)
        parameters = {name: parameter for unit in units.values() for name, parameter in unit.parameters.items()}
        sinks = {name: sink for unit in units.values() for name, sink in unit.sinks.items()}
        replace_parameters(self, lambda path, _: parameters[self.weight_name(path)])
        for module_path, module in self.named_modules():
            for leaf in module._buffers:
                module._buffers[leaf] = parameters.get(self.weight_name(f"{module_path}.{leaf}"), module._buffers[leaf])
        owned: set[str] = set()
        for module in self.modules():
            if isinstance(module, Projection | SunkWeight):
                module.adopt(parameters, sinks)
                owned |= module.owned
        for unit in (unit for unit in units.values() if isinstance(unit, TrainedUnit)):
            for name in unit.parameters.keys() - owned:
                unit.collect(name)
        first = [self.units_of(blocks[:1]) for blocks in self.groups]
        self.gathered = list(zip(map(self.units_of, self.groups), [*first[1:], []], [[], *first], strict=False))

    def compute(self, group: int, function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor],
                settings: Sequence[Any] = ()) -> tuple[Tensor, ...]:
        """Return ``function(*tensors, *settings)``, the computation of a group of layers, with its parameters unsharded.

        The next group's parameters are prefetched at its beginning; in the backward, those of the group before.
        """
        called = partial(computed_again, function) if self.recomputes else function
        units, behind, before = self.gathered[group]
        passed = any(tensor.requires_grad for tensor in tensors)  # then a gradient leaves, behind which units can be freed
        results = called(*opened(units, *tensors, prefetch=behind), *settings)
        return closed(units, *results, prefetch=before, passed=passed)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a stage holds besides activations."""
        yield from (unit.whole for unit in self.units.values())
        yield from self.buffers()


def replace_parameters(module: nn.Module, replacement: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter inside a module, given its path and itself."""
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        parent, _, leaf = path.rpartition(".")
        module.get_submodule(parent).register_parameter(leaf, replacement(path, parameter))
