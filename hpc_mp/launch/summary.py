"""A plan in words, printed before the start: every choice with its reason, keys without effect, and, on request, defaults."""

import os
import textwrap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from hpc_mp.base.text import counted
from hpc_mp.base.views import view
from hpc_mp.cluster.slurm.options import options_of
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec
from hpc_mp.job.layout import read_config, whole_config
from hpc_mp.job.program import of_engine
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.job.values import toml_value
from hpc_mp.launch.plan import JobPlan, TrainingPlan
from hpc_mp.launch.program.plan import ProgramPlan
from hpc_mp.launch.training_text import TrainingText, text_rows
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.adapter_weights import adapted_weights
from hpc_mp.layout.models.shape import TEXT_PART
from hpc_mp.layout.placement import normalize_order, reach_of
from hpc_mp.planner.device import Pool
from hpc_mp.rundir import find_run
from hpc_mp.rundir.history import saved_step

WIDTH = 120

# Keys that have an effect only in some back ends; every other key has one everywhere.
# Properties of an allocation, or consequences of its end: no step of an allocation can change them.
JOB: tuple[str, ...] = ("slurm",)
# Work of the script (slurm/job.sbatch.j2) or the cluster's nodes before the ranks.
SCRIPT: tuple[str, ...] = ("slurm", "step")

PLACES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("slurm.account", "slurm.qos", "slurm.constraint", "slurm.reservation", "slurm.switches", "slurm.gpu_type",
                     "slurm.gpu_request", "slurm.depends", "sweep.simultaneous", "notify.mail", "slurm.retries",
                     "slurm.chain"), JOB),
    **dict.fromkeys(("slurm.partition", "slurm.mpi", "slurm.components", "slurm.grace", "slurm.container",
                     "slurm.container_runtime", "slurm.container_mounts", "slurm.modules", "slurm.conda", "slurm.venv",
                     "slurm.python", "slurm.setup", "slurm.extra", "environment.local", "environment.stage",
                     "environment.profile", "environment.health", "model.stage", "data.stage", "program.stage"), SCRIPT),
}


def describe(plan: TrainingPlan, title: str, text: TrainingText | None = None) -> str:
    """Return where it runs and why, how the ranks are placed and why, and the memory of the model's state. ``title``: description
    of where the back end's ranks run. ``text``: the training text, if it was examined."""
    rows = _rows(plan, title, "where", "device", "model", "layout", "schedule", "order", "state", "in flight", "expects")
    rows |= text_rows(text, plan.spec) if text else {}
    rows["defaults"] = "hold for all keys that the job file leaves out (launch --explain lists them)"
    choices = plan.resolution
    rows |= _rows(plan, title, "stages") | reasons(
        **dict(zip(("left open",), choices.opened, strict=False)), whole=choices.tensor_modules, gradients=choices.reduce,
        nodes=choices.exclude, rate=choices.schedule, profile=choices.profile)
    return table(rows | _rows(plan, title, "begins") | remarks(plan))


def _rows(plan: JobPlan, title: str, *names: str) -> dict[str, str]:
    """Return the rows that are not empty, by the macros of ``summary.txt.j2``."""
    words = view("launch/summary.txt.j2", title=title, part_of=_part, adapter_numbers=_adapter_numbers, tightest_pool=_tightest,
                 started=STARTED, step_saved=lambda resume: saved_step(find_run(Path(resume))))
    rows = {name: getattr(words, name.replace(" ", "_"))(plan) for name in names}
    return {name: row for name, row in rows.items() if row}


def _part(spec: JobSpec) -> str:
    """Return the model that this one is a part of; empty if it is whole."""
    whole = whole_config(spec)["model_type"]
    return "" if whole == read_config(spec)["model_type"] else f", {TEXT_PART.format(whole=whole)}"


def _adapter_numbers(shape: ModelShape) -> tuple[int, int, int]:
    """Return the number of adapted projections, of trained numbers, and of the numbers of the model."""
    family = family_of(shape)
    adapted = adapted_weights(family, shape)
    trained = sum(prod(factor.shape) for _, *factors in adapted.values() for factor in factors)
    return len(adapted), trained, sum(prod(weight.shape) for weight in family.all_weights(shape))


def _tightest(plan: TrainingPlan) -> tuple[Pool, float]:
    """Return the pool of memory with the largest state, and that state."""
    needs = [sum(plan.record.state[rank].total for rank in pool.ranks) for pool in plan.device.pools]
    return plan.device.pools[needs.index(max(needs))], max(needs)


def reasons(**choices: ResolvedKey[Any]) -> dict[str, str]:
    """Return a row for each choice that has a reason."""
    return {name: choice.why for name, choice in choices.items() if choice.why}


def remarks(plan: JobPlan) -> dict[str, str]:
    """Return rows about keys without effect, and about files that the job script needs and this machine lacks: the nodes may
    have them."""
    slurm, note = plan.user_spec.slurm, without_effect(plan.user_spec, plan.where.place)
    paths = {"slurm.venv": slurm.venv and f"{slurm.venv}/bin/activate", "slurm.python": slurm.python,
             "slurm.container": slurm.container}
    absent = [f"{key}: {path}" for key, path in paths.items()
              if path and path.startswith("/") and not os.path.exists(path)] if plan.where.place in SCRIPT else []
    unseen = f"{'; '.join(absent)} is not there on this machine; every node must have it" if absent else None
    return {name: text for name, text in (("note", note), ("unseen", unseen)) if text is not None}


def table(rows: Mapping[str, str]) -> str:
    """Return each text after its name, in lines of one width."""
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=f"{name:<9} ", subsequent_indent=" " * 10, break_on_hyphens=False,
                      break_long_words=False) for name, text in rows.items())


def defaults(spec: AnySpec) -> dict[str, str]:
    """Return every key that the job file omits and that has a value: by section, ``key = value, key = value``."""
    sections = {}
    for section in type(spec).model_fields:
        keys = getattr(spec, section)
        values = {key: getattr(keys, key) for key in type(keys).model_fields
                  if key not in keys.model_fields_set
                  and not (isinstance(spec, ProgramSpec) and of_engine(f"{section}.{key}", spec))}
        shown = [f"{key} = {toml_value(value)}" for key, value in values.items() if value not in (None, (), {})]
        if shown:
            sections[section] = ", ".join(shown)
    return sections


def without_effect(spec: AnySpec, place: str) -> str | None:
    """Return one sentence on keys that the job changes from the defaults but that have no effect there; None without any.
    ``spec``: the job as the user wrote it."""
    ineffective = [key for key, places in PLACES.items() if place not in places and _is_changed(spec, key)]
    if place == "step":
        in_step = {"cpus-per-task", *options_of(spec, "step")}  # srun gets these too
        ineffective += [f"slurm.extra.{name}" for name in spec.slurm.extra if name not in in_step]
    return f"{', '.join(ineffective)} {'has' if len(ineffective) == 1 else 'have'} no effect here" if ineffective else None


def _is_changed(spec: AnySpec, key: str) -> bool:
    section, name = key.split(".")
    values = getattr(spec, section, None)  # a program has no model and no data
    return values is not None and bool(getattr(values, name) != type(values).model_fields[name].get_default())


STARTED = {
    "rank": "",
    "node": ", once for every node, where it starts its ranks itself",
    "mpi": ", once for every rank, which meet through MPI",
    "script": ", a job script, once on the first node, where it starts its ranks itself",
}


def describe_program(plan: ProgramPlan, title: str) -> str:
    """Return where it runs and why, and the command of every rank. ``title``: description of where the back end's ranks run."""
    choices = plan.resolution
    return table(_rows(plan, title, "where", "device", "program") | _axes(plan) | _rows(plan, title, "hang")
                 | reasons(nodes=choices.exclude, profile=choices.profile, mpi=choices.mpi) | remarks(plan))


def _axes(plan: ProgramPlan) -> dict[str, str]:
    axes, p, placement = plan.spec.program.axes, plan.spec.parallel, plan.placement
    if axes is None:
        return {}
    d = placement.degrees
    sizes = {"tp": ("tensor", d.tensor), "pp": ("pipeline", d.pipeline), "cp": ("context", d.context), "dp": ("data", d.data)}
    reach = reach_of(placement)
    spans = ", ".join(f"{sizes[name][0]} groups span {counted(reach[name].nodes, 'node')}" for name in sizes
                      if sizes[name][1] > 1)
    layout = " × ".join(f"{name}({size})" for name, size in sizes.values() if size > 1) or "data(1)"
    location = ("on the nodes of parallel.rank_map" + ("" if p.order == "auto" else ", which goes before parallel.order")
                if isinstance(p.rank_map, tuple) else "as it numbers its ranks" if p.order == "auto"
                else f"laid out in the order {normalize_order(p.order, d.context)}")
    return {"layout": layout, "order": f"{placement.order} ({axes}), {location}" + (f"; {spans}" if spans else "")}
