"""The layout that a job file leaves open, chosen by the planner where the machine is known; and the refusal of one that cannot fit.

A job that states degrees and microbatches has its layout. Of any other, all keys of ``[parallel]`` that the search chooses and
the file does not name are open. The order of ranks is chosen afterwards, see ``planner.order``.
"""

from collections.abc import Iterator
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

KEPT = "as in the run that is resumed"
KEYS = tuple(key for key in Candidate._fields if key != "order")
DEGREES = ("tensor", "pipeline", "microbatches")  # a job that states these has a layout
# Named keys that hold others: who names stages names all.
HOLD = {"partition": KEYS, "schedule": ("virtual_stages",), "shard_degree": ("zero",)}
# What a job that does not fit changes, the cheapest first; the search may change all keys before.
RELAXED = (("microbatches",), ("recompute",), ("zero", "shard_degree"),
           ("tensor", "sequence", "pipeline", "schedule", "virtual_stages", "context", "context_method", "expert"))


def known_machine(spec: JobSpec, device: Device, facts: ClusterFacts) -> Machine:
    """Return the machine of a job's nodes. Raises HpcMpError if ranks compute on CPUs, share GPUs, or the machine is unknown."""
    if device.kind == "cpu":
        raise HpcMpError("no prediction", "ranks compute on CPUs", "use GPUs")
    kinds = facts.partition.kinds if facts.partition is not None else ()
    counts = [count for kind in kinds for name, count in kind.gpus if name == device.gpu]
    machine = machine_of(device.gpu, max(counts, default=spec.job.ranks_per_node))
    if not machine.fabric.nics and spec.job.nodes > 1 and not device.pools:
        raise HpcMpError(machine.fabric.title, "the network between its nodes is unknown", "add a row with nics to machines.toml")
    return machine


def open_layout(spec: JobSpec, shape: ModelShape, machine: Machine, earlier: RunPlan | None) -> tuple[ResolvedKey[Any], ...]:
    """Return the keys that the job leaves open, with the planner's values and their reason; none if it states its layout.
    ``earlier``: plan of the resumed run, whose layout it keeps while the ranks allow that."""
    stated = _stated(spec)
    if stated.issuperset(DEGREES):
        return ()
    if earlier is not None:
        kept = tuple(replace(choice, why=KEPT) for choice in earlier.choices if choice.key.removeprefix("parallel.") in KEYS
                     and choice.key.removeprefix("parallel.") not in stated)
        with suppress(HpcMpError):
            check_arithmetic(resolved(spec, kept))
            check_job(resolved(spec, kept), shape)
            return kept
    plan = search(Question(spec, shape, machine, stated))
    lost = ", ".join(f"{count:,} {reason}" for reason, count in plan.lost.items() if count)
    why = (f"{'fastest' if plan.fits else 'smallest'} by the planner: {duration(plan.best.step.seconds)} per step, limited by "
           f"{plan.limit}, {memory_size(plan.best.peak.total)} of {memory_size(machine.memory)}" + (f" ({lost})" if lost else ""))
    return tuple(ResolvedKey(f"parallel.{key}", getattr(plan.best.chosen, key), why) for key in KEYS if key not in stated)


def _stated(spec: JobSpec) -> frozenset[str]:
    """Return the keys of ``[parallel]`` that the job file names, and those that they hold."""
    named = {key for key in spec.parallel.model_fields_set if getattr(spec.parallel, key) not in ("auto", None)}
    named |= {"microbatches"} if spec.train.gradient_accumulation_steps else set()
    whole = KEYS if is_table(spec.parallel.schedule) else ()
    return frozenset(named.union(whole, *(held for key, held in HOLD.items() if key in named)))


def check_room(spec: JobSpec, shape: ModelShape, machine: Machine, expected: Expectation) -> None:
    """Refuse a job whose tensors exceed the memory of a GPU. Raises HpcMpError with the cheapest change that fits. ``spec``: the
    job with every choice made."""
    if expected.allocated <= expected.memory:
        return
    lines = [f"{memory_size(size)} of {name}" for name, size in expected.fullest.items()]
    raise HpcMpError(f"{memory_size(expected.total)} on each GPU ({several(lines, 3)})",
                     f"is more than the {memory_size(expected.memory)} of {expected.gpu}", _remedy(spec, shape, machine))


def _remedy(spec: JobSpec, shape: ModelShape, machine: Machine) -> str:
    """Return the first change of ``RELAXED`` with which a step fits, in words."""
    smallest = None
    for smallest in _relaxed(spec, shape, machine):
        if smallest.fits:
            break
    if smallest is None:
        return "use a smaller model or more nodes"
    needs = memory_size(smallest.best.peak.total)
    if not smallest.fits:
        return f"use more nodes: the layout of these that needs least has {needs} on each GPU"
    renamed = {"microbatches": "train.gradient_accumulation_steps"} if spec.train.gradient_accumulation_steps else {}
    changes = [f"{renamed.get(key, f'parallel.{key}')} = {toml_value(value)}" for key in KEYS
               if (value := getattr(smallest.best.chosen, key)) != _value(spec, key)]
    return f"use {' and '.join(changes)}: {needs} and {duration(smallest.best.step.seconds)} per step"


def _relaxed(spec: JobSpec, shape: ModelShape, machine: Machine) -> Iterator[Plan]:
    """Yield the best layout with ever more keys open."""
    whole = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={key: _value(spec, key) for key in KEYS})})
    for freed in accumulate(RELAXED):
        with suppress(HpcMpError):  # of this step all are refused
            yield search(Question(whole, shape, machine, frozenset({*KEYS, "order"}.difference(freed))))


def _value(spec: JobSpec, key: str) -> Any:
    return spec.microbatches if key == "microbatches" else getattr(spec.parallel, key)
