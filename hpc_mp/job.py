"""The job file: one validated, frozen description of a run.

``load_job`` reads TOML, applies ``--set`` overrides, makes paths absolute and checks everything that needs neither
the model's shape nor the machine. ``dump_job`` writes the resolved job: a file that reproduces the run.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpc_mp.errors import HpcMpError

Count = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Job(Section):
    """Who runs where."""

    name: Name = "job"
    nodes: Count = 1
    ranks_per_node: Count = 1
    time_limit: Annotated[str, Field(pattern=r"^(\d+|\d+:\d{1,2}|(\d+-)?\d+:\d{1,2}:\d{1,2}|\d+-\d+(:\d{1,2})?)$")] = "01:00:00"
    directory: Annotated[str, Field(min_length=1)] = "runs"
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Model(Section):
    """Which model: a Hugging Face checkpoint directory, or a config to start from random weights."""

    pretrained: str | None = None
    config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.pretrained is None) == (self.config is None):
            given = "neither" if self.pretrained is None else "both"
            raise ValueError(f"{given} of pretrained and config given|exactly one is needed|"
                             "set model.pretrained to a checkpoint directory, or model.config to a table with model_type")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config without model_type|the family must be named|add model_type = \"gpt2\" or \"llama\"")
        return self


class Data(Section):
    """What to train on."""

    files: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    tokenizer: str | None = None
    sequence_length: Count


class Parallel(Section):
    """How the ranks share the work. The data degree is what is left: ranks / (tensor x pipeline x context)."""

    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    expert: Count = 1
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 1
    shard_degree: Count | None = None
    order: str = "auto"
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    virtual_stages: Count = 1
    microbatches: Count | None = None
    partition: Literal["auto"] | tuple[Count, ...] = "auto"
    recompute: Literal["none", "full", "selective"] = "none"
    offload: Literal["none", "optimizer", "activations"] = "none"

    @model_validator(mode="after")
    def _known_order(self) -> Parallel:
        if self.order not in ("auto", "cluster", "spread") and (
            sorted(self.order) not in (sorted("DPT"), sorted("DPCT"))
        ):
            raise ValueError(f"order = {self.order!r}|must be auto, cluster, spread or each of the letters D, P, T (and C) once|"
                             "leave order = \"auto\", or write for example \"DPT\" (the right-most letter varies fastest)")
        return self


class Train(Section):
    """The optimization."""

    steps: Count
    global_batch: Count
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(ge=0, strict=True)] = 3e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1, strict=True)], Annotated[float, Field(ge=0, lt=1, strict=True)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    warmup_steps: NonNegative = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Annotated[float, Field(ge=0, strict=True)] = 0.0
    clip: Annotated[float, Field(ge=0, strict=True)] = 1.0
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    dropout: Annotated[float, Field(ge=0, lt=1, strict=True)] | None = None
    seed: NonNegative = 0


class Checkpoint(Section):
    """When state is saved. The last step always is."""

    every: NonNegative = 0
    keep: Count = 2
    resume: str | None = None


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
    extra: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], str | int | bool] = {}


class Environment(Section):
    """Environment variables of every rank."""

    profile: str | None = None
    set: dict[EnvName, str] = {}


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
        return max(m for m in range(1, per_replica + 1) if per_replica % m == 0 and m <= 4 * self.parallel.pipeline)

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.train.global_batch // (self.data_degree * self.microbatches)


NOT_BUILT: tuple[tuple[str, Any, str], ...] = (
    # (key, the one value that is built, what to do instead)
    ("parallel.context", 1, "leave parallel.context = 1"),
    ("parallel.expert", 1, "leave parallel.expert = 1"),
    ("parallel.virtual_stages", 1, "leave parallel.virtual_stages = 1"),
    ("parallel.recompute", "none", "leave parallel.recompute = \"none\""),
    ("parallel.offload", "none", "leave parallel.offload = \"none\""),
    ("slurm.container", None, "activate the software in slurm.setup instead"),
    ("environment.profile", None, "name the variables in environment.set instead"),
)


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file. ``overrides`` are ``"a.b=value"`` strings, the value TOML or else a plain string.

    Raises:
        HpcMpError: with the value, the rule and the remedy for whatever is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise HpcMpError(f"job file {path}", f"cannot be read ({reason})",
                         "give the path of a job file; `hpc-mp init` writes one") from None
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise HpcMpError(f"job file {path}", f"is not valid TOML ({error})", "mend that line") from None
    for override in overrides:
        _override(tree, override)
    return resolve(tree, path.resolve().parent)


def resolve(tree: dict[str, Any], base: Path) -> JobSpec:
    """Validate a parsed job file; relative paths become absolute, seen from ``base``."""
    try:
        spec = JobSpec.model_validate(tree)
    except ValidationError as error:
        raise _explain(error) from None
    except RecursionError:
        raise HpcMpError("the job file", "is nested too deeply", "flatten it") from None
    spec = _absolute(spec, base)
    _check_built(spec)
    _check_arithmetic(spec)
    return spec


def dump_job(spec: JobSpec) -> str:
    """The resolved job as TOML: every default explicit, every path absolute."""
    tree = spec.model_dump(mode="json", exclude_none=True)
    tree["parallel"]["microbatches"] = spec.microbatches
    return tomli_w.dumps(tree)


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise HpcMpError(f"--set {text}", "must read key=value with the key's section", "write for example --set train.steps=20")
    try:
        value: Any = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    table = tree
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise HpcMpError(f"--set {text}", f"{part} is a value, not a table", "name a key inside a section")
    table[parts[-1]] = value


def _absolute(spec: JobSpec, base: Path) -> JobSpec:
    def at(path: str) -> str:
        return str(base / Path(path).expanduser())

    def maybe(path: str | None) -> str | None:
        return None if path is None else at(path)

    return spec.model_copy(update={
        "job": spec.job.model_copy(update={"directory": at(spec.job.directory)}),
        "model": spec.model.model_copy(update={"pretrained": maybe(spec.model.pretrained)}),
        "data": spec.data.model_copy(update={"files": tuple(map(at, spec.data.files)), "tokenizer": maybe(spec.data.tokenizer)}),
        "checkpoint": spec.checkpoint.model_copy(update={"resume": maybe(spec.checkpoint.resume)}),
    })


def _check_built(spec: JobSpec) -> None:
    for key, built, remedy in NOT_BUILT:
        section, name = key.split(".")
        value = getattr(getattr(spec, section), name)
        if value != built:
            raise HpcMpError(f"{key} = {value}", "not built yet", remedy)
    if spec.parallel.schedule == "interleaved_1f1b":
        raise HpcMpError("parallel.schedule = interleaved_1f1b", "not built yet in the engine (`hpc-mp schedule` draws it)",
                         "use schedule = \"1f1b\" or \"gpipe\"")
    if spec.train.precision == "fp16":
        raise HpcMpError("train.precision = fp16", "not built yet", "use precision = \"bf16\" or \"fp32\"")


def _check_arithmetic(spec: JobSpec) -> None:
    p, t = spec.parallel, spec.train
    degree = p.tensor * p.pipeline * p.context
    product = f"tensor({p.tensor}) × pipeline({p.pipeline}) × context({p.context}) = {degree}"
    ranks = f"{spec.ranks} ranks (nodes({spec.job.nodes}) × ranks_per_node({spec.job.ranks_per_node}))"
    if spec.ranks % degree:
        raise HpcMpError(product, f"does not divide {ranks}",
                         f"choose degrees whose product divides {spec.ranks}, or a number of ranks that is a multiple of {degree}")
    if p.shard_degree is not None and p.zero == 0:
        raise HpcMpError(f"parallel.shard_degree = {p.shard_degree}", "has no effect with zero = 0", "set parallel.zero to 1, 2 or 3")
    if p.shard_degree is not None and spec.data_degree % p.shard_degree:
        raise HpcMpError(f"parallel.shard_degree = {p.shard_degree}",
                         f"does not divide the data degree {spec.data_degree} = {spec.ranks} ranks / ({product})",
                         f"use a divisor of {spec.data_degree}, or leave it out")
    if p.partition != "auto" and len(p.partition) != p.pipeline * p.virtual_stages:
        raise HpcMpError(f"parallel.partition = {list(p.partition)}",
                         f"has {len(p.partition)} entries for {p.pipeline * p.virtual_stages} stages",
                         "give the number of layers of every stage, or partition = \"auto\"")
    microbatches = p.microbatches or 1
    unit = spec.data_degree * microbatches
    if t.global_batch % unit:
        raise HpcMpError(f"train.global_batch = {t.global_batch}",
                         f"is not a multiple of data({spec.data_degree}) × microbatches({microbatches}) = {unit}",
                         f"use {max(1, t.global_batch // unit) * unit} or another multiple of {unit}")
    if t.momentum and t.optimizer != "sgd":
        raise HpcMpError(f"train.momentum = {t.momentum}", f"has no effect with optimizer = {t.optimizer!r}",
                         "use betas with adamw, or optimizer = \"sgd\"")
    if t.warmup_steps > t.steps:
        raise HpcMpError(f"train.warmup_steps = {t.warmup_steps}", f"is more than train.steps = {t.steps}",
                         "the learning rate would never be reached: lower warmup_steps")


def _explain(error: ValidationError) -> HpcMpError:
    """Pydantic's findings in our form: the first in full, the others counted."""
    problems = [_problem(dict(e)) for e in error.errors(include_url=False)]
    value, rule, remedy = problems[0]
    if len(problems) > 1:
        others = "; ".join(f"{v}: {r}" for v, r, _ in problems[1:6])
        remedy += f". Also wrong: {others}"
    return HpcMpError(value, rule, remedy)


def _problem(e: dict[str, Any]) -> tuple[str, str, str]:
    where = ".".join(str(part) for part in e["loc"] if not (isinstance(part, str) and ("[" in part or part.startswith("literal"))))
    kind, given = e["type"], e.get("input")
    if kind == "extra_forbidden":
        parent, _, key = where.rpartition(".")
        known = _fields(parent)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        return where, f"is not a key of {f'[{parent}]' if parent else 'a job file'}", (
            f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}")
    if kind == "missing":
        return where, "is required", f"add {where.rpartition('.')[2]} to [{where.rpartition('.')[0] or where}]"
    if kind == "value_error":
        value, rule, remedy = (str(e["ctx"]["error"]).split("|") + ["", ""])[:3]
        return f"{where}: {value}" if where else value, rule or "is not allowed", remedy or "mend it"
    message = str(e["msg"])
    shown = repr(given)
    return (f"{where} = {shown if len(shown) < 80 else shown[:77] + '...'}", message[0].lower() + message[1:],
            _remedy(kind, where))


def _remedy(kind: str, where: str) -> str:
    remedies = {
        "int_type": "write a whole number without quotes",
        "float_type": "write a number without quotes",
        "string_type": "write it in quotes",
        "literal_error": "use one of the values named",
        "string_pattern_mismatch": "use letters, digits and . _ - (time limits as Slurm writes them: 02:00:00)",
        "finite_number": "write a finite number",
    }
    return remedies.get(kind, f"mend {where} in the job file")


def _fields(parent: str) -> list[str]:
    model: Any = JobSpec
    for part in filter(None, parent.split(".")):
        model = model.model_fields[part].annotation
    return list(model.model_fields)
