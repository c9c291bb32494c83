"""Rows of the catalogue from its files: the shipped ones, the site's, the user's; the later ones override by name.

A row says ``like = NAME`` and only what differs. ``like`` its own name changes a row that an earlier file has. What it takes over is
what the machine is, not who it is: its title, its marks, its short name and its twin are a row's own.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.site_files import config_folders
from hpc_mp.catalogue.machines import GpuModel, MachineType

ASSET, FILE, VARIABLE = "env/machines", "machines.toml", "HPC_MP_MACHINES"
CLOUDS = ("azure", "aws", "gcp", "site")
_TABLES = ("gpu", *CLOUDS, "sources")
_OWN = ("title", "fabric", "twin", "marks", "pci")
_FORMS = {"gpu": TypeAdapter(GpuModel), "machine": TypeAdapter(MachineType)}

Row = dict[str, Any]
Rows = dict[str, dict[str, Row]]


def own_files(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """What a site and a user have added, in the order in which rows override: ``/etc``, the user's, that of ``HPC_MP_MACHINES``."""
    found = [folder / FILE for folder in reversed(config_folders(environ)) if (folder / FILE).is_file()]
    named = environ.get(VARIABLE)
    return (*found, *([Path(named)] if named else []))


def read_rows(own: Iterable[Path]) -> Rows:
    """Complete rows by name, ``gpus``, ``machines`` (with their ``cloud``) and ``sources``, of the shipped files and of ``own``.

    Raises:
        HpcMpError: a file cannot be read, a key is unknown, missing or of another kind, or a name leads nowhere.
    """
    rows: Rows = {"gpus": {}, "machines": {}, "sources": {}}
    rows = _layer(rows, [(path, _parse(path)) for path in sorted(asset(ASSET).glob("*.toml"))], shipped=True)
    for path in own:
        rows = _layer(rows, [(path, _parse(path))], shipped=False)
    return rows


def _layer(below: Rows, parsed: Iterable[tuple[Path, Row]], shipped: bool) -> Rows:
    """``below`` under the rows of files that may refer to each other."""
    files = list(parsed)
    given: dict[str, dict[str, tuple[Path, Row]]] = {"gpus": {}, "machines": {}}
    for path, tree in files:
        for table in set(tree) - {"sources"}:
            for name, row in tree[table].items():
                kind, more = ("gpus", {}) if table == "gpu" else ("machines", {"cloud": table})
                given[kind][name] = (path, {**row, **more})
    done: Rows = {}
    for kind in ("gpus", "machines"):
        full = {name: _complete(name, kind, given[kind], below[kind], shipped) for name in given[kind]}
        done[kind] = {**full, **{name: row for name, row in below[kind].items() if name not in full}}
        models = done["gpus"]
        for name, row in full.items():
            _check(f"{name} in {given[kind][name][0]}", name, kind, row, models)
    sources = {name: text for _, tree in files for name, text in tree.get("sources", {}).items()}
    return {**done, "sources": {**below["sources"], **sources, **({} if shipped else {str(path): str(path) for path, _ in files})}}


def _complete(name: str, kind: str, given: Mapping[str, tuple[Path, Row]], below: Mapping[str, Row], shipped: bool,
              waiting: tuple[str, ...] = ()) -> Row:
    """A row with what it takes over from those that it is like."""
    path, row = given[name]
    like = row.get("like")
    base: Row = {}
    if like is not None:
        if like in waiting:
            raise HpcMpError(f"like = {like!r} of {name} in {path}", "leads back to itself", "name a row that stands by itself")
        if like in given and like != name:
            base = _complete(like, kind, given, below, shipped, (*waiting, name))
        elif like in below:
            base = below[like]
        else:
            raise HpcMpError(f"like = {like!r} of {name} in {path}", "is in no file of the catalogue", _meant(like, {**below, **given}))
    inherited = base if like == name else {key: value for key, value in base.items() if key not in _OWN}
    own = {key: value for key, value in row.items() if key not in ("like", "from")}
    said = {figure: source for source, figures in row.get("from", {}).items() for figure in figures}
    if not shipped:
        said = dict.fromkeys(set(own) - {"cloud"}, str(path)) | said
    return inherited | own | {"sources": inherited.get("sources", {}) | said}


def _check(where: str, name: str, kind: str, row: Row, models: Mapping[str, Row]) -> None:
    plain = {key: value for key, value in row.items() if key != "gpu" or kind == "gpus"}
    try:
        _FORMS["gpu" if kind == "gpus" else "machine"].validate_json(json.dumps({"name": name, **plain}, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = [each for each in _fields(kind) if each not in ("name", "cloud", "sources")] + ["like", "from"]
        if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            raise HpcMpError(f"{key} of {where}", "is no figure of the catalogue", _meant(key, known)) from None
        if first["type"] in ("missing", "missing_argument"):
            raise HpcMpError(f"{key} of {where}", "is missing", "give it, or say `like = \"NAME\"` of a row that has it") from None
        raise HpcMpError(f"{key} = {first['input']!r} of {where}", f"is refused ({first['msg']})", "see env/README.md") from None
    if kind == "machines":
        gpu = row.get("gpu")
        if gpu is not None and gpu not in models:
            raise HpcMpError(f"gpu = {gpu!r} of {where}", "is no row of [gpu]", _meant(str(gpu), models))
        if bool(gpu) != bool(row.get("gpus")):
            raise HpcMpError(f"gpus = {row.get('gpus', 0)} of {where}", f"does not go with gpu = {gpu!r}", "give both, or neither")


def _parse(path: Path) -> Row:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HpcMpError(f"machines file {path}", f"cannot be read ({error})", "mend or remove it") from None
    for table, content in tree.items():
        if table not in _TABLES:
            raise HpcMpError(f"[{table}] in {path}", "is no table of the catalogue", _meant(table, _TABLES))
        if not isinstance(content, dict) or (table != "sources" and not all(isinstance(row, dict) for row in content.values())):
            raise HpcMpError(f"[{table}] in {path}", "has no rows", f"write [{table}.NAME] and its figures")
    return tree


def _fields(kind: str) -> list[str]:
    return list((GpuModel if kind == "gpus" else MachineType).__dataclass_fields__)


def _meant(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]!r}?" if near else "name one of " + ", ".join(sorted(names)[:40])
