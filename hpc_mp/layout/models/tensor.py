"""The cut of a model by tensor parallelism: cut parts, shared parts, and whole weights, with the reason. No torch.

Modules are cut as a whole: the embedding, the head, and of every block its attention and its MLP (Megatron-LM, arXiv:1909.08053,
section 3). Heads are never split. Each rank has query heads of whole groups, with the key-value head of each; if there are fewer
key-value heads than ranks, neighbouring ranks hold the same one, and share its group out. So all key-value heads of a rank have
equally many query heads there, as attention functions require, and each is shared by one set of ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import runs
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
    """The part of a weight on a tensor rank."""

    box: tuple[slice, ...]  # the rectangle of the whole weight
    cut: bool  # True if tensor ranks compute different results with the weight, False if all compute the same
    copies: int  # number of tensor ranks that have this part; they are consecutive
    replica: int  # number of this copy
    partial: bool  # True if each of the copies computes only a share of the gradient


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a rank.

    Attributes:
        query, kv: numbers of its query heads, and of their key-value heads.
        copies: number of ranks that have these key-value heads; they are consecutive.
        replica: number of this rank among them.
    """

    query: range
    kv: range
    copies: int
    replica: int


def heads_of(heads: int, kv_heads: int, ranks: int, rank: int) -> Heads:
    """Return a rank's heads of so many heads; each of up to ``heads`` ranks has some; the first one has the most."""
    end = _split(kv_heads, ranks, rank + 1)
    kv = range(min(_split(kv_heads, ranks, rank), end - 1), end)
    first, behind = (number * ranks // kv_heads for number in (kv.start, kv.stop))
    copies, replica, group = behind - first, rank - first, heads // kv_heads
    begin, end = (kv.start * group + _split(len(kv) * group, copies, replica + after) for after in (0, 1))
    return Heads(range(begin, end), kv, copies, replica)


def selected_heads(order: str, own: Heads, heads: int, kv_heads: int) -> tuple[int, list[int]] | None:
    """Return the number of heads in what a module returns, and those of a rank among them; None: it has no others.

    Args:
        order: "query" or "key": all heads of this kind; "query key value": those of each kind; "groups": the heads of this rank's
            key-value heads: for each of these its query heads, key and value. Several ranks may share one.
    """
    group, kv = heads // kv_heads, [*own.kv]
    if order == "groups":
        first = own.query.start - own.kv.start * group
        return None if own.copies == 1 else (group + 2, [*range(first, first + len(own.query)), group, group + 1])
    rows = [*own.query, *(heads + head for head in kv), *(heads + kv_heads + head for head in kv)]
    return {"query": (heads, [*own.query]), "key": (kv_heads, kv), "query key value": (heads + 2 * kv_heads, rows)}[order]


def _split(size: int, parts: int, part: int) -> int:
    """Return where a part begins if the sizes of parts differ by at most 1."""
    return -(-size * part // parts)


def part_of(family: Family, shape: ModelShape, weight: Weight, tensor: TensorCut) -> TensorPart:
    """Return a tensor rank's part of a weight of a family: in attention that of its heads."""
    module = family.module_of(shape, weight.name)
    part = cut_part(weight, tensor, tensor.cuts(module))
    if not part.cut or weight.cut is None or not family.has_heads(str(module)):
        return part
    own, box = heads_of(shape.heads, shape.kv_heads, tensor.size, tensor.rank), list(part.box)
    numbers, copies, replica = (own.kv, own.copies, own.replica) if weight.most_parts else (own.query, 1, 0)
    size, rest = divmod(weight.shape[weight.cut], weight.most_parts or shape.heads)
    if rest:
        raise HpcMpError(f"parallel.tensor = {tensor.size}", f"cuts heads, and {weight.name} of shape {weight.shape} has none",
                         "leave attentions out of parallel.tensor_modules")
    box[weight.cut] = slice(numbers.start * size, numbers.stop * size)
    return TensorPart(tuple(box), True, copies, replica, copies > 1)


def cut_part(weight: Weight, tensor: TensorCut, cuts: bool) -> TensorPart:
    """Return a tensor rank's part of a weight, cut as ``torch.chunk`` cuts: the last parts may be smaller or empty.

    ``cuts``: True if the ranks cut the module that it belongs to.
    """
    box = [slice(0, size) for size in weight.shape]
    if weight.cut is None or not cuts:
        return TensorPart(tuple(box), False, tensor.size, tensor.rank, weight.partial and cuts)
    part = chunk(weight.shape[weight.cut] // weight.together, tensor.size, tensor.rank)
    box[weight.cut] = slice(part.start * weight.together, part.stop * weight.together)
    return TensorPart(tuple(box), True, 1, 0, False)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tensor_modules(family: Family, shape: ModelShape) -> tuple[str, ...]:
    """Return the modules that can be cut, by their Hugging Face names; a tied head is the embedding."""
    inner = [f"{family.path(layer)}.{module}" for layer in range(shape.layers)
             for module in (family.entered(shape, layer) if family.decoder else family.block_modules)]
    return family.embedding, *inner, *(() if shape.tied or shape.classes else (family.head,))


def head_counts(family: Family, shape: ModelShape, tensor: TensorCut) -> tuple[int, ...]:
    """Return the number of query heads of every tensor rank, or of all ranks if they cut the attention of no layer."""
    ranks = tensor.size if any(tensor.cuts(family.attention_of(layer)) for layer in range(shape.layers)) else 1
    return tuple(len(heads_of(shape.heads, shape.kv_heads, ranks, rank).query) for rank in range(ranks))


def kv_copies(shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """Return the numbers of neighbouring tensor ranks that hold the same key-value heads."""
    every = (heads_of(shape.heads, shape.kv_heads, tensor, rank) for rank in range(tensor))
    return tuple(heads.copies for heads in every if heads.replica == 0)


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
    module = family.module_of(shape, weight.name)
    if part_of(family, shape, weight, tensor).cut:
        return f"{weight.most_parts} key-value heads on {tensor.size} ranks" if weight.most_parts and (
            weight.most_parts < tensor.size) else None
    if module is not None and not tensor.cuts(module):
        return NOT_CHOSEN
    if weight.row:
        return ROW_BIAS
    if weight.partial:
        attention = str(module).rpartition(".")[2] == family.block_module(family.attention)
        return "a norm of queries or keys" if len(weight.shape) == 1 else (
            f"{'queries or keys' if attention else 'a router'}, which every rank computes in full")
    if len(weight.shape) == 1:
        return "a vector of hidden size"
    looked_up = family.lookups.get(weight.name.rpartition(".")[0])
    return f"looked up by {looked_up}, not by tokens" if looked_up else "a layer that every rank computes in full"


def _ranges(layers: Iterable[int | None], all_layers: int) -> str:
    """Return ``*`` for all layers, else their numbers such as ``0,3-5``, or how many they are; ``layers`` in ascending order."""
    numbers = [layer for layer in layers if layer is not None]
    if len(numbers) == all_layers:
        return "*"
    ranges = [f"{first}-{last}" if first < last else f"{first}" for first, last in runs(numbers)]
    return ",".join(ranges) if len(ranges) <= 3 else f"({len(numbers)} of {all_layers})"
