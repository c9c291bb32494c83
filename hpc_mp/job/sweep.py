"""Sweeps: several runs from one job file that differ in some values. The table of the job file, and its expansion to runs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted, shown
from hpc_mp.job.errors import dotted
from hpc_mp.job.values import Count, Section, leaves, toml_value

MOST_RUNS = 1000  # Slurm's arrays have at most 1,001 elements unless a site sets MaxArraySize
# Tables that all runs of a sweep share: one script starts them on Slurm, and sweeps cannot be nested.
SHARED = ("job", "slurm", "environment", "sweep")

Values = Mapping[str, Any]


class Sweep(Section):
    """Several runs from one job file, each with other values of some keys. On Slurm they are one array of jobs; on emulated nodes
    they run one after the other. See [sweeps](../user/jobs.md#sweeps)."""

    grid: dict[str, Any] = Field(default={})
    """A list of values for each key: every combination is a run, and the last key varies fastest. Keys of `[job]`, `[slurm]` and
    `[environment]` are not allowed. Example: `{ "train.seed" = [1, 2], "train.learning_rate" = [1e-3, 3e-4] }`."""
    runs: tuple[dict[str, Any], ...] = ()
    """Instead of a grid: a table with the values of each run; `{}` is the job file as it is. Example: `[{ "train.seed" = 1 }, {
    "train.seed" = 2, "train.clip" = 0.5 }]`."""
    simultaneous: Count | None = None
    """The maximum number of runs at the same time. Default: no limit except Slurm's. Example: `2`."""

    @property
    def given(self) -> bool:
        """True if the job file has a sweep."""
        return bool(self.model_fields_set)


def runs_of(sweep: Sweep) -> tuple[Values, ...]:
    """Return the values of every run by key (``train.seed``), in order; empty without a sweep. Raises HpcMpError if the sweep
    names no runs, too many, the same one twice, or values that all runs must share."""
    if not sweep.given:
        return ()
    if bool(sweep.grid) == bool(sweep.runs):
        raise HpcMpError("[sweep]", f"has {'both grid and runs' if sweep.grid else 'neither grid nor runs'}",
                         'set grid to lists of values, grid = { "train.seed" = [1, 2] }, or runs to one table for each run, '
                         'or leave the whole table out')
    runs = _product(sweep.grid) if sweep.grid else tuple(_flat(values) for values in sweep.runs)
    if len(runs) > MOST_RUNS:
        raise _too_many(len(runs))
    earlier: list[Values] = []
    for number, values in enumerate(runs):
        if values in earlier:
            raise HpcMpError(f"[sweep]: run {number + 1} ({words_of(values) or 'the job file as it is'})",
                             f"is the same as run {earlier.index(values) + 1}",
                             "remove one of them; to repeat a run with other random numbers, change train.seed")
        earlier.append(values)
    for key in dict.fromkeys(key for values in runs for key in values):
        section, location = key.partition(".")[0], f"sweep.{'grid' if sweep.grid else 'runs'}: {key}"
        if "." not in key:
            raise HpcMpError(location, "has no table: write keys with the name of their table",
                             f'write "train.{key}", or put the name of its table in front')
        if section in SHARED:
            raise HpcMpError(location, "cannot differ between the runs of a sweep, "
                             f"all of which share {', '.join(f'[{name}]' for name in SHARED)}",
                             'use keys of other tables, for example "train.seed"')
    return runs


def words_of(values: Values) -> str:
    """Format values as ``train.seed = 1, train.learning_rate = 0.001``."""
    return ", ".join(f"{key} = {toml_value(value)}" for key, value in values.items())


def summary_of(sweep: Sweep, runs: Sequence[Values]) -> str:
    """Summarize a sweep as ``4 runs, train.seed(2) × train.learning_rate(2)``."""
    shape = " × ".join(f"{key}({len(values)})" for key, values in _flat(sweep.grid).items())
    return ", ".join(filter(None, (counted(len(runs), "run"), shape)))


def _product(grid: Mapping[str, Any]) -> tuple[Values, ...]:
    """Return every combination, the last key varying fastest."""
    axes = _flat(grid)
    for key, values in axes.items():
        if not isinstance(values, list):
            raise HpcMpError(f"sweep.grid: {key} = {shown(values)}", "must be a list of values",
                             f'write "{key}" = [{toml_value(values)}], with more values')
        if not values:
            raise HpcMpError(f"sweep.grid: {key} = []", "must have at least one value", "list the values, or leave the key out")
    if (number := math.prod(map(len, axes.values()))) > MOST_RUNS:
        raise _too_many(number)
    return tuple(dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def _flat(table: Mapping[str, Any]) -> Values:
    """Flatten tables to dotted names. ``"train.seed" = 1`` stays; TOML reads ``train.seed = 1`` and ``train = { seed = 1 }`` as
    tables."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        for name, leaf in (leaves(key, value) if "." not in key else {key: value}).items():
            if name in flat:
                raise HpcMpError(f"[sweep]: {dotted([name])}", "is named twice", "name it once")
            flat[name] = leaf
    return flat


def _too_many(number: int) -> HpcMpError:
    return HpcMpError("[sweep]", f"makes {number:,} runs, but {MOST_RUNS:,} are the maximum",
                      "use fewer values, or several sweeps")
