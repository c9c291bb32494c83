"""Frameworks that train transformers: what they reach of a GPU's rates, and the bytes that a rank of theirs holds.

``products`` of each row, and the general row, are fitted to published results by ``benchmarks/calibrate_planner.py``; what is fused
and hidden is from the frameworks' documentation. Bytes are those of arXiv:2205.05198 (a layer keeps 10 + 24/T bytes per token and
hidden unit if its MLP has 4 h inner units) and arXiv:1910.02054, with what measured jobs need besides.
"""

from dataclasses import dataclass
from functools import partial

from hpc_mp.layout.flat import StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.planner.footprint import Footprint

FUSED = 2.0  # passes of frameworks with fused kernels
GAPS = 0.1  # share of what is counted that is lost in the allocator's gaps


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework.

    Attributes:
        products: share of the reachable rate of products; attention: rate of flash attention relative to version 2.
        passes: bytes of element-wise passes, relative to those of kernels that are fused where they can be.
        tensor: seconds of the tensor axis' collectives relative to the links': ranks wait for each other, or hide them.
        contention: seconds that computations lose to a collective beside them, relative to it.
        overlap, publish: hidden share of the last backward in which gradients are summed, and of the gathering of parameters.
        host: seconds in which the host launches a layer's forward.
        flash: True for flash attention. scattered: True if tensor ranks share out what crosses to another stage.
        gradient, states, logit: bytes of a gradient, of a parameter's masters and optimizer, of a logit.
        kept: bytes that layers keep relative to the formula. overhead: bytes of context, communicators and buffers.
    """

    products: float = 0.95
    attention: float = 1.0
    passes: float = 4.8
    tensor: float = 1.3
    contention: float = 0.4
    overlap: float = 0.8
    publish: float = 0.0
    host: float = 300e-6
    flash: bool = True
    scattered: bool = True
    gradient: int = 2
    states: int = 12
    logit: int = 10
    kept: float = 1.0
    overhead: float = 4e9


OURS = Framework(scattered=False, gradient=4)
_fused, _eager = partial(Framework, passes=FUSED, overlap=0.0), partial(Framework, overlap=1.0, publish=1.0)
FRAMEWORKS = {  # by the beginning of its name; "": any other
    "": Framework(), "Megatron-LM": _fused(products=1.06), "Megatron-DeepSpeed": _fused(products=0.98),
    "NeMo": Framework(0.98, 1.4, FUSED, 0.3, overlap=1.0, publish=1.0), "Composer": _eager(products=1.0),
    "torchtitan": _eager(products=0.91), "PyTorch FSDP": _eager(products=1.0), "InternEvo": _fused(products=0.94),
    "OneFlow": _fused(products=1.0)}


def weights_of(shape: ModelShape, layer: int) -> tuple[int, int]:
    """Return the weights of a layer's products outside of experts, and of one expert."""
    width, matrices = 2 * (shape.heads + shape.kv_heads) * shape.head_dim, 3 if shape.gated_mlp else 2
    attention = shape.hidden * width * (2 if 0 < shape.encoder <= layer else 1)
    if experts := shape.experts_of(layer):
        return attention + shape.hidden * experts, matrices * shape.hidden * shape.expert_intermediate
    return attention + matrices * shape.hidden * shape.intermediate, 0


def held(layout: Layout, shape: ModelShape, span: StageSpan) -> float:
    """Return the parameters of a stage on a rank."""
    weights = [(*weights_of(shape, layer), shape.experts_of(layer) / layout.degrees.expert) for layer in span.layers]
    ends = span.first + span.last - (span.first and span.last and shape.tied)
    return (sum(dense + expert * count for dense, expert, count in weights) + ends * shape.vocabulary * shape.hidden) \
        / layout.degrees.tensor


def stages_of(layout: Layout, rank: int) -> list[int]:
    """Return the stages of a pipeline rank."""
    p = layout.degrees.pipeline
    return [rank, 2 * p - 1 - rank] if layout.schedule == "zero_bubble_v" else list(range(rank, layout.stages, p))


def footprint_elsewhere(layout: Layout, shape: ModelShape, framework: Framework) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline under another framework."""
    degrees, spans, h = layout.degrees, stage_spans(layout.layers), shape.hidden
    p, m, t = degrees.pipeline, layout.microbatches, degrees.tensor
    tokens, shards = layout.samples * layout.sequence / degrees.context, layout.shard_degree if layout.zero else 1
    inner, rows = (shape.expert_intermediate, shape.experts_per_token) if shape.experts else (shape.intermediate, 1)
    inside = 4 * (shape.heads + shape.kv_heads) * shape.head_dim + rows * inner * (8 if shape.gated_mlp else 4)
    scores = 0 if framework.flash or layout.recompute == "selective" else 5 * shape.heads * layout.sequence
    layer = tokens * (10 * h / (t if layout.sequence_parallel else 1) + (inside + scores) / t) * framework.kept
    together, results = blocks_together(layout.recompute), []
    for rank in range(p):
        own = [spans[stage] for stage in stages_of(layout, rank)]
        count, weights = len(own), sum(held(layout, shape, span) for span in own)
        ahead = {"1f1b": p - rank, "interleaved_1f1b": 2 * (p - rank - 1) + (count - 1) * p + 1, "zero_bubble": p, "zero_bubble_v": 2 * p}
        chunks = min(m * count, ahead.get(layout.schedule, m * count)) * sum(len(span.layers) for span in own) / count
        kept = chunks * layer if together is None else chunks / together * 2 * tokens * h / (t if layout.sequence_parallel else 1)
        whole = max(held(layout, shape, span) / max(1, len(span.layers)) for span in own) * (layout.zero == 3)
        logits = framework.logit * tokens * shape.vocabulary / t * own[-1].last
        sharded = [shards if layout.zero > least else 1 for least in (2, 1, 0)]
        states = (weights * size / part for size, part in zip((2, framework.gradient, framework.states), sharded, strict=True))
        counted = [*states, kept, logits, whole * 8, layer * (together or 0)]
        results.append(Footprint(*map(int, counted), 0, int(framework.overhead + GAPS * sum(counted)), 0))
    return tuple(results)
