"""The cut of a model by tensor parallelism: cut parts, shared parts, and whole weights, with the reason. No torch.

Modules are cut as a whole: the embedding, the head, and of every block its attention and its MLP (Megatron-LM, arXiv:1909.08053,
section 3). Key-value heads are never split: if there are fewer of them than ranks, neighbouring ranks hold the same head.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.shape import ModelShape, chunk

ALL = ("*",)
NOT_CHOSEN = "not among parallel.tensor_modules"
ROW_BIAS = "added once, to the sum over the ranks"


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A tensor rank, and the number of tensor ranks. ``modules``: name patterns of the modules that are cut; all others stay
    whole."""

    size: int = 1
    rank: int = 0
    modules: tuple[str, ...] = ALL

    def cuts(self, module: str | None) -> bool:
        return self.size > 1 and module is not None and matches(module, self.modules)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a weight on a tensor rank.

    Attributes:
        box: the rectangle of the whole weight.
        cut: True if tensor ranks compute different results with the weight, False if all compute the same.
        copies: number of tensor ranks that have this part; they are consecutive.
        replica: number of this copy.
        partial: True if each of the copies computes only a share of the gradient.
    """

    box: tuple[slice, ...]
    cut: bool
    copies: int
    replica: int
    partial: bool


def part_of(family: Family, shape: ModelShape, weight: Weight, tensor: TensorCut) -> TensorPart:
    """Return a tensor rank's part of a weight of a family."""
    return cut_part(weight, tensor, tensor.cuts(family.module_of(shape, weight.name)))


def cut_part(weight: Weight, tensor: TensorCut, cuts: bool) -> TensorPart:
    """Return a tensor rank's part of a weight, cut as ``torch.chunk`` cuts: the last parts may be smaller or empty.

    ``cuts``: True if the ranks cut the module that it belongs to.
    """
    box = [slice(0, size) for size in weight.shape]
    if weight.cut is None or not cuts:
        return TensorPart(tuple(box), False, tensor.size, tensor.rank, weight.partial and cuts)
    parts = min(tensor.size, weight.most_parts or tensor.size)
    copies = tensor.size // parts
    box[weight.cut] = chunk(weight.shape[weight.cut], parts, tensor.rank // copies)
    return TensorPart(tuple(box), True, copies, tensor.rank % copies, copies > 1)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tensor_modules(family: Family, shape: ModelShape) -> tuple[str, ...]:
    """Return the modules that can be cut, by their Hugging Face names; a tied head is the embedding."""
    inner = [f"{family.blocks}.{layer}.{module}" for layer in range(shape.layers) for module in family.block_modules]
    return family.embedding, *inner, *(() if shape.tied else (family.head,))


def kv_copies(shape: ModelShape, tensor: int) -> int:
    """Return the number of tensor ranks that hold the same key-value heads."""
    return max(1, tensor // shape.kv_heads)


def left_whole(family: Family, shape: ModelShape, tensor: TensorCut) -> str:
    """Return a short description of what several tensor ranks share, grouped by the reason; empty if there is nothing."""
    groups: dict[str, dict[str, dict[int | None, None]]] = {}  # reason -> name, with a gap for the layer -> layers, in order
    for weight in family.all_weights(shape) if tensor.size > 1 else ():
        if reason := _reason(family, shape, weight, tensor):
            module = family.module_of(shape, weight.name) if reason == NOT_CHOSEN else None
            name, layer = family.without_layer(module or (weight.name if reason == ROW_BIAS else weight.name.rpartition(".")[0]))
            groups.setdefault(reason, {}).setdefault(name, {})[layer] = None
    return "; ".join(f"{reason}: {', '.join(name.format(_ranges(layers, shape.layers)) for name, layers in names.items())}"
                     for reason, names in groups.items())


def _reason(family: Family, shape: ModelShape, weight: Weight, tensor: TensorCut) -> str | None:
    """Return the reason why several tensor ranks hold the same part; None if each has its own."""
    module, part = family.module_of(shape, weight.name), part_of(family, shape, weight, tensor)
    if part.cut:
        return f"{weight.most_parts} key-value heads, each on {part.copies} ranks" if part.copies > 1 else None
    if module is not None and not tensor.cuts(module):
        return NOT_CHOSEN
    if weight.row:
        return ROW_BIAS
    if weight.partial:
        return "a norm of heads" if len(weight.shape) == 1 else "a router, which every rank computes in full"
    if len(weight.shape) == 1:
        return "a vector of hidden size"
    looked_up = family.lookups.get(weight.name.rpartition(".")[0])
    return f"looked up by {looked_up}, not by tokens" if looked_up else "a layer that every rank computes in full"


def _ranges(layers: Iterable[int | None], all_layers: int) -> str:
    """Return ``*`` for all layers, else their numbers such as ``0,3-5``; ``layers`` in ascending order."""
    numbers = [layer for layer in layers if layer is not None]
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return "*" if len(numbers) == all_layers else ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
