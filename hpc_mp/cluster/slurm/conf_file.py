"""Slurm's configuration files, read as Slurm's parser reads them: slurm.conf, gres.conf, cgroup.conf and topology.conf.

Keys are case-insensitive, ``#`` begins a comment, and a backslash at the end of a line joins the next one to it without a blank.
``Include FILE`` at the start of a line is replaced by the lines of FILE. Source: src/common/parse_config.c, releases 22.05 to
26.05.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hpc_mp.base.assets import asset_table

TABLE = "slurm/conf-keys.toml"
_PAIR = re.compile(r'\s*([\w.]+)\s*[-*+/]?=\s*(?:"([^"]*)"|(\S+))(?=\s|$)', re.ASCII)
_INCLUDE = re.compile(r"include\s+(\S+)(.*)", re.IGNORECASE | re.DOTALL)
_COMMENT = re.compile(r"((?<!\\)(?:\\\\)*)#.*")


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """One line, with the lines joined to it."""

    number: int  # number of its first line, counted from 1
    text: str  # its text without comments
    file: Path | None = None  # its file; None: the text was not read from a file
    pairs: tuple[tuple[str, str], ...] = ()  # keys and values, as they are written
    rest: str = ""  # trailing text that is not ``KEY=VALUE``, for which Slurm refuses the file; empty: nothing
    unread: str = ""  # the file that it includes and that could not be read; empty: none

    @property
    def fields(self) -> dict[str, str]:
        """Return values by lower-case keys."""
        return {key.casefold(): value for key, value in self.pairs}


def read_conf(text: str, file: Path | None = None) -> tuple[ConfigLine, ...]:
    """Return the lines of a file that are not empty, with included files in place of the line that includes them. ``file``: the
    text's file, relative to which included files are found; None: they are not read."""
    return tuple(_lines(text, file, ()))


def read_beside(path: Path) -> tuple[ConfigLine, ...] | None:
    """Return the lines of a file; None if it cannot be read."""
    try:
        return read_conf(path.read_text(encoding="utf-8", errors="replace"), path)
    except OSError:
        return None


def first_pairs(lines: Iterable[ConfigLine]) -> dict[str, str]:
    """Return the first pair of each line; the last of equal keys counts."""
    return dict(line.pairs[0] for line in lines if line.pairs)


@cache
def conf_table(name: str) -> Mapping[str, Any]:
    """Return a table of ``slurm/conf-keys.toml``, which lists what Slurm's releases know."""
    return asset_table(TABLE)[name]  # type: ignore[no-any-return]


@cache
def conf_keys(name: str) -> Mapping[str, tuple[str, str]]:
    """Return the keys of one table by lower-case name: as manuals write them, and the releases that know them."""
    rows = dict(conf_table(name))
    return {key.casefold(): (key, releases) for key, releases in (dict.fromkeys(rows.pop("all"), "") | rows).items()}


@cache
def conf_kinds(name: str) -> Mapping[str, tuple[Mapping[str, Any], ...]]:
    """Return the kinds of value that each key of one table takes, by lower-case key."""
    kinds: Any = conf_table("kind")
    rows = [(key.casefold(), kind) for kind in kinds for key in kind.get(name, ())]
    return {key: tuple(kind for other, kind in rows if other == key) for key, _ in rows}


def fits(value: str, kind: Mapping[str, Any]) -> bool:
    """Return True if Slurm takes the value for one of this kind."""
    words = [word for word in value.split(",") if word] if kind.get("list") else [value]
    return all(re.fullmatch(kind["form"], word, re.IGNORECASE | re.ASCII) and not (
        word.isdecimal() and int(word) > kind.get("most", int(word))) for word in words)


def _lines(text: str, file: Path | None, above: tuple[Path, ...]) -> Iterator[ConfigLine]:
    cluster = ""
    for number, line in _joined(text):
        if (included := _INCLUDE.match(line)) is None:
            pairs, end = [], 0
            while match := _PAIR.match(line, end):
                pairs.append((match[1], match[3] if match[2] is None else match[2]))
                end = match.end()
            cluster = next((value for key, value in pairs if key.casefold() == "clustername"), cluster)
            yield ConfigLine(number, line, file, tuple(pairs), line[end:].strip())
            continue
        name, rest = included[1].replace("%c", cluster.lower()), included[2].strip()
        path = None if file is None else (*above, file)[0].parent / name
        try:
            inner = None if path is None or path in (file, *above) else path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            inner = None
        if inner is None or rest:
            yield ConfigLine(number, line, file, rest=rest, unread="" if rest else name)
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
