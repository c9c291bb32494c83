"""The types of values of a job file's keys, values that no key accepts, and the base class of its tables."""

import datetime
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.job.errors import dotted, wrong
from hpc_mp.layout.schedule.names import AT, NAMES, TABLE, is_schedule

LEVELS = 32  # nesting of tables and lists; a Hugging Face configuration has three
SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST_NAME = 128  # of a job
WHOLE = 2**63  # TOML's integers have 64 bits, but Python reads longer ones

# Values that TOML allows but no key accepts: (predicate, rule, remedy).
UNUSABLE: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda v: isinstance(v, int) and not -WHOLE <= v < WHOLE, "does not fit into 64 bits", "write a smaller number"),
    (lambda v: isinstance(v, float) and not math.isfinite(v), "must be finite", "write a number"),
    (lambda v: isinstance(v, str) and "\0" in v, "holds a NUL character", "leave it out"),
    (lambda v: isinstance(v, str) and SURROGATE.search(v) is not None,
     "holds half a character (a surrogate), which UTF-8 cannot encode", "write the whole character"),
    (lambda v: isinstance(v, datetime.date | datetime.time), "is a date or a time, which no key accepts",
     "write it in quotes if text is meant"),
)


def check_values(tree: dict[str, Any]) -> None:
    """Refuse values that no key accepts, before anything computes with them. Raises HpcMpError if a value is in ``UNUSABLE``, or
    more than ``LEVELS`` tables and lists are nested."""
    pending: list[tuple[tuple[str | int, ...], Any]] = [((), tree)]
    while pending:
        path, value = pending.pop()
        if len(path) > LEVELS:
            raise HpcMpError(f"{dotted(path[:4])}…", f"is nested deeper than {LEVELS} levels", "use fewer levels")
        for is_so, rule, remedy in UNUSABLE:
            if is_so(value):
                raise HpcMpError(f"{dotted(path)} = {shown(value)}", rule, remedy)
        if isinstance(value, dict):
            pending += (((*path, key), item) for key, item in value.items())
        elif isinstance(value, list):
            pending += (((*path, index), item) for index, item in enumerate(value))


def must(rule: str, remedy: str, holds: Callable[[Any], object]) -> AfterValidator:
    """Return a validator for ``Annotated``: a value of the right type must also satisfy ``holds``."""
    return AfterValidator(_check(rule, remedy, holds))


def must_first(rule: str, remedy: str, holds: Callable[[Any], object]) -> BeforeValidator:
    """Return a validator for ``Annotated`` that runs before the type check, to replace a poorer message of pydantic."""
    return BeforeValidator(_check(rule, remedy, holds))


def _check(rule: str, remedy: str, holds: Callable[[Any], object]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not holds(value):
            raise wrong(rule, remedy)
        return value

    return check


def job_name(text: str, otherwise: str = "job") -> str:
    """Return the valid name of a job that is nearest to a text; ``otherwise`` if nothing of it can stand in one."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:LONGEST_NAME] or otherwise


def _is_path(text: str) -> bool:
    return bool(ONE_LINE.fullmatch(text)) and all(len(os.fsencode(name)) <= 255 for name in text.split("/"))


def _is_order(text: str) -> bool:
    return text in ("auto", "cluster", "spread") or sorted(text) in (sorted("DPT"), sorted("DPCT"))


def _is_rank_map(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("auto", "block", "cyclic")
    return isinstance(value, list | tuple) and len(value) > 0 and all(type(node) is int and node >= 0 for node in value)


def _is_partition(value: Any) -> bool:
    if isinstance(value, str):
        return value in PARTITIONS or (value.startswith(AT) and bool(ONE_LINE.fullmatch(value)) and _is_regex(value[len(AT):]))
    return (isinstance(value, list | tuple) and len(value) > 0 and all(type(layers) is int and layers >= 0 for layers in value)
            and all(value[1:-1]) and any(value))


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return bool(text)


def _is_offload(value: Any) -> bool:
    return value == "none" or (isinstance(value, list | tuple) and len(value) > 0 and len(set(map(str, value))) == len(value)
                               and all(name in OFFLOADED for name in value))


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(
        isinstance(beta, int | float) and not isinstance(beta, bool) and 0 <= beta < 1 for beta in value)


PARTITIONS = ("auto", "uniform", "parameters", "cost", "profile")
OFFLOADED = ("optimizer", "parameters", "activations")
ONE_LINE = re.compile(r"[^\x00-\x1f\x7f]+")
TIME = re.compile(r"\d{1,9}|\d{1,9}:\d\d?|(\d{1,9}-)?\d{1,9}:\d\d?:\d\d?|\d{1,9}-\d{1,9}(:\d\d?)?")

DEPENDENCY = re.compile(r"(?:(afterok|afterany|afternotok):)?(?!after\w*:|singleton$|expand:|-)([^\x00-\x1f\x7f]+)")
JOB_ID = re.compile(r"\d+(_\d+)?")  # a job ID of Slurm

Count = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Rate = Annotated[float, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1, strict=True)]
Weighting = Annotated[float, Field(ge=0, le=1, strict=True)]

Line = Annotated[str, must("must be one line of text and not empty", "leave the key out if it has no value", ONE_LINE.fullmatch)]
PathName = Annotated[str, must(
    "must be a path: one line, not empty, no name in it longer than 255 bytes", "write it as ls prints it", _is_path)]
Patterns = Annotated[tuple[PathName, ...], must("names no file", 'write for example files = ["corpus/*.txt"]', len)]
Name = Annotated[str, must(
    f"must be 1 to {LONGEST_NAME} letters, digits, dots, underscores or dashes, the first a letter or a digit",
    "write for example run-1", lambda text: text == job_name(text))]
Address = Annotated[str, must(
    "must be one mail address, or the name of a user of the site's mail", 'write for example "me@example.org"',
    re.compile(r"[^\s,;<>\"'\\\x00-\x1f]+").fullmatch)]
Dependency = Annotated[str, must(
    "must be a run or the id of a Slurm job, optionally after afterok:, afterany: or afternotok:",
    'write for example "runs/pretrain" or "afterany:123"; slurm.extra.dependency takes any other dependency',
    DEPENDENCY.fullmatch)]
Variable = Annotated[str, must(
    "must consist of letters, digits and underscores, and not begin with a digit", "write a name that the shell accepts",
    re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch)]
Option = Annotated[str, must(
    "must be a long option of sbatch, without its dashes", "write for example cpus-per-task",
    re.compile(r"[a-z][a-z0-9-]*").fullmatch)]
Flag = Annotated[str | int | bool, must_first(
    "must be text, a whole number, true or false", 'write for example mem = "0" or exclusive = true',
    lambda value: isinstance(value, str | int))]
Time = Annotated[str, must(
    "must be a time as Slurm writes it", 'write for example "02:00:00", or "1-12" for a day and twelve hours', TIME.fullmatch)]
Order = Annotated[str, must(
    "must be auto, cluster, spread, or the letters D, P, T (and C) once each",
    'leave order = "auto", or write for example "DPT" (the right-most letter varies fastest)', _is_order)]
Partition = Annotated[str | tuple[int, ...], must_first(
    f'must be one of {", ".join(PARTITIONS)}, "at:" and a regular expression, or a list with the number of layers of '
    "every stage, 0 only for the first and the last", "write for example partition = [4, 4]", _is_partition)]
RankMap = Annotated[Literal["auto", "block", "cyclic"] | tuple[int, ...], must_first(
    'must be "auto", "block", "cyclic" or a list with the node (from 0) of every rank',
    "write for example rank_map = [1, 1, 0, 0]", _is_rank_map)]
ScheduleName = Annotated[PathName, must(
    "is not a schedule", f"use one of {NAMES}, or a table whose name ends in {TABLE}", is_schedule)]
Recompute = Annotated[str, must(
    'must be "none", "selective", "full" or "every-" and a number of blocks', 'write for example recompute = "every-2"',
    re.compile(r"none|selective|full|every-[1-9][0-9]{0,5}").fullmatch)]
Offload = Annotated[Literal["none"] | tuple[Literal["optimizer", "parameters", "activations"], ...], must_first(
    'must be "none" or a list of "optimizer", "parameters" and "activations", each at most once',
    'write for example offload = ["optimizer"]', _is_offload)]
Betas = Annotated[tuple[float, float], must_first(
    "must be two numbers of at least 0 and less than 1", "write for example betas = [0.9, 0.95]", _are_betas)]
Config = Annotated[dict[str, Any], must(
    "does not name the model's family", 'add for example model_type = "gpt2"',
    lambda config: isinstance(config.get("model_type"), str))]


class Section(BaseModel):
    """A table of the job file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def seconds_of(text: str) -> int | None:
    """Convert a time in Slurm's notation (``"90"`` minutes, ``"1:30:00"``, ``"1-12"``) to seconds; None for 0, no limit."""
    days, dash, clock = text.rpartition("-")
    fields = [int(field) for field in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*fields, 0, 0][:3]
    elif len(fields) == 3:
        hours, minutes, seconds = fields
    else:
        hours, (minutes, seconds) = 0, [*fields, 0][:2]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds or None


def toml_value(value: Any) -> str:
    """Format a value on one line as in a job file: numbers, text, booleans, lists and tables."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {toml_value(item)}' for name, item in value.items())} }}" if value else "{}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def leaves(name: str, value: Any) -> dict[str, Any]:
    """Return the leaves of a tree of tables by dotted name; ``name`` is that of the tree, empty for a whole job file."""
    if not isinstance(value, dict):
        return {name: value}
    below = (leaves(f"{name}.{key}" if name else key, inner) for key, inner in value.items())
    return {leaf: item for branch in below for leaf, item in branch.items()}
