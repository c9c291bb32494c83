"""Rules that connect several keys of a job file, and keys whose feature is not built yet."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.errors import shown
from hpc_mp.job.spec import JobSpec, Parallel

MOST_RANKS = 2**17  # more than any machine has; to count more would take minutes

# Of those that a job file may name, what the engine runs; the other has virtual stages.
BUILT_SCHEDULES = tuple(name for name in get_args(Parallel.model_fields["schedule"].annotation) if name != "interleaved_1f1b")

# (key, the values that are built, what to do instead)
NOT_BUILT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("parallel.context", (1,), "leave parallel.context = 1"),
    ("parallel.expert", (1,), "leave parallel.expert = 1"),
    ("parallel.virtual_stages", (1,), "leave parallel.virtual_stages = 1"),
    ("parallel.schedule", BUILT_SCHEDULES, 'use "1f1b" or "gpipe" (`hpc-mp schedule` draws the other)'),
    ("parallel.recompute", ("none",), 'leave parallel.recompute = "none"'),
    ("parallel.offload", ("none",), 'leave parallel.offload = "none"'),
    ("train.precision", ("fp64", "fp32", "bf16"), 'use "bf16" or "fp32"'),
)


def check_built(spec: JobSpec) -> None:
    for key, built, remedy in NOT_BUILT:
        section, name = key.split(".")
        value = getattr(getattr(spec, section), name)
        if value not in built:
            raise HpcMpError(f"{key} = {shown(value)}", "is not built yet", remedy)


def check_arithmetic(spec: JobSpec) -> None:
    p, t = spec.parallel, spec.train
    degree = p.tensor * p.pipeline * p.context
    product = f"tensor({p.tensor}) × pipeline({p.pipeline}) × context({p.context}) = {degree}"
    ranks = f"nodes({spec.job.nodes}) × ranks_per_node({spec.job.ranks_per_node}) = {spec.ranks}"
    if spec.ranks > MOST_RANKS:
        raise HpcMpError(ranks, f"is more than {MOST_RANKS} ranks", "lower job.nodes or job.ranks_per_node")
    if spec.ranks % degree:
        raise HpcMpError(product, f"does not divide {spec.ranks} ranks ({ranks})",
                         f"choose degrees whose product divides {spec.ranks}, or a multiple of {degree} as ranks")
    if p.shard_degree is not None and p.zero == 0:
        raise HpcMpError(f"parallel.shard_degree = {p.shard_degree}", "has no effect with parallel.zero = 0",
                         "set parallel.zero to 1, 2 or 3, or leave shard_degree out")
    if p.shard_degree is not None and spec.data_degree % p.shard_degree:
        raise HpcMpError(f"parallel.shard_degree = {p.shard_degree}",
                         f"does not divide the data degree {spec.ranks} ranks / ({product}) = {spec.data_degree}",
                         f"use a divisor of {spec.data_degree}, or leave it out")
    _check_rank_map(spec)
    if spec.slurm.array and spec.slurm.chain:
        raise HpcMpError(f"slurm.chain = {spec.slurm.chain}", "cannot follow the elements of slurm.array one by one",
                         "leave out one of slurm.chain and slurm.array")
    _check_staged_environment(spec)
    stages = p.pipeline * p.virtual_stages
    if p.partition != "auto" and len(p.partition) != stages:
        raise HpcMpError(f"parallel.partition = {shown(p.partition)}",
                         f"has the length {len(p.partition)}, the number of stages is {stages}",
                         'give the number of layers of every stage, or partition = "auto"')
    microbatches = p.microbatches or 1
    unit = spec.data_degree * microbatches
    if t.global_batch % unit:
        raise HpcMpError(f"train.global_batch = {t.global_batch}",
                         f"is not a multiple of data({spec.data_degree}) × microbatches({microbatches}) = {unit}",
                         f"use {max(1, t.global_batch // unit) * unit} or another multiple of {unit}")
    if t.momentum and t.optimizer != "sgd":
        raise HpcMpError(f"train.momentum = {t.momentum}", f"has no effect with optimizer = {t.optimizer!r}",
                         'use betas with adamw, or optimizer = "sgd"')
    if t.warmup_steps > t.steps:
        raise HpcMpError(f"train.warmup_steps = {t.warmup_steps}", f"is more than train.steps = {t.steps}, so that the "
                         "learning rate would never be reached", "lower warmup_steps")


def _check_staged_environment(spec: JobSpec) -> None:
    """There is one, and the login node can tell where it lies."""
    slurm = spec.slurm
    if not spec.environment.stage:
        return
    if slurm.container is not None:
        raise HpcMpError("environment.stage = true", "has no effect on ranks in a container, which brings its own environment",
                         "leave out one of environment.stage and slurm.container")
    if slurm.conda is not None and "/" not in slurm.conda and slurm.python is None and slurm.venv is None:
        raise HpcMpError(f"slurm.conda = {shown(slurm.conda)}", "is a name, and environment.stage packs a directory",
                         "write the environment's directory (conda env list)")


def _check_rank_map(spec: JobSpec) -> None:
    """A list puts exactly ``ranks_per_node`` ranks on each of the nodes."""
    nodes = spec.parallel.rank_map
    if isinstance(nodes, str):
        return
    counts = Counter(nodes)
    if counts != dict.fromkeys(range(spec.job.nodes), spec.job.ranks_per_node):
        raise HpcMpError(f"parallel.rank_map = {shown(nodes)}",
                         f"does not put ranks_per_node({spec.job.ranks_per_node}) ranks on each of the nodes 0 to "
                         f"{spec.job.nodes - 1}", "name every node that many times")
