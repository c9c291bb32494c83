"""A job shrunk to the least one of the same structure: every axis that is used has two ranks, and the model the fewest layers.

It keeps the schedule, the ZeRO stage, recomputation, documents, and the methods of the sequence and context axes. Its optimizer
shows the scale of gradients: AdamW of a large eps, or SGD. What the job's tensor ranks cut unevenly, two ranks cut unevenly too.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from pydantic import BaseModel

from hpc_mp.job.learning_rate import ScheduleOptions
from hpc_mp.job.lora import Lora
from hpc_mp.job.spec import Checkpoint, Evaluate, JobSpec, LossScale, ProfiledSteps, Train
from hpc_mp.job.sweep import Sweep
from hpc_mp.layout.flat import GROUPED
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.adapter_weights import targets, trained_weights
from hpc_mp.layout.models.adapters import chooses
from hpc_mp.layout.models.tensor import matches, tensor_modules
from hpc_mp.layout.placement.grid import ALIASES
from hpc_mp.layout.schedule.names import is_table

STEPS, TOKENS, PROMPT, RANK = 2, 24, 13, 3
ALWAYS = {"steps": STEPS, "epochs": None, "gradient_accumulation_steps": None, "learning_rate": 1e-2, "eps": 1e-2,
          "warmup_steps": 0, "lr_schedule": "constant", "lr_schedule_options": ScheduleOptions(), "precision": "fp64",
          "compile": False, "seed": 0, "loss_scale": LossScale(), "router_balance": 0.0, "router_z": 0.0, "expert_capacity": None,
          "exp_avg_dtype": None, "profile": ProfiledSteps(), "muon_momentum": Train.model_fields["muon_momentum"].default}
Table = TypeVar("Table", bound=BaseModel)


def shrunk(spec: JobSpec, shape: ModelShape) -> JobSpec:
    """Return the shrunk job of one that ``check_job`` has accepted, with the job's own model: ``with_model`` sets another."""
    p, table = spec.parallel, is_table(spec.parallel.schedule)
    tensor, context, expert = (min(2, size) for size in (p.tensor, p.context, p.expert))
    pipeline = p.pipeline if table else min(2, p.pipeline)
    data, shards = _data(spec, context, expert)
    microbatches = spec.microbatches if table else _microbatches(spec)
    samples = min(2, spec.microbatch_size)
    uneven = p.sequence and context == 1 and spec.data.sequence_length % p.tensor
    order = ALIASES.get("cluster" if p.order == "auto" else p.order, p.order)
    parallel = _changed(
        p, tensor=tensor, context=context, expert=expert, pipeline=pipeline, shard_degree=shards, microbatches=microbatches,
        virtual_stages=p.virtual_stages if table else min(2, p.virtual_stages), partition="auto", reduce=spec.reduce, order=order,
        recompute=f"{GROUPED}2" if p.recompute.startswith(GROUPED) else p.recompute, rank_map="auto", profile=None,
        memory_weight=None, offload="none", offload_directory=None, offload_horizon=None)
    train = _changed(spec.train, **ALWAYS, global_batch=data * microbatches * samples, clip=0.5 if spec.train.clip else 0.0,
                     optimizer="sgd" if spec.train.optimizer == "sgd" else "adamw")
    return _changed(
        spec, parallel=parallel, train=train, lora=_lora(spec, shape), evaluate=Evaluate(), checkpoint=Checkpoint(),
        job=_changed(spec.job, nodes=1, ranks_per_node=tensor * context * pipeline * data, device="cpu"), sweep=Sweep(),
        data=_changed(spec.data, sequence_length=TOKENS + bool(uneven), weights=(),
                      prompt_length=spec.data.prompt_length and PROMPT))


def with_model(small: JobSpec, config: Mapping[str, Any], shape: ModelShape, held: Sequence[int]) -> JobSpec:
    """Return a shrunk job with a shrunk model: patterns of names keep what they match there. ``held``: layers of every stage of
    the job itself."""
    family = family_of(shape)
    modules, parameters = tensor_modules(family, shape), [weight.name for weight in trained_weights(family, shape)]
    patterns = tuple(pattern for pattern in small.parallel.tensor_modules
                     if any(matches(module, [pattern]) for module in modules))
    names = targets(family, shape)
    adapted = tuple(pattern for pattern in small.lora.modules if any(chooses(pattern, name) for name in names))
    factors = {pattern: factor for pattern, factor in small.train.lr_factors.items()
               if any(fnmatchcase(name, pattern) for name in parameters)}
    partition = partition_of(shape.layers, held, small.stages)
    return _changed(
        small, model=_changed(small.model, pretrained=None, config=dict(config), stage=False),
        parallel=_changed(small.parallel, tensor_modules=patterns or ("*",), partition=partition),
        lora=_changed(small.lora, modules=adapted or ("*",)), train=_changed(small.train, lr_factors=factors))


def partition_of(layers: int, held: Sequence[int], stages: int) -> tuple[int, ...] | str:
    """Return the layers of every stage of a shrunk job: as even as possible, and none at an end that has none in the job itself.
    ``held``: layers of every stage there."""
    if stages == 1:
        return "auto"
    empty = {stage for stage, end in ((0, held[0]), (stages - 1, held[-1])) if end == 0}
    full = [stage for stage in range(stages) if stage not in empty]
    share, more = divmod(layers, len(full))
    numbers = {stage: share + (place < more) for place, stage in enumerate(full)}
    return tuple(numbers.get(stage, 0) for stage in range(stages))


def layout_words(spec: JobSpec) -> str:
    """Return the layout of a job in words."""
    p = spec.parallel
    axes = {"tensor": p.tensor, "pipeline": p.pipeline, "context": p.context, "data": spec.data_degree, "expert": p.expert}
    sizes = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"
    return f"{sizes}, zero {p.zero}" + (f", {p.schedule}" if spec.stages > 1 else "")


def _data(spec: JobSpec, context: int, expert: int) -> tuple[int, int | None]:
    """Return the data degree, and the number of ranks over which ZeRO shards (None: all). Ranks that have the same shards, or the
    same experts, beside others of their kind stay several."""
    whole, shards = spec.state_degree, spec.parallel.shard_degree
    data = min(2, spec.data_degree)
    copies = spec.parallel.zero > 0 and shards is not None and 1 < shards < whole
    while data * context < (4 if copies or (expert > 1 and whole > spec.parallel.expert) else expert):
        data *= 2
    return data, None if shards is None or shards == whole else min(2, shards)


def _microbatches(spec: JobSpec) -> int:
    limit = min(spec.microbatches, 2 if spec.parallel.pipeline == 1 else 4)
    return limit - limit % 2 if spec.parallel.schedule == "interleaved_1f1b" and spec.parallel.pipeline > 1 else limit


def _lora(spec: JobSpec, shape: ModelShape) -> Lora:
    """Return adapters of the same scale, of a small rank, that are drawn."""
    adapters = shape.adapters
    if adapters is None:
        return Lora()
    rank = min(RANK, adapters.rank)
    alpha = adapters.scale * (rank**0.5 if adapters.rslora else rank)
    modules = spec.lora.modules if spec.lora.pretrained is None else tuple(adapters.modules)
    return Lora(rank=rank, alpha=alpha, modules=modules, dropout=adapters.dropout, rslora=adapters.rslora)


def _changed(table: Table, **values: Any) -> Table:
    return table.model_copy(update=values)
