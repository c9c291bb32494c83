"""Layers per stage as a job asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hpc_mp.layout.schedule.partition import partition


def stage_layers(
    given: Literal["auto"] | tuple[int, ...], costs: Sequence[float], stages: int, first: float, last: float,
) -> tuple[int, ...]:
    """The layers of every stage: as ``given``, or for ``auto`` the cut whose most expensive stage is cheapest.

    ``costs``, ``first`` and ``last`` as in ``partition``.
    """
    return partition(costs, stages, first, last) if given == "auto" else given
