"""The first pass of a search: all candidates, ranked by sums that take microseconds each.

The seconds of a layer and of the head are those of ``estimate``. The bubble is in closed form, and the data axis takes its bytes
over the rate of its links. The bytes are those of the state, and those by which ``footprint`` grows with a layer and a sample.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from heapq import nsmallest
from itertools import product
from math import gcd
from operator import attrgetter
from typing import Any, NamedTuple

from hpc_mp.job.layout import undivided
from hpc_mp.job.parallel import Parallel
from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.placement import Degrees
from hpc_mp.layout.schedule import most_stages
from hpc_mp.layout.schedule.names import stages_per_rank
from hpc_mp.planner.frameworks import OURS, held
from hpc_mp.planner.memory import BYTES
from hpc_mp.planner.question import Question, divisors
from hpc_mp.planner.step import estimate

BEST, FEWEST_TOKENS = 4, 1024  # candidates of a division that are returned; fewest tokens of a sample on a context rank
NEAR = 1.1  # × the memory of a GPU: candidates that need more are dropped


class Idle(NamedTuple):
    """Idle time of a schedule, in units of 1F1B's with as many stages. With ``m`` microbatches on P ranks, ``share`` grows by
    ``growth`` for each P microbatches that are missing to ``enough`` × P."""

    virtual_stages: tuple[int, ...] = (1,)
    share: float = 1.0
    growth: float = 0.0
    enough: float = 0.0


SCHEDULES = {"1f1b": Idle(), "zero_bubble": Idle(share=1 / 3, growth=0.4, enough=1.0),
             "zero_bubble_v": Idle(share=1 / 3, growth=2 / 3, enough=1.5),
             "interleaved_1f1b": Idle(virtual_stages=(2, 3, 4, 6, 8)), "gpipe": Idle()}


class RankDivision(NamedTuple):
    """The degrees that divide the ranks, and the samples of a step on a data rank."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    batch: int


class Sharding(NamedTuple):
    """A ZeRO stage on groups of ``group`` ranks, or of all. ``state``: bytes of a rank, with units that are gathered or summed;
    ``axis``: seconds of the data axis, for a microbatch under ZeRO-3, else for a step; ``between``: seconds between groups."""

    zero: int
    group: int | None
    state: float
    axis: float
    between: float


class PipelineRun(NamedTuple):
    """A way to run a pipeline. ``stages``: the number on a rank."""

    microbatches: int
    sequence: bool
    recompute: str
    schedule: str
    virtual_stages: int
    stages: int


class LayerTime(NamedTuple):
    """Seconds of a microbatch in a layer, the part of its attention, and seconds in the head."""

    layer: float
    attention: float
    head: float


class KeptBytes(NamedTuple):
    """Bytes that a layer keeps of a sample, those of a sample on a rank besides, and those of libraries."""

    layer: float
    besides: float
    libraries: float


class Candidate(NamedTuple):
    """Values of KEYS but the order. ``score``: seconds of a step, for the goal memory bytes; ``needs``: bytes of a GPU."""

    score: float
    needs: float
    values: tuple[Any, ...]


def candidates(question: Question, lost: Counter[str]) -> list[Candidate]:
    """Return the best candidates of each division of the ranks, the best first. ``lost`` counts the others, by reason."""
    shape, memory, least = question.shape, question.machine.memory, question.goal == "memory"
    parallel = Parallel(tensor_modules=question.spec.parallel.tensor_modules)
    whole = undivided(question.spec.model_copy(update={"parallel": parallel}))
    alone = replace(whole, layers=(shape.layers,), samples=1, microbatches=1, zero=0, shard_degree=1)
    layer_time, activations = _layer_times(alone, question), _activations(alone, question)
    best: dict[Any, dict[float, tuple[Candidate, Candidate]]] = defaultdict(dict)  # division → score → the plainest, the leanest
    for division in _divisions(question, alone, lost):
        tensor, pipeline, context, expert, _, batch = division
        shardings, of_division = _shardings(question, alone, division), best[tensor, pipeline, expert]
        method = "ulysses" if shape.bidirectional and context > 1 else "ring"
        for run in _runs(question, division, lost, len(shardings)):
            time = layer_time(tensor, context, expert, batch // run.microbatches, run.sequence)
            computing = _seconds(run, division, time, shape.layers)
            held_bytes = _bytes(run, division, activations(tensor, run.sequence, run.recompute), shape.layers)
            for zero, group, state, axis, between in shardings:
                needs = state + held_bytes
                if not least and needs > NEAR * memory:
                    lost["does not fit"] += 1
                    continue
                lost["slower"] += 1
                exposed = max(run.microbatches * axis / 10, run.microbatches * axis - computing) if zero == 3 else axis / 3
                score = needs if least else computing + exposed + between
                one = Candidate(score, needs, (run.recompute, group, zero, run.virtual_stages, run.schedule, run.sequence,
                                               run.microbatches, method, expert, context, pipeline, tensor))
                plainest, leanest = of_division.setdefault(rounded := float(f"{score:.3e}"), (one, one))
                if needs < leanest.needs:
                    of_division[rounded] = plainest, one
    pairs = [pair for scores in best.values() for pair in nsmallest(BEST, scores.values(), key=lambda pair: pair[0].score)]
    return sorted((one for pair in pairs for one in dict.fromkeys(pair)), key=attrgetter("score"))


def _divisions(question: Question, alone: Layout, lost: Counter[str]) -> Iterator[RankDivision]:
    """Yield all divisions of the ranks that leave whole samples to each data rank."""
    spec, shape = question.spec, question.shape
    limits = {"tensor": min(2 * spec.job.ranks_per_node, shape.heads), "pipeline": most_stages(shape.layers),
              "context": max(1, alone.sequence // FEWEST_TOKENS), "expert": max(1, shape.experts)}
    sizes = ([size for size in divisors(spec.ranks) if size <= limit] for limit in limits.values())
    for tensor, pipeline, context, expert in product(*map(question.options, limits, sizes)):
        data, rest = divmod(spec.ranks, tensor * pipeline * context)
        if rest or spec.train.global_batch % data or data * context % expert:
            lost["not allowed"] += not rest
        else:
            yield RankDivision(tensor, pipeline, context, expert, data, spec.train.global_batch // data)


def _shardings(question: Question, alone: Layout, division: RankDivision) -> list[Sharding]:
    """Return the ZeRO stages of a division, those that can be with groups inside a node too."""
    spec, shape, fabric, t = question.spec, question.shape, question.machine.fabric, division.tensor
    near, far = 1e9 * fabric.link * fabric.links, 1e9 * fabric.nic * fabric.nics / fabric.gpus  # bytes per second of a GPU
    far = far if spec.job.nodes > 1 else near
    full, number = BYTES[alone.precision]
    master = 0 if shape.adapters else full
    moments = master * (alone.optimizer_slots * ("optimizer" not in spec.parallel.offload) + (full != number))
    if question.framework is not OURS:
        master, moments = question.framework.gradient, question.framework.states * ("optimizer" not in spec.parallel.offload)
    shards, per_node = division.data * division.context, spec.job.ranks_per_node
    inside = gcd(per_node // gcd(per_node, t), shards)
    of_experts = replace(alone, degrees=Degrees(t, 1, division.expert, 1, division.expert))
    weights = held(of_experts, shape, stage_spans((shape.layers,))[0])
    head = shape.vocabulary * shape.hidden / t
    block, weights = (weights - head * (2 - shape.tied)) / shape.layers, weights / division.pipeline
    shardings = []
    for zero in question.options("zero", range(4 if shards > 1 else 1)):
        own = number * (zero < 3) + master * (zero < 2) + moments * (zero < 1)  # bytes of a parameter that are not shared
        gathered = 2 * number * max(block, head) * (zero == 3)
        summed = master * (3 * block + head * (1 + (division.pipeline == 1))) * (zero > 1)
        for group in question.options("shard_degree", (None, inside)[:1 + (zero > 0 and 1 < inside < shards)]):
            state = weights * (own + (number + master + moments - own) / (group or shards)) + gathered + summed
            axis = weights * number * (2 if zero == 3 else 3) * (shards > 1) / (near if group else far)
            shardings.append(Sharding(zero, group, state, axis, 2 * weights * master / group / far if group else 0.0))
    return shardings


def _runs(question: Question, division: RankDivision, lost: Counter[str], shardings: int) -> Iterator[PipelineRun]:
    """Yield microbatches, recomputation and schedules of a division. ``shardings``: candidates that go with each."""
    shape, pipeline, batch = question.shape, division.pipeline, division.batch
    for count, sequence, recompute, name in product(
            question.options("microbatches", divisors(batch)), question.options("sequence", (True, False)[division.tensor == 1:]),
            question.options("recompute", ("none", "full", "selective")[:3 - (shape.encoder > 0)]),
            question.options("schedule", list(SCHEDULES) if pipeline > 1 else ["1f1b"])):
        for virtual in question.options("virtual_stages", SCHEDULES.get(name, Idle()).virtual_stages):
            stages = stages_per_rank(name, virtual)
            uneven = batch % count or (name == "interleaved_1f1b" and count % pipeline)
            if uneven or pipeline * stages > most_stages(shape.layers):
                lost["not allowed"] += shardings
            else:
                yield PipelineRun(count, sequence, recompute, name, virtual, stages)


def _seconds(run: PipelineRun, division: RankDivision, time: LayerTime, layers: int) -> float:
    """Return the seconds of the computations of a step, with the bubble, on the rank that has most."""
    bubble, p, m = SCHEDULES.get(run.schedule, SCHEDULES["1f1b"]), division.pipeline, run.microbatches
    again = {"none": 0.0, "selective": time.attention / 3.5}.get(run.recompute, time.layer / 3)  # the part of a forward
    layer = time.layer + again
    microbatch = max(layer * _most_layers(run, division, layers), (layer * layers + time.head) / p)
    return microbatch * (m + (p - 1) / run.stages * (bubble.share + bubble.growth * max(0.0, bubble.enough - m / p)))


def _bytes(run: PipelineRun, division: RankDivision, sample: KeptBytes, layers: int) -> float:
    """Return the bytes of a rank besides its state: of microbatches in flight, and of libraries."""
    p, stages = division.pipeline, run.stages
    flight = {"interleaved_1f1b": (2 * p - 1) / stages + p * (1 - 1 / stages), "gpipe": run.microbatches}.get(run.schedule, p)
    in_flight = sample.layer * _most_layers(run, division, layers) * min(run.microbatches, flight) + sample.besides
    return sample.libraries + in_flight * division.batch / run.microbatches / division.context


def _most_layers(run: PipelineRun, division: RankDivision, layers: int) -> int:
    return run.stages * -(-layers // (run.stages * division.pipeline))


def _layer_times(alone: Layout, question: Question) -> Callable[[int, int, int, int, bool], LayerTime]:
    """Return a function of the tensor, context and expert degree, the samples of a microbatch and sequence parallelism."""
    @cache
    def layer_time(tensor: int, context: int, expert: int, samples: int, sequence: bool) -> LayerTime:
        degrees = Degrees(tensor, 1, expert // gcd(expert, context), context, expert)
        layout = replace(alone, degrees=degrees, samples=samples, sequence_parallel=sequence)
        parts, layers = estimate(layout, question.shape, question.machine, question.framework).parts, question.shape.layers
        return LayerTime((sum(parts.values()) - parts["head"]) / layers, parts["attention"] / layers, parts["head"])
    return layer_time


def _activations(alone: Layout, question: Question) -> Callable[[int, bool, str], KeptBytes]:
    """Return a function of the tensor degree, sequence parallelism and recomputation: the difference of one and two layers.
    Of a model of one layer, all bytes are the layer's."""
    @cache
    def activations(tensor: int, sequence: bool, recompute: str) -> KeptBytes:
        proxy = replace(alone, degrees=Degrees(tensor), sequence_parallel=sequence, recompute=recompute)
        rows = [rank for count in (1, 2)[:question.shape.layers] for rank in question.footprints(replace(proxy, layers=(count,)))]
        sizes = [row.counted - row.parameters - row.gradients - row.optimizer for row in rows]
        besides = 2 * sizes[0] - sizes[1] if len(sizes) > 1 else 0
        return KeptBytes(sizes[0] - besides, besides, rows[0].libraries)
    return activations
