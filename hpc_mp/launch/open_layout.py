"""The layout that a job leaves open, chosen by the planner where the machine is known; and the refusal of one that cannot fit.

A job that states tensor, pipeline and microbatches has its layout. Of any other, all keys of ``[parallel]`` are open that the
search chooses and the file does not name. The order of ranks is chosen afterwards, see ``planner.order``.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import duration, memory_size, several
from hpc_mp.catalogue import catalogue
from hpc_mp.job import JobSpec
from hpc_mp.job.checks import check_arithmetic
from hpc_mp.job.layout import check_job
from hpc_mp.job.resolution import ResolvedKey, resolved
from hpc_mp.job.values import toml_value
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule.names import is_table
from hpc_mp.planner.device import Device
from hpc_mp.planner.expectation import CPU, machine_of, shared
from hpc_mp.planner.machine import NodeType
from hpc_mp.planner.question import KEYS, Question
from hpc_mp.planner.search import search
from hpc_mp.rundir.plan import ExpectedStep, RunPlan

CHOSEN = tuple(key for key in KEYS if key != "order")  # keys of [parallel]
HOLD = {"partition": CHOSEN, "schedule": ("virtual_stages",), "shard_degree": ("zero",)}  # named keys that hold others
ROOM = 0.95  # share of a GPU's memory that a chosen layout may take: predictions err by some per cent
RELAXED = (("microbatches",), ("recompute",), ("zero", "shard_degree"), CHOSEN)  # by a job that does not fit, in this order


def known_machine(spec: JobSpec, device: Device, facts: ClusterFacts) -> tuple[NodeType | None, str]:
    """Return the machine of a job's nodes; None and the reason if ranks share GPUs, or it is unknown. Processors are known by the
    user's row whose vendor is ``cpu``; emulated nodes share those of this machine."""
    if device.kind == "cpu":
        ranks = spec.ranks if device.pools else spec.job.ranks_per_node
        name = next((model.name for model in catalogue().gpus.values() if model.vendor == CPU), None)
        return (shared(machine_of(name, ranks), ranks), "") if name else (None, "ranks compute on CPUs, of which no row is known")
    kinds = facts.partition.kinds if facts.partition is not None else ()
    counts = [count for kind in kinds for name, count in kind.gpus if name == device.gpu]
    try:
        machine = machine_of(device.gpu, max(counts, default=spec.job.ranks_per_node))
    except HpcMpError as error:
        return None, f"{error.value}: {error.rule}"
    linked = machine.fabric.nics or spec.job.nodes == 1
    return (machine, "") if linked else (None, f"{machine.fabric.title}: its network is unknown")


def open_layout(spec: JobSpec, shape: ModelShape, machine: NodeType, earlier: RunPlan | None) -> tuple[ResolvedKey[Any], ...]:
    """Return the open keys with the planner's values and their reason; none if the job states its layout. ``earlier``: plan of
    the resumed run, whose layout it keeps if the ranks allow that. Raises HpcMpError if no layout is possible."""
    named = {key for key in spec.parallel.model_fields_set if getattr(spec.parallel, key) not in ("auto", None)}
    named |= {"microbatches"} if spec.train.gradient_accumulation_steps else set()
    stated = named.union(*(held for key, held in HOLD.items() if key in named), CHOSEN * is_table(spec.parallel.schedule))
    if stated.issuperset(("tensor", "pipeline", "microbatches")):
        return ()
    opened = [key for key in CHOSEN if key not in stated]
    if earlier is not None:
        same = tuple(replace(choice, why="as in the run that is resumed") for choice in earlier.choices
                     if choice.key.removeprefix("parallel.") in opened)
        with suppress(HpcMpError):
            check_arithmetic(resolved(spec, same))
            check_job(resolved(spec, same), shape)
            return same
    plan = search(question := _question(spec, shape, machine, stated)) or search(replace(question, goal="memory"))
    assert plan is not None  # there is a smallest one
    limit = max(plan.step.parts, key=plan.step.parts.__getitem__)
    why = f"the planner's best: {duration(plan.step.seconds)} per step, limited by {limit}"
    return tuple(ResolvedKey(f"parallel.{key}", getattr(plan.job.parallel, key), why) for key in opened)


def _question(spec: JobSpec, shape: ModelShape, machine: NodeType, stated: Iterable[str]) -> Question:
    """Return the question for a layout with these keys of the job, with room to spare."""
    plain = resolved(spec, (ResolvedKey("parallel.microbatches", spec.microbatches if "microbatches" in stated else None),
                            ResolvedKey("train.gradient_accumulation_steps", None)))
    roomy = replace(machine, gpu=replace(machine.gpu, memory_mib=int(ROOM * machine.memory) >> 20))
    return Question(plain, shape, roomy, frozenset(stated))


def check_room(spec: JobSpec, shape: ModelShape, machine: NodeType, expected: ExpectedStep) -> None:
    """Refuse a job whose tensors exceed the memory of a GPU. Raises HpcMpError with the cheapest change that fits. ``spec``: the
    job with every choice made."""
    if expected.allocated > expected.memory:
        lines = [f"{memory_size(size)} of {name}" for name, size in expected.fullest.items()]
        raise HpcMpError(f"{memory_size(expected.total)} on each GPU ({several(lines, 3)})",
                         f"is more than the {memory_size(expected.memory)} of {expected.gpu}", _remedy(spec, shape, machine))


def _remedy(spec: JobSpec, shape: ModelShape, machine: NodeType) -> str:
    """Return the first change of ``RELAXED`` with which a step fits, in words."""
    for freed in accumulate(RELAXED):
        with suppress(HpcMpError):  # all of these are refused
            if plan := search(_question(spec, shape, machine, {*CHOSEN, "order"}.difference(freed))):
                better, accumulated = plan.job.parallel, spec.train.gradient_accumulation_steps
                names = {"microbatches": "train.gradient_accumulation_steps"} if accumulated else {}
                before = spec.parallel.model_copy(update={"microbatches": spec.microbatches})
                changes = [f"{names.get(key, f'parallel.{key}')} = {toml_value(getattr(better, key))}" for key in CHOSEN
                           if getattr(better, key) != getattr(before, key)]
                needs = memory_size(max(rank.total for rank in plan.footprints))
                return f"use {' and '.join(changes)}: {needs} and {duration(plan.step.seconds)} per step"
    return "use more nodes, or a smaller model: no layout of these fits"
