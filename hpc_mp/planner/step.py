"""The time of an optimizer step, predicted from a layout, a model's shape and a machine; no torch. Kernels: see ``kernels.py``.

A stage's forward and backward have its layers' kernels, and what these do not hide of messages: the tensor axis' two all-reduces per
layer and direction (or an all-gather and a reduce-scatter each), the context ring, the experts' all-to-all, ZeRO-3's gathers and
scatters. Layers of a kind are computed once. The pipeline is simulated action by action, up to ``MOST`` forwards; its period is steady
after 4 P microbatches, and longer steps are extrapolated. In the end gradients are summed, beside the last backward as far as the
framework does that, the optimizer passes over its state, and parameters are gathered. Modules that ``tensor_modules`` leaves whole
count as cut, and adapters as if the whole model were trained.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from hpc_mp.layout.flat import StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import normalize_order
from hpc_mp.layout.placement.grid import NODE_OF
from hpc_mp.layout.schedule.simulate import simulate
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.collectives import expect
from hpc_mp.planner.fabrics import Fabric
from hpc_mp.planner.frameworks import OURS, Framework, held, stages_of, weights_of
from hpc_mp.planner.kernels import LOGIT, Parts, Rates, block, product, rates_of
from hpc_mp.planner.machine import Machine
from hpc_mp.planner.memory import BYTES

MOST, STEADY = 1024, 4  # forwards that are simulated; × P microbatches
BUBBLES = {"zero_bubble": 1 / 3, "zero_bubble_v": 1 / 6}  # relative to 1F1B's with as many stages
UPDATE = 40  # bytes of a parameter's masters, gradient and two slots that an optimizer reads and writes
SKEW = 0.002  # of a step that ranks wait for the slowest, for each doubling of their number
Pipeline = Callable[[Layout, list[float], list[float], float], float]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, the sum of ``parts`` of the slowest rank; tokens per second of all ranks; and their model FLOPs relative to
    the peak: per token 6 (W + V h) + 12 L h s, with the weights W of the layers that a token uses, and attention over the whole
    square, as in most publications."""

    seconds: float
    parts: Parts
    tokens_per_s: float
    mfu: float


def step_time(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework = OURS) -> StepTime:
    """Return the time of a step of stages that are cut. Raises HpcMpError if ranks span nodes without a network."""
    return _step(layout, shape, machine, framework, simulated)


def estimate(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework = OURS) -> StepTime:
    """Return the same with the pipeline's bubble in closed form, in a millisecond, for searches."""
    return _step(layout, shape, machine, framework, closed)


def model_flops(shape: ModelShape, sequence: int) -> float:
    """Return the model FLOPs of a token."""
    total = float(shape.hidden * (shape.classes or shape.vocabulary))
    for layer in range(shape.layers):
        dense, expert = weights_of(shape, layer)
        seen = min(sequence, shape.window_of(layer) or sequence)
        total += dense + expert * shape.experts_per_token + 2 * shape.heads * shape.head_dim * seen
    return 6 * total


_expected = lru_cache(4096)(expect)


@dataclass(frozen=True, slots=True)
class _Links:
    """Messages of a layout's axes over a machine's links."""

    layout: Layout
    fabric: Fabric

    def group(self, axes: str) -> list[int]:
        """Return the first group along these letters, ascending."""
        degrees, ranks, stride = self.layout.degrees, [0], 1
        sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}
        for letter in reversed(normalize_order(self.layout.order.replace("auto", "DPT"), degrees.context)):
            if letter in axes:
                ranks = [rank + stride * place for place in range(sizes[letter]) for rank in ranks]
            stride *= sizes[letter]
        return sorted(ranks)

    def seconds(self, collective: str, size: float, ranks: list[int]) -> float:
        """Return the seconds of a collective, while all groups of the axis do the same. ``size``: bytes of the whole array."""
        if len(ranks) == 1 or not size:
            return 0.0
        here, nodes, mapped = self.layout.ranks_per_node, self.layout.nodes, self.layout.rank_map
        used = {mapped[rank] if isinstance(mapped, tuple) else NODE_OF[mapped](rank, here, nodes) for rank in ranks}
        each = -(-len(ranks) // len(used))
        return _expected(collective, int(size), len(used), each, self.fabric, max(1, here // each)).seconds


def _total(terms: Iterable[tuple[float, Parts]]) -> Parts:
    """Return a weighted sum of parts."""
    total: Parts = {}
    for weight, parts in terms:
        total |= {name: total.get(name, 0.0) + weight * seconds for name, seconds in parts.items()}
    return total


def _layer(layout: Layout, shape: ModelShape, layer: int, rates: Rates, links: _Links, framework: Framework) -> tuple[Parts, Parts]:
    """Return the parts of a layer's forward and backward of a microbatch."""
    degrees, (forward, backward) = layout.degrees, block(layout, shape, layer, rates, framework)
    tokens, everyone = layout.samples * shape.tokens_of(layer, layout.sequence) / degrees.context, links.group("DC")
    size, keys = tokens * shape.hidden * rates.number, 2 * tokens * shape.kv_heads * shape.head_dim / degrees.tensor * rates.number
    kinds = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
    routed = size * shape.experts_per_token * (shape.experts_of(layer) > 0)
    ring = (degrees.context - 1) * links.seconds("sendrecv", keys, links.group("C")[:2])
    sent = {"tensor": 2 * framework.tensor * sum(links.seconds(kind, size, links.group("T")) for kind in kinds),
            "context": max(0.0, ring - forward["attention"]),
            "experts": 2 * links.seconds("all_to_all", routed, everyone[:degrees.expert])}
    again = 1.0 if blocks_together(layout.recompute) else 0.0
    weights = held(layout, shape, StageSpan(range(layer, layer + 1), False, False)) * (layout.zero == 3)
    gather = links.seconds("all_gather", weights * rates.number, everyone[:layout.shard_degree])
    scatter = links.seconds("reduce_scatter", weights * framework.gradient * (layout.reduce == "microbatch"),
                            everyone[:layout.shard_degree])
    forward, backward = forward | sent, _total(((1.0, backward), (1.0 + again, sent)))
    for parts, launches, moved in ((forward, 1.0, gather), (backward, 1.5 + again, gather + scatter)):
        busy = sum(parts.values())
        parts["gathers"] = max(0.0, moved - busy) + framework.contention * min(moved, busy)
        parts["host"] = max(0.0, launches * framework.host - busy)
    return forward, backward


def _step(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework, pipeline: Pipeline) -> StepTime:
    rates, links, degrees = rates_of(machine.gpu, layout.precision, framework), _Links(layout, machine.fabric), layout.degrees
    m, (master, number), kinds = layout.microbatches, BYTES[layout.precision], shape.kinds
    layers = {kind: _layer(layout, shape, kinds.index(kind), rates, links, framework) for kind in set(kinds)}
    tokens, rows = layout.samples * layout.sequence / degrees.context, (shape.classes or shape.vocabulary) / degrees.tensor
    size = tokens * shape.hidden * number
    looked_up = {"tensor": links.seconds("all_reduce", size, links.group("T"))}  # and the gradient of the head's input
    loss = {"head": product(tokens, -(-rows // 8) * 8, shape.hidden, rates) + tokens * rows * LOGIT / rates.memory}
    stages, weights = [], []
    for span in stage_spans(layout.layers):
        count = Counter(kinds[layer] for layer in span.layers)
        weights.append(held(layout, shape, span))
        summed = weights[-1] * (number + 2 * master) / rates.memory * (m > 1) / (layout.shard_degree if layout.zero == 3 else 1)
        stages.append([_total((*((n, layers[kind][back]) for kind, n in count.items()), (back, {"passes": summed}),
                               (span.last * (1 + back), loss), (span.last if back else span.first, looked_up))) for back in (0, 1)])
    part = degrees.tensor if framework.scattered or layout.sequence_parallel else 1
    crossing = [links.seconds("sendrecv", size / part, list(pair)) for pair in pairwise(links.group("P"))]
    latency = sum(crossing) / max(1, len(crossing))
    forwards, backwards = ([sum(stage[back].values()) for stage in stages] for back in (0, 1))
    ranks = [stages_of(layout, rank) for rank in range(degrees.pipeline)]
    parts = max((_total((m, part) for stage in own for part in stages[stage]) for own in ranks), key=lambda parts: sum(parts.values()))
    parts["bubble"] = max(0.0, pipeline(layout, forwards, backwards, latency) - sum(parts.values()))
    if layout.stages > degrees.pipeline:  # messages are hidden, and each rank sends and receives two of each stage and microbatch
        parts["messages"] = framework.contention * 4 * m * len(ranks[0]) * latency
    parts |= max((_state(layout, sum(weights[stage] for stage in own), backwards[own[0]],
                         1 + sum(layout.layers[stage] for stage in own), rates, links, framework)
                  for own in ranks), key=lambda parts: sum(parts.values()))
    parts["skew"] = SKEW * math.log2(layout.ranks) * sum(parts.values())
    seconds = sum(parts.values())
    rate = degrees.data * m * layout.samples * layout.sequence / seconds
    return StepTime(seconds, parts, rate, rate * model_flops(shape, layout.sequence) / layout.ranks / rates.peak)


def _state(layout: Layout, weights: float, last: float, units: int, rates: Rates, links: _Links, framework: Framework) -> Parts:
    """Return the parts at the end of a step of a rank with so many parameters in units, and seconds of the last backward."""
    everyone, shards, gradients = links.group("DC"), layout.shard_degree, weights * framework.gradient / units
    scattered = links.seconds("reduce_scatter", gradients * (layout.zero < 3 or layout.reduce == "step"), everyone[:shards])
    summed = units * (scattered + links.seconds("all_reduce", gradients / shards, everyone[::shards]))
    gathered = units * links.seconds("all_gather", weights * rates.number / units * (layout.zero < 3), everyone[:shards])
    return {"reduce": max(summed - framework.overlap * last, framework.contention * summed * (framework.overlap > 0)),
            "publish": (1 - framework.publish) * gathered, "update": weights / shards * UPDATE / rates.memory}


def simulated(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the makespan of the layout's schedule, from the seconds of its stages and of a message between them."""
    p, m, half = layout.degrees.pipeline, layout.microbatches, [seconds / 2 for seconds in backwards]
    some = min(m, STEADY * p + m % p)
    if p == 1 or some * len(forwards) > MOST:
        return closed(layout, forwards, backwards, latency)
    times = {kind: dict(enumerate(seconds)) for kind, seconds in zip("FBIW", (forwards, backwards, half, half), strict=True)}
    whole, less = (simulate(schedule_of(replace(layout, microbatches=count)), times, latency).makespan if count else 0.0
                   for count in (some, some - p if some < m else 0))
    return whole + (m - some) * (whole - less) / p


def closed(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the makespan in closed form. Under 1F1B, P − r microbatches are in flight on rank r, whose round trips limit the
    period."""
    p, times = layout.degrees.pipeline, list(map(sum, zip(forwards, backwards, strict=True)))
    ranks = [sum(times[stage] for stage in stages_of(layout, rank)) for rank in range(p)]
    trips = ((sum(ranks[r:]) + 2 * (p - 1 - r) * latency) / (p - r) for r in range(p)) if layout.schedule == "1f1b" else ()
    share = BUBBLES.get(layout.schedule, 1.0) * p / len(times)
    return layout.microbatches * max(*ranks, *trips, 0.0) + share * (sum(ranks) - max(ranks)) + 2 * latency * (p - 1)
