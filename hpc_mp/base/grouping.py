"""Values grouped by a key. The doctor packs this module into its health check: only the standard library of Python 3.10."""

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the members of every key, in the order of the first member of each."""
    groups: dict[K, list[V]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return groups
