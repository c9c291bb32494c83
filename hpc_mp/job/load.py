"""Conversion between job files and ``JobSpec`` or ``ProgramSpec``: TOML, ``--set`` overrides, absolute paths, and all checks.

``load_job`` checks everything that needs neither the model's shape nor the machine. ``dump_job`` writes the resolved job as a
file that reproduces the run.
"""

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import nearest
from hpc_mp.job.checks import check_arithmetic, check_together
from hpc_mp.job.errors import explain
from hpc_mp.job.program import ProgramSpec, check_program
from hpc_mp.job.spec import JobSpec
from hpc_mp.job.sweep import Values, runs_of
from hpc_mp.job.values import DEPENDENCY, JOB_ID, check_values
from hpc_mp.layout.schedule.names import is_table

_TOML = "a job file is TOML; `hpc-mp init` writes one"
OTHERS = {  # files given by mistake instead of a job file, by suffix
    **dict.fromkeys((".json", ".yaml", ".yml"), _TOML),
    **dict.fromkeys((".sh", ".sbatch", ".slurm"), f"{_TOML}, and `hpc-mp lint` checks job scripts"),
    ".py": f"{_TOML}, with the model and the data in it",
}

AnySpec = JobSpec | ProgramSpec
Spec = TypeVar("Spec", JobSpec, ProgramSpec)
OWN = ("model", "data", "train", "lora", "evaluate", "checkpoint")  # tables of a training, which a program does not have

# The key that an override replaces besides its own: a job has only one of the two.
INSTEAD = {"train.epochs": "steps", "train.steps": "epochs", "model.pretrained": "config"}


def load_any(path: Path, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})) -> AnySpec:
    """Read a job file of a training or of a program. ``overrides``: ``"a.b=value"`` strings, the value TOML or else a plain
    string. ``defaults``: tables with the defaults of the site. Raises HpcMpError if the file is invalid; the error has the value,
    the rule and the remedy."""
    return resolve_any(reduce(_override, overrides, under(defaults, _parse(path))), path.resolve().parent)


def load_resolved(path: Path) -> AnySpec:
    """Read the job file of a run, which holds every choice made. A process parses it once while it does not change. Raises
    HpcMpError as ``load_any``."""
    try:
        file = path.stat()
    except OSError:
        return load_any(path)  # with its words
    return _unchanged(path, (file.st_ino, file.st_mtime_ns, file.st_size))


@lru_cache(maxsize=256)
def _unchanged(path: Path, identity: tuple[int, int, int]) -> AnySpec:
    return load_any(path)


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read the job file of a training. Raises HpcMpError as ``load_any``, and for the job file of a program."""
    return _training(load_any(path, overrides), f"job file {path}")


def load_sweep(job: Path | AnySpec, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = MappingProxyType({}),
               before_arithmetic: Callable[[AnySpec], None] = lambda _: None) -> tuple[AnySpec, ...]:
    """Return the job of each run of ``[sweep]``, in order: the file with that run's values. Without a sweep, the one job.
    ``job``: a job file; or a job made in Python, whose relative paths are relative to the current directory.
    ``before_arithmetic``: called with the job after each value has been validated by itself. Raises HpcMpError as ``load_any``,
    ``runs_of`` and ``before_arithmetic``, for each run; and for an override of a key that the sweep sets."""
    written = _parse(job) if isinstance(job, Path) else job.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    base = job.resolve().parent if isinstance(job, Path) else Path.cwd()
    tree = reduce(_override, overrides, dict(under(defaults, written)))
    _refuse_contradiction(overrides)
    spec = resolve_any(tree, base, before_arithmetic)
    runs = runs_of(spec.sweep)
    swept = {key for values in runs for key in values}
    for text in overrides:
        if (key := text.partition("=")[0].strip()) in swept:
            raise HpcMpError(f"--set {text}", f"has no effect: each run of the sweep has its own {key}",
                             "leave it out, or change [sweep]")
    return tuple(_run_of(tree, base, number, values) for number, values in enumerate(runs)) or (spec,)


def _refuse_contradiction(overrides: Sequence[str]) -> None:
    texts = {text.partition("=")[0].strip(): text for text in overrides}
    for key, name in INSTEAD.items():
        rival = f"{key.rpartition('.')[0]}.{name}"
        if key in texts and rival in texts:
            raise HpcMpError(f"--set {texts[key]} --set {texts[rival]}", f"sets both {key} and {rival}, but a job has only one",
                             "leave one of the two out")


def _run_of(tree: Mapping[str, Any], base: Path, number: int, values: Values) -> AnySpec:
    try:
        return resolve_any(reduce(lambda changed, item: _put(changed, *item), values.items(), dict(tree)), base)
    except HpcMpError as error:
        raise HpcMpError(f"{error.value} in run {number + 1} of the sweep", error.rule, error.remedy) from None


def resolve_any(tree: dict[str, Any], base: Path, before_arithmetic: Callable[[AnySpec], None] = lambda _: None) -> AnySpec:
    """Validate a parsed job file and make its paths, relative to ``base``, absolute. Raises HpcMpError."""
    check_values(tree)
    if "program" not in tree and not _means_program(tree):
        training = _absolute(_validated(tree, JobSpec), base)
        before_arithmetic(training)
        check_arithmetic(training)
        return training
    if foreign := [f"[{name}]" for name in OWN if name in tree]:
        raise HpcMpError(f"{' '.join(foreign)} with [program]", "configures hpc-mp's own engine, which a program does not "
                         "use", "leave one of the two out")
    program = _absolute(_validated(tree, ProgramSpec), base)
    check_program(program)
    before_arithmetic(program)
    check_together(program)
    return program


def _means_program(tree: Mapping[str, Any]) -> bool:
    """Return True if a file without the tables of a training has a misspelt ``[program]``."""
    return not any(name in tree for name in OWN) and any(nearest(name, ["program"]) for name in tree)


def resolve(tree: dict[str, Any], base: Path) -> JobSpec:
    """Validate the parsed job file of a training, as ``resolve_any`` does."""
    return _training(resolve_any(tree, base), "[program]")


def _training(spec: AnySpec, value: str) -> JobSpec:
    if isinstance(spec, JobSpec):
        return spec
    raise HpcMpError(value, "starts a program ([program]), but this command trains with hpc-mp's own engine",
                     "`hpc-mp launch` starts it; name the job file of a training here")


def _validated(tree: dict[str, Any], kind: type[Spec]) -> Spec:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise explain(error, kind) from None


def under(defaults: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in missing values of ``tree`` from ``defaults``. Tables are merged key by key."""
    joined = {**defaults, **tree}
    return joined | {name: under(defaults[name], tree[name]) for name in defaults.keys() & tree.keys()
                     if isinstance(defaults[name], dict) and isinstance(tree[name], dict)}


def dump_job(spec: AnySpec) -> str:
    """Return the resolved job as TOML, with explicit defaults and absolute paths. It describes one run and has no sweep."""
    if isinstance(spec, JobSpec):
        spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"microbatches": spec.microbatches}),
                                       "train": spec.train.model_copy(update={"gradient_accumulation_steps": None})})
    return tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True, exclude={"sweep"}))


def _parse(path: Path) -> dict[str, Any]:
    value = f"job file {path}"
    try:
        return _without_array(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "name a job file; `hpc-mp init` writes one") from None
    except UnicodeDecodeError:
        raise HpcMpError(value, "is not UTF-8 text", "save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        twice = "Cannot overwrite" in str(error) or "twice" in str(error)
        text = str(error).replace("Cannot overwrite a value", "Cannot overwrite a value: a key is set twice")
        line = "correct that line: leave one of the two out" if twice else "correct that line"
        raise HpcMpError(value, f"is not valid TOML ({text})", OTHERS.get(path.suffix, line)) from None
    except ValueError:  # from Python's int
        raise HpcMpError(value, "holds a number with thousands of digits", "write a smaller number") from None
    except RecursionError:
        raise HpcMpError(value, "is nested too deeply", "use fewer levels") from None


def _without_array(tree: dict[str, Any]) -> dict[str, Any]:
    """Remove ``slurm.array = []``, which release 0.1.0 wrote into the job file of every run."""
    slurm = tree.get("slurm")
    if not isinstance(slurm, dict) or slurm.get("array") != []:
        return tree
    return tree | {"slurm": {key: value for key, value in slurm.items() if key != "array"}}


def _override(tree: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a parsed job file with ``"a.b=value"`` applied. A value that is not TOML is taken literally."""
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise HpcMpError(f"--set {text}", "must have the form SECTION.KEY=VALUE", "write for example --set train.steps=20")
    try:
        parsed = tomllib.loads(f"v = {raw}")
    except (ValueError, RecursionError):
        parsed = {}
    try:
        is_value = list(parsed) == ["v"] and (isinstance(parsed["v"], str) or not _is_text(parts))
        return _put(tree, key, parsed["v"] if is_value else raw)
    except HpcMpError as error:
        raise HpcMpError(f"--set {text}", error.rule, error.remedy) from None


def _put(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a parsed job file with ``a.b`` set and any key that excludes it removed. Raises HpcMpError."""
    parts = [part.strip() for part in key.split(".")]
    changed = dict(tree)
    table = changed
    for part in parts[:-1]:
        inner = table.get(part, {})
        if not isinstance(inner, dict):
            raise HpcMpError(key, f"{part} is a value, not a table", "name a key of a table")
        table[part] = dict(inner)  # a copy: the runs of a sweep start from the same file
        table = table[part]
    if parts[:2] == ["sweep", "grid"] and parts[2:]:  # its keys may also be written dotted
        changed["sweep"]["grid"].pop(".".join(parts[2:]), None)
    table[parts[-1]] = value
    table.pop(INSTEAD.get(".".join(parts), ""), None)
    return changed


def _is_text(key: Sequence[str]) -> bool:
    """Return True if a key takes only text, so that ``00:30:00`` and ``7`` need no quotes, which a shell would remove."""
    fields = {**ProgramSpec.model_fields, **JobSpec.model_fields}
    for part in key[:-1]:
        inner = fields[part].annotation if part in fields else None
        if get_origin(inner) is dict:  # environment.set
            return get_args(inner)[1] is str
        fields = inner.model_fields if isinstance(inner, type) and issubclass(inner, BaseModel) else {}
    field = fields.get(key[-1])
    kind = field.annotation if field is not None else None
    kinds = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
    return {getattr(member, "__origin__", member) for member in kinds if member is not type(None)} == {str}


def is_image(container: str | None) -> TypeGuard[str]:
    """Return True if a container is the path of an image, and not its name in a registry."""
    return container is not None and "://" not in container and container.endswith((".sif", ".img", ".sqsh"))


def _on_path(command: tuple[str, ...], absolute: Callable[[str], str]) -> tuple[str, ...]:
    """Make the program of a command absolute if it is a path. A plain name is looked up on PATH later."""
    return (absolute(command[0]), *command[1:]) if command and "/" in command[0] else command


def _absolute(spec: Spec, base: Path) -> Spec:
    def absolute(path: str) -> str:
        try:
            return str(base / Path(path).expanduser())
        except RuntimeError:
            raise HpcMpError(f"the path {path}", "begins with the home directory of an unknown user",
                             "write the full path") from None

    def maybe(path: str | None) -> str | None:
        return None if path is None else absolute(path)

    def within(path: str | None) -> str | None:
        """Make a path absolute. A name that its program looks up stays: an image in a registry, a conda environment."""
        return absolute(path) if path is not None and ("/" in path or (base / path).exists()) and "://" not in path else path

    def behind(word: str) -> str:
        """Make the directory of a run in a dependency absolute. A job ID stays."""
        match = DEPENDENCY.fullmatch(word)
        assert match is not None  # the value has been checked
        return word if JOB_ID.fullmatch(match[2]) else word[:match.start(2)] + absolute(match[2])

    slurm = spec.slurm
    shared = {
        "job": spec.job.model_copy(update={"directory": absolute(spec.job.directory)}),
        "slurm": slurm.model_copy(update={
            "container": absolute(slurm.container) if is_image(slurm.container) else slurm.container,
            "venv": maybe(slurm.venv), "python": within(slurm.python), "conda": within(slurm.conda),
            "depends": tuple(map(behind, slurm.depends))}),
        "environment": spec.environment.model_copy(update={"local": maybe(spec.environment.local)}),
        "notify": spec.notify.model_copy(update={"command": _on_path(spec.notify.command, absolute)}),
    }
    if isinstance(spec, ProgramSpec):
        directory = os.path.normpath(absolute(spec.program.directory))  # "." by default, which would be its last part
        stage = tuple(os.path.normpath(absolute(path)) for path in spec.program.stage)
        program = spec.program.model_copy(update={"directory": directory, "stage": stage})
        return spec.model_copy(update=shared | {"program": program})
    model, data, parallel, checkpoint = spec.model, spec.data, spec.parallel, spec.checkpoint
    return spec.model_copy(update=shared | {
        "model": model.model_copy(update={"pretrained": maybe(model.pretrained)}),
        "data": data.model_copy(update={"files": tuple(map(absolute, data.files)), "tokenizer": maybe(data.tokenizer),
                                        "template": maybe(data.template)}),
        "parallel": parallel.model_copy(update={
            **({"schedule": absolute(parallel.schedule)} if is_table(parallel.schedule) else {}),
            "offload_directory": maybe(parallel.offload_directory), "profile": maybe(parallel.profile)}),
        "evaluate": spec.evaluate.model_copy(update={"files": tuple(map(absolute, spec.evaluate.files))}),
        "lora": spec.lora.model_copy(update={"pretrained": maybe(spec.lora.pretrained)}),
        "checkpoint": checkpoint.model_copy(update={"resume": maybe(checkpoint.resume)}),
    })
