"""Parsing of facts that may be missing."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from hpc_mp.cluster.node.source import NodeSource, Unavailable

S = TypeVar("S")
T = TypeVar("T")


class Readings(dict[str, T]):
    """The values of a file by name. A lookup of a missing name raises Unavailable."""

    def __init__(self, file: str, values: Mapping[str, T]) -> None:
        super().__init__(values)
        self.file = file

    def __missing__(self, name: str) -> T:
        raise Unavailable(f"{self.file} of this kernel does not show {name}")


def maybe(read: Callable[[S], T], name: S) -> T | None:
    """Return ``read(name)``; None if it is unavailable."""
    try:
        return read(name)
    except Unavailable:
        return None


def uptime(source: NodeSource) -> float:
    """Return the seconds since boot. Raises Unavailable."""
    text = source.text("/proc/uptime")
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        raise Unavailable(f"/proc/uptime holds {text[:40]!r}") from None


def firmware(source: NodeSource) -> tuple[str, str]:
    """Return the vendor and the product that the firmware names; empty if it names none."""
    vendor, product = (maybe(source.text, f"/sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name"))
    return vendor, product


def fields(text: str, separator: str = ":") -> Mapping[str, str]:
    """Return ``Name: value`` lines as a mapping; the first of equal names counts."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(separator)
        if colon:
            values.setdefault(name.strip(), value.strip())
    return values


def members(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list such as ``0-3,8``; none of an empty list."""
    numbers: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def real(source: NodeSource, name: str) -> str:
    """Return the target of a link in the tree, as ``/sys/devices/…``; ``name`` itself if it is not a link."""
    path, root = source.path(name).resolve(), source.root.resolve()
    return f"/{path.relative_to(root)}" if path.is_relative_to(root) else name
