"""The time of an optimizer step, from a layout, a model's shape and a machine; see ``kernels.py`` for the computations.

Each stage's forward and backward take their layers' kernels and exposed collectives: those of the tensor axis (two all-reduces per
layer and pass, or an all-gather and a reduce-scatter each), of the context ring beyond the attention that hides it, of experts,
and ZeRO-3's gathers and scatters beyond the computations that hide them. Layers of a kind count once. The pipeline's schedule is
simulated action by action. After 4 P microbatches a step grows by a steady period, so that longer ones are extrapolated.
The data axis' reductions hide behind the last backward, as far as the framework lets them, then the optimizer passes over its state.

Model FLOPs are those of published.md's normalisation: 6 (W + V h) + 12 L h s per token, W the weights of the layers' products and
of the experts that a token uses, attention counted over the whole square.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from hpc_mp.layout.flat import blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import normalize_order
from hpc_mp.layout.placement.grid import NODE_OF
from hpc_mp.layout.schedule.simulate import simulate
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.collectives import expect
from hpc_mp.planner.fabrics import Fabric
from hpc_mp.planner.frameworks import OURS, Framework
from hpc_mp.planner.kernels import LOGIT, Rates, flash, passes, product, rates_of, unfused
from hpc_mp.planner.machine import Machine
from hpc_mp.planner.memory import BYTES

Parts = dict[str, float]  # what takes time → seconds
MOST = 1024  # computations of a direction that are simulated
STEADY = 4  # × P microbatches, after which a pipeline is steady
UPDATE = 10  # numbers of fp32 for each parameter that an optimizer with two slots reads and writes
BUBBLES = {"interleaved_1f1b": 1.0, "breadth_first": 1.0, "zero_bubble": 1 / 3, "zero_bubble_v": 1 / 6}
HIDES = 0.9  # share of a hidden collective that costs nothing: it takes some of the GPU from the computations


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, by ``parts`` of the slowest rank, tokens per second of all ranks, and the share of the peak in model
    FLOPs."""

    seconds: float
    parts: Parts
    tokens_per_s: float
    mfu: float


def step_time(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework = OURS) -> StepTime:
    """Return the time of a step, with the pipeline simulated. Raises HpcMpError if ranks span nodes without a network."""
    return _step(layout, shape, machine, framework, _simulated)


def estimate(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework = OURS) -> StepTime:
    """Return the same with the schedule's bubble in closed form, in less than a millisecond, for searches."""
    return _step(layout, shape, machine, framework, _closed)


@dataclass(frozen=True, slots=True)
class _Links:
    """The groups of a layout's axes on a machine's links."""

    layout: Layout
    fabric: Fabric

    def group(self, axes: str) -> list[int]:
        """Return the first group along these letters, ascending."""
        degrees, ranks, stride = self.layout.degrees, [0], 1
        sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}
        order = "DPT" if self.layout.order == "auto" else self.layout.order
        for letter in reversed(normalize_order(order, degrees.context)):
            if letter in axes:
                ranks = [rank + stride * place for place in range(sizes[letter]) for rank in ranks]
            stride *= sizes[letter]
        return sorted(ranks)

    def seconds(self, collective: str, size: float, ranks: list[int]) -> float:
        """Return the seconds of a collective among such ranks, while all others do the same."""
        if len(ranks) == 1 or not size:
            return 0.0
        per_node, mapped = self.layout.ranks_per_node, self.layout.rank_map
        nodes = len({mapped[rank] if isinstance(mapped, tuple) else NODE_OF[mapped](rank, per_node, self.layout.nodes)
                     for rank in ranks})
        here = -(-len(ranks) // nodes)
        return expect(collective, int(size), nodes, here, self.fabric, max(1, per_node // here)).seconds


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer of a kind: parts of its forward and backward, and the bytes of its weights on a rank in the compute format."""

    forward: Parts
    backward: Parts


def parameters(shape: ModelShape, layer: int) -> tuple[int, int]:
    """Return the weights of a layer's products, and of one of its experts."""
    q, kv, matrices = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, 3 if shape.gated_mlp else 2
    attention = shape.hidden * (2 * q + 2 * kv) * (2 if 0 < shape.encoder <= layer else 1)
    if experts := shape.experts_of(layer):
        return attention + shape.hidden * experts, matrices * shape.hidden * shape.expert_intermediate
    return attention + matrices * shape.hidden * shape.intermediate, 0


def model_flops(shape: ModelShape, sequence: int) -> float:
    """Return the model FLOPs of a token, forward and backward."""
    weights = shape.hidden * (shape.classes or shape.vocabulary)
    for layer in range(shape.layers):
        dense, expert = parameters(shape, layer)
        seen = min(sequence, shape.window_of(layer) or sequence)
        weights += dense + expert * shape.experts_per_token + 2 * shape.heads * shape.head_dim * seen
    return 6.0 * weights


def _total(terms: Iterable[tuple[float, Mapping[str, float]]]) -> Parts:
    """Return a weighted sum of parts."""
    total: Parts = {}
    for weight, parts in terms:
        for name, seconds in parts.items():
            total[name] = total.get(name, 0.0) + weight * seconds
    return total


def _held(layout: Layout, shape: ModelShape, layer: int) -> float:
    """Return the parameters of a layer on a rank."""
    dense, expert = parameters(shape, layer)
    return (dense + expert * shape.experts_of(layer) / layout.degrees.expert) / layout.degrees.tensor


def _block(layout: Layout, shape: ModelShape, layer: int, rates: Rates, links: _Links, framework: Framework) -> _Block:
    """Return the times of a layer for one microbatch."""
    degrees, hidden, number = layout.degrees, shape.hidden, rates.number
    tensor, context = degrees.tensor, degrees.context
    sequence = shape.tokens_of(layer, layout.sequence)
    tokens = layout.samples * sequence / context
    q = -(-shape.heads // tensor) * shape.head_dim
    kv = -(-shape.kv_heads // tensor) * shape.head_dim
    entering = 3 if shape.gated_mlp else 2
    cross = 0 < shape.encoder <= layer
    projections = product(tokens, q + 2 * kv, hidden, rates) + product(tokens, hidden, q, rates)
    times: Parts = {"products": projections * (2 if cross else 1)}
    inner, rows, experts = shape.intermediate // tensor, tokens, shape.experts_of(layer)
    if experts:  # each of a rank's experts gets its share of the rows
        inner, rows = shape.expert_intermediate // tensor, tokens * shape.experts_per_token
        each, count = rows * degrees.expert / experts, experts / degrees.expert
        times["products"] += count * (product(each, (entering - 1) * inner, hidden, rates) + product(each, hidden, inner, rates))
    else:
        times["products"] += product(tokens, (entering - 1) * inner, hidden, rates) + product(tokens, hidden, inner, rates)
    window = min(sequence, shape.window_of(layer) or sequence)
    both = shape.bidirectional or layer < shape.encoder
    visible = min(2 * window - 1, sequence) if both else window * (1 - window / (2 * sequence))
    if framework.flash:
        times["attention"] = flash(tokens, visible + cross * shape.prompt, q, rates)
    else:
        times["attention"] = unfused(tokens, sequence + cross * shape.prompt, q // shape.head_dim, shape.head_dim, rates)
    shares = tensor if layout.sequence_parallel else 1
    around = tokens * hidden / shares * 10 + (rows - tokens) * hidden * 4  # two norms and two additions; rows of experts
    times["passes"] = framework.passes * passes(around + tokens * 2 * (q + 2 * kv) + rows * entering * inner, rates)
    whole = layout.samples * sequence / context * hidden * number
    kind = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
    together = sum(links.seconds(name, whole, links.group("T")) for name in kind) * (1 - framework.tensor)
    ring = links.seconds("sendrecv", 2 * tokens * kv * number, links.group("C")[:2]) * (context - 1)
    everyone = links.group("DC")
    exchange = 2 * links.seconds("all_to_all", rows * hidden * number / (shares if experts else 1), everyone[:degrees.expert]) \
        if experts else 0.0
    sent: Parts = {"tensor": 2 * together, "context": max(0.0, ring - times["attention"]), "experts": exchange}
    again = {"full": 1.0, "none": 0.0, "selective": 0.0}.get(layout.recompute, 1.0)
    attention = 2.5 if framework.flash else 2.0
    repeated = sum(times.values()) * again + times["attention"] * (layout.recompute == "selective")
    forward = times | sent
    backward = {"products": 2 * times["products"], "attention": attention * times["attention"], "passes": 2 * times["passes"],
                "recompute": repeated} | {name: (1 + again) * seconds for name, seconds in sent.items()}
    gather = scatter = 0.0
    if layout.zero == 3 and layout.shard_degree > 1:
        held = _held(layout, shape, layer)
        gather = links.seconds("all_gather", held * number, everyone[:layout.shard_degree])
        if layout.reduce == "microbatch":
            scatter = links.seconds("reduce_scatter", held * framework.gradient, everyone[:layout.shard_degree])
    for parts, host, moved in ((forward, 1.0, gather), (backward, 1.5 + again, gather + scatter)):
        busy = sum(parts.values())
        parts["host"] = max(0.0, host * framework.host - busy)
        parts["gathers"] = max(0.0, moved - busy) + (1 - HIDES) * min(moved, busy)
    return _Block(forward, backward)


def _ends(layout: Layout, shape: ModelShape, rates: Rates, links: _Links) -> tuple[_Block, _Block]:
    """Return the times of the embedding, and of the last norm, the head and the loss."""
    tokens = layout.samples * layout.sequence / layout.degrees.context
    whole = tokens * shape.hidden * rates.number
    together = {"tensor": links.seconds("all_reduce", whole, links.group("T"))}
    rows = (shape.classes or shape.vocabulary) / layout.degrees.tensor
    head = {"head": product(tokens, rows // 8 * 8, shape.hidden, rates) + tokens * rows * LOGIT / rates.memory}
    look_up = {"passes": passes(3 * tokens * shape.hidden, rates)}
    return _Block(look_up | together, look_up), _Block(head, _total(((2.0, head), (1.0, together))))


def _step(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework,
          pipeline: Callable[[Layout, list[float], list[float], float], float]) -> StepTime:
    rates, links = rates_of(machine.gpu, layout.precision, framework), _Links(layout, machine.fabric)
    master, _ = BYTES[layout.precision]
    kinds, m, stages = shape.kinds, layout.microbatches, layout.stages
    firsts = {kind: kinds.index(kind) for kind in set(kinds)}
    blocks = {kind: _block(layout, shape, layer, rates, links, framework) for kind, layer in firsts.items()}
    held = {kind: _held(layout, shape, layer) for kind, layer in firsts.items()}
    first, last = _ends(layout, shape, rates, links)
    rows = shape.vocabulary * shape.hidden / layout.degrees.tensor
    forwards, backwards, weights = [], [], []
    for stage, span in enumerate(stage_spans(layout.layers or (shape.layers,))):
        count = Counter(kinds[layer] for layer in span.layers)
        ends = [(1.0, block) for block, here in ((first, span.first), (last, span.last)) if here]
        forwards.append(_total([*((n, blocks[kind].forward) for kind, n in count.items()), *((n, end.forward) for n, end in ends)]))
        weights.append(sum(n * held[kind] for kind, n in count.items())
                       + rows * (span.first + span.last - (span.first and span.last and shape.tied)))
        summed = {"passes": weights[-1] * (2 + 2 * master) / rates.memory * (m > 1)}
        backwards.append(_total([*((n, blocks[kind].backward) for kind, n in count.items()),
                                 *((n, end.backward) for n, end in ends), (1.0, summed)]))
    onward = links.group("P")
    size = layout.samples * layout.sequence // layout.degrees.context * shape.hidden * rates.number
    scattered = framework.scattered or layout.sequence_parallel
    crossing = [links.seconds("sendrecv", size // (layout.degrees.tensor if scattered else 1), list(pair))
                for pair in zip(onward, onward[1:], strict=False)]
    latency = sum(crossing) / max(1, len(crossing))
    makespan = pipeline(layout, [sum(parts.values()) for parts in forwards], [sum(parts.values()) for parts in backwards], latency)
    ranks = [[stage for stage in range(stages) if _holder(layout, stage) == rank] for rank in range(layout.degrees.pipeline)]
    busy = [_total((m, parts) for stage in own for parts in (forwards[stage], backwards[stage])) for own in ranks]
    parts = max(busy, key=lambda parts: sum(parts.values()))
    parts["bubble"] = max(0.0, makespan - sum(parts.values()))
    parts |= max((_state(layout, sum(weights[stage] for stage in own), min(sum(backwards[stage].values()) for stage in own),
                         rates, links, framework) for own in ranks), key=lambda parts: sum(parts.values()))
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    seconds = sum(parts.values())
    rate = layout.degrees.data * m * layout.samples * layout.sequence / seconds
    peak = 1e12 * (machine.gpu.peak_tflops.get(layout.precision) or machine.gpu.peak_tflops["fp16"])
    return StepTime(seconds, parts, rate, rate * model_flops(shape, layout.sequence) / layout.ranks / peak)


def _state(layout: Layout, weights: float, window: float, rates: Rates, links: _Links, framework: Framework) -> Parts:
    """Return the seconds of a rank's data axis, as far as no computation hides them, and of its optimizer. ``window``: seconds of
    the last backward."""
    everyone, shards = links.group("DC"), layout.shard_degree
    near, far = everyone[:shards], everyone[::shards]
    part = weights / shards
    summed = links.seconds("all_reduce", part * framework.gradient, far)
    gathered = 0.0
    if shards > 1 and (layout.zero < 3 or layout.reduce == "step"):
        summed += links.seconds("reduce_scatter", weights * framework.gradient, near)
    if shards > 1 and layout.zero < 3:
        gathered = links.seconds("all_gather", weights * rates.number, near)
    return {"reduce": max(summed - framework.overlap * window, 0.1 * summed), "publish": gathered * (1 - framework.publish),
            "update": part * UPDATE * 4 / rates.memory}


def _holder(layout: Layout, stage: int) -> int:
    """Return the pipeline rank of a stage."""
    pipeline = layout.degrees.pipeline
    return 2 * pipeline - 1 - stage if layout.schedule == "zero_bubble_v" and stage >= pipeline else stage % pipeline


def _simulated(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the makespan of the layout's schedule."""
    p, m = layout.degrees.pipeline, layout.microbatches
    if p == 1:
        return m * (sum(forwards) + sum(backwards))
    half = [seconds / 2 for seconds in backwards]
    times = {kind: dict(enumerate(seconds)) for kind, seconds in (("F", forwards), ("B", backwards), ("I", half), ("W", half))}
    some = min(m, STEADY * p) if m % p == 0 else m
    if some * len(forwards) > MOST:
        return _closed(layout, forwards, backwards, latency)

    def makespan(count: int) -> float:
        return simulate(schedule_of(replace(layout, microbatches=count)), times, latency).makespan
    whole = makespan(some)
    return whole if some == m else whole + (m - some) * (whole - makespan(some - p)) / p


def _closed(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the makespan with the schedule's bubble in closed form: the slowest rank's computations, and those of the other
    ranks on one microbatch while the pipeline fills and drains."""
    p, m, stages = layout.degrees.pipeline, layout.microbatches, len(forwards)
    ranks = [0.0] * p
    for stage in range(stages):
        ranks[_holder(layout, stage)] += forwards[stage] + backwards[stage]
    period = max(ranks)
    if layout.schedule == "1f1b":  # P - r microbatches are between rank r's forward and its backward
        period = max(period, *((sum(ranks[r:]) + 2 * (p - 1 - r) * latency) / (p - r) for r in range(p)))
    share = BUBBLES.get(layout.schedule, 1.0) * p / stages
    return m * period + share * (sum(ranks) - max(ranks)) + 2 * latency * (p - 1)
