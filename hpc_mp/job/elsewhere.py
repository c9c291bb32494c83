"""The names that other trainers use for keys and values of a job file, and their equivalents here, from ``elsewhere.toml``."""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Elsewhere(NamedTuple):
    """The tables of ``elsewhere.toml``."""

    names: Mapping[str, str]  # a name elsewhere to the key here
    within: Mapping[str, Mapping[str, str]]  # the same, for tables in which a name means a different key than elsewhere
    options: frozenset[str]  # options of sbatch, which belong in ``slurm.extra``
    instead: Mapping[str, str]  # a name without an equivalent to the alternative
    values: Mapping[str, Mapping[str, Any]]  # a key to the values that others use, in lower case, and the equivalents here


@cache
def elsewhere() -> Elsewhere:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    values: dict[str, dict[str, Any]] = {}
    for row in table["values"]:
        values.setdefault(row["key"], {}).update(dict.fromkeys(row["elsewhere"], row["here"]))
    return Elsewhere(_by_name(table["names"]), {section: _by_name(names) for section, names in table["within"].items()},
                     frozenset(table["options"]["names"].split()),
                     {name: row["instead"] for row in table["words"] for name in row["names"].split()}, values)


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    return {name: ours for ours, others in names.items() for name in others.split()}


def key_here(name: str, section: str, keys: Iterable[str], value: Any = None) -> tuple[str, str] | None:
    """Return the rule and the remedy for a key of other trainers; None for a key that is unknown there too. ``section``: the
    table that contains the key; "" for none. ``keys``: the keys of that table. ``value``: the given value."""
    plain = name.lower().replace("-", "_").removeprefix("__")
    place = f"[{section}]" if section else "a job file"
    tables = elsewhere()
    if (advice := tables.instead.get(plain)) is not None:
        return f"is not a key of {place}", advice
    if plain in tables.options:
        written = json.dumps(value, ensure_ascii=False) if value is not None else "…"
        return "is an option of sbatch, not a key", f"write extra = {{ {plain.replace('_', '-')} = {written} }} in [slurm]"
    names = {**tables.names, **tables.within.get(section, {})}
    ours = f"{section}.{plain}" if section and plain in keys else names.get(plain)
    if ours is None:
        return None
    table, _, key = ours.rpartition(".")
    if ours == "data.files" and isinstance(value, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", value) and not os.path.lexists(value):
        return ("is a dataset of the Hugging Face Hub, but data.files must be files that all nodes see",
                f'write its rows into a file with load_dataset("{value}", split="train").to_json("train.jsonl"), and set '
                'files = ["train.jsonl"] in [data]')
    return f"is {ours} here", f"write {key} = … " + ("in its place" if table == section else f"below the line [{table}]")


def value_here(key: str, value: Any) -> str | None:
    """Return ``key = value`` as written here, for a value that other trainers accept; None if it is unknown there too."""
    ours = elsewhere().values.get(key, {}).get(str(value).lower())
    return None if ours is None else f"{key.rpartition('.')[2]} = {json.dumps(ours)}"
