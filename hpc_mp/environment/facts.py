"""What is known of variables: which names NCCL reads, with which defaults, and which settings do nothing or do harm.

The facts are data that a reader may edit: ``env/nccl-variables.toml`` and ``env/harmful-variables.toml``.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpc_mp.base.assets import asset

NCCL = "env/nccl-variables.toml"
HARMFUL = "env/harmful-variables.toml"
RELEASE = (2, 30, 7)  # of NCCL, whose names and defaults these are


class Harm(NamedTuple):
    """Which values hurt (a regular expression), what they do, what to do instead (empty: leave it out)."""

    values: str
    does: str
    cure: str = ""


class AllowedWords(NamedTuple):
    """Which values are understood (a regular expression), and what to write."""

    values: str
    words: str


@dataclass(frozen=True, slots=True)
class VariableFacts:
    """The two tables as one.

    Attributes:
        names: that NCCL reads.
        numbers: those of them that are whole numbers, with their defaults; None where NCCL decides for itself.
        since: the release that brought a name, where it is known.
        known: ``names`` and those that container images set for themselves.
        plugins: how names begin that network plug-ins read.
        removed, legacy, foreign: name to what to do about it.
        levels, words: names that took numbers once, and the words that stand for them.
        choices: by name, where NCCL knows a few words only.
        debug, harmful, info: by name.
        vendors: ``clouds`` whose plug-ins ask for some of the settings in ``debug`` and ``legacy``; ``allows`` are these.
        clouds: whose network a setting is for, to ``NAME=VALUE`` as a regular expression.
        families: how names begin that matter here.
    """

    names: frozenset[str]
    numbers: Mapping[str, int | None]
    since: Mapping[str, tuple[int, ...]]
    known: frozenset[str]
    plugins: tuple[str, ...]
    removed: Mapping[str, str]
    legacy: Mapping[str, str]
    foreign: Mapping[str, str]
    levels: frozenset[str]
    words: str
    choices: Mapping[str, AllowedWords]
    debug: Mapping[str, Harm]
    harmful: Mapping[str, Harm]
    info: Mapping[str, Harm]
    vendors: frozenset[str]
    allows: frozenset[str]
    clouds: Mapping[str, str]
    families: tuple[str, ...]

    def explains(self, name: str) -> bool:
        """Whether a name is in one of the tables, or a plug-in's."""
        tables = (self.known, self.removed, self.legacy, self.foreign, self.info, self.harmful)
        return any(name in table for table in tables) or name.startswith(self.plugins)


@functools.cache
def facts() -> VariableFacts:
    nccl, other = _read(NCCL), _read(HARMFUL)
    defaults = dict(word.partition("=")[::2] for word in nccl["names"].split())
    names = frozenset(f"NCCL_{name}" for name in defaults)
    return VariableFacts(
        names=names,
        numbers={f"NCCL_{name}": None if default == "auto" else int(default) for name, default in defaults.items() if default},
        since={f"NCCL_{name}": tuple(map(int, release.split("."))) for name, release in
               (word.split("=") for word in nccl["since"].split())},
        known=names | set(nccl["images"]),
        plugins=tuple(nccl["plugins"]),
        removed=nccl["removed"], legacy=nccl["legacy"], foreign=nccl["foreign"],
        levels=frozenset(nccl["levels"]["names"]), words=nccl["levels"]["words"],
        choices={name: AllowedWords(*row) for name, row in nccl["choices"].items()},
        debug=_harms(nccl["debug"]), harmful=_harms(other["harmful"]), info=_harms(other["info"]),
        vendors=frozenset(nccl["vendor"]["clouds"]), allows=frozenset(nccl["vendor"]["allows"]),
        clouds=other["clouds"],
        families=tuple(other["families"]),
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(asset(name).read_text(encoding="utf-8"))


def _harms(table: dict[str, list[str]]) -> dict[str, Harm]:
    return {name: Harm(*row) for name, row in table.items()}
