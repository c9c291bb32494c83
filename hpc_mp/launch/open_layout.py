"""The layout that a job leaves open, chosen by the planner where the machine is known; and the refusal of one that cannot fit.

A job that states tensor, pipeline and microbatches has its layout. Of any other, all keys of ``[parallel]`` are open that the
search chooses and the file does not name. The order of ranks is chosen afterwards, see ``planner.order``.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import duration, memory_size, several
from hpc_mp.job import JobSpec
from hpc_mp.job.checks import check_arithmetic
from hpc_mp.job.layout import check_job
from hpc_mp.job.resolution import ResolvedKey, resolved
from hpc_mp.job.values import toml_value
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule.names import is_table
from hpc_mp.planner.device import Device
from hpc_mp.planner.expectation import machine_of
from hpc_mp.planner.machine import Machine
from hpc_mp.planner.search import Candidate, Plan, Question, search
from hpc_mp.rundir.plan import Expectation, RunPlan

KEYS = tuple(key for key in Candidate._fields if key != "order")
HOLD = {"partition": KEYS, "schedule": ("virtual_stages",), "shard_degree": ("zero",)}  # named keys that hold others
ROOM = 0.95  # share of a GPU's memory that a chosen layout may take: predictions err by some per cent
# What a job that does not fit changes, the cheapest first.
RELAXED = (("microbatches",), ("recompute",), ("zero", "shard_degree"),
           ("tensor", "sequence", "pipeline", "schedule", "virtual_stages", "context", "context_method", "expert"))


def known_machine(spec: JobSpec, device: Device, facts: ClusterFacts) -> tuple[Machine | None, str]:
    """Return the machine of a job's nodes; None and the reason if ranks compute on CPUs or share GPUs, or it is unknown."""
    if device.kind == "cpu":
        return None, "ranks compute on CPUs"
    kinds = facts.partition.kinds if facts.partition is not None else ()
    counts = [count for kind in kinds for name, count in kind.gpus if name == device.gpu]
    try:
        machine = machine_of(device.gpu, max(counts, default=spec.job.ranks_per_node))
    except HpcMpError as error:
        return None, f"{error.value}: {error.rule}"
    known = machine.fabric.nics or spec.job.nodes == 1
    return (machine, "") if known else (None, f"{machine.fabric.title}: its network is unknown")


def open_layout(spec: JobSpec, shape: ModelShape, machine: Machine, earlier: RunPlan | None) -> tuple[ResolvedKey[Any], ...]:
    """Return the open keys with the planner's values and their reason; none if the job states its layout. ``earlier``: plan of
    the resumed run, whose layout it keeps if the ranks allow that. Raises HpcMpError if no layout is possible."""
    named = {key for key in spec.parallel.model_fields_set if getattr(spec.parallel, key) not in ("auto", None)}
    named |= {"microbatches"} if spec.train.gradient_accumulation_steps else set()
    held = [keys for key, keys in HOLD.items() if key in named] + [KEYS] * is_table(spec.parallel.schedule)
    stated = frozenset(named.union(*held))
    if stated.issuperset(("tensor", "pipeline", "microbatches")):
        return ()
    if earlier is not None:
        names = {f"parallel.{key}" for key in KEYS if key not in stated}
        kept = tuple(replace(choice, why="as in the run that is resumed") for choice in earlier.choices if choice.key in names)
        with suppress(HpcMpError):
            check_arithmetic(resolved(spec, kept))
            check_job(resolved(spec, kept), shape)
            return kept
    plan = search(Question(spec, shape, _with_room(machine), stated))
    why = (f"{'fastest layout that fits' if plan.fits else 'smallest layout'}, by the planner: "
           f"{duration(plan.best.step.seconds)} per step, limited by {plan.limit}")
    return tuple(ResolvedKey(f"parallel.{key}", getattr(plan.best.chosen, key), why) for key in KEYS if key not in stated)


def _with_room(machine: Machine) -> Machine:
    """Return the machine with the memory that chosen layouts may take."""
    return replace(machine, gpu=replace(machine.gpu, memory_mib=int(ROOM * machine.memory) >> 20))


def check_room(spec: JobSpec, shape: ModelShape, machine: Machine, expected: Expectation) -> None:
    """Refuse a job whose tensors exceed the memory of a GPU. Raises HpcMpError with the cheapest change that fits. ``spec``: the
    job with every choice made."""
    if expected.allocated > expected.memory:
        lines = [f"{memory_size(size)} of {name}" for name, size in expected.fullest.items()]
        raise HpcMpError(f"{memory_size(expected.total)} on each GPU ({several(lines, 3)})",
                         f"is more than the {memory_size(expected.memory)} of {expected.gpu}", _remedy(spec, shape, machine))


def _remedy(spec: JobSpec, shape: ModelShape, machine: Machine) -> str:
    """Return the first change of ``RELAXED`` with which a step fits, in words."""
    values = {key: spec.microbatches if key == "microbatches" else getattr(spec.parallel, key) for key in KEYS}
    whole = spec.model_copy(update={"parallel": spec.parallel.model_copy(update=values)})
    plan: Plan | None = None
    for freed in accumulate(RELAXED):
        with suppress(HpcMpError):  # all of these are refused
            plan = search(Question(whole, shape, _with_room(machine), frozenset({*KEYS, "order"}.difference(freed))))
            if plan.fits:
                break
    if plan is None:
        return "use a smaller model or more nodes"
    needs = memory_size(plan.best.peak.total)
    if not plan.fits:
        return f"use more nodes: the layout of these that needs least has {needs} on each GPU"
    name = "train.gradient_accumulation_steps" if spec.train.gradient_accumulation_steps else "parallel.microbatches"
    changes = [f"{name if key == 'microbatches' else f'parallel.{key}'} = {toml_value(value)}" for key in KEYS
               if (value := getattr(plan.best.chosen, key)) != values[key]]
    return f"use {' and '.join(changes)}: {needs} and {duration(plan.best.step.seconds)} per step"
