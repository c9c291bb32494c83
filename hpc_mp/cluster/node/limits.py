"""Limits of this process, which are those that a program started here would get."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.cluster.node.rdma import CLASS
from hpc_mp.cluster.node.source import Source

_LINE = re.compile(r"^Max (.+?)\s{2,}(\S+)\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Limit:
    """None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Limits:
    """Attributes:
        of: by the kernel's name: ``locked memory``, ``open files``, ``stack size``, ``processes``.
        rdma: adapters for RDMA are here, which need locked memory.
    """

    of: Mapping[str, Limit]
    rdma: bool


def read_limits(source: Source) -> Limits:
    """Raises Unseen."""
    found = {name: Limit(_number(soft), _number(hard)) for name, soft, hard in _LINE.findall(source.text("/proc/self/limits"))}
    return Limits(found, bool(source.names(f"{CLASS}/*")))


def _number(text: str) -> int | None:
    return None if text == "unlimited" else int(text)
