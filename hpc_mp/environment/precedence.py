"""Precedence of the sources of a variable: the effective value, its source, and the sources that it hides."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpc_mp.base.grouping import grouped
from hpc_mp.environment.conf import ConfFile, read_number
from hpc_mp.environment.facts import facts

Origin = Literal["process", "user file", "system file", "profile", "default"]  # the strongest first


@dataclass(frozen=True, slots=True)
class Said:
    """The setting of a variable by one source."""

    name: str
    value: str | None
    origin: Origin
    where: str = ""  # ``/etc/nccl.conf:3``, ``azure-ndv4``; empty for the process and the library
    # a separator; if given, the value is put in front of a stronger source's value instead of being hidden by it
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Effective:
    """A variable as programs get it."""

    name: str
    value: str | None  # the value; None if no source sets it and NCCL decides
    # origin, where: the source that won
    origin: Origin
    where: str = ""
    hides: tuple[Said, ...] = ()  # the settings of weaker sources, the strongest first, without the library's default
    read: int | None = None  # the number that NCCL reads, for integer variables; None if NCCL decides


def of_process(environ: Mapping[str, str], names: Iterable[str]) -> Iterator[Said]:
    """Yield the settings of the process for these names and for all relevant families."""
    requested = frozenset(names)
    for name in sorted(environ):
        if name in requested or name.startswith(facts().families):
            yield Said(name, environ[name], "process")


def of_file(file: ConfFile, origin: Origin) -> Iterator[Said]:
    return (Said(line.name, line.value, origin, f"{file.path}:{line.line}") for line in file.lines)


def of_library() -> Iterator[Said]:
    """Yield every name that NCCL reads, with its default."""
    for name in sorted(facts().names):
        default = facts().numbers.get(name)
        yield Said(name, None if default is None else str(default), "default")


def settle(sources: Sequence[Iterable[Said]]) -> tuple[Effective, ...]:
    """Return the effective variables by name. The first source with a value, even an empty one, wins. ``sources``: the settings
    of each source, the strongest first."""
    settings = grouped((setting.name, setting) for source in sources for setting in source)
    return tuple(_settled(settings[name]) for name in sorted(settings))


def _settled(settings: Sequence[Said]) -> Effective:
    first, *others = settings
    hidden = tuple(setting for setting in others if setting.origin != "default")
    for setting in hidden:
        if setting.before is not None:  # a list of directories: both values count
            first, hidden = _in_front(setting, first), ()
    return Effective(first.name, first.value, first.origin, first.where, hidden, _number(first))


def _in_front(new: Said, old: Said) -> Said:
    separator, parts = new.before or "", [part for part in (new.value, old.value) if part]
    included = separator and old.value and new.value in old.value.split(separator)
    return old if included else replace(new, value=separator.join(parts))


def _number(setting: Said) -> int | None:
    """Return the number that NCCL reads. Empty text, and numbers of more than 64 bits, count as the default."""
    if setting.name not in facts().numbers:
        return None
    default = facts().numbers[setting.name]
    read = read_number(setting.value) if setting.value else None
    return default if read is None else read
