"""The comparison of what ranks have computed with Hugging Face's own model: the first module that differs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.adapter_weights import trained_weights
from hpc_mp.train.verify.observed import Observed

EXACT = 1e-10  # of fp64: rounding stays a thousand times below, and no fault does
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of one kind of numbers: what they are, in words, and of which module or parameter."""

    what: str
    name: str
    size: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences, in the order in which a fault shows: forward, loss, backward, update, export."""

    differences: tuple[Difference, ...]
    counts: Mapping[str, int]  # number of comparisons by kind: outputs of modules, gradients and parameters

    @property
    def first(self) -> Difference | None:
        """The first difference that is none of rounding."""
        return next((difference for difference in self.differences if not difference.size <= EXACT), None)

    @property
    def largest(self) -> float:
        return max(difference.size for difference in self.differences)


def compared(shape: ModelShape, plain: Observed, ranks: Sequence[Observed], stored: Tensors, exported: Tensors) -> Comparison:
    """Compare all numbers.

    Args:
        plain: of Hugging Face's model; ``stored``: its tensors behind the last step, as its own library stores them.
        exported: the same tensors, exported from the ranks' checkpoint.
    """
    outputs, gradients = _outputs(plain, ranks), _gradients(shape, plain, ranks)
    head = family_of(shape).head_module(shape)
    backward = [*reversed(plain.order)]  # the gradient of what is computed last comes first
    places = {module: place for place, module in enumerate(backward)}
    gradients.sort(key=lambda gradient: places.get(_module(gradient.name), len(backward)))
    parameters = [*_tensors(stored, exported)]
    last = len(plain.losses) - 1
    numbers = [_of_step("the loss", head, plain.losses, (rank.losses for rank in ranks), 0), *gradients,
               _of_step("the norm of all gradients", "the model", plain.norms, (rank.norms for rank in ranks), 0), *parameters,
               _of_step(f"the loss of step {last + 1}", "the model", plain.losses, (rank.losses for rank in ranks), last)]
    counts = {"modules": len(outputs), "gradients": len(gradients), "parameters": len(parameters)}
    return Comparison((*outputs, *numbers), counts)


def _outputs(plain: Observed, ranks: Sequence[Observed]) -> list[Difference]:
    """Compare the outputs of modules, in the order of a forward. Outputs that tensor ranks have parts of are left out, and those
    of a module that runs twice in a forward: a stage of a pipeline may run it on values that nothing uses."""
    whole: dict[tuple[str, int], NDArray[Any]] = {}
    for name, parts in plain.outputs.items():
        for position in {part.samples[0] for part in parts}:
            documents = sorted((part for part in parts if part.samples[0] == position), key=lambda part: part.places[0])
            if len({part.places[0] for part in documents}) == len(documents):
                whole[name, position] = np.concatenate([part.values[0] for part in documents])
    sizes: dict[str, float] = {}
    for rank in ranks:
        for name, parts in rank.outputs.items():
            for part in parts:
                for position, values in zip(part.samples, part.values, strict=True):
                    expected = whole.get((name, position))
                    if expected is not None and expected.shape[-1] == values.shape[-1]:
                        inside = part.places < len(expected)  # of a row for classification, not of what fills it up
                        sizes[name] = max(sizes.get(name, 0.0), _size(expected[part.places[inside]], values[inside]))
    return [Difference("its output", name, sizes[name]) for name in plain.order if name in sizes]


def _gradients(shape: ModelShape, plain: Observed, ranks: Sequence[Observed]) -> list[Difference]:
    shapes = {weight.name: weight.shape for weight in trained_weights(family_of(shape), shape)}
    expected = {name: values.reshape(shapes[name]) for name, _, values in plain.gradients}
    sizes = dict.fromkeys(expected, 0.0)
    covered = {name: np.zeros(shapes[name], np.bool_) for name in expected}
    for name, box, values in (part for rank in ranks for part in rank.gradients):
        covered[name][box] = True
        sizes[name] = max(sizes[name], _size(expected[name][box], values))
    return [Difference("its gradient", name, size if covered[name].all() else np.inf) for name, size in sizes.items()]


def _tensors(stored: Tensors, exported: Tensors) -> Iterable[Difference]:
    """Compare tensors; one that only an export has, or a parameter that it lacks, is a difference without a limit."""
    for name in dict.fromkeys((*stored, *exported)):
        same = name in stored and name in exported and stored[name].shape == exported[name].shape
        yield Difference("it, exported behind the last step,", name, _size(stored[name], exported[name]) if same else np.inf)


def _of_step(what: str, name: str, plain: Sequence[float], ranks: Iterable[Sequence[float]], step: int) -> Difference:
    return Difference(what, name, max(_size(np.array(plain[step]), np.array(numbers[step])) for numbers in ranks))


def _size(expected: NDArray[Any], values: NDArray[Any]) -> float:
    """Return the largest difference of two arrays; infinity if a number is none."""
    return float(np.nan_to_num(np.abs(expected - values), nan=np.inf).max(initial=0.0))


def _module(name: str) -> str:
    """Return the module of a parameter, or of the factor of an adapter."""
    return name.rpartition(".")[0].removesuffix(".lora_A").removesuffix(".lora_B")
