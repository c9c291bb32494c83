"""Checks answered in this process: as ``in_time`` does it, without its processes and its deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_mp.cluster.node.source import Unavailable
from hpc_mp.doctor.checks.check import Said


def in_process(tasks: Mapping[str, Callable[[], Said]], seconds: float, left: Path | None) -> dict[str, Said | Unavailable]:
    """What each task returns. Nothing may hang."""
    def answer(task: Callable[[], Said]) -> Said | Unavailable:
        try:
            return task()
        except Unavailable as why:
            return why

    return {name: answer(task) for name, task in tasks.items()}
