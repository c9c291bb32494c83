"""Rows of the catalogue from its files: the shipped ones, the site's, the user's. Later ones override by name.

A row may have ``like = NAME`` and only the differences; a row that is like its own name changes the row of an earlier file. It
inherits the figures of the machine, not its identity: title, marks, short name and twin are a row's own. Measurements are not
inherited if the GPUs, memory or adapters that they depend on differ.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import TypeAdapter, ValidationError

from hpc_mp.base.assets import asset, config_folders
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.catalogue.machines import GpuModel, MachineType

ASSET, FILE, VARIABLE = "env/machines", "machines.toml", "HPC_MP_MACHINES"
CLOUDS = ("azure", "aws", "gcp", "site")
_TABLES = ("gpu", *CLOUDS, "sources")
_OWN = ("title", "fabric", "twin", "marks", "pci")
_MEASURED = {"memory_seen_gib": ("memory_gib",), "busbw": ("gpu", "gpus")}  # measured figure → figures that it depends on

Kind = Literal["gpus", "machines"]
Row = dict[str, Any]
Placed = Mapping[str, tuple[Path, Row]]  # rows by name, with the file of each
_FORMS: dict[Kind, type[GpuModel] | type[MachineType]] = {"gpus": GpuModel, "machines": MachineType}


class Rows(TypedDict):
    """Complete rows by name; machines have their ``cloud``; sources are descriptions."""

    gpus: dict[str, Row]
    machines: dict[str, Row]
    sources: dict[str, str]


def own_files(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the files of the site, of the user, and of ``HPC_MP_MACHINES``. Rows of later files override."""
    files = [folder / FILE for folder in reversed(config_folders(environ)) if (folder / FILE).is_file()]
    named = environ.get(VARIABLE)
    return (*files, *([Path(named)] if named else []))


def read_rows(files: Iterable[Path]) -> Rows:
    """Return the rows of the shipped files, overridden by those of ``files``. Raises HpcMpError if a file cannot be read, a key
    is unknown, missing or of the wrong type, or a referenced name does not exist."""
    nothing = Rows(gpus={}, machines={}, sources={})
    rows = _layer(nothing, [(path, _parse(path)) for path in sorted(asset(ASSET).glob("*.toml"))], shipped=True)
    for path in files:
        rows = _layer(rows, [(path, _parse(path))], shipped=False)
    return rows


def _layer(below: Rows, files: Sequence[tuple[Path, Row]], shipped: bool) -> Rows:
    """Add the rows of files, which may refer to each other, over those of earlier files."""
    gpus = _rows("gpus", _placed(files, "gpu"), below["gpus"], shipped)
    placed = {name: (path, row | {"cloud": cloud}) for cloud in CLOUDS for name, (path, row) in _placed(files, cloud).items()}
    machines = _rows("machines", placed, below["machines"], shipped)
    for name, (path, _) in placed.items():
        _check_gpu(f"{name} in {path}", machines[name], gpus)
    sources = {name: text for _, tree in files for name, text in tree.get("sources", {}).items()}
    file_sources = {} if shipped else {str(path): str(path) for path, _ in files}
    return Rows(gpus=gpus, machines=machines, sources=below["sources"] | sources | file_sources)


def _placed(files: Sequence[tuple[Path, Row]], table: str) -> dict[str, tuple[Path, Row]]:
    return {name: (path, row) for path, tree in files for name, row in tree.get(table, {}).items()}


def _rows(kind: Kind, placed: Placed, below: dict[str, Row], shipped: bool) -> dict[str, Row]:
    full = {name: _complete(name, placed, below, shipped) for name in placed}
    form = TypeAdapter[Any](_FORMS[kind])
    for name, row in full.items():
        _check_form(f"{name} in {placed[name][0]}", {"name": name, **row}, kind, form)
    return full | {name: row for name, row in below.items() if name not in full}


def _complete(name: str, placed: Placed, below: Mapping[str, Row], shipped: bool, waiting: tuple[str, ...] = ()) -> Row:
    """Return a row with the figures inherited by ``like``, and with the source of every figure."""
    path, row = placed[name]
    like: str | None = row.get("like")
    reference = f"like = {like!r} of {name} in {path}"
    if like is None:
        base: Row = {}
    elif like in waiting:
        raise HpcMpError(reference, "refers back to itself", "name a row that does not depend on this one")
    elif like in placed and like != name:
        base = _complete(like, placed, below, shipped, (*waiting, name))
    elif like in below:
        base = below[like]
    else:
        raise HpcMpError(reference, "is not in any file of the catalogue", _meant(like, {**below, **placed}))
    own = {key: value for key, value in row.items() if key not in ("like", "from")}
    differs = {key for key, value in own.items() if value != base.get(key)}
    inherited = {key: value for key, value in base.items()
                 if (like == name or key not in _OWN) and differs.isdisjoint(_MEASURED.get(key, ()))}
    sources = {} if shipped else dict.fromkeys(own.keys() - {"cloud"}, str(path))
    sources |= {figure: source for source, figures in row.get("from", {}).items() for figure in figures}
    return inherited | own | {"sources": inherited.get("sources", {}) | sources}


def _check_form(where: str, row: Row, kind: Kind, form: TypeAdapter[Any]) -> None:
    try:
        form.validate_json(json.dumps({key: value for key, value in row.items() if key != "gpu"}, default=str))
    except ValidationError as error:
        first = error.errors()[0]
    else:
        return
    key = ".".join(map(str, first["loc"]))
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        keys = [field.name for field in fields(_FORMS[kind]) if field.name not in ("name", "cloud", "sources")]
        raise HpcMpError(f"{key} of {where}", "is not a key of the catalogue", _meant(key, [*keys, "like", "from"]))
    if first["type"] in ("missing", "missing_argument"):
        raise HpcMpError(f"{key} of {where}", "is missing", "add it, or `like = \"NAME\"` with the name of a row that has it")
    raise HpcMpError(f"{key} = {first['input']!r} of {where}", f"is invalid ({first['msg']})",
                     "use the format of the rows in env/machines")


def _check_gpu(where: str, row: Row, gpus: Mapping[str, Row]) -> None:
    gpu, count = row.get("gpu"), row.get("gpus", 0)
    if gpu is not None and gpu not in gpus:
        raise HpcMpError(f"gpu = {gpu!r} of {where}", "is not a row of [gpu]", _meant(str(gpu), gpus))
    if bool(gpu) != bool(count):
        raise HpcMpError(f"gpus = {count} of {where}", f"does not match gpu = {gpu!r}", "set both, or neither")
    if "marks" in row and not gpu and not row["marks"].get("product"):
        raise HpcMpError(f"marks of {where}", "match every machine of that vendor",
                         "add `product`, with the text of /sys/class/dmi/id/product_name")


def _parse(path: Path) -> Row:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HpcMpError(f"machines file {path}", f"cannot be read ({error})", "correct or remove it") from None
    for table, content in tree.items():
        if table not in _TABLES:
            raise HpcMpError(f"[{table}] in {path}", "is not a table of the catalogue", _meant(table, _TABLES))
        if not isinstance(content, dict) or (table != "sources" and not all(isinstance(row, dict) for row in content.values())):
            raise HpcMpError(f"[{table}] in {path}", "has no rows", f"write [{table}.NAME] and its figures")
    return tree


def _meant(word: str, candidates: Iterable[str]) -> str:
    names = sorted(candidates)
    return did_you_mean(word, names, f"use one of {', '.join(names)}")
