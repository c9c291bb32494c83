"""Slurm's configuration files, read as Slurm's parser reads them: slurm.conf, gres.conf, cgroup.conf and topology.conf.

Keys count in any case, ``#`` begins a comment, a backslash at the end of a line joins the next one to it without a blank, and
``Include FILE`` at the start of a line stands for the lines of FILE. Source: src/common/parse_config.c, releases 22.05 to 26.05.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hpc_mp.base.assets import asset

TABLE = "slurm/conf-keys.toml"
_PAIR = re.compile(r'\s*([\w.]+)\s*[-*+/]?=\s*(?:"([^"]*)"|(\S+))(?=\s|$)', re.ASCII)
_INCLUDE = re.compile(r"include\s+(\S+)(.*)", re.IGNORECASE | re.DOTALL)
_COMMENT = re.compile(r"((?<!\\)(?:\\\\)*)#.*")


@dataclass(frozen=True, slots=True)
class ConfLine:
    """One line, with those that are joined to it.

    Attributes:
        number: of its first line, counted from 1.
        text: without comments.
        file: where it stands; None: the text was not read from a file.
        pairs: keys and values, as they are written.
        rest: what follows and is no ``KEY=VALUE``, with which Slurm refuses the file; empty: nothing.
        unread: the file that it includes and that could not be read; empty: none.
    """

    number: int
    text: str
    file: Path | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    rest: str = ""
    unread: str = ""

    @property
    def fields(self) -> dict[str, str]:
        """Values by their keys in small letters."""
        return {key.casefold(): value for key, value in self.pairs}


def read_conf(text: str, file: Path | None = None) -> tuple[ConfLine, ...]:
    """The lines of a file that are not empty, those of included files in the place of the line that includes them.

    Args:
        file: where the text lies, from where included files are looked for; None: they are not read.
    """
    return tuple(_lines(text, file, ()))


def read_beside(path: Path) -> tuple[ConfLine, ...] | None:
    """The lines of a file; None where it cannot be read."""
    try:
        return read_conf(path.read_text(encoding="utf-8", errors="replace"), path)
    except OSError:
        return None


def first_pairs(lines: Iterable[ConfLine]) -> dict[str, str]:
    """The first pair of each line; of several with one key the last counts."""
    return dict(line.pairs[0] for line in lines if line.pairs)


@cache
def conf_table(name: str) -> Mapping[str, Any]:
    """A table of ``slurm/conf-keys.toml``: what Slurm's releases know."""
    return tomllib.loads(asset(TABLE).read_text(encoding="utf-8"))[name]  # type: ignore[no-any-return]


@cache
def conf_keys(name: str) -> Mapping[str, tuple[str, str]]:
    """The keys of one table by their small letters: as manuals write them, and the releases that know them."""
    rows = dict(conf_table(name))
    return {key.casefold(): (key, releases) for key, releases in (dict.fromkeys(rows.pop("all"), "") | rows).items()}


def _lines(text: str, file: Path | None, above: tuple[Path, ...]) -> Iterator[ConfLine]:
    cluster = ""
    for number, line in _joined(text):
        if (included := _INCLUDE.match(line)) is None:
            pairs, end = [], 0
            while found := _PAIR.match(line, end):
                pairs.append((found[1], found[3] if found[2] is None else found[2]))
                end = found.end()
            cluster = next((value for key, value in pairs if key.casefold() == "clustername"), cluster)
            yield ConfLine(number, line, file, tuple(pairs), line[end:].strip())
            continue
        name, rest = included[1].replace("%c", cluster.lower()), included[2].strip()
        path = None if file is None else (*above, file)[0].parent / name
        try:
            inner = None if path is None or path in (file, *above) else path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            inner = None
        if inner is None or rest:
            yield ConfLine(number, line, file, rest=rest, unread="" if rest else name)
        elif file is not None:
            yield from _lines(inner, path, (*above, file))


def _joined(text: str) -> Iterator[tuple[int, str]]:
    held, first = "", 1
    for number, line in enumerate((*text.split("\n"), ""), 1):
        plain = _COMMENT.sub(r"\1", line).rstrip()
        goes_on = (len(plain) - len(plain.rstrip("\\"))) % 2
        held += plain[:-1] if goes_on else plain
        if not goes_on:
            if held.strip():
                yield first, re.sub(r"\\(.)", r"\1", held)
            held, first = "", number + 1
