"""Frameworks that train transformers: what they reach of a GPU's rates, and the bytes that a rank of theirs holds.

Shares of the rates are fitted to published results by ``benchmarks/calibrate_planner.py``; what is fused or hidden is from
documentation. Bytes are those of arXiv:2205.05198 and arXiv:1910.02054, and what measured jobs need besides.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

from hpc_mp.layout.flat import StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.planner.footprint import Footprint
from hpc_mp.planner.memory import BYTES

FUSED, GAPS = 2.0, 0.05  # passes of fused kernels; share of what is counted that is lost in the allocator's gaps


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework, or with the defaults one that runs each operation as a kernel of its own."""

    products: float = 0.93  # share of the reachable rate
    attention: float = 1.0  # rate of flash attention, relative to version 2; 0.5: version 1, 1.7: cuDNN
    passes: float = 4.2  # bytes of element-wise passes, relative to kernels that are fused wherever they can be
    tensor: float = 1.26  # seconds of the tensor axis' collectives, relative to the links': ranks wait, or hide them
    contention: float = 0.39  # seconds that computations lose to a collective beside them, relative to it
    overlap: float = 0.8  # share of the last backward in which gradients are summed; 1: forwards hide gathers of updates too
    host: float = 300e-6  # seconds in which the host launches a layer's forward
    flash: bool = True
    sums: bool = True  # True if a pass adds up gradients of microbatches, False if the weights' products do
    broadcasts: int = 0  # tensors of a layer that ranks with their optimizer broadcast; 0: shards are gathered
    scattered: bool = True  # True if tensor ranks share out what crosses to another stage
    gradient: int = 2  # bytes of a gradient; of a parameter's masters and optimizer; of a logit with its gradient
    states: int = 12
    logit: int = 10
    overhead: float = 5e9  # bytes of the CUDA context, communicators and buffers


OURS = Framework(scattered=False, gradient=4)
_fused, _eager = partial(Framework, passes=FUSED, overlap=0.0), partial(Framework, overlap=1.0)
FRAMEWORKS = {  # by the beginning of its name; "": any other. InternEvo: its hybrid_zero_optim.py
    "": Framework(passes=3.2), "Megatron": _fused(1.01, sums=False), "Megatron-DeepSpeed": _fused(0.92, states=16),
    **dict.fromkeys(("NeMo", "Megatron-Core", "Megatron-Bridge"), _fused(0.92, 1.7, tensor=0.3, overlap=1.0, sums=False)),
    "Composer": _eager(0.92, 0.5, FUSED), "torchtitan": _eager(0.91), "PyTorch": _eager(0.98),
    "InternEvo": _fused(0.91, broadcasts=7), "OneFlow": _fused(0.95, logit=4)}


def framework_named(name: str) -> Framework:
    """Return the framework whose row is the longest that begins a name."""
    return FRAMEWORKS[max((key for key in FRAMEWORKS if name.startswith(key)), key=len)]


@lru_cache(64)
def layer_weights(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return, for every layer, the weights of its matrices, and those of all its experts."""
    table, kinds = family_of(shape).block_weights, shape.kinds
    of_kind = []
    for kind in range(1 + max(kinds, default=-1)):
        sizes = {True: 0, False: 0}
        for weight in table(shape, kinds.index(kind)):
            sizes[weight.experts] += prod(weight.shape) * (len(weight.shape) > 1 + weight.experts)
        of_kind.append((sizes[False], sizes[True]))
    return tuple(of_kind[kind] for kind in kinds)


def held(layout: Layout, shape: ModelShape, span: StageSpan) -> float:
    """Return the parameters of a stage on a rank."""
    weights = sum(own + experts / layout.degrees.expert for own, experts in map(layer_weights(shape).__getitem__, span.layers))
    ends = span.first + span.last - (span.first and span.last and shape.tied)
    return (weights + ends * shape.vocabulary * shape.hidden) / layout.degrees.tensor


def stages_of(layout: Layout, rank: int) -> list[int]:
    """Return the stages of a pipeline rank."""
    p = layout.degrees.pipeline
    return [rank, 2 * p - 1 - rank] if layout.schedule == "zero_bubble_v" else list(range(rank, layout.stages, p))


def footprint_elsewhere(layout: Layout, shape: ModelShape, framework: Framework) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline under another framework. Numbers of 16 bits have masters of 32."""
    h, p, t, results = shape.hidden, layout.degrees.pipeline, layout.degrees.tensor, []
    tokens, outer = layout.samples * layout.sequence / layout.degrees.context, t if layout.sequence_parallel else 1
    inner = shape.expert_intermediate * shape.experts_per_token if shape.experts else shape.intermediate
    inside = 4 * (shape.heads + shape.kv_heads) * shape.head_dim + inner * (8 if shape.gated_mlp else 4)
    scores = 0 if framework.flash or layout.recompute == "selective" else 5 * shape.heads * layout.sequence
    number = BYTES[layout.precision][1]
    layer, together = tokens * (10 * h / outer + (inside + scores) / t) * number / 2, blocks_together(layout.recompute)
    slots = framework.states + 4 * (layout.optimizer_slots - 2 - (number > 2)) - 2 * len(layout.narrow_slots)
    summed = 1 if layout.reduce == "microbatch" or layout.microbatches == 1 else 3  # microbatches add up in whole gradients
    parts_of_state = (("parameters", 2, number), ("gradients", summed, max(number, framework.gradient)), ("optimizer", 0, slots))
    for rank in range(p):
        own = [stage_spans(layout.layers)[stage] for stage in stages_of(layout, rank)]
        parts, count, chunks = [held(layout, shape, span) for span in own], len(own), layout.microbatches * len(own)
        in_flight = {"1f1b": p - rank, "interleaved_1f1b": 2 * (p - rank - 1) + (count - 1) * p + 1, "zero_bubble": p}
        layers = min(chunks, in_flight.get(layout.schedule, chunks)) * sum(len(span.layers) for span in own) / count
        whole = max(part / max(1, len(span.layers)) for part, span in zip(parts, own, strict=True)) * (layout.zero == 3)
        state = {name: sum(parts) * size / (layout.shard_degree if layout.zero > least else 1)
                 for name, least, size in parts_of_state}
        states = [size * (name not in layout.offload) for name, size in state.items()]
        activations = layers * layer if together is None else layers / together * number * tokens * h / outer
        logits = framework.logit * tokens * shape.vocabulary / t * own[-1].last
        counted = [*states, activations, logits, 3 * number * whole, layer * (together or 0), 0.0]
        host = sum(state.values()) - sum(states)
        results.append(Footprint(*map(int, (*counted, framework.overhead + GAPS * sum(counted), host))))
    return tuple(results)
