"""Flat units: the memory layout of a rank's parameters, cut into parts of equal length over the data axis.

A stage consists of units: one for each block, one for the embedding, one for the last norm and the head, and one for an embedding
that is also the head. With expert parallelism, the experts of a block are a separate unit, because they are replicated on other
ranks. With adapters, those of a block are a unit beside that of its own weights, which are not trained. What a model never trains
is a unit of its own. A unit is one flat array of the parts of its weights that a tensor rank computes with, one after another,
padded so that it splits into as many equal parts as there are shards. A part is what ZeRO gives a rank to update. It begins and
ends anywhere, also within a row. Its piece of a weight is a few rectangles (``boxes``), and checkpoints name it by them.

The engine allocates this layout, and the planner counts it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod
from operator import mul
from typing import Literal

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import Family, ModelShape, Weight, family_of
from hpc_mp.layout.models.adapter_weights import adapter_weights
from hpc_mp.layout.models.adapters import Adapters
from hpc_mp.layout.models.experts import ALL_EXPERTS, ExpertCut
from hpc_mp.layout.models.tensor import TensorPart, matches, part_of

Box = tuple[slice, ...]  # a rectangle of a whole tensor

EMBEDDING, HEAD, TIED = "embedding", "head", "tied"  # units other than blocks; TIED: the embedding that is also the head
EXPERTS = " experts"  # suffix of a block's name: the unit of the experts that an expert rank has
FIXED = " fixed"  # the same: the unit of weights that the model never trains, in the format of masters
ADAPTERS = " adapters"  # suffix of a block's name, before that of experts: the unit of its adapters
GROUPED = "every-"  # prefix of a number of blocks
ALIGNED = 8  # elements: a part of 16-bit numbers begins at a multiple of 16 bytes, as vector instructions and NCCL prefer


@dataclass(frozen=True, slots=True)
class StageSpan:
    """The part of the model in a stage: global layer numbers, and whether it has the embedding and the head."""

    layers: range
    first: bool
    last: bool


def stage_spans(layers: Sequence[int]) -> tuple[StageSpan, ...]:
    """Return the stages of a model, from their numbers of layers."""
    return tuple(StageSpan(range(begin, end), stage == 0, stage == len(layers) - 1)
                 for stage, (begin, end) in enumerate(pairwise(accumulate(layers, initial=0))))


Sharers = Literal["tensor", "kv"]
"""The ranks over which a gradient is a sum: all tensor ranks, or those of them with the same key-value heads."""


class Rectangle:
    """A part of a weight: the rectangle ``box`` of the whole tensor."""

    __slots__ = ()
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.box)

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterSlot(Rectangle):
    """A weight in a unit."""

    weight: Weight
    box: Box  # the part of the whole weight that this tensor rank computes with
    begin: int  # its first element in the unit
    cut: bool = False  # True if tensor ranks compute different results with this weight, False if all compute the same
    copies: int = 1  # number of tensor ranks that have this part; all of them if it is the whole weight
    replica: int = 0  # number of this copy
    shares: Sharers | None = None  # ranks whose gradients of this part are shares of a sum; None: each has the whole gradient
    counts: bool = True  # True for the one copy that counts in checkpoints and norms


@dataclass(frozen=True, slots=True)
class Piece(Rectangle):
    """A rectangle of a weight in a part of a unit. ``begin`` is its first element in the part."""

    slot: ParameterSlot
    box: Box
    begin: int


@dataclass(frozen=True, slots=True)
class Tie:
    """Weights with which several modules compute, such as an embedding that is also the head."""

    stages: tuple[int, ...]  # that have a copy; the gradient is a sum over them
    counts: bool  # True if this rank's copy is that of the first of them, which counts in checkpoints and norms


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """One unit of a tensor rank: its weights one after another, and its number of parts. ``tie``: the stages that have the same
    unit, of a unit with which several modules compute; None: one module of one stage."""

    unit: str
    slots: tuple[ParameterSlot, ...]
    shards: int
    tie: Tie | None = None

    @property
    def of_experts(self) -> bool:
        """True if its parts are held by other ranks than those of other units: by the ranks with the same experts."""
        return self.unit.endswith(EXPERTS)

    @property
    def fixed(self) -> bool:
        """True if the model never trains its weights. A rank has them in the format of masters."""
        return self.unit.endswith(FIXED)

    @property
    def block(self) -> str:
        """Name of its block; the units of a block are gathered and freed together."""
        return self.unit.removesuffix(FIXED).removesuffix(EXPERTS).removesuffix(ADAPTERS)

    @property
    def trained(self) -> bool:
        """True if its weights are trained, all of them or none."""
        return all(slot.weight.trained for slot in self.slots)

    @property
    def filled(self) -> int:
        """Elements without the padding."""
        return self.slots[-1].begin + self.slots[-1].size if self.slots else 0

    @property
    def part(self) -> int:
        """Elements of each part."""
        size = -(-self.filled // self.shards)
        return -(-size // ALIGNED) * ALIGNED

    @property
    def padded(self) -> int:
        """Elements of all parts."""
        return self.part * self.shards

    def pieces(self, shard: int) -> Iterator[Piece]:
        """Yield the pieces in a shard's part, in the order of its elements, without padding."""
        low, high = shard * self.part, (shard + 1) * self.part
        for slot in self.slots:
            begin, end = max(low, slot.begin), min(high, slot.begin + slot.size)
            for box in boxes(slot.shape, begin - slot.begin, end - slot.begin) if begin < end else ():
                piece = Piece(slot, tuple(slice(whole.start + part.start, whole.start + part.stop)
                                          for whole, part in zip(slot.box, box, strict=True)), begin - low)
                yield piece
                begin += piece.size


def blocks_together(recompute: str) -> int | None:
    """Return the number of blocks of a stage that are recomputed, and so gathered, together; None without recomputation."""
    if recompute == "full":
        return 1
    return int(recompute.removeprefix(GROUPED)) if recompute.startswith(GROUPED) else None


def unit_weights(family: Family, shape: ModelShape, span: StageSpan, expert: ExpertCut = ALL_EXPERTS) -> dict[str, list[Weight]]:
    """Return the weights of every unit of a stage, under their Hugging Face names."""
    units: dict[str, list[Weight]] = {}
    tied = [weight for weight in family.embedding_weights(shape) if shape.tied and weight.name == f"{family.embedding}.weight"]
    if span.first or span.last:
        units[TIED] = tied
    if span.first:
        units[EMBEDDING] = [weight for weight in family.embedding_weights(shape) if weight not in tied]
    for layer in span.layers:
        block, weights = family.path(layer), family.layer_weights(shape, layer)
        units[block] = [weight for weight in weights if expert.size == 1 or not weight.experts]
        units[f"{block}{EXPERTS}"] = [weight for weight in weights if expert.size > 1 and weight.experts]
    if span.last:
        units[HEAD] = [*family.norm_weights(shape), *family.own_head_weights(shape)]
    fixed = {f"{unit}{FIXED}": [weight for weight in weights if not weight.trained] for unit, weights in units.items()}
    units = {unit: [weight for weight in weights if weight.trained] for unit, weights in units.items()}
    adapted = units if shape.adapters is None else dict(_adapted(family, shape.adapters, units))
    return {unit: weights for unit, weights in (adapted | fixed).items() if weights}


def _adapted(family: Family, adapters: Adapters, units: Mapping[str, Sequence[Weight]]) -> Iterator[tuple[str, list[Weight]]]:
    """Yield units whose weights keep their values, each followed by the unit of the adapters beside these weights, or of a new
    head."""
    for unit, weights in units.items():
        new = [weight for weight in weights if matches(weight.name, family.fresh)]
        yield unit, [replace(weight, trained=False) for weight in weights if weight not in new]
        yield f"{unit}{ADAPTERS}", new
        if unit.startswith(f"{family.blocks}."):
            block = unit.removesuffix(EXPERTS)
            yield f"{block}{ADAPTERS}{unit.removeprefix(block)}", list(adapter_weights(family, adapters, weights))


def rank_units(layout: Layout, shape: ModelShape, spans: Iterable[StageSpan], tensor: int = 0, expert: int = 0,
               ) -> dict[str, FlatLayout]:
    """Return the units of a rank with these stages and these tensor and expert coordinates. A tied weight appears once, even if
    the rank has both ends."""
    spans, family, experts = list(spans), family_of(shape), layout.expert_cut(expert)
    weights: dict[str, list[Weight]] = {}
    for span in spans:
        weights |= unit_weights(family, shape, span, experts)
    cut, ends = layout.tensor_cut(tensor), Tie(tuple({0, layout.stages - 1}), any(span.first for span in spans))
    return flat_units(layout, weights, lambda weight: part_of(family, shape, weight, cut), experts, {TIED: ends})


def flat_units(layout: Layout, weights: Mapping[str, Sequence[Weight]], part: Callable[[Weight], TensorPart], expert: ExpertCut,
               ties: Mapping[str, Tie]) -> dict[str, FlatLayout]:
    """Return units of a rank by name. ``weights``: of every unit. ``part``: a weight's part on this tensor rank. ``ties``: of the
    units with which several modules compute."""
    return {unit: FlatLayout(unit, tuple(_slots(layout, [(weight, part(weight)) for weight in group], expert, ties.get(unit))),
                             expert.shards if unit.endswith(EXPERTS) else layout.shard_degree, ties.get(unit))
            for unit, group in weights.items()}


def _slots(layout: Layout, parts: Iterable[tuple[Weight, TensorPart]], expert: ExpertCut, tie: Tie | None,
           ) -> Iterator[ParameterSlot]:
    """Yield the slots of a unit. Matrices come before vectors, which mostly have no weight decay, so that the optimizer updates
    long stretches. Within both, the parts that several tensor ranks share are adjacent, so that their gradients are summed in few
    messages."""
    begin = 0
    for weight, part in sorted(parts, key=lambda pair: (len(pair[0].shape) < 2, pair[0].cut is None, pair[1].copies)):
        box = (expert.part(weight.shape[0]), *part.box[1:]) if weight.experts else part.box
        shares: Sharers | None = "kv" if part.partial and part.cut else None
        if not part.cut and layout.degrees.tensor > 1 and (part.partial or layout.sequence_parallel):
            shares = "tensor"
        slot = ParameterSlot(weight, box, begin, part.cut, part.copies, part.replica, shares,
                             counts=part.replica == 0 and (tie is None or tie.counts))
        begin += slot.size
        yield slot


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yield the rectangles that cover the elements ``begin`` to ``end`` of a row-major array, in order: at most two for each
    dimension but the last, and one more."""
    if not shape:
        yield ()
        return
    strides = [prod(shape[dimension + 1:]) for dimension in range(len(shape))]
    while begin < end:
        axis, stride = next((axis, stride) for axis, stride in enumerate(strides) if not begin % stride and begin + stride <= end)
        *outer, first = (begin // strides[dimension] % shape[dimension] for dimension in range(axis + 1))
        count = min(shape[axis] - first, (end - begin) // stride)
        yield (*(slice(at, at + 1) for at in outer), slice(first, first + count), *(slice(0, size) for size in shape[axis + 1:]))
        begin += count * stride


def stretches(sizes: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield (first element, elements) of the contiguous stretches of a rectangle in a row-major array, in order."""
    if not sizes:
        yield 0, 1
        return
    axis = len(sizes) - 1  # dimensions behind it are complete, so that their elements are contiguous
    while axis and (box[axis].start, box[axis].stop) == (0, sizes[axis]):
        axis -= 1
    strides = [prod(sizes[dimension + 1:]) for dimension in range(axis + 1)]
    for at in product(*(range(part.start, part.stop) for part in box[:axis])):
        yield sum(map(mul, (*at, box[axis].start), strides)), (box[axis].stop - box[axis].start) * strides[axis]


def pieces(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Yield rectangles that make up a tensor, in the order of its elements, each of at most ``limit`` elements."""
    rows = max(stride for stride in accumulate(reversed(shape), mul, initial=1) if stride <= limit)  # as many as fit, whole
    for begin in range(0, prod(shape), limit // rows * rows):
        yield from boxes(shape, begin, min(begin + limit // rows * rows, prod(shape)))
