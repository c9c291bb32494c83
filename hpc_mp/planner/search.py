"""The search for a job's layout: stated keys of ``[parallel]`` hold, the others are chosen so that a step fits and is fast.

A first pass ranks all candidates by sums: seconds of a layer and of the head in ``estimate``, the bubble in closed form, bytes of
the data axis over the rate of its links; bytes of the state, and those by which ``footprint`` grows with a layer and a chunk.
A second pass simulates steps of the best that a launch accepts. The fastest whose footprint fits wins, of equals the plainest.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import nsmallest
from itertools import product
from math import gcd, inf
from operator import itemgetter
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.checks import check_arithmetic
from hpc_mp.job.layout import check_division, check_job, stage_cut, undivided
from hpc_mp.job.parallel import MOST_MICROBATCHES, Parallel
from hpc_mp.job.resolution import ResolvedKey, resolved
from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import Degrees
from hpc_mp.layout.schedule import most_stages
from hpc_mp.layout.schedule.names import stages_per_rank
from hpc_mp.planner.footprint import Footprint, footprint
from hpc_mp.planner.frameworks import OURS, Framework, footprint_elsewhere, held
from hpc_mp.planner.machine import Machine
from hpc_mp.planner.memory import BYTES
from hpc_mp.planner.step import StepTime, estimate, step_time

KEYS = ("recompute", "shard_degree", "zero", "virtual_stages", "schedule", "sequence", "microbatches", "context_method",
        "expert", "context", "pipeline", "tensor", "order")  # of [parallel], the cheapest remedies first
PLAIN = ("none", None, 0, 1, "1f1b", "ring")
# virtual stages; bubble, relative to 1F1B's with as many stages; what it grows by for each P microbatches below so many P
SCHEDULES = {"1f1b": ((1,), 1.0, 0.0, 0.0), "zero_bubble": ((1,), 1 / 3, 0.4, 1.0), "zero_bubble_v": ((1,), 1 / 3, 2 / 3, 1.5),
             "interleaved_1f1b": ((2, 3, 4, 6, 8), 1.0, 0.0, 0.0), "gpipe": ((1,), 1.0, 0.0, 0.0)}
EACH, ENOUGH, FEWEST_TOKENS = 4, 48, 1024  # candidates of a division of the ranks, and of all; of a sample on a context rank
NEAR, SLOW = 1.1, 1.1  # × the memory: dropped in the first pass; × the fastest step: not simulated
Candidate = tuple[float, float, tuple[Any, ...]]  # seconds (bytes, for the goal memory), bytes, values of KEYS


@dataclass(frozen=True, slots=True)
class Question:
    """A job, its model's shape, the machine, the keys of ``[parallel]`` that hold, and the goal: speed, gpus or memory.
    ``framework``: what trains; ``allowed``: the only options that it has for a key, in words."""

    spec: JobSpec
    shape: ModelShape
    machine: Machine
    stated: frozenset[str] = frozenset()
    goal: str = "speed"
    framework: Framework = OURS
    allowed: Mapping[str, Collection[str]] = field(default_factory=dict)

    def having(self, **values: Any) -> "Question":
        """Return the question for a job with other values, by dotted key."""
        return replace(self, spec=resolved(self.spec, map(ResolvedKey, values, values.values())))

    def options(self, key: str, options: Sequence[Any]) -> Sequence[Any]:
        """Return the stated value of a key, else those of the options that are allowed."""
        if key in self.stated:
            return (getattr(self.spec.parallel, key),)
        return [option for option in options if str(option).lower() in self.allowed.get(key, (str(option).lower(),))]

    def footprints(self, layout: Layout) -> tuple[Footprint, ...]:
        """Return the footprint of every rank of a pipeline under the framework."""
        ours = self.framework is OURS
        return footprint(layout, self.shape) if ours else footprint_elsewhere(layout, self.shape, self.framework)


@dataclass(frozen=True, slots=True)
class Plan:
    """A job, its layout and step, and its bytes in the first pass. Of the best and of faster ones: footprints of pipeline ranks.
    Of the best: the next ones of other degrees, all of the second pass, and the numbers of others by the reason of their loss."""

    job: JobSpec
    layout: Layout
    step: StepTime
    needs: float
    footprints: tuple[Footprint, ...] = ()
    others: "tuple[Plan, ...]" = ()
    tried: "tuple[Plan, ...]" = ()
    lost: dict[str, int] = field(default_factory=dict)

    def fits(self, machine: Machine) -> bool:
        """Return True if the footprint of each rank fits into a GPU."""
        return max(rank.total for rank in self.footprints) <= machine.memory


def search(question: Question) -> Plan | None:
    """Return the best plan on the job's nodes, for the goal memory that with the smallest footprint; None if none fits. Raises
    HpcMpError if a launch would refuse all."""
    least, lost, refused, cuts = question.goal == "memory", Counter[str](), list[HpcMpError](), dict[int, tuple[int, ...]]()
    candidates, any_allowed = iter(_candidates(question, lost)), False
    while plans := _timed(question, candidates, refused, cuts):
        any_allowed = True
        for place, plan in enumerate(plans):
            # more microbatches change nothing
            flight = plan.layout.microbatches if plan.layout.schedule == "gpipe" else 2 * plan.layout.stages
            few = replace(plan.layout, microbatches=min(plan.layout.microbatches, flight))
            plans[place] = best = replace(plan, footprints=question.footprints(few))
            if least or best.fits(question.machine):
                check_job(best.job, question.shape)
                lost.update({"not allowed": len(refused), "does not fit": place, "slower": -len(refused) - place - 1})
                degrees = [(d.tensor, d.pipeline, d.expert, d.context > 1) for d in (plan.layout.degrees for plan in plans)]
                others = [plan for at, plan in enumerate(plans) if degrees[at] not in (degrees[place], *degrees[:at])]
                return replace(best, others=tuple(others[:3]), tried=tuple(plans), lost=dict(lost))
    if any_allowed:  # those that the first pass takes to fit do not, but others may
        other = search(replace(question, goal="memory"))
        return other if other and other.fits(question.machine) else None
    if least or refused:
        check_arithmetic(question.spec)
        check_division(question.spec, question.shape)
        raise next(iter(refused), HpcMpError(f"{question.spec.ranks} ranks", "are divided by no layout that is searched, with "
                                             f"the batch of {question.spec.train.global_batch}", "change one of both"))
    return None


def _timed(question: Question, candidates: Iterator[Candidate], refused: list[HpcMpError],
           cuts: dict[int, tuple[int, ...]]) -> list[Plan]:
    """Return the plans of the next candidates that a launch accepts, the fastest first, and note why others are refused.
    ``cuts``: layers of the stages by their number, found once."""
    shape, machine, plans, fastest = question.shape, question.machine, list[tuple[Any, Plan]](), inf
    for _, needs, values in candidates:
        job = question.having(**{f"parallel.{key}": value for key, value in zip(KEYS, values, strict=False)}).spec
        try:
            check_arithmetic(job)
            check_division(job, shape)
        except HpcMpError as error:
            refused.append(error)
            continue
        cuts[job.stages] = cuts.get(job.stages) or stage_cut(job, shape).layers
        layouts = [replace(undivided(job), layers=cuts[job.stages], order=order)
                   for order in question.options("order", ("DPT", "PDT"))]
        step, layout = min(((estimate(layout, shape, machine, question.framework), layout) for layout in layouts),
                           key=lambda pair: pair[0].seconds)
        if step.seconds < SLOW * fastest:
            step = step_time(layout, shape, machine, question.framework)
            fastest = min(fastest, step.seconds)
        plan = Plan(resolved(job, [ResolvedKey("parallel.order", layout.order)]), layout, step, needs)
        plain = -sum(value in PLAIN for value in values), job.parallel.zero, str(values)
        plans.append(((needs * (question.goal == "memory"), float(f"{step.seconds:.3e}"), *plain), plan))
        if len(plans) == ENOUGH:
            break
    return [plan for _, plan in sorted(plans, key=itemgetter(0))]


def larger(question: Question) -> Iterator[Question]:
    """Yield the question on more and more nodes, by an eighth at most beyond 8; for the goal gpus, first on parts of one."""
    per_node = question.spec.job.ranks_per_node
    for ranks in _divisors(per_node)[0 if question.goal == "gpus" else -1:]:
        yield question.having(**{"job.nodes": 1, "job.ranks_per_node": ranks})
    for nodes in sorted({*(2**power for power in range(1, 15)), *(int(1.125**power) for power in range(6, 83))}):
        yield question.having(**{"job.nodes": nodes})


def remedies(question: Question) -> Iterator[Question]:
    """Yield the question without one of the stated keys, without all, with the optimizer offloaded, and on more nodes."""
    yield from (replace(question, stated=question.stated - {key}) for key in KEYS if key in question.stated)
    free = replace(question, stated=frozenset())
    yield from (free, free.having(**{"parallel.offload": ("optimizer",)}), *larger(free))


def _candidates(question: Question, lost: Counter[str]) -> list[Candidate]:
    """Return the best candidates of each division of the ranks by the first pass."""
    spec, shape, machine, least = question.spec, question.shape, question.machine, question.goal == "memory"
    layers, fabric, per_node = shape.layers, machine.fabric, spec.job.ranks_per_node
    near, far = 1e9 * fabric.link * fabric.links, 1e9 * fabric.nic * fabric.nics / fabric.gpus
    far = far if spec.job.nodes > 1 else near  # bytes per second of a GPU
    whole = undivided(spec.model_copy(update={"parallel": Parallel(tensor_modules=spec.parallel.tensor_modules)}))
    alone = replace(whole, layers=(layers,), samples=1, microbatches=1, zero=0, shard_degree=1)
    full, number = BYTES[alone.precision]
    master = 0 if shape.adapters else full
    moments = master * (alone.optimizer_slots * ("optimizer" not in spec.parallel.offload) + (full != number))
    if question.framework is not OURS:
        master, moments = question.framework.gradient, question.framework.states * ("optimizer" not in spec.parallel.offload)

    @cache
    def seconds(tensor: int, context: int, expert: int, samples: int, sequence: bool) -> tuple[float, float, float]:
        """Return the seconds of a layer for a microbatch, of its attention, and of the head."""
        degrees = Degrees(tensor, 1, expert // gcd(expert, context), context, expert)
        layout = replace(alone, degrees=degrees, samples=samples, sequence_parallel=sequence)
        parts = estimate(layout, shape, machine, question.framework).parts
        return (sum(parts.values()) - parts["head"]) / layers, parts["attention"] / layers, parts["head"]

    @cache
    def kept(tensor: int, sequence: bool, recompute: str) -> tuple[float, float, int]:
        """Return the bytes that a layer keeps of a sample, those that are there besides, and those of libraries."""
        proxy = replace(alone, degrees=Degrees(tensor), sequence_parallel=sequence, recompute=recompute)
        rows = [row for count in (1, 2) for row in question.footprints(replace(proxy, layers=(count,)))]
        one, two = (row.counted - row.parameters - row.gradients - row.optimizer for row in rows)
        return two - one, 2 * one - two, rows[0].libraries

    divisions: dict[Any, dict[float, list[Candidate]]] = defaultdict(dict)
    limits = {"tensor": min(2 * per_node, shape.heads), "pipeline": most_stages(layers),
              "context": max(1, whole.sequence // FEWEST_TOKENS), "expert": max(1, shape.experts)}
    sizes = ([size for size in _divisors(spec.ranks) if size <= limit] for limit in limits.values())
    for t, p, c, e in product(*map(question.options, limits, sizes)):
        d, rest = divmod(spec.ranks, t * p * c)
        if rest or spec.train.global_batch % d or d * c % e:
            lost["not allowed"] += not rest
            continue
        batch, shards, method = spec.train.global_batch // d, d * c, "ulysses" if shape.bidirectional and c > 1 else "ring"
        head, inside = shape.vocabulary * shape.hidden / t, gcd(per_node // gcd(per_node, t), shards)
        weights = held(replace(alone, degrees=Degrees(t, 1, e, 1, e)), shape, stage_spans((layers,))[0]) / p
        block = (weights * p - head * (2 - shape.tied)) / layers
        states = []
        for zero in question.options("zero", range(4 if shards > 1 else 1)):
            own = number * (zero < 3) + master * (zero < 2) + moments * (zero < 1)  # bytes of a parameter that are not shared
            under_way = 2 * number * max(block, head) * (zero == 3) + master * (3 * block + head * (1 + (p == 1))) * (zero > 1)
            for group in question.options("shard_degree", (None, inside)[:1 + (zero > 0 and 1 < inside < shards)]):
                size = weights * (own + (number + master + moments - own) / (group or shards)) + under_way
                sent = weights * number * (2 if zero == 3 else 3) * (shards > 1) / (near if group else far)
                states.append((zero, group, size, sent, 2 * weights * master / group / far if group else 0.0))
        for m, sequence, recompute, name in product(
                question.options("microbatches", _divisors(batch)), question.options("sequence", (True, False)[t == 1:]),
                question.options("recompute", ("none", "full", "selective")[:3 - (shape.encoder > 0)]),
                question.options("schedule", list(SCHEDULES)[:5 if p > 1 else 1])):
            time, attention, loss = seconds(t, c, e, batch // m, sequence)
            time += {"none": 0.0, "selective": attention / 3.5}.get(recompute, time / 3)  # the part of a forward
            grows, rest, fixed = kept(t, sequence, recompute)
            virtual, bubble, more, enough = SCHEDULES.get(name, SCHEDULES["1f1b"])
            for v in question.options("virtual_stages", virtual):
                stages = stages_per_rank(name, v)
                if p * stages > most_stages(layers) or batch % m or (name == "interleaved_1f1b" and m % p):
                    lost["not allowed"] += len(states)
                    continue
                chunks = {"interleaved_1f1b": (2 * p - 1) / stages + p * (1 - 1 / stages), "gpipe": m}.get(name, p)
                most = stages * -(-layers // (stages * p))  # layers of a rank
                keeps = fixed + (grows * most * min(m, chunks) + rest) * batch / m / c
                took = max(time * most, (time * layers + loss) / p) * (
                    m + (p - 1) / stages * (bubble + more * max(0.0, enough - m / p)))
                for zero, group, size, sent, summed in states:
                    needs = size + keeps
                    if not least and needs > NEAR * machine.memory:
                        lost["does not fit"] += 1
                        continue
                    lost["slower"] += 1
                    late = max(m * sent / 10, m * sent - took) if zero == 3 else sent / 3
                    score = needs if least else took + late + summed
                    one = score, needs, (recompute, group, zero, v, name, sequence, m, method, e, c, p, t)
                    equals = divisions[t, p, e].setdefault(float(f"{score:.3e}"), [one, one])
                    equals[1] = min(equals[1], one, key=itemgetter(1))  # beside the plainest, the one with fewest bytes
    best = [nsmallest(EACH, division.values(), key=lambda equals: equals[0][0]) for division in divisions.values()]
    return sorted((one for division in best for equals in division for one in dict.fromkeys(equals)), key=itemgetter(0))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, MOST_MICROBATCHES) + 1) if number % divisor == 0]
