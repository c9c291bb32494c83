"""The job file: one validated, frozen description of a run.

``load_job`` reads TOML, applies ``--set`` overrides, makes paths absolute and checks everything that needs neither
the model's shape nor the machine. ``dump_job`` writes the resolved job: a file that reproduces the run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import starmap
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeGuard

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.checks import check_arithmetic, check_built
from hpc_mp.job.errors import explain, wrong
from hpc_mp.job.values import (
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
    RankMap,
    Rate,
    Share,
    Time,
    Variable,
    check_values,
)

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
    heartbeat_timeout: NonNegative = 30  # seconds without a sign of life until a node counts as lost; 0 = never
    step_timeout: NonNegative = 1800  # seconds without a finished step until ranks count as hung; 0 = never


class Model(Section):
    """Which model: a Hugging Face checkpoint directory, or a config to start from random weights."""

    pretrained: PathName | None = None
    config: Config | None = None
    stage: bool = False  # copy the checkpoint to every node's local disk first

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
    stage: bool = False  # copy the token files to every node's local disk first


class Parallel(Section):
    """How the ranks share the work. The data degree is what is left: ranks / (tensor x pipeline x context)."""

    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    expert: Count = 1
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 1
    shard_degree: Count | None = None
    order: Order = "auto"
    rank_map: RankMap = "auto"  # node of every rank: auto (block over nodes sorted by switch), block, cyclic, or a list
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


class Component(Section):
    """Nodes of one kind in a heterogeneous job; what is left out is as in ``[slurm]``."""

    nodes: Count
    partition: Line | None = None
    constraint: Line | None = None
    extra: dict[Option, Flag] = {}


class Slurm(Section):
    """What the site needs; nothing of it has an effect on emulated nodes."""

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    switches: Line | None = None  # "1" or "1@00:30:00": leaf switches to span, and how long to wait for that
    gpu_type: Name | None = None
    gpu_request: Literal["auto", "gpus-per-node", "gres", "none"] = "auto"
    mpi: Literal["none", "pmix", "pmi2"] = "none"  # ranks meet through MPI, started by srun --mpi
    array: tuple[dict[str, Any], ...] = ()  # one job per table of overrides, as --set gives them
    components: tuple[Component, ...] = ()  # a heterogeneous job: nodes of several kinds
    grace: Count = 120  # seconds before the time limit in which ranks save and stop
    retries: NonNegative = 3  # failures of machines (not of the program) after which the job is queued again
    chain: NonNegative = 0  # jobs queued behind this one, to carry on where it stops
    container: Line | None = None
    container_runtime: Literal["auto", "pyxis", "apptainer", "singularity"] = "auto"
    container_mounts: tuple[Line, ...] = ()
    modules: tuple[Line, ...] = ()
    conda: Line | None = None
    venv: Line | None = None
    python: Line | None = None  # interpreter of the ranks; default: the launching one
    setup: tuple[str, ...] = ()
    extra: dict[Option, Flag] = {}


class Environment(Section):
    """Environment variables of every rank, and where its caches lie."""

    profile: Name | None = None  # of env/profiles; auto: the platform that the doctor noted; none
    local: Line | None = None  # a directory on each node's own disk; default: under $TMPDIR, else /tmp
    stage: bool = False  # pack the Python environment once and unpack it on every node
    health: bool = True  # the doctor looks at every node before the ranks start
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


def load_job(path: Path, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})) -> JobSpec:
    """Read a job file.

    Args:
        overrides: ``"a.b=value"`` strings, the value TOML or else a plain string.
        defaults: tables under those of the file: what its site decides.

    Raises:
        HpcMpError: with the value, the rule and the remedy for whatever is wrong with it.
    """
    return _overridden(under(defaults, _parse(path)), overrides, path.resolve().parent)


def load_array(
    job: Path | JobSpec, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})
) -> tuple[JobSpec, ...]:
    """The jobs of ``slurm.array``: each the file with that element's overrides. Without an array the one job.

    Args:
        job: a job file; or a job made in Python, whose relative paths are seen from the current directory.

    Raises:
        HpcMpError: as ``load_job`` does, and for an element that changes more than its script can say.
    """
    written = job.model_dump(mode="json", exclude_unset=True, exclude_none=True) if isinstance(job, JobSpec) else _parse(job)
    base = Path.cwd() if isinstance(job, JobSpec) else job.resolve().parent
    tree = under(defaults, written)
    spec = _overridden(tree, overrides, base)
    for number, element in enumerate(spec.slurm.array):
        for key in element:
            if key.startswith(("job.", "slurm.", "environment.")) or "." not in key:
                raise HpcMpError(f"slurm.array[{number}].{key}", "cannot differ between the elements of an array, which "
                                 "share one script", 'name keys of other tables, for example {"train.seed" = 1}')
    return tuple(_overridden(tree, (*overrides, *starmap(_as_override, element.items())), base)
                 for element in spec.slurm.array) or (spec,)


def resolve(tree: dict[str, Any], base: Path) -> JobSpec:
    """Validate a parsed job file; relative paths become absolute, seen from ``base``. Raises HpcMpError."""
    check_values(tree)
    try:
        spec = JobSpec.model_validate(tree)
    except ValidationError as error:
        raise explain(error, JobSpec) from None
    spec = _absolute(spec, base)
    check_built(spec)
    check_arithmetic(spec)
    return spec


def under(defaults: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with what it leaves out from ``defaults``; tables are joined key by key."""
    joined = {**defaults, **tree}
    return joined | {name: under(defaults[name], tree[name]) for name in defaults.keys() & tree.keys()
                     if isinstance(defaults[name], dict) and isinstance(tree[name], dict)}


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


def _overridden(tree: Mapping[str, Any], overrides: Sequence[str], base: Path) -> JobSpec:
    changed = deepcopy(dict(tree))
    for override in overrides:
        _override(changed, override)
    return resolve(changed, base)


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


def _as_override(key: str, value: Any) -> str:
    return f"{key}={tomli_w.dumps({'v': value}).removeprefix('v = ').strip()}"


def is_image(container: str | None) -> TypeGuard[str]:
    """Whether a container is the path of an image, and not its name in a registry."""
    return container is not None and "://" not in container and container.endswith((".sif", ".img", ".sqsh"))


def _absolute(spec: JobSpec, base: Path) -> JobSpec:
    def at(path: str) -> str:
        try:
            return str(base / Path(path).expanduser())
        except RuntimeError:
            raise HpcMpError(f"the path {path}", "begins with the home directory of an unknown user",
                             "write the directory itself") from None

    def maybe(path: str | None) -> str | None:
        return None if path is None else at(path)

    def within(path: str | None) -> str | None:
        """A path, or a name that its program looks up: an image of a registry, an environment of conda."""
        return at(path) if path is not None and ("/" in path or (base / path).exists()) and "://" not in path else path

    job, model, data, checkpoint, slurm = spec.job, spec.model, spec.data, spec.checkpoint, spec.slurm
    return spec.model_copy(update={
        "job": job.model_copy(update={"directory": at(job.directory)}),
        "model": model.model_copy(update={"pretrained": maybe(model.pretrained)}),
        "data": data.model_copy(update={"files": tuple(map(at, data.files)), "tokenizer": maybe(data.tokenizer)}),
        "checkpoint": checkpoint.model_copy(update={"resume": maybe(checkpoint.resume)}),
        "slurm": slurm.model_copy(update={"container": at(slurm.container) if is_image(slurm.container) else slurm.container,
                                          "venv": maybe(slurm.venv), "python": within(slurm.python),
                                          "conda": within(slurm.conda)}),
        "environment": spec.environment.model_copy(update={"local": maybe(spec.environment.local)}),
    })
