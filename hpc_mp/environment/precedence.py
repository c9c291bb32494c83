"""Which value of a variable counts, who says it, and whom that hides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpc_mp.environment.conf import ConfFile
from hpc_mp.environment.facts import facts
from hpc_mp.environment.nccl_values import read_number

Origin = Literal["process", "user file", "system file", "profile", "default"]
ORIGINS: tuple[Origin, ...] = ("process", "user file", "system file", "profile", "default")  # the strongest first


@dataclass(frozen=True, slots=True)
class Said:
    """What one source says of a variable.

    Attributes:
        where: ``/etc/nccl.conf:3``, ``azure-ndv4``; empty for the process and the library.
        before: goes in front of what a stronger source says, with this between them, instead of being hidden by it.
    """

    name: str
    value: str | None
    origin: Origin
    where: str = ""
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Effective:
    """A variable as programs get it.

    Attributes:
        value: None where nobody says anything and NCCL decides for itself.
        origin, where: of the source that won.
        hides: what weaker sources say, the strongest first, without the library's default.
        read: the number that NCCL takes, of a variable that is one; None where it decides for itself.
    """

    name: str
    value: str | None
    origin: Origin
    where: str = ""
    hides: tuple[Said, ...] = ()
    read: int | None = None


def of_process(environ: Mapping[str, str], names: Iterable[str]) -> Iterator[Said]:
    """What the process says of these names and of all families that matter."""
    wanted = frozenset(names)
    for name in sorted(environ):
        if name in wanted or name.startswith(facts().families):
            yield Said(name, environ[name], "process")


def of_file(file: ConfFile, origin: Origin) -> Iterator[Said]:
    return (Said(line.name, line.value, origin, f"{file.path}:{line.number}") for line in file.lines)


def of_library() -> Iterator[Said]:
    """Every name that NCCL reads, with its default."""
    for name in sorted(facts().names):
        default = facts().numbers.get(name)
        yield Said(name, None if default is None else str(default), "default")


def settle(sources: Sequence[Iterable[Said]]) -> tuple[Effective, ...]:
    """The first source that says anything wins, an empty value included; variables by name.

    Args:
        sources: the strongest first.
    """
    said: dict[str, list[Said]] = {}
    for source in sources:
        for each in source:
            said.setdefault(each.name, []).append(each)
    return tuple(_settled(said[name]) for name in sorted(said))


def _settled(said: Sequence[Said]) -> Effective:
    first, *others = said
    hidden = tuple(each for each in others if each.origin != "default")
    for each in hidden:
        if each.before is not None:  # a list of directories: both count
            first, hidden = _in_front(each, first), ()
    return Effective(first.name, first.value, first.origin, first.where, hidden, _number(first))


def _in_front(new: Said, old: Said) -> Said:
    between, parts = new.before or "", [part for part in (new.value, old.value) if part]
    there = between and old.value and new.value in old.value.split(between)
    return old if there else replace(new, value=between.join(parts))


def _number(said: Said) -> int | None:
    """What NCCL makes of it: text that is empty or too long for 64 bits counts as the default."""
    if said.name not in facts().numbers:
        return None
    default = facts().numbers[said.name]
    read = read_number(said.value) if said.value else None
    return default if read is None else read
