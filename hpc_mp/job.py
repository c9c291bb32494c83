"""The job file: one validated, frozen description of a run.

``load_job`` reads TOML, applies ``--set`` overrides, makes paths absolute and checks everything that needs neither
the model's shape nor the machine. ``dump_job`` writes the resolved job: a file that reproduces the run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpc_mp.errors import HpcMpError
from hpc_mp.job_errors import explain, shown, wrong
from hpc_mp.job_values import (
    Betas,
    Config,
    Count,
    Flag,
    Line,
    Name,
    NonNegative,
    Option,
    Order,
    Partition,
    PathName,
    Patterns,
    Rate,
    Share,
    Time,
    Variable,
    check_values,
)

MOST_RANKS = 2**17  # more than any machine has; to count more would take minutes
MOST_MICROBATCHES = 2**16  # a rank's schedule has as many actions of each kind


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Job(Section):
    """Who runs where."""

    name: Name = "job"
    nodes: Count = 1
    ranks_per_node: Count = 1
    time_limit: Time = "01:00:00"
    directory: PathName = "runs"
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Model(Section):
    """Which model: a Hugging Face checkpoint directory, or a config to start from random weights."""

    pretrained: PathName | None = None
    config: Config | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.pretrained is None) == (self.config is None):
            given = "neither pretrained nor config" if self.pretrained is None else "both pretrained and config"
            raise wrong(f"has {given}", "set pretrained to the directory of a checkpoint, or config to a table with "
                        "model_type and sizes")
        return self


class Data(Section):
    """What to train on."""

    files: Patterns
    tokenizer: PathName | None = None
    sequence_length: Count


class Parallel(Section):
    """How the ranks share the work. The data degree is what is left: ranks / (tensor x pipeline x context)."""

    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    expert: Count = 1
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 1
    shard_degree: Count | None = None
    order: Order = "auto"
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    virtual_stages: Count = 1
    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES, strict=True)] | None = None
    partition: Partition = "auto"
    recompute: Literal["none", "full", "selective"] = "none"
    offload: Literal["none", "optimizer", "activations"] = "none"


class Train(Section):
    """The optimization."""

    steps: Count
    global_batch: Count
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Rate = 3e-4
    betas: Betas = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8
    momentum: Share = 0.0
    warmup_steps: NonNegative = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Rate = 0.0
    clip: Rate = 1.0
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    dropout: Share | None = None
    seed: NonNegative = 0


class Checkpoint(Section):
    """When state is saved. The last step always is."""

    every: NonNegative = 0
    keep: Count = 2
    resume: PathName | None = None


class Slurm(Section):
    """What the site needs; nothing of it has an effect on emulated nodes."""

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    gpu_type: Name | None = None
    gpu_request: Literal["auto", "gpus-per-node", "gres", "none"] = "auto"
    container: str | None = None
    setup: tuple[str, ...] = ()
    extra: dict[Option, Flag] = {}


class Environment(Section):
    """Environment variables of every rank."""

    profile: str | None = None
    set: dict[Variable, str] = {}


class JobSpec(Section):
    """A whole job file. Frozen; every value is either given or has the default shown here."""

    job: Job = Job()
    model: Model
    data: Data
    parallel: Parallel = Parallel()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    slurm: Slurm = Slurm()
    environment: Environment = Environment()

    @property
    def ranks(self) -> int:
        return self.job.nodes * self.job.ranks_per_node

    @property
    def data_degree(self) -> int:
        """D: how many replicas of the model train side by side."""
        p = self.parallel
        return self.ranks // (p.tensor * p.pipeline * p.context)

    @property
    def shard_degree(self) -> int:
        """Over how many ranks of the data axis ZeRO shards (1 for ZeRO-0)."""
        if self.parallel.zero == 0:
            return 1
        return self.parallel.shard_degree or self.data_degree

    @property
    def microbatches(self) -> int:
        """Microbatches per replica and optimizer step. Default: one without a pipeline, else up to 4 per stage."""
        if self.parallel.microbatches is not None:
            return self.parallel.microbatches
        if self.parallel.pipeline == 1:
            return 1
        per_replica = self.train.global_batch // self.data_degree
        most = min(per_replica, 4 * self.parallel.pipeline, MOST_MICROBATCHES)
        return next(m for m in range(most, 0, -1) if per_replica % m == 0)

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.train.global_batch // (self.data_degree * self.microbatches)


# (key, the values that are built, what to do instead)
NOT_BUILT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("parallel.context", (1,), "leave parallel.context = 1"),
    ("parallel.expert", (1,), "leave parallel.expert = 1"),
    ("parallel.virtual_stages", (1,), "leave parallel.virtual_stages = 1"),
    ("parallel.schedule", ("gpipe", "1f1b"), 'use "1f1b" or "gpipe" (`hpc-mp schedule` draws the other)'),
    ("parallel.recompute", ("none",), 'leave parallel.recompute = "none"'),
    ("parallel.offload", ("none",), 'leave parallel.offload = "none"'),
    ("train.precision", ("fp64", "fp32", "bf16"), 'use "bf16" or "fp32"'),
    ("slurm.container", (None,), "activate the software in slurm.setup instead"),
    ("environment.profile", (None,), "name the variables in environment.set instead"),
)


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file. ``overrides`` are ``"a.b=value"`` strings, the value TOML or else a plain string.

    Raises:
        HpcMpError: with the value, the rule and the remedy for whatever is wrong with it.
    """
    tree = _parse(path)
    for override in overrides:
        _override(tree, override)
    return resolve(tree, path.resolve().parent)


def resolve(tree: dict[str, Any], base: Path) -> JobSpec:
    """Validate a parsed job file; relative paths become absolute, seen from ``base``. Raises HpcMpError."""
    check_values(tree)
    try:
        spec = JobSpec.model_validate(tree)
    except ValidationError as error:
        raise explain(error, JobSpec) from None
    spec = _absolute(spec, base)
    _check_built(spec)
    _check_arithmetic(spec)
    return spec


def dump_job(spec: JobSpec) -> str:
    """The resolved job as TOML: every default explicit, every path absolute."""
    parallel = spec.parallel.model_copy(update={"microbatches": spec.microbatches})
    return tomli_w.dumps(spec.model_copy(update={"parallel": parallel}).model_dump(mode="json", exclude_none=True))


def _parse(path: Path) -> dict[str, Any]:
    value = f"job file {path}"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "give a job file; `hpc-mp init` writes one") from None
    except UnicodeDecodeError:
        raise HpcMpError(value, "is not UTF-8 text", "save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise HpcMpError(value, f"is not valid TOML ({error})", "mend that line") from None
    except ValueError:  # from Python's int
        raise HpcMpError(value, "holds a number of thousands of digits", "write a smaller number") from None
    except RecursionError:
        raise HpcMpError(value, "is nested too deeply", "write it flatter") from None


def _override(tree: dict[str, Any], text: str) -> None:
    """Put ``"a.b=value"`` into a parsed job file; text that is no TOML value is taken as it is."""
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise HpcMpError(f"--set {text}", "does not read SECTION.KEY=VALUE", "write for example --set train.steps=20")
    try:
        parsed = tomllib.loads(f"v = {raw}")
    except (ValueError, RecursionError):
        parsed = {}
    table = tree
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise HpcMpError(f"--set {text}", f"{part} is a value, not a table", "name a key of a table")
    table[parts[-1]] = parsed["v"] if list(parsed) == ["v"] else raw


def _absolute(spec: JobSpec, base: Path) -> JobSpec:
    def at(path: str) -> str:
        try:
            return str(base / Path(path).expanduser())
        except RuntimeError:
            raise HpcMpError(f"the path {path}", "begins with the home directory of an unknown user",
                             "write the directory itself") from None

    def maybe(path: str | None) -> str | None:
        return None if path is None else at(path)

    job, model, data, checkpoint = spec.job, spec.model, spec.data, spec.checkpoint
    return spec.model_copy(update={
        "job": job.model_copy(update={"directory": at(job.directory)}),
        "model": model.model_copy(update={"pretrained": maybe(model.pretrained)}),
        "data": data.model_copy(update={"files": tuple(map(at, data.files)), "tokenizer": maybe(data.tokenizer)}),
        "checkpoint": checkpoint.model_copy(update={"resume": maybe(checkpoint.resume)}),
    })


def _check_built(spec: JobSpec) -> None:
    for key, built, remedy in NOT_BUILT:
        section, name = key.split(".")
        value = getattr(getattr(spec, section), name)
        if value not in built:
            raise HpcMpError(f"{key} = {shown(value)}", "is not built yet", remedy)


def _check_arithmetic(spec: JobSpec) -> None:
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
