"""The time of an optimizer step, predicted from a layout, a model's shape and a machine; no torch.

A product takes its operations at the reachable rate, and half a wave of tiles, at whose end processors idle; or as long as its
bytes. Stages have their layers' kernels, and what these do not hide of messages; layers of a kind are computed once. The pipeline
is simulated action by action up to ``MOST`` forwards; it is steady after 4 P microbatches: longer steps are extrapolated. Modules
that ``tensor_modules`` leaves whole count as cut, adapters as all weights, and offloaded activations as hidden.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

from hpc_mp.layout.flat import StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement.grid import NODE_OF, normalize_order
from hpc_mp.layout.schedule.simulate import Times, simulate
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.collectives import expect
from hpc_mp.planner.frameworks import OURS, Framework, held, layer_weights, stages_of
from hpc_mp.planner.machine import NodeType
from hpc_mp.planner.memory import BYTES

TILE, STREAM = 128 * 256, 0.85  # numbers of a product that a processor computes at once; reachable share of the memory's rate
SCORE, LOGIT, UPDATE = 13, 18, 40  # bytes that move for each score and logit of a forward, for a parameter in the optimizer
UNALIGNED, COARSE = 13.0, 1.2  # times slower for sizes that are not multiples of 8, and of 64 (bigscience, chronicles-prequel)
LAUNCH, SKEW = 5e-6, 0.002  # seconds between kernels; share of a step that ranks wait, for each doubling of their number
MOST, STEADY = 512, 4  # forwards that are simulated; × P microbatches
BUBBLES = {"zero_bubble": 1 / 3, "zero_bubble_v": 1 / 6}  # relative to 1F1B's with as many stages
Parts = dict[str, float]  # what takes time → seconds
Makespan = Callable[[Layout, list[float], list[float], float], float]
_expected = lru_cache(4096)(expect)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, the sum of ``parts`` of the slowest rank; tokens per second of all ranks; model FLOPs relative to the
    peak: for a token 6 (W + V h) + 12 L h s, with W weights in its layers, and attention over the whole square, as usual; seconds
    of the computations of every pipeline rank."""

    seconds: float
    parts: Parts
    tokens_per_s: float
    mfu: float
    passes: tuple[float, ...]


def simulated(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the makespan of the layout's schedule, from the seconds of its stages and of a message between them."""
    p, m = layout.degrees.pipeline, layout.microbatches
    some = min(m, STEADY * p + m % p)
    if p == 1 or some * len(forwards) > MOST:
        return closed(layout, forwards, backwards, latency)
    forth, back, split = map(dict, map(enumerate, (forwards, backwards, [seconds / 2 for seconds in backwards])))
    times: Times = {"F": forth, "B": back, "I": split, "W": split}
    whole, less = (simulate(schedule_of(replace(layout, microbatches=count)), times, latency).makespan if count else 0.0
                   for count in (some, some - p if some < m else 0))
    return whole + (m - some) * (whole - less) / p


def closed(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the same in closed form. Under 1F1B, P − r microbatches are in flight on rank r, whose trips limit the period."""
    p = layout.degrees.pipeline
    ranks = [sum(forwards[stage] + backwards[stage] for stage in stages_of(layout, rank)) for rank in range(p)]
    trips = ((sum(ranks[r:]) + 2 * (p - 1 - r) * latency) / (p - r) for r in range(p)) if layout.schedule == "1f1b" else ()
    share = BUBBLES.get(layout.schedule, 1.0) * p / len(forwards)
    return layout.microbatches * max(*ranks, *trips, 0.0) + share * (sum(ranks) - max(ranks)) + 2 * latency * (p - 1)


def step_time(layout: Layout, shape: ModelShape, machine: NodeType, framework: Framework = OURS,
              pipeline: Makespan = simulated) -> StepTime:
    """Return the time of a step of stages that are cut. Raises HpcMpError if ranks span nodes without a network."""
    gpu, peaks = machine.gpu, machine.gpu.peak_tflops
    peak = 1e12 * next(peaks[name] for name in (layout.precision, "fp16", "fp32") if peaks.get(name))
    memory = 1e9 * (gpu.memory_gbs or 0) * STREAM
    products, attention = gpu.reach
    reach = gpu.products_share or products * framework.products
    flash = gpu.attention_share or attention * framework.attention
    wave, launch = gpu.wave or gpu.processors * TILE / 2, LAUNCH if gpu.launch_us is None else gpu.launch_us / 1e6
    return _Prediction(layout, shape, machine, framework, peak, peak * reach, peak * flash, memory, wave, launch,
                 BYTES[layout.precision][1]).time(pipeline)


estimate = partial(step_time, pipeline=closed)  # within a millisecond, for searches


def _total(terms: Iterable[tuple[float, Parts]]) -> Parts:
    """Return a weighted sum of parts."""
    total: Parts = {}
    for weight, parts in terms:
        total |= {name: total.get(name, 0.0) + weight * seconds for name, seconds in parts.items()}
    return total


@dataclass(frozen=True, slots=True)
class _Prediction:
    layout: Layout
    shape: ModelShape
    machine: NodeType
    framework: Framework
    peak: float  # operations per second: at most
    products: float  # of products
    flash: float  # of flash attention
    memory: float  # bytes per second
    wave: float  # numbers of half a wave of tiles
    launch: float  # seconds between kernels
    number: int  # bytes of a number

    def product(self, m: float, n: float, k: float) -> float:
        """Return the seconds of a product of m × k and k × n numbers."""
        slower = 1.0 if self.machine.fabric.gloo else UNALIGNED if n % 8 or k % 8 else COARSE if n % 64 or k % 64 else 1.0
        moved = (m * k + k * n + m * n) * self.number / self.memory
        return max(2 * k * (m * n + self.wave) / self.products * slower, moved) + self.launch

    def group(self, axes: str) -> list[int]:
        """Return the first group of ranks along these letters, ascending."""
        degrees, ranks, stride = self.layout.degrees, [0], 1
        sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}
        for letter in reversed(normalize_order(self.layout.order.replace("auto", "DPT"), degrees.context)):
            ranks = [rank + stride * place for place in range(sizes[letter] if letter in axes else 1) for rank in ranks]
            stride *= sizes[letter]
        return sorted(ranks)

    def seconds(self, collective: str, size: float, ranks: list[int]) -> float:
        """Return the seconds of a collective, while all groups of the axis do the same. ``size``: bytes of the whole array."""
        if len(ranks) == 1 or not size:
            return 0.0
        per_node, nodes, mapped = self.layout.ranks_per_node, self.layout.nodes, self.layout.rank_map
        used = {mapped[rank] if isinstance(mapped, tuple) else NODE_OF[mapped](rank, per_node, nodes) for rank in ranks}
        on_one = -(-len(ranks) // len(used))
        return _expected(collective, int(size), len(used), on_one, self.machine.fabric, max(1, per_node // on_one)).seconds

    def attention(self, layer: int, tokens: float, q: float) -> float:
        """Return the seconds of attention's forward: of the keys that are visible if fused, else of whole rows of scores."""
        shape, d, sequence = self.shape, self.shape.head_dim, self.shape.tokens_of(layer, self.layout.sequence)
        prompt, product = shape.prompt * (0 < shape.encoder <= layer), 4 * d / self.products * (UNALIGNED if d % 8 else 1.0)
        if not self.framework.flash:
            return tokens * q / d * (sequence + prompt) * (product + SCORE / self.memory) + 4 * self.launch
        window, both = min(sequence, shape.window_of(layer) or sequence), shape.bidirectional or layer < shape.encoder
        visible = min(2 * window - 1, sequence) if both else window * (1 - window / (2 * sequence))
        return 4 * tokens * q * (visible + prompt) / self.flash + self.launch

    def layer(self, layer: int) -> tuple[Parts, Parts]:
        """Return the parts of a layer's forward and backward of a microbatch."""
        layout, shape, factors, degrees, h = self.layout, self.shape, self.framework, self.layout.degrees, self.shape.hidden
        tokens, tensor = layout.samples * shape.tokens_of(layer, layout.sequence) / degrees.context, degrees.tensor
        q, kv = (-(-heads // tensor) * shape.head_dim for heads in (shape.heads, shape.kv_heads))
        rows, count, inner, entering = tokens, 1.0, -(-shape.intermediate // tensor), 1 + shape.gated_mlp
        if experts := shape.experts_of(layer):  # each of a rank's experts gets an equal share of the rows
            inner, count = -(-shape.expert_intermediate // tensor), experts / degrees.expert
            rows = tokens * shape.experts_per_token / count
        projections = self.product(tokens, q + 2 * kv, h) + self.product(tokens, h, q)
        mlp = count * (self.product(rows, entering * inner, h) + self.product(rows, h, inner))
        between = 10 * tokens * h / (tensor if layout.sequence_parallel else 1)  # two norms and two sums
        within = 2 * tokens * (q + 2 * kv) + rows * count * ((1 + entering) * inner + 4 * h * (experts > 0))
        core, again = self.attention(layer, tokens, q), float(bool(blocks_together(layout.recompute)))
        forward = {"products": (1 + (0 < shape.encoder <= layer)) * projections + mlp, "attention": core,
                   "passes": factors.passes * (between + within) * self.number / self.memory}
        backward = {name: 2 * seconds for name, seconds in forward.items()} | {
            "attention": (2.5 if factors.flash else 2.0) * core,
            "recompute": again * sum(forward.values()) + core * (layout.recompute == "selective")}
        size, around, everyone = tokens * h * self.number, self.group("C"), self.group("DC")
        kinds = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
        ring, routed = self.seconds("sendrecv", 2 * size * kv / h, around[:2]), size * shape.experts_per_token * (experts > 0)
        sent = {"tensor": 2 * factors.tensor * sum(self.seconds(kind, size, self.group("T")) for kind in kinds),
                "context": max(0.0, (degrees.context - 1) * ring - core) if layout.context_method == "ring" else self.seconds(
                    "all_to_all", 2 * size * (q + kv) / h, around),
                "experts": 2 * self.seconds("all_to_all", routed, everyone[:degrees.expert])}
        weights, shards = held(layout, shape, StageSpan(range(layer, layer + 1), False, False)), everyone[:layout.shard_degree]
        repeated = layout.zero > 1 and layout.reduce == "microbatch"
        gather = self.seconds("all_gather", weights * self.number * (layout.zero == 3), shards)
        scatter = self.seconds("reduce_scatter", weights * factors.gradient * repeated, shards)
        forward, backward = forward | sent, _total(((1.0, backward), (1.0 + again, sent)))
        for parts, launches, moved in ((forward, 1.0, gather), (backward, 1.5 + again, gather + scatter)):
            busy = sum(parts.values())
            parts |= {"gathers": max(0.0, moved - busy) + factors.contention * min(moved, busy),
                      "host": max(0.0, launches * factors.host - max(busy, moved) * (not self.machine.fabric.gloo))}
        return forward, backward

    def end(self, own: list[int], held: list[float], backwards: list[float]) -> Parts:
        """Return the parts at a step's end of a rank with these stages, from all stages' parameters and backwards."""
        layout, factors, everyone, shards = self.layout, self.framework, self.group("DC"), self.layout.shard_degree
        weights, units = sum(held[stage] for stage in own), 1 + sum(layout.layers[stage] for stage in own)
        unit, near, once = weights / units, everyone[:shards], layout.zero < 2 or layout.reduce == "step"
        summed = units * (self.seconds("reduce_scatter", unit * factors.gradient * once, near)
                          + self.seconds("all_reduce", unit * factors.gradient / shards, everyone[::shards]))
        pieces, kind = (min(shards, factors.broadcasts * units), "broadcast") if factors.broadcasts else (units, "all_gather")
        gathered = pieces * self.seconds(kind, weights / pieces * self.number * (layout.zero < 3), near)
        copied = (self.machine.gpu.host_copy_gbs or math.inf) * 1e9 if "optimizer" in layout.offload else self.memory
        return {"reduce": max(summed - factors.overlap * backwards[own[0]], factors.contention * summed * (factors.overlap > 0)),
                "publish": gathered * (factors.overlap < 1), "update": weights / shards * UPDATE / min(copied, self.memory)}

    def time(self, pipeline: Makespan) -> StepTime:
        """Return the time of the step."""
        layout, shape, degrees, m, h = self.layout, self.shape, self.layout.degrees, self.layout.microbatches, self.shape.hidden
        factors, kinds, tokens = self.framework, shape.kinds, layout.samples * layout.sequence / degrees.context
        layers, rows = {kind: self.layer(kinds.index(kind)) for kind in set(kinds)}, shape.classes or shape.vocabulary
        size, part, cut = tokens * h * self.number, rows / degrees.tensor, self.framework.scattered or layout.sequence_parallel
        edge = {"tensor": self.seconds("all_reduce", size, self.group("T"))}
        loss = {"head": self.product(tokens, -(-part // 64) * 64, h) + tokens * part * LOGIT / self.memory}
        stages, weights = [], [held(layout, shape, span) for span in stage_spans(layout.layers)]
        for span, own in zip(stage_spans(layout.layers), weights, strict=True):
            count, shards = Counter(kinds[layer] for layer in span.layers), layout.shard_degree if layout.zero == 3 else 1
            summed = {"passes": own * (self.number + 2 * factors.gradient) / self.memory / shards * (m > 1 and factors.sums)}
            ends = [((span.first, edge), (span.last, loss)), ((span.last, edge), (2 * span.last, loss), (1, summed))]
            stages.append([_total([*((n, layers[kind][back]) for kind, n in count.items()), *ends[back]]) for back in (0, 1)])
        crossing = [self.seconds("sendrecv", size / (degrees.tensor if cut else 1), list(pair))
                    for pair in pairwise(self.group("P"))]
        latency, ranks = sum(crossing) / max(1, len(crossing)), [stages_of(layout, rank) for rank in range(degrees.pipeline)]
        forwards, backwards = ([sum(stage[back].values()) for stage in stages] for back in (0, 1))
        busy = [_total((m, some) for stage in own for some in stages[stage]) for own in ranks]
        passes = tuple(sum(own.values()) for own in busy)
        parts = max(busy, key=lambda own: sum(own.values()))
        parts["bubble"] = max(0.0, pipeline(layout, forwards, backwards, latency) - sum(parts.values()))
        if layout.stages > degrees.pipeline:  # messages are hidden; each rank sends and receives two of a stage and microbatch
            parts["messages"] = self.framework.contention * 4 * m * len(ranks[0]) * latency
        parts = parts | max((self.end(own, weights, backwards) for own in ranks), key=lambda own: sum(own.values()))
        parts["skew"] = SKEW * math.log2(layout.ranks) * sum(parts.values())
        seconds, sequence, q = sum(parts.values()), layout.sequence, 2 * shape.heads * shape.head_dim
        flops = float(rows * h)
        for layer, (own, experts) in enumerate(layer_weights(shape)):
            used = own + experts * shape.experts_per_token / max(1, shape.experts_of(layer))
            flops += used + q * min(sequence, shape.window_of(layer) or sequence)
        rate = degrees.data * m * layout.samples * sequence / seconds
        return StepTime(seconds, parts, rate, 6 * rate * flops / layout.ranks / self.peak, passes)
