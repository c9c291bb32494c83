"""The search for a job's layout: stated keys of ``[parallel]`` hold, the others are chosen so that a step fits and is fast.

``candidates`` ranks all of them by sums. Here, steps of the best that a launch accepts are simulated. The fastest whose footprint
fits wins, of equals the plainest.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.checks import check_arithmetic
from hpc_mp.job.layout import check_division, check_job, stage_cut, undivided
from hpc_mp.job.resolution import ResolvedKey, resolved
from hpc_mp.layout.layout import Layout
from hpc_mp.planner.candidates import Candidate, candidates
from hpc_mp.planner.footprint import Footprint
from hpc_mp.planner.machine import NodeType
from hpc_mp.planner.question import KEYS, Question
from hpc_mp.planner.step import StepTime, estimate, step_time

PLAIN = ("none", None, 0, 1, "1f1b", "ring")
ENOUGH, SLOW = 48, 1.1  # candidates that are timed at once; × the fastest step: not simulated


@dataclass(frozen=True, slots=True)
class Plan:
    """A job, its layout and step, and its bytes in the first pass. Of the best and of faster ones: footprints of pipeline ranks.
    Of the best: the next ones of other degrees, all that were timed with it, and the numbers of others by the reason of their
    loss."""

    job: JobSpec
    layout: Layout
    step: StepTime
    needs: float
    footprints: tuple[Footprint, ...] = ()
    others: "tuple[Plan, ...]" = ()
    tried: "tuple[Plan, ...]" = ()
    lost: dict[str, int] = field(default_factory=dict)

    def fits(self, machine: NodeType) -> bool:
        """Return True if the footprint of each rank fits into a GPU."""
        return max(rank.total for rank in self.footprints) <= machine.memory


def search(question: Question) -> Plan | None:
    """Return the best plan on the job's nodes, for the goal memory that with the smallest footprint; None if none fits. Raises
    HpcMpError if a launch would refuse all."""
    least, lost, refused = question.goal == "memory", Counter[str](), list[HpcMpError]()
    accepted = _accepted(question, iter(candidates(question, lost)), refused)
    any_allowed, cuts = False, dict[int, tuple[int, ...]]()
    while plans := _timed(question, list(islice(accepted, ENOUGH)), cuts):
        any_allowed = True
        for place, plan in enumerate(plans):
            plans[place] = best = replace(plan, footprints=_footprints(plan.layout, question))
            if least or best.fits(question.machine):
                check_job(best.job, question.shape)
                lost.update({"not allowed": len(refused), "does not fit": place, "slower": -len(refused) - place - 1})
                return replace(best, others=_others(plans, place), tried=tuple(plans), lost=dict(lost))
    if any_allowed:  # those that the first pass takes to fit do not, but others may
        other = search(replace(question, goal="memory"))
        return other if other and other.fits(question.machine) else None
    if least or refused:
        check_arithmetic(question.spec)
        check_division(question.spec, question.shape)
        raise next(iter(refused), HpcMpError(f"{question.spec.ranks} ranks", "are divided by no layout that is searched, with "
                                             f"the batch of {question.spec.train.global_batch}", "change one of both"))
    return None


def _accepted(question: Question, ranked: Iterator[Candidate], refused: list[HpcMpError]) -> Iterator[tuple[JobSpec, Candidate]]:
    """Yield candidates that a launch accepts with their jobs, and note why others are refused."""
    for candidate in ranked:
        job = question.having(**{f"parallel.{key}": value for key, value in zip(KEYS, candidate.values, strict=False)}).spec
        try:
            check_arithmetic(job)
            check_division(job, question.shape)
        except HpcMpError as error:
            refused.append(error)
        else:
            yield job, candidate


def _timed(question: Question, jobs: list[tuple[JobSpec, Candidate]], cuts: dict[int, tuple[int, ...]]) -> list[Plan]:
    """Return the plans of jobs, the fastest first. Steps that are far slower than the fastest so far are not simulated.
    ``cuts``: layers of the stages by their number, found once."""
    plans, fastest, of_this = list[tuple[Any, Plan]](), inf, (question.shape, question.machine, question.framework)
    for job, (_, needs, values) in jobs:
        cuts[job.stages] = cuts.get(job.stages) or stage_cut(job, question.shape).layers
        layouts = [replace(undivided(job), layers=cuts[job.stages], order=order)
                   for order in question.options("order", ("DPT", "PDT"))]
        step, layout = min(((estimate(layout, *of_this), layout) for layout in layouts), key=lambda pair: pair[0].seconds)
        if step.seconds < SLOW * fastest:
            step = step_time(layout, *of_this)
            fastest = min(fastest, step.seconds)
        plan = Plan(resolved(job, [ResolvedKey("parallel.order", layout.order)]), layout, step, needs)
        plain = -sum(value in PLAIN for value in values), job.parallel.zero, str(values)
        plans.append(((needs * (question.goal == "memory"), float(f"{step.seconds:.3e}"), *plain), plan))
    return [plan for _, plan in sorted(plans, key=itemgetter(0))]


def _footprints(layout: Layout, question: Question) -> tuple[Footprint, ...]:
    """Return the footprints of pipeline ranks. More microbatches than can be in flight change none."""
    flight = layout.microbatches if layout.schedule == "gpipe" else 2 * layout.stages
    return question.footprints(replace(layout, microbatches=min(layout.microbatches, flight)))


def _others(plans: list[Plan], best: int) -> tuple[Plan, ...]:
    """Return at most three plans of other degrees than the best's, each of different ones."""
    degrees = [(d.tensor, d.pipeline, d.expert, d.context > 1) for d in (plan.layout.degrees for plan in plans)]
    others = [plan for at, plan in enumerate(plans) if degrees[at] not in (degrees[best], *degrees[:at])]
    return tuple(others[:3])
