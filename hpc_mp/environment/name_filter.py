"""Which names a list takes, by NCCL's rules (``parseStringList``, ``matchIfList`` in its src/misc/utils.cc)."""

from __future__ import annotations

from collections.abc import Iterable


def taken(pattern: str, names: Iterable[str]) -> list[str]:
    """Of ``names`` those that ``[^][=]name[:port…],name…`` takes: ``^`` all others, ``=`` whole names instead of beginnings.

    An empty list takes everything, behind ``^`` nothing.
    """
    others = pattern.startswith("^")
    entries = pattern.removeprefix("^")
    exact = entries.startswith("=")
    wanted = [name for entry in entries.removeprefix("=").split(",") if (name := entry.partition(":")[0])]

    def listed(name: str) -> bool:
        return not wanted or any(name == each if exact else name.startswith(each) for each in wanted)

    return [name for name in names if listed(name) != others]
