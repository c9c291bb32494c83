"""Facts about variables: the names that NCCL reads, their defaults, and settings that are harmful or have no effect.

The facts are editable data: ``env/nccl-variables.toml`` and ``env/harmful-variables.toml``.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpc_mp.base.assets import asset_table

NCCL = "env/nccl-variables.toml"
HARMFUL = "env/harmful-variables.toml"
RELEASE = (2, 30, 7)  # the release of NCCL with these names and defaults


class Harm(NamedTuple):
    """Harmful values (a regular expression), their effect, and the remedy (empty: leave the variable out)."""

    values: str
    does: str
    cure: str = ""


class AllowedWords(NamedTuple):
    """The accepted values (a regular expression), and their description."""

    values: str
    words: str


@dataclass(frozen=True, slots=True)
class VariableFacts:
    """The two tables combined."""

    names: frozenset[str]  # the names that NCCL reads
    numbers: Mapping[str, int | None]  # the integer variables with their defaults; None if NCCL chooses the default
    since: Mapping[str, tuple[int, ...]]  # the release that introduced a name, if known
    recognized: frozenset[str]  # ``names`` and the names that container images set
    plugins: tuple[str, ...]  # prefixes of the names that network plug-ins read
    # removed, legacy, foreign: name to remedy
    removed: Mapping[str, str]
    legacy: Mapping[str, str]
    foreign: Mapping[str, str]
    # levels, words: names that used to take numbers, and the words that replace the numbers
    levels: frozenset[str]
    words: str
    choices: Mapping[str, AllowedWords]  # by name, the values if NCCL accepts only a few words
    # debug, harmful, info: by name
    debug: Mapping[str, Harm]
    harmful: Mapping[str, Harm]
    info: Mapping[str, Harm]
    # ``clouds`` whose plug-ins require some settings in ``debug`` and ``legacy``; ``allows`` are these settings
    vendors: frozenset[str]
    allows: frozenset[str]
    clouds: Mapping[str, str]  # the owner of the network that a setting is for, to ``NAME=VALUE`` as a regular expression
    families: tuple[str, ...]  # prefixes of the names that are relevant here

    def explains(self, name: str) -> bool:
        """Return True if a name is in one of the tables, or belongs to a plug-in."""
        tables = (self.recognized, self.removed, self.legacy, self.foreign, self.info, self.harmful)
        return any(name in table for table in tables) or name.startswith(self.plugins)


@functools.cache
def facts() -> VariableFacts:
    nccl, harmful = asset_table(NCCL), asset_table(HARMFUL)
    defaults = dict(word.partition("=")[::2] for word in nccl["names"].split())
    names = frozenset(f"NCCL_{name}" for name in defaults)
    return VariableFacts(
        names=names,
        numbers={f"NCCL_{name}": None if default == "auto" else int(default) for name, default in defaults.items() if default},
        since={f"NCCL_{name}": tuple(map(int, release.split("."))) for name, release in
               (word.split("=") for word in nccl["since"].split())},
        recognized=names | set(nccl["images"]),
        plugins=tuple(nccl["plugins"]),
        removed=nccl["removed"], legacy=nccl["legacy"], foreign=nccl["foreign"],
        levels=frozenset(nccl["levels"]["names"]), words=nccl["levels"]["words"],
        choices={name: AllowedWords(*row) for name, row in nccl["choices"].items()},
        debug=_harms(nccl["debug"]), harmful=_harms(harmful["harmful"]), info=_harms(harmful["info"]),
        vendors=frozenset(nccl["vendor"]["clouds"]), allows=frozenset(nccl["vendor"]["allows"]),
        clouds=harmful["clouds"],
        families=tuple(harmful["families"]),
    )


def _harms(table: dict[str, list[str]]) -> dict[str, Harm]:
    return {name: Harm(*row) for name, row in table.items()}
