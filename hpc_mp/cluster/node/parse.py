"""Reading what may be missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from hpc_mp.cluster.node.source import NodeSource, Unavailable

S = TypeVar("S")
T = TypeVar("T")


class Readings(dict[str, T]):
    """The values of a file by name. To ask for one that the file does not have raises Unavailable."""

    def __init__(self, file: str, values: Mapping[str, T]) -> None:
        super().__init__(values)
        self.file = file

    def __missing__(self, name: str) -> T:
        raise Unavailable(f"{self.file} of this kernel does not tell {name}")


def maybe(read: Callable[[S], T], name: S) -> T | None:
    """The result of ``read(name)``; None where it cannot be seen."""
    try:
        return read(name)
    except Unavailable:
        return None


def fields(text: str, separator: str = ":") -> Mapping[str, str]:
    """``Name: value`` lines as a mapping; the first of a name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(separator)
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def members(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list such as ``0-3,8``; none of an empty one."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def real(source: NodeSource, name: str) -> str:
    """Where a link of the tree ends, as ``/sys/devices/…``; ``name`` itself where it is none."""
    path, root = source.path(name).resolve(), source.root.resolve()
    return f"/{path.relative_to(root)}" if path.is_relative_to(root) else name
