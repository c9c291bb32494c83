"""The time of an optimizer step, predicted from a layout, a model's shape and a machine; no torch. Kernels: see ``kernels.py``.

A stage's forward and backward have its layers' kernels, and what these do not hide of messages. Layers of a kind count once. The
pipeline is simulated action by action, up to ``MOST`` forwards; it is steady after 4 P microbatches, and longer steps are
extrapolated. In the end gradients are summed, beside the last backward as far as the framework does that, the optimizer passes
over its state, and parameters are gathered. Modules that ``tensor_modules`` leaves whole count as cut, adapters as all weights,
and offloaded activations as hidden.
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
from hpc_mp.planner.frameworks import OURS, Framework, held, stages_of, weights_of
from hpc_mp.planner.kernels import LOGIT, Parts, Rates, block, rates_of
from hpc_mp.planner.machine import Machine
from hpc_mp.planner.memory import BYTES

MOST, STEADY = 512, 4  # forwards that are simulated; × P microbatches
BUBBLES = {"zero_bubble": 1 / 3, "zero_bubble_v": 1 / 6}  # relative to 1F1B's with as many stages
UPDATE = 40  # bytes of a parameter's masters, gradient and two slots that an optimizer reads and writes
SKEW = 0.002  # of a step that ranks wait for the slowest, for each doubling of their number
Makespan = Callable[[Layout, list[float], list[float], float], float]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, the sum of ``parts`` of the slowest rank; tokens per second of all ranks; model FLOPs relative to the
    peak: for a token 6 (W + V h) + 12 L h s, with W weights in its layers, and attention over the whole square, as in most
    publications."""

    seconds: float
    parts: Parts
    tokens_per_s: float
    mfu: float


def simulated(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the makespan of the layout's schedule, from the seconds of its stages and of a message between them."""
    p, m, half = layout.degrees.pipeline, layout.microbatches, [seconds / 2 for seconds in backwards]
    some = min(m, STEADY * p + m % p)
    if p == 1 or some * len(forwards) > MOST:
        return closed(layout, forwards, backwards, latency)
    forth, back, split = (dict(enumerate(seconds)) for seconds in (forwards, backwards, half))
    times: Times = {"F": forth, "B": back, "I": split, "W": split}
    whole, less = (simulate(schedule_of(replace(layout, microbatches=count)), times, latency).makespan if count else 0.0
                   for count in (some, some - p if some < m else 0))
    return whole + (m - some) * (whole - less) / p


def closed(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the same in closed form. Under 1F1B, P − r microbatches are in flight on rank r, whose trips limit the period."""
    p, times = layout.degrees.pipeline, list(map(sum, zip(forwards, backwards, strict=True)))
    ranks = [sum(times[stage] for stage in stages_of(layout, rank)) for rank in range(p)]
    trips = ((sum(ranks[r:]) + 2 * (p - 1 - r) * latency) / (p - r) for r in range(p)) if layout.schedule == "1f1b" else ()
    share = BUBBLES.get(layout.schedule, 1.0) * p / len(times)
    return layout.microbatches * max(*ranks, *trips, 0.0) + share * (sum(ranks) - max(ranks)) + 2 * latency * (p - 1)


def step_time(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework = OURS,
              pipeline: Makespan = simulated) -> StepTime:
    """Return the time of a step of stages that are cut. Raises HpcMpError if ranks span nodes without a network."""
    return _Step(layout, shape, machine, framework, rates_of(machine.gpu, layout.precision, framework)).time(pipeline)


estimate = partial(step_time, pipeline=closed)  # within a millisecond, for searches
_expected = lru_cache(4096)(expect)


def model_flops(shape: ModelShape, sequence: int) -> float:
    """Return the model FLOPs of a token."""
    layers = [(*weights_of(shape, layer), min(sequence, shape.window_of(layer) or sequence)) for layer in range(shape.layers)]
    q, k = shape.heads * shape.head_dim, shape.experts_per_token
    used = sum(dense + expert * k + 2 * q * seen for dense, expert, seen in layers)
    return 6.0 * (used + shape.hidden * (shape.classes or shape.vocabulary))


def _total(terms: Iterable[tuple[float, Parts]]) -> Parts:
    """Return a weighted sum of parts."""
    total: Parts = {}
    for weight, parts in terms:
        total |= {name: total.get(name, 0.0) + weight * seconds for name, seconds in parts.items()}
    return total


@dataclass(frozen=True, slots=True)
class _Step:
    layout: Layout
    shape: ModelShape
    machine: Machine
    framework: Framework
    rates: Rates

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
        here, nodes, mapped = self.layout.ranks_per_node, self.layout.nodes, self.layout.rank_map
        used = {mapped[rank] if isinstance(mapped, tuple) else NODE_OF[mapped](rank, here, nodes) for rank in ranks}
        each = -(-len(ranks) // len(used))
        return _expected(collective, int(size), len(used), each, self.machine.fabric, max(1, here // each)).seconds

    def layer(self, layer: int) -> tuple[Parts, Parts]:
        """Return the parts of a layer's forward and backward of a microbatch."""
        layout, shape, factors, degrees, number = self.layout, self.shape, self.framework, self.layout.degrees, self.rates.number
        (forward, backward), everyone = block(layout, shape, layer, self.rates, factors), self.group("DC")
        size = layout.samples * shape.tokens_of(layer, layout.sequence) / degrees.context * shape.hidden * number
        kinds = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
        head, around = 2 * size * shape.head_dim / shape.hidden / degrees.tensor, self.group("C")
        ring = (degrees.context - 1) * self.seconds("sendrecv", head * shape.kv_heads, around[:2])
        shuffled = self.seconds("all_to_all", head * (shape.heads + shape.kv_heads), around)
        routed = size * shape.experts_per_token * (shape.experts_of(layer) > 0)
        sent = {"tensor": 2 * factors.tensor * sum(self.seconds(kind, size, self.group("T")) for kind in kinds),
                "context": shuffled if layout.context_method == "ulysses" else max(0.0, ring - forward["attention"]),
                "experts": 2 * self.seconds("all_to_all", routed, everyone[:degrees.expert])}
        again, shards = 1.0 if blocks_together(layout.recompute) else 0.0, everyone[:layout.shard_degree]
        weights = held(layout, shape, StageSpan(range(layer, layer + 1), False, False))
        gather = self.seconds("all_gather", weights * number * (layout.zero == 3), shards)
        each = layout.zero > 1 and layout.reduce == "microbatch"
        scatter = self.seconds("reduce_scatter", weights * factors.gradient * each, shards)
        forward, backward = forward | sent, _total(((1.0, backward), (1.0 + again, sent)))
        for parts, launches, moved in ((forward, 1.0, gather), (backward, 1.5 + again, gather + scatter)):
            busy = sum(parts.values())
            parts |= {"gathers": max(0.0, moved - busy) + factors.contention * min(moved, busy),
                      "host": max(0.0, launches * factors.host - busy)}
        return forward, backward

    def end(self, weights: float, units: int, last: float) -> Parts:
        """Return the parts at a step's end of a rank with so many parameters in units, and seconds of the last backward."""
        layout, factors, everyone, shards = self.layout, self.framework, self.group("DC"), self.layout.shard_degree
        unit, near, once = weights / units, everyone[:shards], layout.zero < 2 or layout.reduce == "step"
        scattered = self.seconds("reduce_scatter", unit * factors.gradient * once, near)
        summed = units * (scattered + self.seconds("all_reduce", unit * factors.gradient / shards, everyone[::shards]))
        gathered = units * self.seconds("all_gather", unit * self.rates.number * (layout.zero < 3), near)
        memory = (self.machine.gpu.host_copy_gbs or math.inf) * 1e9 if "optimizer" in layout.offload else self.rates.memory
        return {"reduce": max(summed - factors.overlap * last, factors.contention * summed * (factors.overlap > 0)),
                "publish": (1 - factors.publish) * gathered, "update": weights / shards * UPDATE / min(memory, self.rates.memory)}

    def time(self, pipeline: Makespan) -> StepTime:
        """Return the time of the step."""
        layout, shape, rates, degrees, m = self.layout, self.shape, self.rates, self.layout.degrees, self.layout.microbatches
        tokens, rows = layout.samples * layout.sequence / degrees.context, (shape.classes or shape.vocabulary) / degrees.tensor
        kinds, (master, number), shards = shape.kinds, BYTES[layout.precision], layout.shard_degree if layout.zero == 3 else 1
        layers, size = {kind: self.layer(kinds.index(kind)) for kind in set(kinds)}, tokens * shape.hidden * number
        edge = {"tensor": self.seconds("all_reduce", size, self.group("T"))}
        loss = {"head": rates.product(tokens, -(-rows // 64) * 64, shape.hidden) + tokens * rows * LOGIT / rates.memory}
        stages, weights = [], [held(layout, shape, span) for span in stage_spans(layout.layers)]
        for span, own in zip(stage_spans(layout.layers), weights, strict=True):
            count = Counter(kinds[layer] for layer in span.layers)
            summed = {"passes": own * (number + 2 * master) / rates.memory / shards * (m > 1)}
            ends = [((span.first, edge), (span.last, loss)), ((span.last, edge), (2 * span.last, loss), (1, summed))]
            stages.append([_total([*((n, layers[kind][back]) for kind, n in count.items()), *ends[back]]) for back in (0, 1)])
        part = degrees.tensor if self.framework.scattered or layout.sequence_parallel else 1
        crossing = [self.seconds("sendrecv", size / part, list(pair)) for pair in pairwise(self.group("P"))]
        latency, ranks = sum(crossing) / max(1, len(crossing)), [stages_of(layout, rank) for rank in range(degrees.pipeline)]
        forwards, backwards = ([sum(stage[back].values()) for stage in stages] for back in (0, 1))
        busy = (_total((m, some) for stage in own for some in stages[stage]) for own in ranks)
        parts = max(busy, key=lambda own: sum(own.values()))
        parts["bubble"] = max(0.0, pipeline(layout, forwards, backwards, latency) - sum(parts.values()))
        if layout.stages > degrees.pipeline:  # messages are hidden; each rank sends and receives two of a stage and microbatch
            parts["messages"] = self.framework.contention * 4 * m * len(ranks[0]) * latency
        states = [(sum(weights[stage] for stage in own), 1 + sum(layout.layers[stage] for stage in own)) for own in ranks]
        endings = (self.end(*state, backwards[own[0]]) for state, own in zip(states, ranks, strict=True))
        parts = parts | max(endings, key=lambda own: sum(own.values()))
        parts["skew"] = SKEW * math.log2(layout.ranks) * sum(parts.values())
        seconds = sum(parts.values())
        rate = degrees.data * m * layout.samples * layout.sequence / seconds
        return StepTime(seconds, parts, rate, rate * model_flops(shape, layout.sequence) / layout.ranks / rates.peak)
